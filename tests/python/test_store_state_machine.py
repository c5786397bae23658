"""A directory store against a dict: whatever is done to it, it gives back what a dict would.

Sequences grow, are cut, saved, restored and saved again, with companions or without; snapshots are
deleted, pinned, left to expire and collected; bytes are compared raw. A save that finds no room
changes nothing.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from typing import Any
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from small_store import CHUNK, Author, C, size, text

from kvpager import _core
from kvpager.errors import CapacityError, InvalidArgumentError, StorageError
from kvpager.pager import SnapshotInfo
from kvpager.stores import DirectoryStore
from kvpager.stores.companions import CompanionSnapshot

NAMES = st.sampled_from(["a", "b", "c", "d"])
SALTS = ("", "tenant")
HOUR = 3600


@dataclass
class Kept:
    """What the store must give back under one name."""

    tokens: list[int]
    salt: str
    used: float
    pinned: bool = False
    ttl: float | None = None  # None: the store's
    drafted: list[int] | None = None  # tokens of its companion, if it has one


class StoreAgainstDict(RuleBasedStateMachine):
    @initialize(budget=st.sampled_from([None, 24, 40, 80]), ttl=st.sampled_from([None, 5 * HOUR]))
    def make_store(self, budget: int | None, ttl: float | None) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="kvpager-store-")
        self.clock = time.time()
        self.patch = mock.patch.object(time, "time_ns", self.now)
        self.patch.start()
        self.budget = None if budget is None else budget * CHUNK
        self.ttl = ttl
        self.store = DirectoryStore(self.folder.name, byte_budget=self.budget, ttl=ttl)
        self.authors = {salt: Author(salt=salt) for salt in SALTS}
        self.drafts = {salt: Author(salt=salt, fingerprint="draft") for salt in SALTS}
        self.tokens: dict[str, list[int]] = {salt: [] for salt in SALTS}  # of a sequence each
        self.kept: dict[str, Kept] = {}
        self.readers: list[tuple[_core.SnapshotReader, list[int], str]] = []

    def now(self) -> int:
        return int(self.clock * 1e9)

    def tick(self) -> None:
        self.clock += 1  # no two uses at once: who is evicted first is then certain

    def expired(self, kept: Kept) -> bool:
        ttl = self.ttl if kept.ttl is None else kept.ttl
        return not kept.pinned and ttl is not None and self.clock - kept.used > ttl

    def visible(self) -> dict[str, Kept]:
        return {name: kept for name, kept in self.kept.items() if not self.expired(kept)}

    def forget_evicted(self, spared: str | None = None) -> None:
        """Takes out of the model what is gone, once it is known that it was allowed to go."""
        there = {entry.name for entry in self.store.entries()}
        gone = [name for name in self.visible() if name not in there]
        for name in gone:
            assert self.budget is not None, f"{name} is lost"
            assert not self.kept[name].pinned
            assert name != spared
            del self.kept[name]

    @rule(salt=st.sampled_from(SALTS), more=st.integers(1, 5 * C), seed=st.integers(0, 2))
    def append(self, salt: str, more: int, seed: int) -> None:
        tokens = self.tokens[salt]
        self.tokens[salt] = text(min(len(tokens) + more, 14 * C), seed=seed, start=tokens)

    @rule(
        name=NAMES, salt=st.sampled_from(SALTS), more=st.integers(1, 5 * C), drafted=st.booleans()
    )
    def turn(self, name: str, salt: str, more: int, drafted: bool) -> None:
        """What stores are for: a session goes on and is saved again."""
        self.append(salt, more, 0)
        self.save(name, salt, drafted)

    @rule(salt=st.sampled_from(SALTS), share=st.floats(0, 1))
    def trim(self, salt: str, share: float) -> None:
        del self.tokens[salt][round(share * len(self.tokens[salt])) :]

    @rule(name=NAMES, salt=st.sampled_from(SALTS), drafted=st.booleans())
    def save(self, name: str, salt: str, drafted: bool) -> None:
        tokens = self.tokens[salt]
        if not tokens:
            return
        self.tick()
        before = self.visible().get(name)
        try:
            companions = [self.beside(salt, tokens)] if drafted else []
            report = self.authors[salt].save(
                self.store, name, tokens, companions=companions, overwrite=True
            )
        except CapacityError as error:
            assert self.budget is not None
            assert f"byte_budget is {self.budget}" in str(error)  # noqa: PT017
            self.forget_evicted(spared=name)
            return
        assert report.tokens == len(tokens)
        self.kept[name] = Kept(list(tokens), salt, self.clock)
        if report.companions:
            self.kept[name].drafted = list(tokens)
        else:
            assert not drafted or self.budget is not None
        if before is not None:
            self.kept[name].pinned, self.kept[name].ttl = before.pinned, before.ttl
        self.forget_evicted(spared=name)

    def beside(self, salt: str, tokens: list[int]) -> CompanionSnapshot:
        """What a draft model would hold of them."""
        draft = self.drafts[salt]
        content = draft.content(tokens)
        return CompanionSnapshot("draft", content, draft.pager.fingerprint_json, "{}")

    @rule(name=NAMES, keep_open=st.booleans(), go_on=st.booleans())
    def restore(self, name: str, keep_open: bool, go_on: bool) -> None:
        self.tick()
        kept = self.visible().get(name)
        if kept is None:
            try:
                self.store.open(name)
            except StorageError as error:
                assert repr(name) in str(error)  # noqa: PT017
                return
            raise AssertionError(f"{name} should not be there")
        reader = self.store.open(name)
        kept.used = self.clock
        author = self.authors[kept.salt]
        author.check(reader, kept.tokens)
        author.check_restored(reader, kept.tokens)
        if go_on:
            self.tokens[kept.salt] = list(kept.tokens)
        if keep_open and len(self.readers) < 3:
            self.readers.append((reader, list(kept.tokens), kept.salt))

    @rule(name=NAMES, new_name=NAMES)
    def save_what_was_restored(self, name: str, new_name: str) -> None:
        """From the snapshot's own bytes, without a pager that knows the content."""
        self.tick()
        kept = self.visible().get(name)
        if kept is None:
            return
        reader = self.store.open(name)
        kept.used = self.clock
        pager = Author(salt=kept.salt).pager
        sequence = pager.restore(SnapshotInfo.of(reader), salt=kept.salt)
        content = pager.core.freeze(sequence.uid, -1)
        self.tick()
        before = self.visible().get(new_name)
        try:
            report = self.store.save(
                new_name,
                content,
                fingerprint=reader.fingerprint,
                session=reader.session,
                overwrite=True,
            )
        except CapacityError:
            assert self.budget is not None
            self.forget_evicted(spared=new_name)
            return
        assert report.bytes_shared == len(kept.tokens) // C * CHUNK
        assert report.logical_digest == reader.logical_digest
        self.kept[new_name] = Kept(list(kept.tokens), kept.salt, self.clock)
        if before is not None:
            self.kept[new_name].pinned, self.kept[new_name].ttl = before.pinned, before.ttl
        self.forget_evicted(spared=new_name)

    @precondition(lambda self: self.readers)
    @rule()
    def read_on_and_close(self) -> None:
        """Whatever has happened to the snapshot, its reader has its bytes."""
        reader, tokens, salt = self.readers.pop(0)
        self.authors[salt].check(reader, tokens)

    @rule(salt=st.sampled_from(SALTS), share=st.floats(0, 1))
    def find_prefix(self, salt: str, share: float) -> None:
        self.tick()
        wanted = self.tokens[salt][: round(share * len(self.tokens[salt]))]
        best = 0
        for kept in self.visible().values():
            if kept.salt == salt:
                same = [a == b for a, b in zip(kept.tokens, wanted)]
                best = max(best, (same.index(False) if False in same else len(same)) // C)
        found = self.store.find_prefix(self.authors[salt].hashes(wanted))
        if found is None:
            assert best == 0
            return
        assert len(found.tokens) == best * C
        self.authors[salt].check(found, wanted[: best * C])
        used = [e for e in self.store.entries() if abs(e.last_used - self.clock) < 1e-3]
        assert len(used) == 1
        self.kept[used[0].name].used = self.clock

    @rule(name=NAMES)
    def delete(self, name: str) -> None:
        kept = self.visible().get(name)
        try:
            self.store.delete(name, salt="" if kept is None else kept.salt)
        except StorageError:
            assert kept is None
        except InvalidArgumentError:
            assert kept is not None
            assert kept.pinned
        else:
            del self.kept[name]

    @rule(name=NAMES, pinned=st.booleans())
    def pin_or_unpin(self, name: str, pinned: bool) -> None:
        kept = self.visible().get(name)
        try:
            (self.store.pin if pinned else self.store.unpin)(name)
        except StorageError:
            assert kept is None
        except CapacityError:
            assert self.budget is not None
        else:
            assert kept is not None
            kept.pinned = pinned
        self.forget_evicted(spared=name)

    @rule(name=NAMES, hours=st.sampled_from([None, "never", 0.5, 2, 9]))
    def set_ttl(self, name: str, hours: Any) -> None:
        kept = self.visible().get(name)
        ttl = hours * HOUR if isinstance(hours, (int, float)) else hours
        try:
            self.store.set_ttl(name, ttl)
        except StorageError:
            assert kept is None
        except CapacityError:
            assert self.budget is not None
        else:
            assert kept is not None
            kept.ttl = 1e12 if ttl == "never" else ttl
        self.forget_evicted(spared=name)

    @rule(hours=st.sampled_from([0.2, 1, 3, 10]))
    def wait(self, hours: float) -> None:
        self.clock += hours * HOUR

    @rule()
    def open_again(self) -> None:
        self.store = DirectoryStore(self.folder.name, create=False)

    @rule()
    def gc(self) -> None:
        visible = set(self.visible())
        before = size(self.folder.name)
        report = self.store.gc()
        assert set(self.visible()) == visible
        self.kept = self.visible()
        assert report.damaged == ()
        assert size(self.folder.name) <= before
        if not self.readers:
            stats = self.store.stats()
            needed, chunks = stats["chunks_needed"], stats["chunks"]
            assert needed is not None
            assert chunks is not None
            assert report.skipped or chunks <= 2 * needed

    @invariant()
    def what_is_listed_is_what_is_kept(self) -> None:
        if not hasattr(self, "store"):
            return
        entries = {entry.name: entry for entry in self.store.entries()}
        assert entries.keys() == self.visible().keys()
        for name, kept in self.visible().items():
            entry = entries[name]
            assert (entry.tokens, entry.pinned, entry.error) == (
                *(len(kept.tokens), kept.pinned, None),
            )
            # Past the store, so that looking is no use.
            self.authors[kept.salt].check(_core.SnapshotReader.open(entry.path), kept.tokens)
            assert entry.companions == (() if kept.drafted is None else (f"{name}.draft",))
            if kept.drafted is not None:
                path = entry.path.replace(f"{name}.kvsnap", f"{name}.draft.kvsnap")
                self.drafts[kept.salt].check(_core.SnapshotReader.open(path), kept.drafted)
        total = size(self.folder.name)
        assert self.store.stats()["bytes"] == total
        assert self.budget is None or total <= self.budget

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.patch.stop()
            self.readers.clear()
            self.folder.cleanup()


TestStoreAgainstDict = StoreAgainstDict.TestCase
TestStoreAgainstDict.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
