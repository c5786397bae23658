"""`python -m kvpager_bench.profile` times the parts of a forward, and what moves chunks."""

from __future__ import annotations

import json

import pytest
from bench_reports import named_rows

from kvpager_bench import harness, profile


def test_all_of_a_forward_is_in_one_of_its_parts(monkeypatch, tmp_path):
    monkeypatch.setenv(harness.RESULTS_VARIABLE, str(tmp_path))
    sizes = ["--quick", "--context", "256", "--runs", "1", "--steps", "2", "--threads", "1"]
    monkeypatch.setattr("sys.argv", ["profile", *sizes])
    profile.main()
    parts = [column.name for column in profile.FORWARD_COLUMNS if column.unit == "%"]
    rows = named_rows(json.loads((tmp_path / "profile-quick.json").read_text()))
    assert [row["rows"] for row in rows] == [256, 1, 1, 32]
    for row in rows:
        assert sum(row[part] for part in parts) == pytest.approx(100)
        assert row["matmuls"] > 0 < row["attention"]
    moved = named_rows(json.loads((tmp_path / "profile_moving-quick.json").read_text()))
    assert len(moved) == 5
    assert all(row["gb_per_s"] > 0 for row in moved)
