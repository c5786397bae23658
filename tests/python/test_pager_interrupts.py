"""No instant at which a call of the lower level may be interrupted leaves anything behind."""

from __future__ import annotations

import pytest
from interrupted_pager import OPERATIONS, expected_row, interrupt


@pytest.fixture(scope="module")
def expected() -> bytes:
    return expected_row()


@pytest.mark.parametrize("operate", OPERATIONS, ids=lambda operate: operate.__name__)
def test_an_interrupt_at_any_return_leaves_nothing_behind(operate, tmp_path, expected):
    assert interrupt(operate, expected, tmp_path).interrupted >= 1
