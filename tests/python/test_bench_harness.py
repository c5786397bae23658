from __future__ import annotations

import itertools
import json
import math
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "bench"
if not BENCH.is_dir():
    pytest.skip("bench/ is not part of this checkout", allow_module_level=True)
sys.path.insert(0, str(BENCH))

import hard_keys  # noqa: E402
import harness  # noqa: E402
import plots  # noqa: E402
import residency_traffic  # noqa: E402
import subjects  # noqa: E402
from harness import Column, MissingNumberError, NondeterministicSubjectError, Report  # noqa: E402


def make_report(**changes):
    values = {
        "name": "sample",
        "question": "How long?",
        "columns": (
            Column("shape", text=True),
            Column("time_ms", "ms"),
            Column("scan_ms", "ms", optional=True),
        ),
        "settings": {"runs": 3},
        "environment": harness.environment(),
    }
    return Report(**{**values, **changes})


class TestReport:
    def test_a_row_that_lacks_a_column_is_refused(self):
        with pytest.raises(MissingNumberError, match="time_ms"):
            make_report().add(shape="a", scan_ms=1.0)

    def test_a_column_nobody_declared_is_refused(self):
        with pytest.raises(MissingNumberError, match="tme_ms"):
            make_report().add(shape="a", time_ms=1.0, scan_ms=1.0, tme_ms=1.0)

    @pytest.mark.parametrize("value", [math.nan, math.inf, None, "n/a", "", True])
    def test_what_is_no_finite_number_is_refused(self, value):
        report = make_report()
        with pytest.raises(MissingNumberError, match="time_ms"):
            report.add(shape="a", time_ms=value, scan_ms=1.0)
        assert report.rows == []

    def test_an_optional_column_takes_na_and_nothing_else(self):
        report = make_report()
        report.add(shape="a", time_ms=1.0, scan_ms=harness.NOT_APPLICABLE)
        with pytest.raises(MissingNumberError, match="scan_ms"):
            report.add(shape="a", time_ms=1.0, scan_ms=None)

    def test_na_is_never_read_as_a_number(self):
        report = make_report()
        row = report.add(shape="a", time_ms=0.5, scan_ms=harness.NOT_APPLICABLE)
        assert report.number(row, "time_ms") == 0.5
        for name in ("scan_ms", "shape", "unknown"):
            with pytest.raises(MissingNumberError):
                report.number(row, name)

    def test_a_report_without_rows_is_not_written(self, tmp_path):
        with pytest.raises(MissingNumberError, match="no rows"):
            make_report().write(tmp_path)
        assert list(tmp_path.iterdir()) == []

    def test_what_is_written_reads_back_the_same(self, tmp_path):
        report = make_report()
        report.add(shape="a", time_ms=1.25, scan_ms=3)
        report.judge("it is short", True, "1.25 ms")
        again = harness.load_report(report.write(tmp_path))
        assert again == report
        assert again.markdown() == report.markdown()

    @pytest.mark.parametrize(
        "damage",
        [
            lambda data: data["rows"][0].pop("time_ms"),
            lambda data: data["rows"][0].update(time_ms=None),
            lambda data: data["rows"].clear(),
            lambda data: data["environment"].pop("commit"),
            lambda data: data["environment"].update(isa=""),
            lambda data: data.update(schema=harness.SCHEMA + 1),
        ],
    )
    def test_a_damaged_file_is_refused_when_read(self, tmp_path, damage):
        report = make_report()
        report.add(shape="a", time_ms=1.25, scan_ms=3)
        path = report.write(tmp_path)
        data = json.loads(path.read_text(encoding="utf-8"))
        damage(data)
        path.write_text(json.dumps(data), encoding="utf-8")
        with pytest.raises(MissingNumberError):
            harness.load_report(path)

    @pytest.mark.parametrize(
        ("value", "printed"),
        [(0.0, "0"), (0.0123, "0.0123"), (1.0, "1.00"), (12.34, "12.3"), (1234.5, "1234")],
    )
    def test_numbers_print_with_three_significant_digits(self, value, printed):
        report = make_report(columns=(Column("x"),))
        report.add(x=value)
        assert report.markdown().splitlines()[-1].strip("| ") == printed


class TestMeasuring:
    def test_the_warm_up_is_not_among_the_runs(self):
        calls = itertools.count()
        timing = harness.measure(lambda: next(calls), runs=4, warm_up=2)
        assert next(calls) == 6
        assert len(timing.runs) == 4
        assert timing.fastest <= timing.median <= timing.slowest

    def test_preparation_runs_before_every_call_and_is_not_timed(self):
        order = []
        harness.measure(
            lambda: order.append("call"), runs=2, warm_up=1, before=lambda: order.append("before")
        )
        assert order == ["before", "call"] * 3

    @pytest.mark.parametrize("runs", [(), (1.0, math.nan), (0.0,), (-1.0,)])
    def test_timings_that_are_none_are_refused(self, runs):
        with pytest.raises(MissingNumberError):
            harness.Timing(runs)

    def test_a_subject_that_changes_is_refused_and_one_that_does_not_passes(self):
        tensor = torch.arange(8.0)
        harness.require_deterministic(lambda: harness.digest(tensor), "constant", times=3)
        steps = itertools.count()
        with pytest.raises(NondeterministicSubjectError, match="drifting"):
            harness.require_deterministic(
                lambda: harness.digest(tensor + 1e-6 * next(steps)), "drifting"
            )

    def test_the_digest_tells_zero_from_negative_zero(self):
        assert harness.digest(torch.tensor([0.0])) != harness.digest(torch.tensor([-0.0]))

    def test_a_worker_that_fails_gives_no_numbers(self, tmp_path):
        script = tmp_path / "worker.py"
        script.write_text("raise SystemExit(3)", encoding="utf-8")
        with pytest.raises(MissingNumberError, match="exit 3"):
            harness.run_worker(str(script), {"what": "nothing"})

    def test_the_environment_names_machine_versions_and_commit(self):
        record = harness.environment()
        assert record["torch"] == torch.__version__
        assert record["threads"] == torch.get_num_threads()
        assert record["isa"] in ("base", "v3", "v4")
        assert isinstance(record["dirty"], bool)
        assert all(value not in (None, "") for value in record.values())


class TestHardKeys:
    @pytest.mark.parametrize("variant", ["rotated", "skewed", "offset"])
    def test_full_attention_answers_as_before_while_keys_differ(self, variant):
        asked = subjects.questions(1024, 4, seed=3, quiet=320)
        prompt = [*asked.document.ids, *asked.prompts[1]]
        plain = subjects.load_model(subjects.SHIPPED)
        hard = hard_keys.harden(subjects.load_model(subjects.SHIPPED), variant)
        before_cache, before = subjects.stock_prefill(plain, prompt)
        after_cache, after = subjects.stock_prefill(hard, prompt)
        assert int(before.argmax()) == asked.answers[1][0]
        torch.testing.assert_close(after, before, atol=2e-3, rtol=1e-3)
        layer = hard_keys.RETRIEVING_LAYER
        change = after_cache.layers[layer].keys - before_cache.layers[layer].keys
        assert change.abs().mean() > 0.1 * before_cache.layers[layer].keys.abs().mean()


class TestTraffic:
    def test_lru_counts_misses_by_unit(self):
        steps = [{(0, 0, 0), (0, 0, 1)}, {(0, 0, 0)}, {(1, 0, 0)}, {(0, 0, 1)}]
        page = residency_traffic.Unit("page", lambda p: p, 1)
        chunk = residency_traffic.Unit("chunk", lambda p: p[0], 2)
        assert residency_traffic.play(steps, page, 3).misses == 3
        assert residency_traffic.play(steps, page, 2).misses == 4
        assert residency_traffic.play(steps, chunk, 2).misses == 3
        assert residency_traffic.play(steps, chunk, 2).accesses == 4


def test_plots_refuse_an_empty_folder_and_render_what_is_there(tmp_path):
    with pytest.raises(MissingNumberError, match="no results"):
        plots.render(tmp_path, tmp_path / "docs", "")
    report = make_report(name="save")
    report.add(shape="a", time_ms=1.25, scan_ms=3)
    report.judge("it is short", False, "1.25 ms")
    report.write(tmp_path)
    assert "decode" in plots.render(tmp_path, tmp_path / "docs", "")
    text = (tmp_path / "docs" / "results.md").read_text(encoding="utf-8")
    assert "does not hold" in text
    assert "1.25" in text
