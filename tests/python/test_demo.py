"""The main job from the command line: several processes, not one different bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from kvpager.cli import demo as command
from kvpager.cli import demo_part, main

SMALL = ("--context", "2048", "--pool", "256", "--chunks", "8", "--needles", "6", "--host", "64MiB")


@pytest.fixture
def parts(monkeypatch):
    """Runs the demo's parts in this process: seconds less each. Entries run before the part."""
    before = {}

    def run_here(name, job):
        before.get(name, lambda job: None)(job)
        return demo_part.work({**job, "started_at": time.time()}, Path(job["workdir"]))

    monkeypatch.setattr(command, "run_part", run_here)
    return before


def demo(capsys, *arguments, code=0):
    assert main(["demo", "--format", "json", "-q", *map(str, arguments)]) == code
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def test_turns_in_new_processes_continue_without_one_different_bit(capfd):
    code = main(["demo", *SMALL, "--format", "json", "--turns", "2", "--seed", "3"])
    out, err = capfd.readouterr()
    assert code == 0, err
    values = json.loads(out)  # one object and nothing else
    assert "turn 2 of 2: a new process restores turn 1" in err
    assert values["differing_bits"] == 0
    assert values["compared_bits"] > 8 * 2048 * 2048  # K/V of the document, to begin with
    first, second = values["turns"]
    assert second["restored_tokens"] == first["tokens"] - 1  # the last token was pending
    assert second["needles_paged_out_at_start"] == second["needles_asked"] == 3
    assert second["load_s"] > 0
    assert values["resident_bytes"] <= values["pool_bytes"] < values["full_cache_bytes"] / 4
    assert values["needles_found"] == values["uninterrupted"]["needles_found"]


def test_as_many_needles_are_found_as_by_full_attention(capsys, parts):
    paged = demo(capsys, *SMALL)
    dense = demo(capsys, *SMALL[:4], *SMALL[6:], "--dense")
    assert paged["differing_bits"] == dense["differing_bits"] == 0
    assert dense["selection"].startswith("dense")
    assert paged["needles_found"] >= dense["needles_found"] >= 5
    assert paged["needles_asked"] == dense["needles_asked"] == 6


def test_one_flipped_logit_bit_fails_the_demo_and_is_located(capsys, parts):
    def flip(job):
        path = Path(job["workdir"]) / "turn2.logits"
        logits = load_file(path)["logits"]
        logits.view(torch.int32)[1, 7] ^= 16
        save_file({"logits": logits}, path)

    parts["reference"] = flip
    values = demo(capsys, *SMALL, code=1)
    assert values["differing_bits"] == 1
    assert values["first_difference"].startswith("turn 2: logits [1, 7]: ")


def test_other_keys_and_values_fail_the_demo_and_are_located(capsys, parts):
    def another_document(job):
        job["document"][100] = 9 if job["document"][100] != 9 else 10

    parts["reference"] = another_document
    values = demo(capsys, *SMALL, code=1)
    assert values["differing_bits"] > 10_000  # more than the ids alone
    assert "logits" in values["first_difference"] or "token ids" in values["first_difference"]


def test_one_flipped_bit_of_the_saved_values_fails_the_demo_and_is_located(
    capsys, parts, monkeypatch
):
    class Nudged(demo_part.Pager):
        def restore(self, info, **options):
            saved = super().restore(info, **options)
            read = saved.read_kv

            def nudged(layer, start, stop):
                keys, values = read(layer, start, stop)
                values = values.clone()
                values.view(torch.int32)[5, 1, 2] ^= int(layer == 1)
                return keys, values

            monkeypatch.setattr(saved, "read_kv", nudged)
            return saved

    parts["reference"] = lambda job: monkeypatch.setattr(demo_part, "Pager", Nudged)
    values = demo(capsys, *SMALL, code=1)
    assert values["differing_bits"] == 3  # one for each turn
    assert values["first_difference"].startswith("turn 1: V of layer 1, positions from 0 [5, 1, 2]")


def test_the_verdict_of_a_failed_run_says_so(capsys, parts):
    def forget(job):
        save_file({"logits": torch.zeros(8, 1024)}, Path(job["workdir"]) / "turn1.logits")

    parts["reference"] = forget
    assert main(["demo", "-q", *SMALL]) == 1
    out, err = capsys.readouterr()
    assert "FAILED" in out
    assert "turn 1: logits" in out
    assert err == ""


def test_a_model_of_which_nothing_is_known_shows_bits_and_no_needles(capsys, parts, tmp_path):
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    small = ("--context", "512", "--pool", "256", "--chunks", "2", "--needles", "4")
    values = demo(capsys, *small, "--model", tmp_path, "--turns", "2")
    assert values["differing_bits"] == 0
    assert values["needles_asked"] == values["needles_found"] == 0
    arguments = ["demo", "-q", *small, "--model", str(tmp_path), "--turns", "2"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "nothing is known of what this model can look up" in out
    assert "needles found" not in out
    assert main(["demo", "-q", "--context", "2040", "--model", str(tmp_path)]) == 1
    assert "lower --context" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--turns", "1"), 2, "--turns is 1"),
        (("--needles", "2"), 2, "--needles is 2"),
        (("--context", "0"), 2, "--context"),
        (("--context", "300", "--needles", "90"), 2, "do not fit"),
        (("--model", "/no/such/model"), 1, "no such folder"),
        (("--output", "/no/such/folder/x.json"), 1, "there is no folder"),
        (("--needels", "3"), 2, "did you mean --needles?"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(
    capsys, monkeypatch, arguments, code, message
):
    monkeypatch.setattr(command, "run_part", lambda *job: pytest.fail("something ran"))
    assert main(["demo", *arguments]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert message in err


def test_the_failure_of_a_part_is_told_in_one_line(capfd):
    arguments = ["--context", "2048", "--host", "1MiB", "--pool", "256", "--chunks", "4"]
    assert main(["demo", "-q", *arguments]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err
    assert err.startswith("kvpager: turn 1: ")
    assert "bytes" in err


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.deep)]
)
def test_an_interrupted_demo_leaves_nothing_behind(tmp_path, number):
    scratch, here = tmp_path / "scratch", tmp_path / "here"
    scratch.mkdir()
    here.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "kvpager.cli", "demo", "--context", "65536"],
        cwd=here,
        env={**os.environ, "TMPDIR": str(scratch)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A background job of a shell ignores SIGINT, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        child = _child_of(process)
        assert any(scratch.iterdir())
        time.sleep(0.5)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[number]
    assert out == ""
    assert "Traceback" not in err
    assert err.splitlines()[-1] in ("kvpager: interrupted", "kvpager: terminated")
    assert [*scratch.iterdir(), *here.iterdir()] == []
    assert not Path(f"/proc/{child}").exists()


@pytest.mark.deep
def test_a_part_ends_with_the_demo_that_started_it(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "kvpager.cli", "demo", "--context", "65536"],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        child = Path(f"/proc/{_child_of(process)}")
    finally:
        process.kill()
        process.wait()
    for _ in range(600):
        if not child.exists() or ") Z " in (child / "stat").read_text():
            return
        time.sleep(0.1)
    pytest.fail("the part went on")


def _child_of(process):
    """Process id of the part that runs, once one does."""
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    for _ in range(1200):
        assert process.poll() is None
        for child in path.read_text().split():
            if b"demo_part" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
        time.sleep(0.1)
    pytest.fail("no part was started")
