"""What `make verify-all` concludes from what its workers print."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest
from bench_reports import named_rows

from kvpager_bench import harness
from kvpager_bench.harness import Report

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import verify_all


def outcome(**changes):
    row = {
        "model": "llama",
        "relation": "decoded",
        "outcome": "same",
        "kept": True,
        "situations": 3,
        "compared": 100,
        "differing": 0,
        "time": 0.5,
        "first_difference": "none",
    }
    return row | changes


def concluded(rows, monkeypatch, tmp_path):
    """Whether it holds, and the file that these rows give."""
    monkeypatch.setenv("KVPAGER_BENCH_RESULTS", str(tmp_path))
    totals = {}
    for row in rows:
        verify_all.count(row, totals)
    report = Report("sample", "?", verify_all.COLUMNS, {}, harness.environment())
    for total in totals.values():
        report.add(**total)
    verify_all.judge(report)
    report.finish()
    return report.verdicts[0].holds, json.loads((tmp_path / "sample.json").read_text())


def test_cases_are_counted_by_model_and_relation(monkeypatch, tmp_path):
    rows = [outcome(), outcome(compared=11), outcome(relation="warm"), outcome(model="qwen3")]
    rows.append(outcome(relation="converted", outcome="within", compared=0))
    rows.append(outcome(outcome="does not apply", compared=0, first_difference="not promised"))
    holds, written = concluded(rows, monkeypatch, tmp_path)
    assert holds
    first, *others = named_rows(written)
    assert (first["cases"], first["compared"], first["not_applicable"]) == (3, 111, 1)
    assert first["first_difference"] == "none"
    assert [(row["model"], row["relation"]) for row in others] == [
        ("llama", "warm"),
        ("qwen3", "decoded"),
        ("llama", "converted"),
    ]
    assert written["verdicts"][0]["holds"]


@pytest.mark.parametrize("status", ["differs", "failed", "not run"])
def test_anything_but_the_same_bits_fails_and_is_named(status, monkeypatch, tmp_path, capsys):
    bad = outcome(
        outcome=status, kept=False, differing=2 * (status == "differs"), first_difference="layer 1"
    )
    holds, written = concluded([outcome(), bad, outcome()], monkeypatch, tmp_path)
    assert not holds
    assert not written["verdicts"][0]["holds"]
    assert named_rows(written)[0]["not_kept"] == 1
    assert named_rows(written)[0]["first_difference"] == "layer 1"
    assert "FAILS" in capsys.readouterr().out


def test_every_case_is_in_one_process_of_its_architecture_and_threads():
    arguments = argparse.Namespace(only=[""], effort="start", threads=1, quick=False)
    cases = verify_all.matrix.full()
    apart = set(verify_all.matrix.cover(cases))
    jobs = list(verify_all.groups(cases, apart, arguments))
    held = [one for job in jobs if "long" not in job for one in job["cases"]]
    assert sorted(str(verify_all.matrix.Case(**one["values"])) for one in held) == sorted(
        map(str, cases)
    )
    assert sum(one["apart"] for one in held) == len(apart)
    for job in jobs:
        if "long" not in job:
            values = [one["values"] for one in job["cases"]]
            assert {(v["architecture"], v["threads"]) for v in values} == {
                (values[0]["architecture"], job["threads"])
            }
    assert [job["length"] for job in jobs if "long" in job] == [32768, 32768]


def test_a_worker_that_dies_loses_no_other_ones_work(monkeypatch, tmp_path):
    class Dying:
        def work(self, what, **job):
            if job["threads"] == 1:
                raise harness.MissingNumberError("it died")
            return {"rows": [outcome()]}

    case = {"values": {"architecture": "qwen3"}, "apart": False}
    jobs = [{"threads": threads, "cases": [case]} for threads in (1, 2)]
    jobs.append({"threads": 1, "long": "dense", "cases": ["shipped-dense"]})
    holds, written = concluded(verify_all.side_by_side(Dying(), jobs), monkeypatch, tmp_path)
    assert not holds
    rows = {row["model"]: row for row in named_rows(written)}
    assert rows["llama"]["not_kept"] == 0
    assert rows["qwen3"]["first_difference"] == rows["shipped"]["first_difference"] == "it died"


def test_a_worker_verifies_its_cases_and_every_promise_is_kept():
    case = verify_all.matrix.Case(
        "llama", "float32", 256, tied=True, threads=1, group=2, selection="dense", kv_dtype="auto"
    )
    cases = [{"values": vars(case), "apart": False}]
    job = {"what": "cases", "threads": 1, "effort": "start", "cases": cases}
    rows = harness.run_worker("verify_all", job)["rows"]
    assert {row["model"] for row in rows} == {case.architecture}
    assert all(row["kept"] for row in rows)
    assert sum(row["compared"] for row in rows) > 1_000_000
