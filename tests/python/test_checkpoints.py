"""Kept states: how many, which go first, and what nobody may lose."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from kvpager._model.seam.state import RecurrentState
from kvpager._runtime.recurrent.checkpoints import POLICIES, Checkpoints
from kvpager.errors import InvalidArgumentError

CHUNK = 16
ROOM = 4  # bytes of one state: a tensor of one element, and no hidden states


class Owner:
    """A session, as checkpoints know one."""


def state(position):
    hidden = torch.empty(0)
    return RecurrentState(position, (torch.tensor([float(position)]),), hidden)


def text(name, chunks):
    """Chain hashes of a text; texts that begin with the same letters begin alike."""
    letters = name.ljust(chunks, name[-1])
    return [letters[: i + 1].encode().ljust(16, b".") for i in range(chunks)]


def make(states, *, every=1, policy="smallest-gap"):
    return Checkpoints(budget_bytes=ROOM * states, every=every, chunk_tokens=CHUNK, policy=policy)


def put_all(checkpoints, owner, hashes, boundaries):
    for boundary in boundaries:
        checkpoints.put(owner, hashes[:boundary], state(boundary * CHUNK))


def held(checkpoints, hashes):
    return [position // CHUNK for position in checkpoints.held(hashes)]


def test_states_are_due_at_every_kth_chunk_boundary():
    checkpoints = make(1, every=4)
    due = [position for position in range(0, 20 * CHUNK, 8) if checkpoints.due(position)]
    assert due == [4 * CHUNK, 8 * CHUNK, 12 * CHUNK, 16 * CHUNK]


def test_a_state_is_found_by_the_text_before_it():
    checkpoints = make(8)
    owner = Owner()
    put_all(checkpoints, owner, text("a", 6), [2, 4])
    assert held(checkpoints, text("a", 6)) == [2, 4]
    assert held(checkpoints, text("aaab", 6)) == [2]
    assert held(checkpoints, text("b", 6)) == []
    found = checkpoints.get(owner, text("a", 4)[-1])
    assert found.position == 4 * CHUNK
    assert checkpoints.get(owner, text("b", 4)[-1]) is None
    assert checkpoints.stats()["checkpoints_restored"] == 1


def test_the_one_whose_loss_makes_the_smallest_gap_goes_first():
    checkpoints = make(4)
    owner, hashes = Owner(), text("a", 40)
    put_all(checkpoints, owner, hashes, [8, 10, 20, 30, 40])
    assert held(checkpoints, hashes) == [10, 20, 30, 40]  # to 10 from nothing: 8 lay between
    put_all(checkpoints, owner, hashes, [39])
    assert held(checkpoints, hashes) == [10, 20, 30, 39]  # 40 is not in use any more


def test_what_went_before_counts_in_a_gap():
    checkpoints = make(3)
    owner, hashes = Owner(), text("a", 45)
    put_all(checkpoints, owner, hashes, [15, 16, 20, 30])
    assert held(checkpoints, hashes) == [15, 20, 30]
    put_all(checkpoints, owner, hashes, [45])
    assert held(checkpoints, hashes) == [15, 30, 45]


def test_gaps_are_along_each_text_where_texts_part():
    checkpoints = make(4)
    owner = Owner()
    put_all(checkpoints, owner, text("a", 4), [4])
    put_all(checkpoints, owner, text("aaaab", 8), [8])
    put_all(checkpoints, owner, text("aaaac", 6), [6])
    other = Owner()
    put_all(checkpoints, other, text("x", 1), [1])
    put_all(checkpoints, other, text("x", 2), [2])
    # Gaps: a to its nearer branch 6, b to itself 4, x to the next one 2; c and 2 are in use.
    assert held(checkpoints, text("x", 2)) == [2]
    assert held(checkpoints, text("aaaab", 8)) == [4, 8]
    put_all(checkpoints, other, text("x", 5), [5])
    # And now 5 from nothing to 5, so that b has the smallest.
    assert held(checkpoints, text("aaaab", 8)) == [4]
    assert held(checkpoints, text("x", 5)) == [2, 5]


def test_evenly_spaced_checkpoints_stay_even_where_room_is_short():
    checkpoints = make(8)
    owner, hashes = Owner(), text("a", 64)
    put_all(checkpoints, owner, hashes, range(1, 65))
    kept = [0, *held(checkpoints, hashes)]
    assert len(kept) == 9
    assert kept[-1] == 64
    assert max(b - a for a, b in itertools.pairwise(kept)) <= 2 * 64 // 8


def test_under_lru_the_one_not_used_for_longest_goes_first():
    checkpoints = make(3, policy="lru")
    owner, hashes = Owner(), text("a", 9)
    put_all(checkpoints, owner, hashes, [2, 4, 6])
    checkpoints.get(Owner(), hashes[1])
    put_all(checkpoints, owner, hashes, [8])
    assert held(checkpoints, hashes) == [2, 6, 8]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_newest_of_a_text_in_use_never_goes(policy):
    checkpoints = make(2, policy=policy)
    first, second = Owner(), Owner()
    put_all(checkpoints, first, text("a", 9), [3])
    for boundary in range(1, 9):
        put_all(checkpoints, second, text("b", 9), [boundary])
        assert held(checkpoints, text("a", 9)) == [3]
        assert held(checkpoints, text("b", 9)) == [boundary]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_state_is_not_kept_where_nothing_may_go(policy):
    checkpoints = make(1, policy=policy)
    first, second = Owner(), Owner()
    put_all(checkpoints, first, text("a", 9), [3])
    put_all(checkpoints, second, text("b", 9), [3])
    assert held(checkpoints, text("b", 9)) == []
    assert held(checkpoints, text("a", 9)) == [3]
    assert checkpoints.stats()["checkpoints_not_kept"] == 1
    put_all(checkpoints, first, text("a", 9), [5])
    assert held(checkpoints, text("a", 9)) == [5]


def test_what_cannot_fit_at_all_makes_no_other_go():
    checkpoints = make(2)
    owner = Owner()
    put_all(checkpoints, owner, text("a", 9), [2, 4])
    large = RecurrentState(6 * CHUNK, (torch.zeros(100),), torch.empty(0))
    checkpoints.put(owner, text("a", 6), large)
    assert held(checkpoints, text("a", 9)) == [2, 4]
    assert checkpoints.stats()["checkpoints_evicted"] == 0


def test_the_text_of_an_owner_that_is_gone_is_not_in_use():
    checkpoints = make(1)
    owner = Owner()
    put_all(checkpoints, owner, text("a", 9), [3])
    del owner
    put_all(checkpoints, Owner(), text("b", 9), [3])
    assert held(checkpoints, text("b", 9)) == [3]


def test_asking_for_a_state_puts_it_in_use():
    checkpoints = make(2)
    first, second = Owner(), Owner()
    put_all(checkpoints, first, text("a", 9), [3, 6])
    checkpoints.get(first, text("a", 3)[-1])
    put_all(checkpoints, second, text("b", 9), [3])
    assert held(checkpoints, text("a", 9)) == [3]


@pytest.mark.parametrize("policy", POLICIES)
def test_books_are_right_after_any_history(policy):
    chance = random.Random(3)
    checkpoints = make(6, policy=policy)
    owners = [Owner() for _ in range(3)]
    texts = [text(name, 12) for name in ("a", "aab", "aaac", "d")]
    newest = {}
    for _ in range(2000):
        owner, hashes = chance.choice(owners), chance.choice(texts)
        boundary = chance.randint(1, 12)
        action = chance.random()
        if action < 0.7:
            put_all(checkpoints, owner, hashes, [boundary])
            if boundary in held(checkpoints, hashes):
                newest[owner] = hashes[:boundary]
        elif action < 0.95:
            if checkpoints.get(owner, hashes[boundary - 1]) is not None:
                newest[owner] = hashes[:boundary]
        else:
            checkpoints.forget_owner(owner)
            newest.pop(owner, None)
        stats = checkpoints.stats()
        kept = {key for hashes in texts for key in checkpoints.states(hashes)}
        assert stats["checkpoint_states"] == len(kept) <= 6
        assert stats["checkpoint_bytes"] == ROOM * len(kept)
        for hashes in newest.values():
            assert checkpoints.held(hashes)[-1:] == [len(hashes) * CHUNK]


def test_nothing_is_left_after_clear():
    checkpoints = make(3)
    put_all(checkpoints, Owner(), text("a", 9), [3, 6])
    checkpoints.clear()
    assert held(checkpoints, text("a", 9)) == []
    assert checkpoints.stats()["checkpoint_bytes"] == 0


def test_an_unknown_policy_is_refused():
    with pytest.raises(InvalidArgumentError, match="checkpoint_policy is 'oldest'"):
        make(1, policy="oldest")
