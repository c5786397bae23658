"""A part of `make test-deep`: a model changed anywhere, files of a store in others' places."""

from __future__ import annotations

from pathlib import Path

import pytest

from deep.child import deep


def test_a_model_changed_anywhere_is_refused_wherever_that_changes_a_bit(tmp_path: Path) -> None:
    row = deep("identity", tmp_path, "--only", "llama", "--most", "40")["llama"]
    assert row["changes"] == 40
    assert row["refused"] >= 10


@pytest.mark.deep
def test_no_change_of_any_model_and_no_file_in_anothers_place_is_believed(tmp_path: Path) -> None:
    rows = deep("identity", tmp_path)
    assert sum(row["refused"] for row in rows.values()) > 2000
