"""A part of `make test-deep`: two threads at entry points of the bindings, and a short soak."""

from __future__ import annotations

import pytest

from deep.child import deep


def test_two_threads_at_a_sequence_and_a_store_meet_typed_errors_alone(tmp_path) -> None:
    entries = ["Sequence.read_kv", "Forward.commit", "DirectoryStore.save"]
    beside = ["Sequence.append", "Sequence.close", "Pager.begin, shared", "DirectoryStore.delete"]
    rows = deep("pairs", tmp_path, "--only", *entries, "--beside", *beside, "--rounds", "2")
    assert rows.keys() == set(entries)
    assert all(row["calls"] > 0 for row in rows.values())
    assert any(row["refused"] for row in rows.values())


@pytest.mark.deep
def test_a_minute_of_everything_leaves_memory_and_descriptors_as_they_were(tmp_path) -> None:
    rows = deep("soak", tmp_path, "--seconds", "60")
    assert sum(rows["soak"]["done"].values()) > 1000
