"""A part of `make test-deep`: power failures, and system calls that fail, as a library sees them.

All of it is in tests/deep, and what it found is in docs/testing.md.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from deep.child import deep
from deep.interposer import has_compiler

pytestmark = pytest.mark.skipif(not has_compiler(), reason="no C++ compiler for the library")


def test_a_power_failure_loses_nothing_that_was_reported_saved(tmp_path: Path) -> None:
    histories = ["a new store", "files", "a file deleted", "notes", "blocks"]
    options = ["--whole", "16", "--torn", "1"]
    rows = deep("power", tmp_path, "--only", *histories, *options)
    assert rows.keys() == set(histories)
    assert all(row["trees"] >= 4 for row in rows.values())


def test_any_system_call_that_fails_is_a_typed_error_that_costs_nothing(tmp_path: Path) -> None:
    operations = ["store: create and save", "file: save", "file: delete"]
    rows = deep("calls", tmp_path, "--only", *operations, "--stride", "11")
    assert rows.keys() >= set(operations)
    assert all(row["cases"] >= 5 and row["refused"] >= 1 for row in rows.values())


@pytest.mark.deep
def test_a_power_failure_within_saves_and_collections_loses_nothing(tmp_path: Path) -> None:
    rows = deep("power", tmp_path, "--whole", "16", "--torn", "1")
    assert sum(row["trees"] for row in rows.values()) > 1000
