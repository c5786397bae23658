"""`kvpager verify`: what it prints, how it ends, and what it leaves behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers
from cli_snapshots import refused

from kvpager._runtime.execution.runner import Runner
from kvpager.cli import main
from kvpager.cli.needles import shipped_model_path
from kvpager.verify import RELATIONS, relation, run

SMALL = ("--rows", "32", "--chunk-tokens", "16", "--pool", "128", "--host", "128MiB")


def verify(capsys, *arguments):
    """Exit code, stdout and stderr."""
    code = main(["verify", *map(str, arguments)])
    return code, *capsys.readouterr()


@pytest.fixture
def quick(monkeypatch):
    """Fewer relations, all of one process."""
    whole = run.verify

    def few(subject, *, on_relation=None):
        chosen = [relation("trimmed"), relation("decoded")]
        return whole(subject, chosen, on_relation=on_relation)

    monkeypatch.setattr(run, "verify_selections", few)


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """The folder of a small model with experts."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        max_position_embeddings=1024,
    )
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model") / "experts"
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def test_the_shipped_model_keeps_every_relation_in_every_process(capsys):
    code, out, err = verify(capsys, "--format", "json", "-q", *SMALL)
    told = json.loads(out)
    assert code == 0, told["verdict"]
    assert told["kept"]
    assert told["compared"]["bits"] > 10_000_000
    assert told["compared"]["differing_bits"] == 0
    assert told["architecture"] == "SmolLM3ForCausalLM"
    dense = [r for r in told["relations"] if r["selection"].startswith("dense")]
    first = [r["relation"] for r in dense if "moved" not in r["selection"]]
    second = [r["relation"] for r in dense if "moved" in r["selection"]]
    assert first == [each.name for each in RELATIONS]
    assert set(second) == {each.name for each in RELATIONS if each.at_start} | {
        "paged",
        "re-sealed",
    }
    assert second != [name for name in first if name in second]
    assert {r["relation"] for r in told["relations"] if r["selection"].startswith("topk")} >= {
        "warm",
        "decoded",
        "packed",
        "speculated",
        "paged",
    }
    assert {r["status"] for r in told["relations"]} == {"same", "within"}
    assert len(told["lengths"]) > 10
    assert any("clip fraction 0" in note for r in dense for note in r["notes"])
    linear = [shape for shape in told["shapes"] if shape["kind"] == "Linear"]
    assert linear
    assert not any(shape["row_dependent"] for shape in linear)
    assert err == ""


def test_a_table_a_verdict_and_progress_are_shown(capsys, quick):
    code, out, err = verify(capsys, *SMALL)
    assert code == 0
    lines = [line.split() for line in out.splitlines()]
    assert any(line[:1] == ["trimmed"] and "same" in line for line in lines)
    # Row counts of equal bits of a float32 product; which ones depends on the processor.
    assert re.search(r"  1 \| (\d+(-\d+)? \| )*\d+-64  ", out)
    assert out.splitlines()[-1].startswith("kept: ")
    assert "dense(): trimmed" in err


def test_a_difference_is_told_with_its_layer_and_ends_with_1(capsys, quick, monkeypatch):
    monkeypatch.setattr(Runner, "count", lambda self, batch: batch.used)
    code, out, _ = verify(capsys, *SMALL, "-q", "--linear", "torch")
    assert code == 1
    words = " ".join(out.split())
    assert "first: given token by token from 1 to 4: keys of layer 0" in words
    assert "ulp apart" in words
    assert "advice: " in words
    assert "NOT KEPT: " in words


def test_a_prompt_of_token_ids_is_used(capsys, quick):
    code, out, _ = verify(capsys, *SMALL, "-q", "--format", "json", "--ids", "5,6,7,8,9,10")
    assert code == 0
    assert json.loads(out)["prompt_tokens"] > 6


def test_experts_that_share_rows_are_refused_with_advice_and_end_with_3(capsys, experts):
    code, out, _ = verify(capsys, "--model", experts, "--linear", "torch", "-q", *SMALL)
    assert code == 3
    words = " ".join(out.split())
    assert "REFUSED: " in words
    assert "--experts batched_mm" in words


def test_experts_that_treat_each_row_alone_are_verified(capsys, experts, quick):
    code, out, _ = verify(capsys, "--model", experts, "--experts", "batched_mm", "-q", *SMALL)
    assert code == 0, out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "cuda:63"], "cuda:"),
        (["--model", "/nowhere"], "no such folder"),
        (["--prompt", "text"], "has no tokenizer"),
        (["--experts", "magic"], "--experts magic"),
    ],
)
def test_what_cannot_be_told_is_said_in_one_line(capsys, arguments, words):
    assert words in refused(capsys, "verify", "-q", *arguments, code=3)


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [
        (signal.SIGINT, 130, "interrupted"),
        pytest.param(signal.SIGTERM, 143, "terminated", marks=pytest.mark.deep),
    ],
)
def test_an_interruption_in_the_middle_leaves_no_files_and_no_process(
    tmp_path, number, code, words
):
    # Interrupted where a fresh process runs: the snapshots it restores are there, and so is it.
    script = (
        "import signal, sys\n"
        "from kvpager.cli import main\n"
        "from kvpager.verify import relation, run\n"
        "whole = run.verify\n"
        "run.verify_selections = lambda subject, on_relation=None: whole(\n"
        "    subject, [relation('restored')], on_relation=on_relation)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, "verify", *SMALL],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    try:
        jobs = lambda: list(tmp_path.glob("kvpager-verify-*/job*/said"))  # noqa: E731
        deadline = time.monotonic() + 120
        while not jobs() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert jobs()
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == code
    assert out == ""
    assert err.splitlines()[-1] == f"kvpager: {words}"
    assert list(tmp_path.iterdir()) == []
    while running(str(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.05)  # one that was just starting sees for itself that its parent has ended
    assert running(str(tmp_path)) == []


def running(text):
    """Command lines of this machine's processes that hold a text."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = place.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # gone meanwhile
            continue
        if text in command:
            found.append(command)
    return found


def test_a_fresh_process_ends_with_the_one_that_started_it(tmp_path):
    job = {
        "model": str(shipped_model_path()),
        "weights": "",
        "dtype": "float32",
        "experts": None,
        "threads": 1,
        "tasks": [],
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    child = subprocess.Popen(
        [sys.executable, "-m", "kvpager.verify.child", str(tmp_path / "job.json")],
        stdin=subprocess.PIPE,
    )
    child.stdin.close()
    assert child.wait(timeout=60) == 1
    assert not (tmp_path / "result.json").exists()
