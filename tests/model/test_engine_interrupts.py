"""No instant at which an operation of an engine may be interrupted leaves anything behind."""

from __future__ import annotations

import os

import pytest
from interrupted_engine import LONG, OPERATIONS, expected_logits, interrupt
from reference_models import build, make_engine

# How many instants of an operation are tried. Marked slow: all of them, or KVPAGER_INTERRUPTS; an
# operation that looks at the whole model has too many for one run.
MOST = 3
SLOW_MOST = int(os.environ.get("KVPAGER_INTERRUPTS", "0")) or None
LONG_MOST = SLOW_MOST or 40


@pytest.fixture(scope="module")
def engine():
    with make_engine(build("llama")) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected() -> bytes:
    return expected_logits()


@pytest.mark.parametrize("operate", OPERATIONS, ids=lambda operate: operate.__name__)
def test_an_interrupt_at_some_returns_leaves_nothing_behind(operate, engine, expected, tmp_path):
    assert interrupt(operate, engine, expected, tmp_path, MOST).interrupted >= 1


@pytest.mark.deep
@pytest.mark.parametrize("operate", OPERATIONS, ids=lambda operate: operate.__name__)
def test_an_interrupt_at_any_return_leaves_nothing_behind(operate, engine, expected, tmp_path):
    assert interrupt(operate, engine, expected, tmp_path, SLOW_MOST).interrupted >= 1


@pytest.mark.deep
@pytest.mark.parametrize("operate", LONG, ids=lambda operate: operate.__name__)
def test_an_interrupt_at_a_return_of_a_long_operation_leaves_nothing_behind(
    operate, expected, tmp_path
):
    with make_engine(build("llama")) as engine:
        assert interrupt(operate, engine, expected, tmp_path, LONG_MOST).interrupted >= 1
