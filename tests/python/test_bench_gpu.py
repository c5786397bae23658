"""The GPU benchmark without a GPU: its gates, its clockwork, and rehearsals on the shim."""

from __future__ import annotations

import json
import os

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
from kvpager_bench.gpu.products import LAYER
from kvpager_bench.gpu.run import Run
from kvpager_bench.gpu.sizes import FULL, REHEARSAL
from kvpager_bench.harness import Column, MissingNumberError


class FakeMachine(RehearsalMachine):
    """Of a run whose figures are given."""

    rehearsal = False

    def __init__(self):
        pass


@pytest.fixture
def run():
    return Run(FakeMachine(), FULL, harness.environment())


# Every figure the gates ask for, each good enough: of a section, its text columns and its rows.
STEPS = (*FULL.near_contexts, FULL.far_context)
GOOD = {
    "paging": ("what", "what chunks eta ratio rate_gbs bytes_up bytes_down", [
        ("promote", 1, 0.9, 0, 40, 0, 0),
        ("promote", 32, 0.95, 0, 40, 0, 0),
        ("evict, clean", 64, 0, 0, 40, 0, 0),
        ("duplex: both", 64, 0, 1.7, 40, 0, 0),
        ("read in place", 512, 0.8, 0, 40, 0, 0),
        ("stage in waves", 2048, 0.95, 0, 40, 0, 0),
    ]),
    "attention": ("what", "what rows sequences context time_us of_copy over_flash tflops", [
        (what, rows, 1, context, 60, 0.85, 0.8, 300)
        for what, rows in (("decode", 1), ("prefill", 64), ("prefill", 256))
        for context in FULL.contexts
    ]),
    "selection": ("", "chunks attend_us selection_us", [(n, 50, 5) for n in FULL.scanned_chunks]),
    "linear": ("what", "what rows of_copy over_torch", [
        (what, rows, 0.85, 0.5) for what in ("q", LAYER) for rows in FULL.product_rows
    ]),
    "rows": ("", "rows start_s", [(rows, 9) for rows in FULL.rows]),
    "decode": ("selection", "selection context step_ms over_graphed", [
        ("top-32", context, 10 if context < 1e5 else 11, 1.25) for context in STEPS
    ]),
    "profiles": ("what", "what kernels host_us", [
        (f"one layer, {selection}", 5, 25) for selection in ("dense", "top-32")
    ]),
    "restore": ("selection source", "selection source first_token_ms", [
        (selection, "pinned memory", 120) for selection in ("dense", "top-32")
    ]),
}  # fmt: skip
JUDGED = list(GOOD)


def good_figures(run):
    for section, (texts, names, rows) in GOOD.items():
        columns = (Column(name, text=name in texts.split()) for name in names.split())
        report = run.report(section, "?", *columns)
        for row in rows:
            report.add(**dict(zip(names.split(), row, strict=True)))


# Of a section: which row is spoilt, and how.
SPOILERS = [
    ("paging", {"what": "promote", "chunks": 1}, {"eta": 0.89}),
    ("paging", {"what": "promote", "chunks": 32}, {"eta": 0.89}),
    ("paging", {"what": "duplex: both"}, {"ratio": 1.49}),
    ("paging", {"what": "evict, clean"}, {"bytes_down": 1}),
    ("paging", {"what": "evict, clean"}, {"bytes_up": 1}),
    ("paging", {"what": "stage in waves"}, {"eta": 0.89}),
    ("attention", {"what": "decode", "context": 32768}, {"of_copy": 0.79}),
    ("attention", {"what": "decode", "context": 131072}, {"of_copy": 0.84}),
    ("attention", {"what": "prefill", "rows": 64, "context": 2048}, {"over_flash": 0.69}),
    ("selection", {"chunks": 512}, {"selection_us": 12.1}),
    ("linear", {"what": LAYER, "rows": 1}, {"of_copy": 0.79}),
    ("decode", {"context": 262144}, {"step_ms": 11.6}),
    ("decode", {"context": 16384}, {"over_graphed": 1.31}),
    ("decode", {"context": 65536}, {"step_ms": 9.5}),
    ("restore", {"selection": "dense"}, {"first_token_ms": 150.1}),
    ("restore", {"selection": "top-32"}, {"first_token_ms": 150.1}),
]


def spoil(run, section, match, change):
    (row,) = run.rows(section, **match)
    next(r for r in run.reports[section].rows if r is row).update(change)


class TestGates:
    def failing(self, run):
        return [judged.gate.claim for judged in gpu_gates.judge(run, JUDGED) if not judged.holds]

    def test_good_figures_pass(self, run):
        good_figures(run)
        assert self.failing(run) == []

    @pytest.mark.parametrize(("section", "match", "change"), SPOILERS)
    def test_one_bad_figure_fails_exactly_one_gate(self, run, section, match, change):
        good_figures(run)
        spoil(run, section, match, change)
        assert len(self.failing(run)) == 1

    @pytest.mark.parametrize(("section", "match", "change"), SPOILERS)
    @pytest.mark.parametrize("value", ["n/a", float("nan")])
    def test_a_figure_that_is_none_fails_its_gate(self, run, section, match, change, value):
        good_figures(run)
        spoil(run, section, match, {next(iter(change)): value})
        # A step of decode is a figure of its own and one of those that are to be alike.
        far = section == "decode" and match["context"] > 1e5
        assert len(self.failing(run)) == (2 if far else 1)

    @pytest.mark.parametrize("section", JUDGED)
    def test_a_section_that_was_not_measured_fails_all_of_its_gates(self, run, section):
        good_figures(run)
        del run.reports[section]
        assert len(self.failing(run)) == sum(gate.section == section for gate in gpu_gates.GATES)

    def test_gates_of_sections_that_were_not_asked_for_are_not_judged(self, run):
        assert gpu_gates.judge(run, ["ceilings"]) == []
        assert {judged.gate.section for judged in gpu_gates.judge(run, ["rows"])} == {"rows"}

    def test_a_report_has_the_prediction_and_the_limit_beside_the_figure(self, run):
        good_figures(run)
        (judged,) = [
            judged
            for judged in gpu_gates.judge(run, ["attention"])
            if judged.gate.claim == "dense decode at 32K reads"
        ]
        assert judged.to_json()["predicted"] == (0.60, 0.72)
        assert judged.to_json()["wanted"] == ("at least", 0.8)
        assert judged.to_json()["measured"] == 0.85
        assert str(judged).endswith(
            "0.85 of the device copy; predicted 0.6 to 0.72; wanted at least 0.8"
        )

    def test_every_gate_is_of_a_section_there_is(self):
        assert {gate.section for gate in gpu_gates.GATES} == set(GOOD) <= set(gpu.SECTIONS)


class TestRun:
    def section(self, *steps):
        def section(run):
            report = run.report("one", "?", Column("value"))
            for step in steps:
                if isinstance(step, BaseException):
                    raise step
                report.add(value=step)

        return section

    def test_what_a_section_raises_is_recorded_beside_what_it_measured(self, run, capsys):
        run.carry_out("one", self.section(1.5, MemoryError("full")), 10)
        entry = run.to_json()["sections"]["one"]
        assert entry["error"] == "MemoryError: full"
        assert named_rows(entry) == [{"value": 1.5}]
        assert "MemoryError" in capsys.readouterr().err

    def test_a_section_out_of_time_says_what_it_left_out(self, run):
        run.carry_out("one", lambda run: run.report("one", "?", Column("value")).add(value=1), -1)
        assert run.out_of_time("cell 1")
        assert run.to_json()["not_measured"] == run.skipped == ["cell 1"]

    @pytest.mark.parametrize(
        "stop", [gpu_subjects.WrongResultError("off by 3"), KeyboardInterrupt()]
    )
    def test_a_wrong_result_and_an_interrupt_end_the_run_and_keep_its_rows(self, run, stop):
        kept = []
        run.keep = lambda: kept.append(run.to_json()["sections"].get("one", {}))
        with pytest.raises(type(stop)):
            run.carry_out("one", self.section(1.5, stop), 10)
        assert named_rows(kept[0]) == [{"value": 1.5}]  # as soon as it was measured
        assert kept[0]["error"] is None
        assert kept[-1]["error"].startswith(type(stop).__name__)

    def test_a_number_is_that_of_exactly_one_row(self, run):
        run.carry_out("one", self.section(1, 2), 10)
        assert run.number("one", "value", value=2) == 2
        for match in ({}, {"value": 3}):
            with pytest.raises(MissingNumberError, match="expected one"):
                run.number("one", "value", **match)
        with pytest.raises(MissingNumberError, match="not measured"):
            run.number("two", "value")


class TestSubjects:
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


def test_an_unknown_section_is_refused(capsys):
    with pytest.raises(SystemExit):
        gpu.parse(["atention", "--out", "x"])
    assert "attention" in capsys.readouterr().err


def test_every_section_has_a_budget_within_a_step():
    assert set(gpu.BUDGETS) == set(gpu.SECTIONS)
    assert max(gpu.BUDGETS.values()) <= 480


def test_ceilings_are_measured_with_what_is_judged_by_them():
    assert gpu.with_ceilings(["paging"]) == ["ceilings", "paging"]
    assert gpu.with_ceilings(["rows"]) == ["rows"]


def rehearse(sections, tmp_path, capsys):
    if why_not := missing("shim"):
        assert "shim" not in os.environ.get("KVPAGER_TEST_DEVICES", ""), why_not
        pytest.skip(f"shim: {why_not}")
    threads = str(torch.get_num_threads())
    path = tmp_path / "measured.json"
    status = gpu.main([*sections, "--rehearse", "--threads", threads, "--out", str(path)])
    printed = capsys.readouterr()
    assert status == 0, printed.out + printed.err
    data = json.loads(path.read_text(encoding="utf-8"))
    assert data["rehearsal"] is True
    assert "nothing" in data["warning"]
    assert all(section["error"] is None for section in data["sections"].values())
    assert data["not_measured"] == []
    # Every figure is found; whether it is good is for a GPU to say.
    assert {gate["section"] for gate in data["gates"]} == set(sections) & set(GOOD)
    assert all(np.isfinite(gate["measured"]) for gate in data["gates"])
    return {name: named_rows(section) for name, section in data["sections"].items()}


def test_paging_runs_on_the_shim_and_moves_what_it_says(tmp_path, capsys):
    tables = rehearse(["facts", "paging"], tmp_path, capsys)
    assert list(tables) == ["facts", "ceilings", "paging"]
    assert tables["facts"][0] == {"what": "device", "value": "shim"}
    assert len(tables["facts"]) == 1 + len(REHEARSAL.pinned_bytes)
    paging = {(row["what"], row["chunks"]): row for row in tables["paging"]}
    chunk = REHEARSAL.layout().chunk_bytes
    assert paging["promote", 2]["bytes_up"] == 2 * chunk
    assert paging["duplex: both", 2]["bytes_down"] >= 2 * chunk
    in_waves = paging["stage in waves", REHEARSAL.long // 64]
    assert in_waves["bytes_up"] >= in_waves["bytes"]
    in_place = paging["read in place", REHEARSAL.middle // 64]
    assert 0 <= in_place["bytes_up"] + in_place["bytes_down"] < in_place["bytes"]


def test_every_other_section_runs_on_the_shim(tmp_path, capsys):
    others = [name for name in gpu.SECTIONS if name not in ("facts", "ceilings", "paging")]
    tables = rehearse(others, tmp_path, capsys)
    assert {row["what"] for row in tables["attention"]} == {"decode", "prefill"}
    assert max(row["relative_error"] for row in tables["attention"]) < 1e-2
    steps = [row for row in tables["decode"] if row["selection"] == "top-1"]
    assert all(row["over_graphed"] > 0 for row in steps)
    contexts = [row["context"] for row in steps]
    assert contexts == [*REHEARSAL.near_contexts, REHEARSAL.far_context]
    by_kernel = {row["what"] for row in tables["kernels"]}
    assert by_kernel == {row["what"] for row in tables["profiles"]}
    assert len(by_kernel) == 3


def test_a_wrong_result_is_named_and_ends_the_run(tmp_path, capsys, monkeypatch):
    def wrong(run):
        raise gpu_subjects.WrongResultError("attention kernel: off by 3")

    monkeypatch.setitem(gpu.SECTIONS, "attention", wrong)
    path = tmp_path / "measured.json"
    arguments = ["attention", "selection", "--rehearse", "--out", str(path)]
    if missing("shim"):
        pytest.skip("no shim")
    assert gpu.main([*arguments, "--threads", str(torch.get_num_threads())]) == 1
    assert "WRONG: attention kernel: off by 3" in capsys.readouterr().err
    sections = json.loads(path.read_text(encoding="utf-8"))["sections"]
    assert list(sections) == ["ceilings", "attention"]
