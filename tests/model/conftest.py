"""Engines and sessions of a test end with it; what is remembered is in a folder of its own."""

from __future__ import annotations

from unittest import mock

import pytest
import reference_models


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


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """Where row counts are remembered."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("KVPAGER_CACHE", str(folder))
    return folder / "row_counts"


@pytest.fixture
def proofs(monkeypatch):
    """What was proven."""
    from kvpager._model.proof import prove as starting

    made = []
    own = starting.prove

    def noting(model, seen, small_rows):
        made.append(own(model, seen, small_rows))
        return made[-1]

    monkeypatch.setattr(starting, "prove", noting)
    return made


@pytest.fixture(scope="module", params=["auto", pytest.param("q8", marks=pytest.mark.long)])
def kv_dtype(request):
    """What engines keep keys and values in, where a test does not say."""
    with mock.patch.object(reference_models, "KV_DTYPE", request.param):
        yield request.param
