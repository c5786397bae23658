"""The question that sets predictions beside measurements: what it reads, and what it leaves out."""

from __future__ import annotations

import dataclasses

import pytest

from kvpager.plan.machine import DEVICES
from kvpager_bench import harness
from kvpager_bench.harness import Column, Report
from kvpager_bench.questions import plan

SAVES = (
    Column("layout", text=True),
    Column("context", "tokens"),
    Column("file_mib", "MiB"),
    Column("save_gbs", "GB/s"),
)


def measured(columns=SAVES, **environment):
    return Report(
        "snapshot_save",
        "?",
        columns,
        {},
        {**harness.environment(), "load_average": 0.5} | environment,
    )


def save_of(report, seconds):
    report.add(layout="shipped", context=65536, file_mib=133.3, save_gbs=0.1398 / seconds)
    return report


@pytest.fixture
def collected(tmp_path, monkeypatch):
    monkeypatch.setenv("KVPAGER_BENCH_RESULTS", str(tmp_path))

    def collect(*reports):
        for report in reports:
            report.write(tmp_path)
        out = Report("plan", "?", plan.COLUMNS, {}, harness.environment())
        plan.collect(plan.Paper(DEVICES["laptop"], plan.Shapes()), harness.environment(), out)
        return out

    return collect


def test_a_figure_is_set_beside_its_prediction(collected):
    out = collected(save_of(measured(), 0.1))
    (row,) = out.rows
    assert row["figure"] == "save: shipped, 64K"
    assert row["measured_ms"] == pytest.approx(100, rel=0.01)
    assert row["predicted_over_measured"] == pytest.approx(row["predicted_ms"] / 100, rel=0.01)
    assert row["bound"] == "disk"
    assert {skipped.peer for skipped in out.skipped} == set(plan.READERS) - {"snapshot_save"}


def test_results_of_another_machine_are_left_out_and_named(collected):
    out = collected(save_of(measured(cpu="another"), 0.1))
    assert out.rows == []
    assert "cpu was another" in next(s.reason for s in out.skipped if s.peer == "snapshot_save")


def test_a_table_that_is_not_known_is_left_out_and_named(collected):
    report = measured((*SAVES[:3], Column("gbs", "GB/s")))
    report.add(layout="shipped", context=65536, file_mib=133.3, gbs=1.0)
    out = collected(report)
    assert out.rows == []
    assert "save_gbs" in next(s.reason for s in out.skipped if s.peer == "snapshot_save")


def test_a_prediction_that_is_far_off_fails_the_verdict(collected):
    predicted = collected(save_of(measured(), 0.1)).rows[0]["predicted_ms"] / 1e3
    for seconds, holds in ((predicted, True), (10 * predicted, False), (predicted / 10, False)):
        out = collected(save_of(measured(), seconds))
        plan.judge(out)
        assert [verdict.holds for verdict in out.verdicts] == [holds]


def test_the_shapes_of_the_benchmarks_are_read_without_their_weights():
    shapes = plan.Shapes()
    shape = shapes("gqa8-bf16", 4)
    assert (shape.layers, shape.kv_heads, shape.dtype) == (4, 8, "bfloat16")
    assert shapes("gqa8-bf16", 4) is shape
    assert shapes("shipped").dtype == "float32"
    assert dataclasses.replace(shapes("shipped"), dtype="bfloat16") == shapes("shipped-bf16")


def test_a_warm_turn_is_predicted_for_the_layers_it_was_measured_with():
    columns = (
        Column("shape", text=True),
        Column("context", "tokens"),
        Column("file", text=True),
        Column("cold_s", "s"),
        Column("first_token_ms", "ms"),
    )
    predicted = {}
    for layers in (1, 8):
        report = Report("warm", "?", columns, {"layers": {"gqa8": layers}}, harness.environment())
        report.add(shape="gqa8-bf16", context=4096, file="cached", cold_s=1.0, first_token_ms=9.0)
        paper = plan.Paper(DEVICES["laptop"], plan.Shapes())
        predicted[layers] = [p.seconds for p in plan.of_warm(report, paper)]
    for one, eight in zip(predicted[1], predicted[8]):
        assert 3 * one < eight < 9 * one
