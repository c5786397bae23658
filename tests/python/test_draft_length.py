"""How much is guessed where a guess has a price."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpager.errors import InvalidArgumentError
from kvpager.speculation.proposal_length import ProposalLength
from kvpager.speculation.speculation import Proposed

LADDER = (4, 16, 64)


def fit(used):
    return next(count for count in LADDER if count >= used)


def experienced(cost, accepted, proposed, forwards=10):
    """A length that has seen proposals of this fate."""
    length = ProposalLength(cost)
    for _ in range(forwards):
        length.observe(proposed, accepted)
    return length


def choose(length, **more):
    return length.choose(**{"room": 40, "used": 1, "fit": fit, **more})


def test_a_dearer_guess_makes_shorter_proposals():
    counts = [choose(experienced(cost, 8, 9)) for cost in (0.0, 0.1, 0.3, 0.6)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[1] > counts[2]


def test_a_guess_as_dear_as_a_forward_is_only_tried_now_and_then():
    length = experienced(1.0, 3, 4)
    counts = []
    for _ in range(100):
        count = choose(length)
        counts.append(count)
        length.observe(count, 0)
    assert 0 < np.count_nonzero(counts) < 15
    assert max(counts) <= 4


def test_a_cheap_draft_that_is_always_right_is_asked_for_many():
    assert choose(experienced(0.1, 8, 8)) > 8


def test_guesses_that_others_pay_for_are_as_good_as_free():
    dear = experienced(0.4, 6, 7)
    alone, beside = choose(dear), choose(dear, paid=8)
    assert alone < 8 <= beside
    assert choose(dear, paid=10**6) == choose(experienced(0.0, 6, 7))


@given(
    st.floats(0, 3),
    st.integers(0, 20),
    st.integers(0, 20),
    st.integers(-3, 60),
    st.integers(1, 30),
    st.integers(0, 50),
)
def test_a_length_is_never_more_than_there_is_room_for(cost, accepted, refused, room, used, paid):
    length = experienced(cost, accepted, accepted + (refused > 0), refused)
    count = length.choose(room=room, used=used, fit=lambda rows: max(64, rows), paid=paid)
    assert 0 <= count <= max(0, room)


# A proposer's own price.


class Guessing:
    def __init__(self, cost):
        self.guess_cost = cost

    def propose(self, tokens, count):
        return [1] * count


def asked(cost):
    proposed = Proposed(Guessing(cost), 10)
    for _ in range(10):
        proposed.observe(7, 6)
    return len(proposed.propose(np.zeros(4, np.int32), room=30, used=1, fit=fit))


def test_a_proposer_says_what_a_guess_costs():
    assert asked(0) > asked(0.2) > asked(0.7)


@pytest.mark.parametrize("cost", [-0.1, float("nan"), float("inf"), "much", None, True])
def test_a_price_that_cannot_be_is_refused(cost):
    with pytest.raises(InvalidArgumentError, match=r"Guessing\.guess_cost is .*0 or more"):
        Proposed(Guessing(cost), 10)
