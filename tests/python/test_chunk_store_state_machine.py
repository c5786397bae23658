"""A chunk store against a dict: whatever is done to it, it returns what a dict would, or a miss.

Blocks of two identities and two groups are put, read, touched, deleted and left to expire, through
two objects over one folder; files are damaged, the index is removed, and the store is opened again.
Without a budget nothing is missing but what was deleted, expired or damaged.
"""

from __future__ import annotations

import tempfile
import time
from typing import NamedTuple
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from small_blocks import FRONT, block, bytes_on_disk, packs, remove_index

from kvpager.errors import CapacityError
from kvpager.stores import ChunkStore, ReadResult

IDENTITIES = ({"model": "a"}, {"model": "b"})
SIZES = (1, 4096, 5000)
HOUR = 3600
WHO, GROUPS = st.integers(0, 1), st.integers(0, 1)
KEYS = st.lists(st.integers(0, 9), min_size=1, max_size=5)


class Place(NamedTuple):
    """Of a block."""

    who: int
    group: int
    key: int


class BlocksAgainstDict(RuleBasedStateMachine):
    @initialize(
        budget=st.sampled_from([None, 8 * FRONT, 16 * FRONT]), ttl=st.sampled_from([None, HOUR])
    )
    def make_store(self, budget: int | None, ttl: int | None) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="kvpager-blocks-")
        self.clock = time.time_ns()
        self.patch = mock.patch.object(time, "time_ns", self.now)
        self.patch.start()
        self.budget, self.ttl = budget, ttl
        self.is_sure = budget is None  # whether what is kept must be there, and nothing else
        self.stores = [self.opened(who, byte_budget=budget, ttl=ttl) for who in (0, 1)]
        self.kept: dict[Place, int] = {}  # sizes of what must be there, without a budget
        self.ever: dict[Place, set[int]] = {}  # sizes of what may be there
        self.used: dict[Place, int] = {}

    def now(self) -> int:
        self.clock += 1
        return self.clock

    def opened(self, who: int, **options: int | None) -> ChunkStore:
        return ChunkStore(self.folder.name, IDENTITIES[who], **options)

    def content(self, place: Place, size: int) -> bytes:
        return block(place.who * 100 + place.group * 10 + place.key, size)

    def expire(self) -> None:
        if self.ttl is not None:
            limit = self.clock - self.ttl * 10**9
            gone = [place for place in self.kept if self.used[place] < limit]
            for place in gone:
                del self.kept[place]

    @rule(who=WHO, group=GROUPS, keys=KEYS, size=st.sampled_from(SIZES))
    def put(self, who: int, group: int, keys: list[int], size: int) -> None:
        self.expire()
        places = [Place(who, group, key) for key in keys]
        blocks = [(bytes([p.key]), group, self.content(p, size)) for p in places]
        try:
            report = self.stores[who].put(blocks)
        except CapacityError:
            assert self.budget is not None
            return
        assert report.stored + report.already_there == len(blocks)
        if self.budget is None:
            assert report.evicted == 0
        if self.is_sure:
            assert report.stored == len({p for p in places if p not in self.kept})
        for place in places:
            self.kept.setdefault(place, size)
            self.ever.setdefault(place, set()).add(size)
            self.used[place] = self.clock

    @rule(who=WHO, group=GROUPS, keys=KEYS, size=st.sampled_from(SIZES))
    def read(self, who: int, group: int, keys: list[int], size: int) -> None:
        self.expire()
        store, names = self.stores[who], [bytes([key]) for key in keys]
        has = store.has(names, group)
        into = [bytearray(size) for _ in keys]
        for key, result, data, is_there in zip(keys, store.read(names, group, into), into, has):
            place = Place(who, group, key)
            if result is ReadResult.HIT:
                assert data == self.content(place, size)
                assert size in self.ever[place]
                self.used[place] = self.clock
            else:
                assert data == bytes(size)
            if self.is_sure:
                kept = self.kept.get(place)
                assert is_there == (kept is not None)
                wanted = ReadResult.HIT if kept == size else ReadResult.REFUSED
                assert result is (ReadResult.MISS if kept is None else wanted)

    @rule(who=WHO, group=GROUPS, keys=KEYS)
    def delete(self, who: int, group: int, keys: list[int]) -> None:
        count = self.stores[who].delete([bytes([key]) for key in keys], group)
        gone = {place for key in keys if (place := Place(who, group, key)) in self.kept}
        assert count == len(gone) or not self.is_sure
        for place in gone:
            del self.kept[place]

    @rule(who=WHO)
    def collect(self, who: int) -> None:
        self.stores[who].gc()
        assert self.stores[who].stats()["bytes"] == bytes_on_disk(self.folder.name)

    @rule(who=WHO)
    def lose_the_index(self, who: int) -> None:
        for store in self.stores:
            store.close()
        remove_index(self.folder.name)
        self.stores = [self.opened(0), self.opened(1)]
        if self.ttl is not None:  # last uses are those of packs from now on
            self.is_sure = False

    @rule(who=WHO)
    def open_again(self, who: int) -> None:
        self.stores[who].close()
        self.stores[who] = self.opened(who)

    @rule(seconds=st.sampled_from([60, HOUR]))
    def wait(self, seconds: int) -> None:
        self.clock += seconds * 10**9

    @invariant()
    def the_budget_holds(self) -> None:
        if hasattr(self, "budget") and self.budget is not None:
            assert bytes_on_disk(self.folder.name) <= self.budget

    @invariant()
    def nothing_is_damaged(self) -> None:
        if hasattr(self, "stores"):
            assert self.stores[0].verify() == []
            assert all(store.stats()["refused"]["damaged"] == 0 for store in self.stores)

    def teardown(self) -> None:
        if hasattr(self, "stores"):
            for store in self.stores:
                store.close()
            assert len(packs(self.folder.name)) < 1000
            self.patch.stop()
            self.folder.cleanup()


TestBlocksAgainstDict = BlocksAgainstDict.TestCase
TestBlocksAgainstDict.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
