"""A share of tokens is rounded up: a policy that is asked for some of them chooses at least one."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from kvpager.segments import Deviation, QueryGuided


def text(tokens, pieces=()):
    """A text, all moved, whose tokens matter the more the later they are."""
    scores = np.arange(tokens, dtype=np.float32)
    return SimpleNamespace(
        tokens=tokens,
        moved=np.ones(tokens, dtype=np.bool_),
        layers=2,
        pieces=[SimpleNamespace(start=a, stop=b, moved=True) for a, b in pieces],
        question_attention=lambda rows: scores,
        deviation=lambda among, layer, of: np.where(among, scores, 0),
    )


@pytest.mark.parametrize(
    ("fraction", "tokens", "expected"),
    [(0.1, 10, 1), (0.1, 11, 2), (0.01, 7, 1), (0.5, 3, 2), (0.07, 100, 7), (1, 5, 5), (0, 5, 0)],
)
def test_the_share_of_what_a_question_looks_at_is_rounded_up(fraction, tokens, expected):
    chosen = QueryGuided(fraction).choose(text(tokens))
    assert np.flatnonzero(chosen).tolist() == [*range(tokens - expected, tokens)]


def test_the_share_of_each_segments_deviating_tokens_is_rounded_up():
    chosen = Deviation(0.25).choose(text(10, [(0, 1), (1, 6), (6, 10)]))
    assert np.flatnonzero(chosen).tolist() == [0, 4, 5, 9]
