"""The GPU benchmark without a GPU: its gates, its clockwork, and a rehearsal on the shim."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from bench_reports import named_rows

from kvpager.pager.device import missing
from kvpager_bench import harness
from kvpager_bench.gpu import __main__ as gpu
from kvpager_bench.gpu import gates as gpu_gates
from kvpager_bench.gpu import subjects as gpu_subjects
from kvpager_bench.gpu.machine import RehearsalMachine
from kvpager_bench.gpu.run import Run
from kvpager_bench.gpu.sizes import FULL, QUICK, REHEARSAL
from kvpager_bench.harness import Column, MissingNumberError


class FakeMachine(RehearsalMachine):
    """Of a run whose figures are given."""

    rehearsal = False

    def __init__(self):
        pass


@pytest.fixture
def run():
    return Run(FakeMachine(), FULL, harness.environment())


def good_figures(run):
    """Every figure the gates ask for, each good enough."""
    paging = run.report(
        "paging",
        "?",
        *(Column(name, text=name == "what") for name in ("what", "chunks", "eta", "ratio")),
        Column("bytes_up"),
        Column("bytes_down"),
    )
    for what, chunks, eta, ratio in (
        ("promote", 1, 0.8, 0),
        ("promote", 32, 0.95, 0),
        ("evict, clean", 64, 0, 0),
        ("duplex: both", 64, 0, 1.7),
    ):
        paging.add(what=what, chunks=chunks, eta=eta, ratio=ratio, bytes_up=0, bytes_down=0)
    names = ("rows", "sequences", "context", "of_copy", "over_flash")
    attention = run.report("attention", "?", Column("what", text=True), *map(Column, names))
    attention.add(what="decode", rows=1, sequences=1, context=32768, of_copy=0.85, over_flash=1)
    for rows in FULL.prefill_rows:
        for context in FULL.prefill_contexts:
            attention.add(
                what="prefill", rows=rows, sequences=1, context=context, of_copy=0, over_flash=0.8
            )
    decode = run.report(
        "decode", "?", Column("selection", text=True), Column("context"), Column("step_ms")
    )
    restore = run.report(
        "restore",
        "?",
        *(Column(name, text=True) for name in ("selection", "source")),
        *(Column(name) for name in ("context", "first_token_ms")),
    )
    for context in FULL.contexts:
        decode.add(selection="top-32", context=context, step_ms=10 if context < 1e5 else 11)
    for selection in ("dense", "top-32"):
        restore.add(selection=selection, source="pinned memory", context=32768, first_token_ms=120)
    dense = run.report("dense_pool", "?", Column("bits_compared"), Column("differing_bits"))
    dense.add(bits_compared=1000, differing_bits=0)


SPOILERS = [
    ("paging", {"what": "promote", "chunks": 1}, {"eta": 0.74}),
    ("paging", {"what": "promote", "chunks": 32}, {"eta": 0.89}),
    ("paging", {"what": "duplex: both"}, {"ratio": 1.49}),
    ("paging", {"what": "evict, clean"}, {"bytes_down": 1}),
    ("paging", {"what": "evict, clean"}, {"bytes_up": 1}),
    ("attention", {"what": "decode"}, {"of_copy": 0.79}),
    ("attention", {"what": "prefill", "rows": 64, "context": 2048}, {"over_flash": 0.69}),
    ("decode", {"context": 262144}, {"step_ms": 11.6}),
    ("decode", {"context": 32768}, {"step_ms": 9.5}),
    ("restore", {"selection": "dense"}, {"first_token_ms": 150.1}),
    ("restore", {"selection": "top-32"}, {"first_token_ms": 150.1}),
    ("dense_pool", {}, {"differing_bits": 1}),
    ("dense_pool", {}, {"bits_compared": 0}),
]


class TestGates:
    def failing(self, run):
        return [verdict.claim for verdict in gpu_gates.judge(run) if not verdict.holds]

    def test_good_figures_pass(self, run):
        good_figures(run)
        assert self.failing(run) == []

    @pytest.mark.parametrize(("section", "match", "change"), SPOILERS)
    def test_one_bad_figure_fails_exactly_one_gate(self, run, section, match, change):
        good_figures(run)
        (row,) = run.rows(section, **match)
        row.update(change)
        (index,) = [i for i, r in enumerate(run.reports[section].rows) if r == row]
        run.reports[section].rows[index] = row
        assert len(self.failing(run)) == 1

    @pytest.mark.parametrize(("section", "match", "change"), SPOILERS)
    @pytest.mark.parametrize("value", ["n/a", None, float("nan")])
    def test_a_figure_that_is_none_fails_its_gate(self, run, section, match, change, value):
        good_figures(run)
        (row,) = run.rows(section, **match)
        row[next(iter(change))] = value
        assert len(self.failing(run)) == 1

    @pytest.mark.parametrize(("section", "match", "change"), SPOILERS)
    def test_a_row_that_is_missing_fails_its_gate(self, run, section, match, change):
        good_figures(run)
        (row,) = run.rows(section, **match)
        run.reports[section].rows.remove(row)
        failing = self.failing(run)
        assert len(failing) == 1

    def test_without_any_figure_every_gate_fails(self, run):
        assert len(self.failing(run)) == len(gpu_gates.GATES)

    def test_small_sizes_are_not_judged_as_if_they_were_whole(self):
        run = Run(FakeMachine(), QUICK, harness.environment())
        good_figures(run)
        assert "top-k decode from 16K to 256K stays within 15%" in self.failing(run)

    def test_a_rehearsal_reaches_no_gate(self, run):
        good_figures(run)
        run.machine.rehearsal = True
        assert len(self.failing(run)) == len(gpu_gates.GATES)


class TestRun:
    def section(self, *steps):
        def section(run):
            report = run.report("one", "?", Column("value"))
            for step in steps:
                if isinstance(step, Exception):
                    raise step
                report.add(value=step)

        return section

    def test_what_a_section_raises_is_recorded_beside_what_it_measured(self, run, capsys):
        run.carry_out("one", self.section(1.5, MemoryError("full")), 10)
        entry = run.to_json()["sections"]["one"]
        assert entry["error"] == "MemoryError: full"
        assert named_rows(entry) == [{"value": 1.5}]
        assert "MemoryError" in capsys.readouterr().err

    def test_a_section_that_measured_nothing_is_an_error(self, run):
        run.carry_out("one", self.section(), 10)
        assert "nothing was measured" in run.errors["one"]

    def test_a_section_out_of_time_says_what_it_left_out(self, run):
        def slow(run):
            report = run.report("one", "?", Column("value"))
            for value in range(3):
                if run.out_of_time(f"cell {value}"):
                    continue
                report.add(value=value)
                time.sleep(0.02)

        run.carry_out("one", slow, 0.01)
        assert run.skipped == ["cell 1", "cell 2"]
        assert run.to_json()["not_measured"] == run.skipped

    def test_a_number_is_that_of_exactly_one_row(self, run):
        run.carry_out("one", self.section(1, 2), 10)
        assert run.number("one", "value", value=2) == 2
        for match in ({}, {"value": 3}):
            with pytest.raises(MissingNumberError, match="expected one"):
                run.number("one", "value", **match)
        with pytest.raises(MissingNumberError, match="not measured"):
            run.number("two", "value")


class TestSubjects:
    def test_chunks_at_shuffled_places_gather_to_what_they_were(self):
        k = torch.randn(2, 3, 4 * 64, 16)
        v = torch.randn(2, 3, 4 * 64, 32)
        copy = gpu_subjects.ChunkedCopy(k, v)
        assert not torch.equal(copy.v.flatten(), v.flatten())
        gathered = copy.gather()
        assert torch.equal(gathered[0], k)
        assert torch.equal(gathered[1], v)

    def test_torchs_attention_is_causal_at_the_end_of_the_keys(self):
        q, k, v = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
        out = gpu_subjects.torch_attention(q, k, v)
        k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
        for row in range(3):
            seen = 9 - 3 + row + 1
            scores = torch.einsum("hd,htd->ht", q[0, :, row], k[0, :, :seen]) / 8**0.5
            expected = torch.einsum("ht,htd->hd", scores.softmax(-1), v[0, :, :seen])
            torch.testing.assert_close(out[0, :, row], expected, atol=1e-5, rtol=1e-5)

    def test_differing_bits_are_counted_and_shapes_must_agree(self):
        a = torch.tensor([1.0, -0.0, 2.0])
        assert gpu_subjects.differing_bits(a, torch.tensor([1.0, 0.0, 2.0])) == 1
        assert gpu_subjects.differing_bits(a, a.clone()) == 0
        with pytest.raises(MissingNumberError):
            gpu_subjects.differing_bits(a, a[:2])

    def test_layers_that_take_turns_are_larger_than_any_cache(self):
        for tokens in (*FULL.decode_contexts, *FULL.prefill_contexts):
            layers = FULL.attention_layers(tokens)
            assert 2 <= layers <= FULL.layers
            assert layers * tokens * FULL.page_token_bytes >= 4 * 60e6
        assert FULL.layout().chunk_bytes == 9 << 20


def load_gpu_test():
    path = Path(__file__).resolve().parents[2] / "scripts" / "gpu_test.py"
    spec = importlib.util.spec_from_file_location("gpu_test_script", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class TestGpuTestScript:
    """scripts/gpu_test.py: no step is good that was stopped, failed or ran nothing."""

    @pytest.fixture
    def script(self, tmp_path, monkeypatch):
        module = load_gpu_test()
        for name in ("BUILD", "LOGS"):
            monkeypatch.setattr(module, name, tmp_path)
        return module

    @pytest.mark.parametrize(
        ("judge", "good", "bad"),
        [
            (
                "pytest_passed",
                ["3 passed, 1 skipped in 0.1s", "===== 12 passed in 3.2s ====="],
                ["2 skipped in 0.1s", "no tests ran in 0.01s", "0 passed"],
            ),
            (
                "ctest_passed",
                ["100% tests passed, 0 tests failed out of 7"],
                ["No tests were found!!!", "0 tests failed out of 0"],
            ),
            (
                "sanitizer_passed",
                [
                    "[doctest] test cases:  3 |  3 passed\n===== ERROR SUMMARY: 0 errors",
                    "[doctest] test cases: 12 | 12 passed\n"
                    "===== RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
                ],
                [
                    "[doctest] test cases:  0 |  0 passed\n===== ERROR SUMMARY: 0 errors",
                    "[doctest] test cases:  3 |  3 passed\n===== ERROR SUMMARY: 2 errors",
                    "[doctest] test cases:  3 |  3 passed\n"
                    "===== RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)",
                    "[doctest] test cases:  3 |  3 passed",
                    "===== ERROR SUMMARY: 0 errors",
                ],
            ),
        ],
    )
    def test_what_a_step_printed_is_judged(self, script, judge, good, bad):
        judged = getattr(script, judge)
        for output in good:
            assert judged(0, output) == "", output
            assert judged(1, output) != ""
        for output in bad:
            assert judged(0, output) != "", output

    def test_a_step_that_takes_too_long_is_stopped_with_what_it_started(self, script, tmp_path):
        session = script.Session("shim", 1)
        alive = tmp_path / "alive"
        command = ["sh", "-c", f"(sleep 2; touch {alive}) & wait"]
        step = session.run("slow", command, 0.3, script.succeeded)
        assert not step.ok
        assert "stopped after" in step.detail
        assert step.seconds < 2
        time.sleep(2.2)
        assert not alive.exists()

    def test_when_the_time_is_over_nothing_more_is_begun(self, script, tmp_path):
        session = script.Session("shim", 1, start=time.monotonic() - script.TOTAL_SECONDS)
        step = session.run("late", ["touch", str(tmp_path / "late")], 60, script.succeeded)
        assert (step.ok, step.detail) == (False, script.NO_TIME)
        assert not (tmp_path / "late").exists()

    def test_the_report_is_good_only_if_every_step_is(self, script, tmp_path, capsys):
        session = script.Session("shim", 1)
        session.run("one", ["true"], 60, script.succeeded)
        assert script.report(session)
        session.run("two", ["false"], 60, script.succeeded)
        assert not script.report(session)
        assert "FAILED" in capsys.readouterr().out
        data = json.loads((tmp_path / "gpu-test.json").read_text(encoding="utf-8"))
        assert (data["ok"], [step["ok"] for step in data["steps"]]) == (False, [True, False])


def test_a_rehearsal_is_never_written_among_the_results(capsys):
    with pytest.raises(SystemExit):
        gpu.parse(["--rehearse", "--out", str(harness.RESULTS_DIR)])
    assert "mean nothing" in capsys.readouterr().err


def test_an_unknown_section_is_refused(capsys):
    with pytest.raises(SystemExit):
        gpu.parse(["--only", "atention"])
    assert "attention" in capsys.readouterr().err


def test_sections_have_budgets_within_ten_minutes():
    assert set(gpu.BUDGETS) == set(gpu.SECTIONS)
    assert sum(gpu.BUDGETS.values()) <= 560


def test_every_section_runs_on_the_shim(tmp_path, monkeypatch, capsys):
    if why_not := missing("shim"):
        assert "shim" not in os.environ.get("KVPAGER_TEST_DEVICES", ""), why_not
        pytest.skip(f"shim: {why_not}")
    monkeypatch.setattr(harness, "RESULTS_DIR", tmp_path / "results")
    threads = str(torch.get_num_threads())
    status = gpu.main(["--rehearse", "--threads", threads, "--out", str(tmp_path / "out")])
    printed = capsys.readouterr()
    assert status == 0, printed.out + printed.err
    assert not (tmp_path / "results").exists()
    (path,) = (tmp_path / "out").iterdir()
    assert path.name == "gpu-rehearsal.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    assert data["rehearsal"] is True
    assert "nothing" in data["warning"]
    assert list(data["sections"]) == list(gpu.SECTIONS)
    assert all(section["error"] is None for section in data["sections"].values())
    assert data["not_measured"] == []
    assert not any(gate["holds"] for gate in data["gates"])
    rows = named_rows(data["sections"]["attention"])
    assert {row["what"] for row in rows} == {"decode", "prefill"}
    assert max(row["relative_error"] for row in rows) < 1e-2
    paging = {(row["what"], row["chunks"]): row for row in named_rows(data["sections"]["paging"])}
    chunk = REHEARSAL.layout().chunk_bytes
    assert paging["promote", 2]["bytes_up"] == 2 * chunk
    assert paging["duplex: both", 2]["bytes_down"] >= 2 * chunk
    (dense,) = named_rows(data["sections"]["dense_pool"])
    assert dense["bits_compared"] > 1e6
    assert dense["differing_bits"] == 0
    assert np.isfinite([row["step_ms"] for row in named_rows(data["sections"]["decode"])]).all()
