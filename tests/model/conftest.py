"""Engines and sessions of a test end with it."""

from __future__ import annotations

import pytest


@pytest.fixture
def closing():
    """Takes engines and sessions; closes them, last first, when the test is over."""
    opened = []

    def keep(thing):
        opened.append(thing)
        return thing

    yield keep
    for thing in reversed(opened):
        thing.close()
