"""A group of caches against a list of tokens: whatever is done, each holds its part of the text.

What a cache answers to a trim is asked of a copy of it; who then holds how much follows from the
table in the group's documentation, which is written down here a second time.
"""

from __future__ import annotations

import copy

from fake_caches import KINDS, FakeCache, RecurrentCache, assert_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvpager import CapacityError
from kvpager.companions import CacheGroup, NeedsCheckpoint, Ok, Refused, TrimAnswer, TrimCounters

kinds = st.sampled_from(sorted(KINDS))
shares = st.floats(0, 1)


def would_answer(cache: FakeCache, position: int) -> TrimAnswer | None:
    """None for one that fails."""
    twin = copy.deepcopy(cache)
    try:
        return twin.trim(position)
    except CapacityError:
        return None


def would_hold(cache: FakeCache, answer: TrimAnswer | None, position: int) -> int:
    """Tokens that a cache holds after it was cut by itself."""
    if cache.length <= position:
        return cache.length
    if isinstance(answer, NeedsCheckpoint):
        return answer.position
    return position if isinstance(answer, Ok) else 0


class GroupAgainstText(RuleBasedStateMachine):
    @initialize(primary=kinds, companions=st.lists(kinds, max_size=3))
    def make_group(self, primary: str, companions: list[str]) -> None:
        self.group = CacheGroup(KINDS[primary](), [KINDS[kind]() for kind in companions])
        self.text: list[int] = []
        self.expected = TrimCounters()

    @property
    def caches(self) -> list[FakeCache]:
        return [self.group.primary, *self.group.companions]

    def cache(self, share: float) -> FakeCache:
        return self.caches[min(len(self.caches) - 1, int(share * len(self.caches)))]

    @rule(tokens=st.lists(st.integers(0, 50), min_size=1, max_size=25))
    def append_and_compute(self, tokens: list[int]) -> None:
        self.text += tokens
        self.group.primary.feed(self.text)

    @rule(tokens=st.lists(st.integers(0, 50), min_size=1, max_size=9))
    def append_only(self, tokens: list[int]) -> None:
        self.text += tokens

    @rule(which=shares, share=shares)
    def feed_a_part(self, which: float, share: float) -> None:
        self.cache(which).feed(self.text, int(share * len(self.text)))

    @rule()
    def feed_all(self) -> None:
        for cache in self.caches:
            cache.feed(self.text)

    @rule(share=shares)
    def trim_anywhere(self, share: float) -> None:
        self.trim(int(share * (len(self.text) + 3)))

    @rule(back=st.integers(1, 6))
    def trim_a_little(self, back: int) -> None:
        self.trim(max(0, len(self.text) - back))

    @precondition(lambda self: any(isinstance(c, RecurrentCache) for c in self.caches))
    @rule(share=shares)
    def trim_to_a_checkpoint(self, share: float) -> None:
        held = sorted({p for c in self.caches for p in getattr(c, "checkpoints", {})} | {0})
        self.trim(held[int(share * (len(held) - 1))])

    def trim(self, position: int) -> None:
        caches = self.caches
        before = [cache.length for cache in caches]
        digests = [cache.digest() for cache in caches]
        asked = [would_answer(cache, position) for cache in caches]
        primary_refuses = before[0] > position and isinstance(asked[0], Refused)
        expected = [
            0 if primary_refuses else would_hold(cache, answer, position)
            for cache, answer in zip(caches, asked)
        ]
        refused = [
            length > position and (answer is None or isinstance(answer, Refused))
            for length, answer in zip(before, asked)
        ]
        if before[0] > position and asked[0] is None:
            try:
                self.group.trim(position)
            except CapacityError:
                assert [cache.digest() for cache in caches[1:]] == digests[1:]
                self.group.primary.reset()  # the fake has spoilt itself
                return
            raise AssertionError("the primary's failure was not heard of")
        report = self.group.trim(position)
        del self.text[position:]
        assert [cache.length for cache in caches] == expected
        for cache, digest, length in zip(caches, digests, before):
            if length <= position and not primary_refuses:
                assert cache.digest() == digest
        lost = sum(min(was, position) - now for was, now in zip(before, expected) if was > now)
        assert (report.kept, report.lost) == (expected[0], lost)
        self.expected.trim_primary_refused += primary_refuses
        self.expected.trim_companion_refused += 0 if primary_refuses else sum(refused[1:])
        self.expected.tokens_reprefilled += lost

    @rule()
    def reset(self) -> None:
        self.group.reset()
        assert not any(cache.length for cache in self.caches)

    @rule(which=shares, refusal=st.sampled_from([None, "told to"]))
    def tell_to_refuse(self, which: float, refusal: str | None) -> None:
        self.cache(which).refusal = refusal

    @rule(which=shares, fails=st.booleans())
    def tell_to_fail(self, which: float, fails: bool) -> None:
        self.cache(which).failure = CapacityError("no block is free") if fails else None

    @precondition(lambda self: any(isinstance(c, RecurrentCache) for c in self.caches))
    @rule(which=shares, share=shares)
    def lose_a_checkpoint(self, which: float, share: float) -> None:
        cache = self.cache(which)
        if isinstance(cache, RecurrentCache) and cache.checkpoints:
            held = sorted(cache.checkpoints)
            cache.lose(held[int(share * (len(held) - 1))])

    @invariant()
    def each_holds_its_part_of_the_text_and_goes_on_as_a_cold_one(self) -> None:
        if not hasattr(self, "group"):
            return
        for cache in self.caches:
            assert cache.length <= len(self.text)
            assert_of(cache, self.text)
        assert self.group.counters == self.expected


TestGroupAgainstText = GroupAgainstText.TestCase
TestGroupAgainstText.settings = settings(settings.default, stateful_step_count=60)
