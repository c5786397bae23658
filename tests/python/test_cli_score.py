"""`kvpager score`: log-probabilities of given tokens, and those of a generation once more."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from cli_snapshots import refused, told, told_json
from transformers import AutoModelForCausalLM

from kvpager import Engine, PagerConfig
from kvpager.cli import main

IDS = [5 + i * i % 50 for i in range(150)]


def generate(model_dir, path, *arguments):
    """Writes what `generate --logprobs` tells into a file; returns its values."""
    common = ["generate", "-q", "--format", "json", "--logprobs", "--output", path]
    prompt = ["--model", model_dir, "--ids", ",".join(map(str, IDS))]
    assert main([*map(str, (*common, *prompt, *arguments))]) == 0
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def generation(model_dir, tmp_path_factory):
    """A generation of 20 sampled tokens."""
    path = tmp_path_factory.mktemp("turn") / "turn.json"
    sampled = ("--max-new-tokens", 20, "--temperature", "0.9", "--seed", 3)
    return generate(model_dir, path, *sampled)


@pytest.fixture
def turn(generation, tmp_path):
    """Writes that generation into a file, with some fields changed; None takes one out."""

    def write(**fields):
        path = tmp_path / "turn.json"
        values = {k: v for k, v in {**generation, **fields}.items() if v is not None}
        path.write_text(json.dumps(values), encoding="utf-8")
        return path

    return write


def test_given_tokens_have_the_log_probabilities_of_the_engine(capsys, model_dir):
    common = ("score", "-q", "--model", model_dir, "--ids", ",".join(map(str, IDS)))
    values = told_json(capsys, *common)
    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    with Engine(model, PagerConfig(pool_tokens=1024)) as engine:
        expected = engine.score(IDS)
    assert values["ids"] == IDS
    assert np.array(values["logprobs"], np.float32).tobytes() == expected.logprobs.tobytes()
    out = told(capsys, *common)
    assert "149 (all but the first)" in out
    for name, form in (("sum", ".6f"), ("mean", ".6f"), ("perplexity", ".6g")):
        assert values[name] == getattr(expected, name)
        assert format(values[name], form) in out


@pytest.mark.parametrize(
    ("options", "how"),
    [((), ("--temperature", "0.3", "--seed", "1", "--speculate")), (("--chunks", "2"), ())],
    ids=["sampled and speculated", "top-k chunks"],
)
def test_what_was_generated_has_the_same_bits_in_a_fresh_process(model_dir, tmp_path, options, how):
    path = tmp_path / "turn.json"
    values = generate(model_dir, path, "--max-new-tokens", 70, *options, *how)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "kvpager.cli", "score", "--format", "json", "-q"),
            *("--model", model_dir, "--against", path, *options),
        ],
        env=os.environ | {"OMP_NUM_THREADS": str(values["fingerprint"]["threads"])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr or done.stdout
    again = json.loads(done.stdout)
    assert again["logprobs"] == values["logprobs"]
    assert (again["tokens"], again["prompt_tokens"]) == (70, 150)
    assert again["bits"] == {
        "elements": 70,
        "bits": 70 * 32,
        "differing_elements": 0,
        "differing_bits": 0,
        "first": None,
    }
    assert again["max_abs_delta"] == again["approx_kl"] == again["clip_fraction"] == 0
    assert again["differing_tokens"] == 0
    assert again["fingerprint_differs"] == {}


def test_one_other_bit_is_found_and_is_exit_code_1(capsys, model_dir, generation, turn):
    logprobs = list(generation["logprobs"])
    before = logprobs[13]
    logprobs[13] = float(np.nextafter(np.float32(before), np.float32(0)))
    one, other = np.array([before, logprobs[13]], np.float32).view(np.uint32)
    bits = bin(int(one ^ other)).count("1")
    common = ("score", "-q", "--model", model_dir, "--against", turn(logprobs=logprobs))
    values = told_json(capsys, *common, code=1)
    assert values["differing_tokens"] == 1
    assert values["bits"]["differing_bits"] == bits
    assert (values["bits"]["first"]["index"], values["bits"]["first"]["ulps"]) == ([13], 1)
    assert values["max_abs_delta"] == abs(before - logprobs[13])
    assert values["clip_fraction"] == 0
    out = told(capsys, *common, code=1)
    assert "20, after a prompt of 150" in out
    assert f"differing bits       {bits} of 640" in out
    assert "1 ulp apart" in out


def test_other_numerics_are_refused_by_name_with_the_remedy(capsys, model_dir, generation, turn):
    common = ("score", "-q", "--model", model_dir, "--against")
    err = refused(capsys, *common, turn(), "--rows", "32", "--small-rows", "fixed")
    assert "generated with rows" in err
    assert "here it is 32" in err
    assert "set --rows and --small-rows to what" in err
    assert "--on-mismatch compare" in err
    later = {**generation["fingerprint"], "phase_of_moon": "full"}  # of another release
    assert "phase_of_moon 'full'" in refused(capsys, *common, turn(fingerprint=later))


def test_other_numerics_are_compared_if_told_to_and_said(capsys, model_dir, turn):
    arguments = ("score", "-q", "--model", model_dir, "--against", turn(), "--chunk-tokens", "32")
    code = main([*map(str, arguments), "--on-mismatch", "compare", "--format", "json"])
    values = json.loads(capsys.readouterr().out)
    assert values["fingerprint_differs"]["chunk_tokens"] == {"generated": 64, "here": 32}
    assert code == (values["bits"]["differing_bits"] > 0)
    assert values["max_abs_delta"] < 1e-3
    main([*map(str, arguments), "--on-mismatch", "compare"])
    assert "other chunk_tokens   generated 64, here 32" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"command": "info"}, "command is 'info'; expected \"generate\""),
        ({"command": None}, "command is None"),
        ({"logprobs": None}, "a list of float32 numbers, which generate --logprobs writes"),
        ({"logprobs": [-1.0]}, "logprobs is [-1.0]; expected 20 numbers, one for each of ids"),
        ({"logprobs": [0.1] * 20}, "logprobs[0] is 0.1; expected a float32 number"),
        ({"logprobs": [-1.0] * 19 + [-1]}, "logprobs[19] is -1; expected a float32"),
        ({"logprobs": [-1.0] * 19 + [float("nan")]}, "logprobs[19] is nan"),
        ({"logprobs": [-1.0] * 19 + [1e300]}, "logprobs[19] is 1e+300"),
        ({"ids": []}, "ids is []; expected a list of token ids"),
        ({"ids": [1, True]}, "ids[1] is True; expected a token id"),
        ({"ids": [-1]}, "ids[0] is -1"),
        ({"prompt_ids": {"a": "b" * 200}}, "prompt_ids is {'a': 'bbb"),
        ({"fingerprint": None}, "fingerprint is None; expected an object"),
    ],
)
def test_a_file_that_is_no_generation_is_refused_by_its_field(capsys, turn, fields, words):
    path = turn(**fields)
    err = refused(capsys, "score", "--model", "no-model", "--against", path)
    assert f"--against {path}: " in err
    assert words in err


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[1]", "a JSON list; expected what `kvpager generate"),
        (None, "No such file"),
    ],
)
def test_a_file_that_is_no_json_object_is_refused(capsys, tmp_path, data, words):
    path = tmp_path / "turn.json"
    if data is not None:
        path.write_bytes(data)
    assert words in refused(capsys, "score", "--model", "no-model", "--against", path)
