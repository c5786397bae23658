"""A small sound file of every kind, and a pager that must not notice what happens to them."""

from __future__ import annotations

import pytest
from specimens import Bystander, make_specimens


@pytest.fixture(scope="session")
def specimens(tmp_path_factory):
    """Files of every kind; copy them (`Specimens.copy`), never write to them."""
    return make_specimens(tmp_path_factory.mktemp("specimens"))


@pytest.fixture
def bystander():
    """A pager with a sequence of its own, which every failure must leave as it was."""
    keep = Bystander()
    yield keep
    keep.close()
