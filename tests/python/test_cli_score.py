"""`kvpager score`: log-probabilities of given tokens, and those of a generation once more."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from cli_snapshots import files_below, refused, told, told_json
from transformers import AutoModelForCausalLM

from kvpager import Engine, PagerConfig
from kvpager.cli import main

IDS = [5 + i * i % 50 for i in range(150)]
LOOP = [5 + i % 7 for i in range(70)]


def joined(ids):
    return ",".join(map(str, ids))


def generated(capsys, path, model_dir, *arguments, ids=LOOP):
    """Writes what `generate --logprobs` tells into a file; returns its path and the values."""
    out = told(
        capsys,
        *("generate", "-q", "--format", "json", "--logprobs", "--model", model_dir),
        *("--ids", joined(ids), *arguments),
    )
    path.write_text(out, encoding="utf-8")
    return path, json.loads(out)


@pytest.fixture
def turn(capsys, model_dir, tmp_path):
    """A generation of 20 sampled tokens in a file."""
    arguments = ("--max-new-tokens", 20, "--temperature", "0.9", "--seed", 3)
    return generated(capsys, tmp_path / "turn.json", model_dir, *arguments)[0]


def changed(path, **fields):
    """The file with some fields changed; None takes one out."""
    values = json.loads(path.read_text(encoding="utf-8")) | fields
    values = {name: value for name, value in values.items() if value is not None}
    path.write_text(json.dumps(values), encoding="utf-8")
    return path


# Given tokens.


def test_given_tokens_have_the_log_probabilities_of_the_engine(capsys, model_dir):
    values = told_json(capsys, "score", "-q", "--model", model_dir, "--ids", joined(IDS))
    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    with Engine(model, PagerConfig(pool_tokens=1024)) as engine:
        expected = engine.score(IDS)
    assert values["ids"] == IDS
    assert np.array(values["logprobs"], np.float32).tobytes() == expected.logprobs.tobytes()
    assert values["sum"] == expected.sum
    assert values["mean"] == expected.mean
    assert values["perplexity"] == expected.perplexity


def test_a_terminal_shows_sum_mean_and_perplexity(capsys, model_dir):
    common = ("score", "-q", "--model", model_dir, "--ids", joined(IDS))
    values = told_json(capsys, *common)
    out = told(capsys, *common)
    assert "149 (all but the first)" in out
    assert f"{values['sum']:.6f}" in out
    assert f"{values['mean']:.6f}" in out
    assert f"{values['perplexity']:.6g}" in out


def test_text_is_scored_through_the_tokenizer(capsys, spoken_model_dir, tmp_path):
    common = ("score", "-q", "--model", spoken_model_dir)
    spoken = told_json(capsys, *common, "--prompt", "the cache keeps every chunk")
    assert spoken["ids"] == [1, 2, 3, 4, 5]
    file = tmp_path / "prompt.txt"
    file.write_text("the cache keeps every chunk", encoding="utf-8")
    assert told_json(capsys, *common, "--prompt-file", file)["logprobs"] == spoken["logprobs"]
    assert told_json(capsys, *common, "--ids", "1 2 3 4 5")["logprobs"] == spoken["logprobs"]


# A generation once more.


@pytest.mark.parametrize(
    "how",
    [
        ("--temperature", "0.8", "--top-k", "20", "--seed", "9"),
        ("--speculate",),
        ("--temperature", "0.3", "--seed", "1", "--speculate"),
        ("--chunks", "2", "--speculate"),
    ],
    ids=["sampled", "speculated", "sampled and speculated", "top-k chunks"],
)
def test_what_was_generated_has_the_same_bits_in_a_fresh_process(capsys, model_dir, tmp_path, how):
    path, values = generated(
        capsys, tmp_path / "turn.json", model_dir, "--max-new-tokens", 70, *how, ids=IDS
    )
    options = how[how.index("--chunks") :][:2] if "--chunks" in how else ()
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
    assert again["tokens"] == 70
    assert again["prompt_tokens"] == 150
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


def test_a_restored_generation_is_scored_from_token_ids_alone(capsys, model_dir, tmp_path):
    snapshot = tmp_path / "turn.kvsnap"
    common = ("generate", "-q", "--format", "json", "--model", model_dir, "--max-new-tokens", 30)
    told(capsys, *common, "--ids", joined(IDS), "--save", snapshot)
    path = tmp_path / "turn2.json"
    path.write_text(
        told(capsys, *common, "--restore", snapshot, "--ids", "7,8,9", "--logprobs"),
        encoding="utf-8",
    )
    snapshot.unlink()
    out = told(capsys, "score", "-q", "--model", model_dir, "--against", path)
    assert "30, after a prompt of 183" in out
    assert "differing bits       0 of 960" in out


def test_one_other_bit_is_found_and_is_exit_code_1(capsys, model_dir, turn):
    logprobs = json.loads(turn.read_text())["logprobs"]
    next_one = float(np.nextafter(np.float32(logprobs[13]), np.float32(0)))
    flipped = np.array([logprobs[13], next_one], np.float32).view(np.uint32)
    bits = bin(int(flipped[0] ^ flipped[1])).count("1")
    changed(turn, logprobs=[*logprobs[:13], next_one, *logprobs[14:]])
    common = ("score", "-q", "--model", model_dir, "--against", turn)
    values = told_json(capsys, *common, code=1)
    assert values["differing_tokens"] == 1
    assert values["bits"]["differing_bits"] == bits
    assert values["bits"]["first"]["index"] == [13]
    assert values["bits"]["first"]["ulps"] == 1
    assert values["max_abs_delta"] == abs(logprobs[13] - next_one)
    assert values["clip_fraction"] == 0
    out = told(capsys, *common, code=1)
    assert f"differing bits       {bits} of 640" in out
    assert "1 ulp apart" in out


def test_other_tokens_are_found(capsys, model_dir, turn):
    ids = json.loads(turn.read_text())["ids"]
    changed(turn, ids=[(ids[0] + 1) % 64, *ids[1:]])
    values = told_json(capsys, "score", "-q", "--model", model_dir, "--against", turn, code=1)
    assert values["bits"]["first"]["index"] == [0]
    assert values["max_abs_delta"] > 0
    assert values["approx_kl"] > 0


# Another fingerprint.


def test_other_numerics_are_refused_by_name_with_the_remedy(capsys, model_dir, turn):
    options = ("--rows", "32", "--small-rows", "fixed")
    err = refused(capsys, "score", "-q", "--model", model_dir, "--against", turn, *options)
    assert "generated with rows" in err
    assert "here it is 32" in err
    assert "set --rows and --small-rows to what" in err
    assert "--on-mismatch compare" in err


def test_other_numerics_are_compared_if_told_to_and_said(capsys, model_dir, turn):
    arguments = ("score", "-q", "--model", model_dir, "--against", turn, "--chunk-tokens", "32")
    code = main([*map(str, arguments), "--on-mismatch", "compare", "--format", "json"])
    values = json.loads(capsys.readouterr().out)
    assert values["fingerprint_differs"]["chunk_tokens"] == {"generated": 64, "here": 32}
    assert code == (values["bits"]["differing_bits"] > 0)
    assert values["max_abs_delta"] < 1e-3
    main([*map(str, arguments), "--on-mismatch", "compare"])
    assert "other chunk_tokens   generated 64, here 32" in capsys.readouterr().out


def test_a_field_of_another_release_is_a_mismatch_too(capsys, model_dir, turn):
    fingerprint = json.loads(turn.read_text())["fingerprint"]
    changed(turn, fingerprint={**fingerprint, "phase_of_moon": "full"})
    err = refused(capsys, "score", "-q", "--model", model_dir, "--against", turn)
    assert "phase_of_moon 'full'" in err


# What is no generation.


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"command": "info"}, "command is 'info'; expected \"generate\""),
        ({"command": None}, "command is None"),
        ({"logprobs": None}, "no logprobs in it; generate with --logprobs"),
        ({"logprobs": [-1.0]}, "logprobs is 1; expected a list of 20"),
        ({"logprobs": "x"}, "logprobs is 'x'"),
        ({"logprobs": [0.1] * 20}, "logprobs[0] is 0.1; expected a float32 number"),
        ({"logprobs": [-1.0] * 19 + [None]}, "logprobs[19] is None"),
        ({"logprobs": [-1.0] * 19 + [-1]}, "logprobs[19] is -1; expected a float32"),
        ({"logprobs": [-1.0] * 19 + [float("nan")]}, "logprobs[19] is nan"),
        ({"logprobs": [-1.0] * 19 + [1e300]}, "logprobs[19] is 1e+300"),
        ({"ids": []}, "ids is []; expected a list of token ids"),
        ({"ids": [1, "2"]}, "ids[1] is '2'; expected a token id"),
        ({"ids": [1, True]}, "ids[1] is True"),
        ({"ids": [-1]}, "ids[0] is -1"),
        ({"prompt_ids": None}, "prompt_ids is None"),
        ({"prompt_ids": {"a": "b" * 200}}, "prompt_ids is {'a': 'bbb"),
        ({"fingerprint": None}, "fingerprint is None; expected an object"),
    ],
)
def test_a_file_that_is_no_generation_is_refused_by_its_field(capsys, turn, fields, words):
    changed(turn, **fields)
    err = refused(capsys, "score", "--model", "no-model", "--against", turn)
    assert f"--against {turn}: " in err
    assert words in err


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[1]", "a JSON list; expected what `kvpager generate"),
        (b"3", "a JSON int"),
    ],
)
def test_a_file_that_is_no_json_object_is_refused(capsys, tmp_path, data, words):
    path = tmp_path / "turn.json"
    path.write_bytes(data)
    assert words in refused(capsys, "score", "--model", "no-model", "--against", path)


def test_a_missing_file_is_one_line(capsys, tmp_path):
    missing = tmp_path / "none.json"
    err = refused(capsys, "score", "--model", "no-model", "--against", missing)
    assert f"--against {missing}: No such file" in err
    assert "Is a directory" in refused(capsys, "score", "--model", "x", "--against", tmp_path)


def test_ids_outside_the_vocabulary_are_refused(capsys, model_dir, turn):
    prompt_ids = json.loads(turn.read_text())["prompt_ids"]
    changed(turn, prompt_ids=[*prompt_ids, 64])
    err = refused(capsys, "score", "-q", "--model", model_dir, "--against", turn)
    assert "is 64; expected a token id from 0 to 63" in err


# The command line.


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--ids", "1,2"), 2, "--model is missing"),
        (("--model", "x"), 2, "give --prompt, --prompt-file, --ids or --against"),
        (("--model", "x", "--ids", "1", "--against", "y"), 2, "not allowed with"),
        (("--model", "x", "--ids", "1", "--on-mismatch", "compare"), 2, "without --against"),
        (("--model", "x", "--againts", "y"), 2, "did you mean --against?"),
        (("--model", "x", "--against", "y", "--on-mismatch", "comprae"), 2, "mean compare?"),
        (("--model", "x", "--ids", "1;2"), 2, "no token id"),
        (("--model", "x", "--prompt-file", "none.txt"), 1, "none.txt: No such file"),
        (("--model", "none", "--ids", "1,2"), 1, "none: no such folder"),
        (("--model", "x", "--ids", "1,2", "--pool", "100"), 2, "a multiple of chunk_tokens"),
    ],
)
def test_a_wrong_command_line_is_refused_in_one_line(
    capsys, monkeypatch, tmp_path, arguments, code, words
):
    monkeypatch.chdir(tmp_path)
    assert words in refused(capsys, "score", *arguments, code=code)


def test_one_token_alone_cannot_be_scored(capsys, model_dir):
    err = refused(capsys, "score", "-q", "--model", model_dir, "--ids", "1")
    assert "expected at least 2" in err


def test_text_without_a_tokenizer_names_the_option_for_ids(capsys, model_dir):
    assert "--ids" in refused(capsys, "score", "-q", "--model", model_dir, "--prompt", "hello")


# The command in a process of its own that stops in its second forward.
SLOW = """
import signal, sys, time
from kvpager.cli import main
from kvpager.execution.runner import Runner

run, forwards = Runner.run, []

def slow(runner, batch):
    forwards.append(batch)
    if len(forwards) == 2:
        print("in the middle", file=sys.stderr, flush=True)
        time.sleep(60)
    return run(runner, batch)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
Runner.run = slow
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
)
def test_an_interrupted_score_says_so_and_leaves_the_old_file(
    model_dir, tmp_path, number, code, words
):
    old = tmp_path / "scores.json"
    old.write_text("old", encoding="utf-8")
    ids = joined(i % 60 for i in range(1000))
    command = [sys.executable, "-c", SLOW, "score", "-q", "--model", model_dir, "--ids", ids]
    with subprocess.Popen(
        [*command, "--format", "json", "--output", old],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stderr.readline() == "in the middle\n"
            process.send_signal(number)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, out, err) == (code, "", f"kvpager: {words}\n")
    assert files_below(tmp_path) == ["scores.json"]
    assert old.read_text(encoding="utf-8") == "old"
