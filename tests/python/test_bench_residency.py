"""The question `residency`: where the chunks of a conversation are."""

from __future__ import annotations

import argparse

import pytest
from bench_reports import environment

from kvpager_bench.harness import load_report
from kvpager_bench.questions import residency

POOL, CONTEXT = 1024, 2048


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    arguments = argparse.Namespace(
        context=CONTEXT, pool_tokens=POOL, host_tokens=POOL, questions=2, quick=True, full=False
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVPAGER_BENCH_RESULTS", str(folder))
        residency.measure(arguments, environment())
    return load_report(folder / "residency-quick.json")


def places(row):
    """Tier and number of chunks, in logical order."""
    tiers = {"p": "pool", "h": "host", "d": "disk"}
    return [(tiers[part[-1]], int(part[:-1])) for part in row["places"].split(" ")]


def test_a_row_follows_each_forward_and_each_answer(report):
    steps = CONTEXT // residency.FORWARD_TOKENS
    assert [row["after"] for row in report.rows] == ["prefill"] * steps + ["question"] * 2
    assert [row["tokens"] for row in report.rows][:steps] == [
        residency.FORWARD_TOKENS * (step + 1) for step in range(steps)
    ]


def test_each_chunk_is_counted_once_where_it_is_fastest(report):
    for row in report.rows:
        chunks = -(-row["tokens"] // residency.CHUNK_TOKENS)
        assert sum(count for _, count in places(row)) == chunks
        for tier in ("pool", "host", "disk"):
            assert row[tier] == sum(count for name, count in places(row) if name == tier)
    assert report.rows[-1]["pool"] == POOL // residency.CHUNK_TOKENS
    assert report.rows[-1]["host"] + report.rows[-1]["disk"] > 0


def test_the_chunk_with_an_answer_was_somewhere_before_it_was_asked_for(report):
    before, first, second = report.rows[-3:]
    for earlier, row in ((before, first), (first, second)):
        tiers = [tier for tier, count in places(earlier) for _ in range(count)]
        assert row["asked_was_in"] == tiers[row["asked"]]
    assert before["asked_was_in"] == "n/a"


def test_a_pool_that_overflows_and_an_answer_that_is_not_found_are_told(report):
    assert [verdict.holds for verdict in report.verdicts] == [True, True]
    report.verdicts.clear()
    row = report.rows[-1]
    report.rows[-1] = row | {"pool": row["pool"] + 1}
    residency.judge(report, answered=1)
    report.rows[-1] = row
    assert [verdict.holds for verdict in report.verdicts] == [False, False]
    assert report.verdicts[1].evidence.startswith("1 of 2")
