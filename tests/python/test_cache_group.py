"""Caches cut together: who loses what, for every pair of kinds and every pair of answers.

An earlier system emptied both caches where either refused, and nobody could say what its pair of
answers had been. Here the pairs are written down, and a refusal is a refusal: what refused holds
byte for byte what it held.
"""

from __future__ import annotations

import copy
import logging

import pytest
from fake_caches import (
    CHUNK,
    KINDS,
    DenseCache,
    FakeCache,
    RecurrentCache,
    WindowedCache,
    able,
    assert_of,
    refusing,
)

from kvpager import CapacityError, InvalidArgumentError
from kvpager.companions import Cache, CacheGroup, NeedsCheckpoint, Ok, Refused, TrimCounters
from kvpager.errors import InvariantError

TEXT = [7 * i * i % 101 for i in range(60)]
OTHER = [3 * i + 1 for i in range(60)]
P = 21  # inside a chunk, far behind every window
OK, REFUSED = "ok", "refused"
MAKE = {OK: able, REFUSED: refusing}

pairs = [
    pytest.mark.parametrize("companion_kind", KINDS),
    pytest.mark.parametrize("primary_kind", KINDS),
]
answers = [
    pytest.mark.parametrize("companion_answer", MAKE),
    pytest.mark.parametrize("primary_answer", MAKE),
]


def every(marks):
    def decorate(test):
        for mark in marks:
            test = mark(test)
        return test

    return decorate


def fed(cache: FakeCache, upto: int | None = None, text: list[int] = TEXT) -> FakeCache:
    cache.feed(text, upto)
    return cache


def cut_alone(cache: FakeCache, position: int) -> FakeCache:
    """What a cache holds that was cut with nobody beside it."""
    twin = copy.deepcopy(cache)
    answer = twin.trim(position)
    if isinstance(answer, NeedsCheckpoint):
        twin.rewind(answer.position)
    else:
        assert answer == Ok()
    return twin


def assert_goes_on(group: CacheGroup, position: int) -> None:
    """Fed another text from the cut on, all say what they would have said without what was cut."""
    text = TEXT[:position] + OTHER
    for cache in (group.primary, *group.companions):
        assert cache.length <= position
        assert_of(cache, text)
        cache.feed(text)
        assert_of(cache, text)


@every(pairs)
@every(answers)
def test_a_trim_takes_from_each_cache_what_the_pair_of_answers_says(
    primary_kind, companion_kind, primary_answer, companion_answer
):
    primary = fed(MAKE[primary_answer](primary_kind))
    companion = fed(MAKE[companion_answer](companion_kind))
    expected = {
        (OK, OK): (P, P),
        (OK, REFUSED): (P, 0),
        (REFUSED, OK): (0, 0),
        (REFUSED, REFUSED): (0, 0),
    }[primary_answer, companion_answer]
    untouched = cut_alone(primary, P) if primary_answer == OK else None
    group = CacheGroup(primary, [companion])
    report = group.trim(P)

    assert (primary.length, companion.length) == expected
    if untouched is not None:  # whatever the companion answered
        assert primary.digest() == untouched.digest()
        assert primary.calls == [f"trim {P}"]
    assert isinstance(report.primary, Ok if primary_answer == OK else Refused)
    if primary_answer == REFUSED:
        assert report.companions == (None,)
        assert companion.calls == ["reset"]
    else:
        assert isinstance(report.companions[0], Ok if companion_answer == OK else Refused)
    assert (report.position, report.kept) == (P, expected[0])
    assert report.lost == 2 * P - sum(expected)
    assert group.counters == TrimCounters(
        trim_primary_refused=primary_answer == REFUSED,
        trim_companion_refused=(primary_answer, companion_answer) == (OK, REFUSED),
        tokens_reprefilled=report.lost,
    )
    assert_goes_on(group, P)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_that_refuses_holds_byte_for_byte_what_it_held(kind):
    cache = fed(refusing(kind))
    before = cache.digest()
    assert isinstance(cache.trim(P), Refused)
    assert cache.digest() == before
    assert_of(cache, TEXT)


def test_a_cache_that_needs_a_checkpoint_holds_what_it_held_until_it_is_told_to_go_back():
    cache = fed(RecurrentCache(every=8))
    before = cache.digest()
    assert cache.trim(P) == NeedsCheckpoint(16)
    assert cache.digest() == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_that_is_not_the_texts_is_noticed_by_these_tests(kind):
    cache = fed(able(kind))
    assert_of(cache, TEXT)
    cache._spoil()
    with pytest.raises((AssertionError, KeyError)):
        assert_of(cache, TEXT)


@pytest.mark.parametrize("companion_kind", KINDS)
def test_the_primary_goes_back_to_its_checkpoint_and_the_companion_no_further_than_the_cut(
    companion_kind,
):
    group = CacheGroup(fed(RecurrentCache(every=8)), [fed(able(companion_kind))])
    report = group.trim(P)
    assert report.primary == NeedsCheckpoint(16)
    assert (report.kept, report.lost) == (16, P - 16)
    assert [cache.length for cache in (group.primary, *group.companions)] == [16, P]
    assert group.counters == TrimCounters(tokens_reprefilled=P - 16)
    assert_goes_on(group, P)


@pytest.mark.parametrize("primary_kind", KINDS)
def test_a_companion_goes_back_to_its_checkpoint_and_the_primary_does_not_notice(primary_kind):
    primary = fed(able(primary_kind))
    untouched = cut_alone(primary, P)
    group = CacheGroup(primary, [fed(RecurrentCache(every=8))])
    report = group.trim(P)
    assert report.companions == (NeedsCheckpoint(16),)
    assert primary.digest() == untouched.digest()
    assert group.companions[0].length == 16
    assert group.counters == TrimCounters(tokens_reprefilled=P - 16)
    assert_goes_on(group, P)


@pytest.mark.parametrize("position", [8, 16, 24])
def test_a_cut_exactly_at_a_checkpoint_loses_nothing(position):
    group = CacheGroup(fed(RecurrentCache(every=8)), [fed(RecurrentCache(every=4))])
    report = group.trim(position)
    assert report.primary == report.companions[0] == Ok()
    assert (report.kept, report.lost) == (position, 0)
    assert_goes_on(group, position)


def test_where_the_checkpoint_was_lost_the_one_before_serves_and_at_last_the_beginning():
    cache = fed(RecurrentCache(every=8))
    cache.lose(16)
    group = CacheGroup(cache)
    assert group.trim(P).primary == NeedsCheckpoint(8)
    cache.feed(TEXT)
    for position in (8, 16):
        cache.lose(position)
    report = group.trim(P)
    assert report.primary == NeedsCheckpoint(0)
    assert (report.kept, report.lost) == (0, P)
    assert group.counters.trim_primary_refused == 0
    assert_goes_on(group, P)


@pytest.mark.parametrize("position", [0, 1, CHUNK, P, 59])
@every(pairs)
def test_at_every_kind_of_position_nobody_is_beyond_it_and_all_go_on_as_cold_ones(
    primary_kind, companion_kind, position
):
    group = CacheGroup(fed(KINDS[primary_kind]()), [fed(KINDS[companion_kind]())])
    report = group.trim(position)
    assert report.kept == group.primary.length
    assert_goes_on(group, position)


@every(pairs)
def test_a_cut_at_0_empties_all_of_them_and_nobody_is_said_to_have_refused(
    primary_kind, companion_kind
):
    group = CacheGroup(fed(KINDS[primary_kind]()), [fed(KINDS[companion_kind]())])
    report = group.trim(0)
    assert report.primary == report.companions[0] == Ok()
    assert (report.kept, report.lost) == (0, 0)
    assert group.primary.length == group.companions[0].length == 0
    assert group.counters == TrimCounters()


@pytest.mark.parametrize("beyond", [0, 1, 1000])
@every(pairs)
@every(answers)
def test_a_cut_at_the_length_or_after_it_asks_nobody_and_changes_nothing(
    primary_kind, companion_kind, primary_answer, companion_answer, beyond
):
    caches = [
        fed(MAKE[primary_answer](primary_kind)),
        fed(MAKE[companion_answer](companion_kind)),
    ]
    before = [cache.digest() for cache in caches]
    group = CacheGroup(caches[0], caches[1:])
    report = group.trim(len(TEXT) + beyond)
    assert [cache.digest() for cache in caches] == before
    assert [cache.calls for cache in caches] == [[], []]
    assert report.primary == report.companions[0] == Ok()
    assert (report.kept, report.lost) == (len(TEXT), 0)
    assert group.counters == TrimCounters()


@pytest.mark.parametrize("position", [0, 9, 10, 11, 30, 59])
@every(pairs)
def test_a_companion_that_lags_loses_only_what_it_holds_beyond_the_cut(
    primary_kind, companion_kind, position
):
    primary, companion = fed(able(primary_kind)), fed(able(companion_kind), 10)
    before = companion.digest()
    group = CacheGroup(primary, [companion])
    report = group.trim(position)
    assert primary.length == position
    assert companion.length == min(10, position)
    if position >= 10:
        assert companion.digest() == before
        assert companion.calls == []
    assert report.lost == 0
    assert_goes_on(group, position)


@every(pairs)
def test_a_companion_that_lags_behind_the_cut_cannot_refuse_it(primary_kind, companion_kind):
    companion = fed(refusing(companion_kind), 10)
    group = CacheGroup(fed(able(primary_kind)), [companion])
    assert group.trim(P).companions == (Ok(),)
    assert companion.length == 10
    assert group.counters == TrimCounters()


@every(pairs)
def test_a_companion_that_is_further_than_the_primary_is_cut_all_the_same(
    primary_kind, companion_kind
):
    primary, companion = fed(refusing(primary_kind), 10), fed(able(companion_kind))
    before = primary.digest()
    group = CacheGroup(primary, [companion])
    report = group.trim(P)
    assert primary.digest() == before
    assert companion.length == P
    assert (report.primary, report.companions, report.kept) == (Ok(), (Ok(),), 10)
    assert report.lost == 0
    assert_goes_on(group, P)


@every(pairs)
def test_an_empty_cache_has_nothing_to_refuse(primary_kind, companion_kind):
    for lengths in ((0, 60), (60, 0), (0, 0)):
        group = CacheGroup(
            fed(refusing(primary_kind), lengths[0]), [fed(refusing(companion_kind), lengths[1])]
        )
        report = group.trim(P)
        assert isinstance(report.primary, Refused if lengths[0] else Ok)
        assert group.primary.length == group.companions[0].length == 0
        assert report.lost == P * (lengths[0] > 0) + P * (lengths[1] > 0)
        assert_goes_on(group, P)


@pytest.mark.parametrize("first_refuses", [True, False])
@every(pairs)
def test_of_two_companions_only_the_one_that_refuses_begins_anew(
    primary_kind, companion_kind, first_refuses
):
    primary = fed(able(primary_kind))
    untouched = cut_alone(primary, P)
    good, bad = fed(able(companion_kind)), fed(refusing(companion_kind))
    group = CacheGroup(primary, [bad, good] if first_refuses else [good, bad])
    kept = cut_alone(good, P)
    report = group.trim(P)
    assert primary.digest() == untouched.digest()
    assert good.digest() == kept.digest()
    assert bad.length == 0
    assert [isinstance(answer, Refused) for answer in report.companions] == (
        [True, False] if first_refuses else [False, True]
    )
    assert group.counters == TrimCounters(0, 1, P)
    assert_goes_on(group, P)


def test_what_a_trim_cost_is_counted_once_for_each_cache_and_only_up_to_the_cut():
    counters = TrimCounters()
    group = CacheGroup(
        fed(RecurrentCache(every=8)),
        [fed(refusing("dense")), fed(refusing("windowed"), 10), fed(RecurrentCache(every=16))],
        counters,
    )
    report = group.trim(P)
    assert report.lost == (P - 16) + P + 0 + (P - 16)
    assert counters == TrimCounters(0, 1, report.lost)
    assert group.trim(P - 1).lost == 0  # nobody holds what it takes away
    assert counters == TrimCounters(0, 1, report.lost)
    CacheGroup(fed(refusing("dense")), [], counters).trim(P)
    assert counters == TrimCounters(1, 1, report.lost + P)


def test_a_text_that_was_cut_and_goes_on_can_be_cut_again_and_again():
    group = CacheGroup(fed(able("dense")), [fed(RecurrentCache(every=8)), fed(WindowedCache())])
    text = list(TEXT)
    for position in (55, 40, 41, 17, 16, 30, 3, 60):
        group.trim(position)
        text = text[:position] + [position + i for i in range(60 - position)]
        for cache in (group.primary, *group.companions):
            assert cache.length <= position
            cache.feed(text)
            assert_of(cache, text)


@pytest.mark.parametrize("kind", KINDS)
def test_a_primary_that_fails_has_all_be_as_it_was(kind):
    primary, companion = fed(able("dense")), fed(able(kind))
    primary.failure, primary._spoil = CapacityError("no block"), lambda: None
    before = primary.digest(), companion.digest()
    group = CacheGroup(primary, [companion])
    with pytest.raises(CapacityError, match="no block"):
        group.trim(P)
    assert (primary.digest(), companion.digest()) == before
    assert companion.calls == []
    assert group.counters == TrimCounters()


@pytest.mark.parametrize("kind", KINDS)
def test_a_companion_that_fails_is_its_own_affair_and_begins_anew(kind, caplog):
    primary, bad, good = fed(able("dense")), fed(able(kind)), fed(able("recurrent"))
    untouched = cut_alone(primary, P)
    bad.failure = CapacityError("no block is free")
    group = CacheGroup(primary, [bad, good])
    with caplog.at_level(logging.WARNING):
        report = group.trim(P)
    assert "no block is free" in caplog.text
    assert primary.digest() == untouched.digest()
    assert (bad.length, good.length) == (0, P)
    assert isinstance(report.companions[0], Refused)
    assert "no block is free" in report.companions[0].reason
    assert group.counters == TrimCounters(0, 1, P)
    bad.failure = None
    assert_goes_on(group, P)


@pytest.mark.parametrize("failure", [ValueError("a bug"), KeyboardInterrupt()])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_raised_from_a_companion_comes_through_when_no_cache_is_beyond_the_cut(
    kind, failure
):
    primary, bad, good = fed(able("dense")), fed(able(kind)), fed(able("windowed"))
    bad.failure = failure
    group = CacheGroup(primary, [bad, good])
    with pytest.raises(type(failure)):
        group.trim(P)
    assert (primary.length, bad.length, good.length) == (P, 0, P)
    assert group.counters == TrimCounters(0, 1, P)
    bad.failure = None
    assert_goes_on(group, P)


def test_nobody_is_asked_whose_primary_refused_so_that_nobody_can_fail_either():
    companion = fed(able("dense"))
    companion.failure = ValueError("a bug")
    CacheGroup(fed(refusing("dense")), [companion]).trim(P)
    assert companion.length == 0


class Liar(RecurrentCache):
    """Says that it was cut, and has only forgotten to go back."""

    def _trim(self, position):
        return Ok()


class Astray(RecurrentCache):
    """Names a checkpoint after the cut."""

    def _trim(self, position):
        return NeedsCheckpoint(position + 3)


def test_a_success_that_left_the_state_where_it_was_is_not_believed(caplog):
    with pytest.raises(InvariantError, match=r"Liar answered Ok\(\), but holds 60 tokens.*21"):
        CacheGroup(fed(Liar())).trim(P)
    with pytest.raises(InvariantError, match="Astray answered"):
        CacheGroup(fed(Astray(every=1))).trim(P)
    primary, companion = fed(able("dense")), fed(Liar())
    group = CacheGroup(primary, [companion])
    group.trim(P)
    assert "Liar" in caplog.text
    assert (primary.length, companion.length) == (P, 0)
    assert_of(companion, [])


def test_a_position_before_the_beginning_is_refused():
    cache = fed(able("dense"))
    with pytest.raises(InvalidArgumentError, match="position is -1"):
        CacheGroup(cache).trim(-1)
    assert cache.calls == []


def test_a_reset_empties_all_of_them():
    group = CacheGroup(fed(refusing("dense")), [fed(refusing(kind)) for kind in KINDS])
    group.reset()
    assert [cache.length for cache in (group.primary, *group.companions)] == [0] * 4
    assert group.counters == TrimCounters()


def test_the_caches_here_are_caches_in_the_sense_of_the_protocol():
    assert all(isinstance(kind(), Cache) for kind in KINDS.values())
    assert isinstance(DenseCache(), Cache)
