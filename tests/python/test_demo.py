"""The main job from the command line: several processes, not one different bit."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvpager.cli import main
from kvpager.cli.demo import command
from kvpager.cli.demo.compare import differing_bits
from kvpager.cli.demo.plan import Plan
from kvpager.cli.demo.reference import run_reference
from kvpager.cli.demo.turn import PLAN_FILE, logits_file, run_turn
from kvpager.pager import TIER_HOST, TIER_RESIDENT, TIER_SNAPSHOT
from kvpager.report import Episode, draw_blocks, draw_png

SMALL = ("--context", "2048", "--pool", "256", "--chunks", "8", "--needles", "6", "--host", "64MiB")


@pytest.fixture
def parts(monkeypatch):
    """Runs the demo's parts in this process: seconds less each. Entries run before the part."""
    before = {}

    def run_here(name, job, workdir):
        before.get(name, lambda workdir: None)(workdir)
        run = {"turn": run_turn, "reference": run_reference}[job["role"]]
        answer = str(workdir / name)
        return run({**job, "workdir": str(workdir), "answer": answer, "started_at": time.time()})

    monkeypatch.setattr(command, "run_child", run_here)
    return before


def demo(capsys, *arguments, code=0):
    assert main(["demo", "--format", "json", "-q", *map(str, arguments)]) == code
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def test_turns_in_new_processes_continue_without_one_different_bit(capfd, tmp_path):
    plot, kept = tmp_path / "plot.png", tmp_path / "kept"
    arguments = ["--turns", "2", "--plot", str(plot), "--seed", "3", "--workdir", str(kept)]
    code = main(["demo", *SMALL, "--format", "json", *arguments])
    out, err = capfd.readouterr()
    assert code == 0, err
    values = json.loads(out)  # one object and nothing else
    assert "turn 2 of 2: a new process restores turn 1" in err
    assert values["differing_bits"] == 0
    assert values["compared_bits"] > 8 * 2048 * 2048  # K/V of the document, to begin with
    first, second = values["turns"]
    assert second["restored_tokens"] == first["tokens"] - 1  # the last token was pending
    assert second["needles_paged_out_at_start"] == second["needles_asked"] == 3
    assert second["imports_s"] > 0
    assert values["resident_bytes"] <= values["pool_bytes"] < values["full_cache_bytes"] / 4
    assert values["needles_found"] == values["uninterrupted"]["needles_found"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert modes(kept) == ({0o600}, {0o700})


def test_as_many_needles_are_found_as_by_full_attention(capsys, parts):
    paged = demo(capsys, *SMALL, "--plot", "none")
    dense = demo(capsys, *SMALL[:4], *SMALL[6:], "--dense", "--plot", "none")
    assert paged["differing_bits"] == dense["differing_bits"] == 0
    assert dense["selection"].startswith("dense")
    assert paged["needles_found"] >= dense["needles_found"] >= 5
    assert paged["needles_asked"] == dense["needles_asked"] == 6


def test_one_flipped_logit_bit_fails_the_demo_and_is_located(capsys, parts, tmp_path):
    def flip(workdir):
        path = logits_file(workdir, "turn 2")
        logits = np.load(path)
        logits[1, 7] ^= 16
        np.save(path, logits)

    parts["reference"] = flip
    values = demo(capsys, *SMALL, "--plot", "none", code=1)
    assert values["differing_bits"] == 1
    assert values["first_difference"] == "turn 2: logits, byte (1, 7)"


def test_other_keys_and_values_fail_the_demo_and_are_located(capsys, parts):
    def another_document(workdir):
        plan = Plan.load(workdir / PLAN_FILE)
        plan.document[100] = 9 if plan.document[100] != 9 else 10
        plan.save(workdir / PLAN_FILE)

    parts["reference"] = another_document
    values = demo(capsys, *SMALL, "--plot", "none", code=1)
    assert values["kv_comparison"]["differing"] > 10_000  # more than the ids alone
    assert values["first_difference"].startswith("turn 1: token ids")


def test_the_verdict_of_a_failed_run_says_so(capsys, parts, tmp_path):
    def forget(workdir):
        np.save(logits_file(workdir, "turn 1"), np.zeros((8, 4096), np.uint8))

    parts["reference"] = forget
    assert main(["demo", "-q", *SMALL, "--plot", "none"]) == 1
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
    values = demo(capsys, *small, "--model", tmp_path, "--turns", "2", "--plot", "none")
    assert values["differing_bits"] == 0
    assert values["needles_known"] is False
    assert values["needles_asked"] == values["needles_found"] == 0
    arguments = ["demo", "-q", *small, "--model", str(tmp_path), "--turns", "2", "--plot", "none"]
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
        (("--plot", "/no/such/folder/plot.png"), 1, "there is no folder"),
        (("--needels", "3"), 2, "did you mean --needles?"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(
    capsys, monkeypatch, arguments, code, message
):
    monkeypatch.setattr(command, "run_child", lambda *job: pytest.fail("something ran"))
    assert main(["demo", *arguments]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert message in err


def test_the_failure_of_a_part_is_told_in_one_line(capfd, tmp_path):
    arguments = ["--context", "2048", "--host", "1MiB", "--pool", "256", "--chunks", "4"]
    assert main(["demo", "-q", *arguments, "--workdir", str(tmp_path), "--plot", "none"]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err
    assert err.startswith("kvpager: turn 1: ")
    assert "bytes" in err


def test_what_the_demo_keeps_is_its_owners_alone(capsys, tmp_path, parts):
    kept = tmp_path / "kept"
    arguments = ("--turns", "2", "--workdir", kept, "--plot", "none")
    plan = kept / PLAN_FILE
    before = os.umask(0)
    try:
        demo(capsys, *SMALL, *arguments)
        assert modes(kept) == ({0o600}, {0o700})
        plan.chmod(0o644)  # as an older release left it
        demo(capsys, *SMALL, *arguments)
    finally:
        os.umask(before)
    assert modes(kept) == ({0o600}, {0o700})
    assert plan.stat().st_size > 2048
    assert len(list(kept.glob("*.kvsnap"))) == 2


def modes(folder):
    """Permissions of the files and of the folders there are."""
    everything = [folder, *folder.rglob("*")]
    return tuple(
        {stat.S_IMODE(path.stat().st_mode) for path in everything if is_one(path)}
        for is_one in (Path.is_file, Path.is_dir)
    )


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
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


@pytest.mark.slow
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
            if b"_turn" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
        time.sleep(0.1)
    pytest.fail("no part was started")


def test_bits_are_counted_one_by_one():
    one = np.arange(32, dtype=np.uint8).reshape(4, 8)
    other = one.copy()
    assert differing_bits(one, other, "x").differing == 0
    other[2, 3] ^= 0b101
    other[3, 7] ^= 0b1
    difference = differing_bits(one, other, "x")
    assert (difference.compared, difference.differing) == (256, 3)
    assert difference.first == "x, byte (2, 3)"
    assert differing_bits(one, one[:2], "x").differing == 256


# The pictures.


def episodes():
    tiers = np.zeros((9, 20), np.uint8)
    for moment in range(9):
        tiers[moment, : 2 + 2 * moment] = TIER_HOST
        tiers[moment, 2 * moment : 2 + 2 * moment] = TIER_HOST | TIER_RESIDENT
    nothing = np.zeros(tiers.shape, np.bool_)
    recalled = nothing.copy()
    recalled[8, 0] = True
    restored = np.full((4, 20), TIER_SNAPSHOT, np.uint8)
    calm = np.zeros(restored.shape, np.bool_)
    return [
        Episode("prefill", tiers, nothing, recalled),
        Episode("turn 2", restored, calm, calm, [(1, 3)]),
    ]


@pytest.mark.parametrize("width", [40, 80, 133])
@pytest.mark.parametrize("unicode", [True, False])
def test_the_terminal_picture_fits_its_width_and_characters(width, unicode):
    picture = draw_blocks(episodes(), width, colour=False, unicode=unicode)
    rows = picture.splitlines()[1:-2]
    assert max(map(len, rows)) <= width
    assert "\x1b" not in picture
    assert unicode or picture.isascii()
    resident, host, recalled = ("█", "▒", "◆") if unicode else ("#", "-", "o")
    assert resident in "".join(rows)
    assert host in "".join(rows)
    assert recalled in rows[0]
    assert recalled not in "".join(rows[1:])


def test_colour_changes_the_picture_by_escapes_alone():
    plain = draw_blocks(episodes(), 80, colour=False, unicode=True)
    coloured = draw_blocks(episodes(), 80, colour=True, unicode=True)
    assert re.sub("\x1b\\[[0-9;]*m", "", coloured) == plain
    assert coloured != plain


def test_the_png_shows_every_episode():
    data = draw_png(episodes(), 64, "a test")
    assert data.startswith(b"\x89PNG")
    assert len(data) > 10_000
