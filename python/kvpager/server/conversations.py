"""A tenant's conversations: those in memory, and those that are saved.

An answer is always computed in a fork, so that a request that fails or is cancelled leaves its
conversation as it was.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, TypeVar

from kvpager.engine import Engine
from kvpager.errors import CorruptSnapshotError, InvalidArgumentError, PagerError, StorageError
from kvpager.section_json import parse_section
from kvpager.server.errors import ApiError, not_found
from kvpager.server.metrics import RestoreOutcome
from kvpager.server.tenants import Tenant
from kvpager.session import Session
from kvpager.stores import DirectoryStore, SaveReport, StoreEntry
from kvpager.stores.names import check_name

_NOTES = "kvpager.server"  # of a session's metadata
_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")

Digests = tuple[str, ...]


@dataclass
class Kept:
    """A conversation in memory.

    Attributes:
        session: with its text; nobody but `Conversations` uses it, others get forks. It is closed
            as soon as it leaves memory, in any thread.
        seen: digests of the beginnings of its messages as the client knows them, one each.
        salt: that it was computed under.
        notes: JSON values that are saved with it, such as a response.
        length: tokens of its text.
        restored_tokens: those of them that were read from a snapshot or a store.
    """

    session: Session
    seen: Digests = ()
    salt: str | None = None
    notes: dict[str, Any] = field(default_factory=dict)
    used: float = field(default_factory=time.time)
    created: float = field(default_factory=time.time)
    length: int = field(init=False)
    restored_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.length, self.restored_tokens = self.session.length, self.session.restored_tokens


class _Restoring:
    """A restore under way. `outdated`: its conversation was kept anew or deleted meanwhile."""

    outdated = False


def digests(messages: Sequence[dict[str, Any]], salt: str | None) -> Digests:
    """One digest for each beginning of a conversation, as the client has it.

    Ids of tool calls are left out: clients may make their own.
    """
    found, chain = [], (salt or "").encode()
    for message in messages:
        text = json.dumps(_canonical(message), sort_keys=True, ensure_ascii=False)
        chain = blake2b(chain + b"\0" + text.encode(), digest_size=16).digest()
        found.append(chain.hex())
    return tuple(found)


def _canonical(message: dict[str, Any]) -> dict[str, Any]:
    calls = [
        [call["function"]["name"], _loaded(call["function"]["arguments"])]
        for call in message.get("tool_calls") or ()
    ]
    values = {"role": message["role"], "content": message.get("content") or "", "calls": calls}
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    return values if not reasoning else {**values, "reasoning": reasoning}


def _loaded(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments


class Conversations:
    """Conversations of one tenant, by name. Any thread may use it.

    Those that leave memory are restored from the store when they go on.
    """

    def __init__(
        self,
        engine: Engine,
        tenant: Tenant,
        store: DirectoryStore | None,
        *,
        on_kept: Callable[[], object],
        on_restore: Callable[[RestoreOutcome], object],
    ) -> None:
        """on_kept: called when there is one more in memory. on_restore: when one is restored."""
        self.tenant = tenant
        self.store = store
        self._engine = engine
        self._on_kept = on_kept
        self._on_restore = on_restore
        self._lock = threading.RLock()
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._by_seen: dict[str, str] = {}  # the last digest of a conversation: its name
        self._restoring: dict[str, list[_Restoring]] = {}

    def fresh(self, salt: str | None) -> Session:
        """A new session, whose prompt may begin with what the store has."""
        return self._engine.session(salt=salt, store=self.store)

    def fork(self, name: str, salt: str | None, on_corrupt: str) -> tuple[Session, Kept]:
        """A fork of a conversation, which the caller closes, and what is known of it.

        Restores it first if it is not in memory.

        Raises:
            ApiError: 404, nobody knows it.
            FingerprintMismatchError: it was saved by another model or under another salt.
            CorruptSnapshotError: its snapshot's metadata are damaged.
        """
        return self.look(name, salt, on_corrupt, lambda kept: (kept.session.fork(), kept))

    def look(
        self,
        name: str,
        salt: str | None,
        on_corrupt: str,
        use: Callable[[Kept], _Result],
        *,
        keep: bool = True,
    ) -> _Result:
        """What `use` returns of a conversation, which stays as it is; else as `fork`.

        keep: whether one that is restored for it stays in memory.
        """
        while True:
            with self._lock:
                kept = self._kept_under(name, salt)
                if kept is not None:
                    return use(kept)
            if not keep:
                restored = self._restored(name, salt, on_corrupt)
                try:
                    return use(restored)
                finally:
                    restored.session.close()
            with self._lock:
                restoring = _Restoring()
                self._restoring.setdefault(name, []).append(restoring)
            try:
                restored = self._restored(name, salt, on_corrupt)
                with self._lock:
                    kept = self._kept_under(name, salt)  # another thread was faster
                    if kept is None and not restoring.outdated:
                        kept = restored
                        self._put(name, kept)
                    if kept is not restored:
                        restored.session.close()
                    if kept is None:
                        continue
                    result = use(kept)  # at once, since `on_kept` may let it go
            finally:
                with self._lock:
                    self._restoring[name].remove(restoring)
                    if not self._restoring[name]:
                        del self._restoring[name]
            self._on_kept()
            return result

    def fork_of_beginning(self, seen: Digests, salt: str | None) -> tuple[Session, Kept] | None:
        """A fork of the conversation in memory with the longest beginning of these messages."""
        with self._lock:
            for length in range(len(seen), 0, -1):
                name = self._by_seen.get(seen[length - 1])
                kept = self._kept.get(name) if name is not None else None
                if kept is not None and kept.salt == salt:
                    assert name is not None
                    self._touch(name, kept)
                    return kept.session.fork(), kept
        return None

    def fork_if_usable(self, name: str, salt: str | None) -> tuple[Session, Kept] | None:
        """`fork`, or None where that cannot be had."""
        if not self.has(name):
            return None
        try:
            return self.fork(name, salt, "fail")
        except (PagerError, ApiError) as error:  # then its tokens are computed
            _log.warning("conversation %s cannot be used: %s", name, error)
            return None

    def has(self, name: str) -> bool:
        """Whether a conversation of this name is in memory or saved."""
        with self._lock:
            if name in self._kept:
                return True
        return self.store is not None and name in {one.name for one in self.store.entries()}

    def keep(
        self, name: str, kept: Kept, *, save: bool = False, ttl: str | float | None = None
    ) -> SaveReport | None:
        """Keeps a conversation in memory, instead of an older one of its name.

        Args:
            name: of the conversation.
            kept: it; its session is no longer the caller's.
            save: whether it is saved, too. That comes first, so that one which leaves memory at
                once is in the store.
            ttl: how long what is saved lives after its last use; None: as the store says.

        Returns:
            What was written; None where nothing is saved, or without a store.

        Raises:
            PagerError: it cannot be saved; it is kept nevertheless.
        """
        kept.session.metadata = {_NOTES: {"seen": list(kept.seen), **kept.notes}}
        try:
            return self._write(name, kept.session, ttl) if save else None
        finally:
            with self._lock:
                self._put(name, kept)
                self._outdate(name)
            self._on_kept()

    def take(self, name: str, kept: Kept) -> None:
        """`keep` and save, or after an error neither: an older one of its name stays."""
        kept.session.metadata = {_NOTES: {"seen": list(kept.seen)}}
        try:
            self._write(name, kept.session, None)
        except BaseException:
            kept.session.close()
            raise
        with self._lock:
            self._put(name, kept)
            self._outdate(name)
        self._on_kept()

    def save(
        self, name: str, salt: str | None, on_corrupt: str, ttl: str | float | None = None
    ) -> SaveReport | None:
        """Saves a conversation; None without a store. Raises as `fork`, and PagerError."""
        twin, _ = self.fork(name, salt, on_corrupt)  # so that nobody waits for the disk
        with twin:
            return self._write(name, twin, ttl)

    def delete(self, name: str) -> None:
        """Forgets a conversation, and deletes it from the store. Raises ApiError 404."""
        with self._lock:
            known = name in self._kept
            self._forget(name, chunks=True)
            self._outdate(name)
        if self.store is not None:
            try:
                self.store.delete(name, force=True)
            except StorageError:
                if not known and not self.has(name):
                    raise not_found("session", name, "id", "session_not_found") from None
                if not known:
                    raise
        elif not known:
            raise not_found("session", name, "id", "session_not_found")
        _give_back()

    def notes(self, name: str) -> dict[str, Any]:
        """What was saved with a conversation, without restoring it. Raises ApiError 404."""
        with self._lock:
            kept = self._kept.get(name)
            if kept is not None:
                return dict(kept.notes)
        values = parse_section(self._opened(name).session, name, "session")
        return _notes(values.get("metadata", {}))

    def names(self) -> list[str]:
        """Of the conversations in memory, the one used last at the end."""
        with self._lock:
            return list(self._kept)

    def kept(self, name: str) -> Kept | None:
        """A conversation in memory, to look at."""
        with self._lock:
            return self._kept.get(name)

    def entries(self) -> dict[str, StoreEntry]:
        """The saved ones, by name."""
        if self.store is None:
            return {}
        return {entry.name: entry for entry in self.store.entries()}

    def release_oldest(self) -> bool:
        """Lets the conversation go that was not used for longest; False if there is none."""
        with self._lock:
            if not self._kept:
                return False
            name = next(iter(self._kept))
            self._forget(name)
        return True

    def close(self) -> None:
        """Closes every session."""
        with self._lock:
            for name in list(self._kept):
                self._forget(name)

    def _kept_under(self, name: str, salt: str | None) -> Kept | None:
        """The one in memory, which is now the one used last, if it has this salt."""
        kept = self._kept.get(name)
        if kept is None or kept.salt != salt:
            return None
        self._touch(name, kept)
        return kept

    def _put(self, name: str, kept: Kept) -> None:
        before = self._kept.get(name)
        if before is not None:
            kept.created = before.created
        self._forget(name)
        self._kept[name] = kept
        if kept.seen:
            self._by_seen[kept.seen[-1]] = name

    def _outdate(self, name: str) -> None:
        for restoring in self._restoring.get(name, ()):
            restoring.outdated = True

    def _write(self, name: str, session: Session, ttl: str | float | None) -> SaveReport | None:
        if self.store is None:
            return None
        report = session.save(name, store=self.store)
        if ttl is not None:
            self.store.set_ttl(name, ttl)
        return report

    def _restored(self, name: str, salt: str | None, on_corrupt: str) -> Kept:
        outcome: RestoreOutcome = "unknown"
        try:
            notes = self._opened_notes(name)
            outcome = "refused"
            session = self._engine.restore(name, store=self.store, on_corrupt=on_corrupt, salt=salt)
            outcome = "exact"
        except CorruptSnapshotError:
            outcome = "damaged"
            raise
        finally:
            self._on_restore(outcome)
        return Kept(session, tuple(notes.pop("seen")), salt, notes)

    def _opened_notes(self, name: str) -> dict[str, Any]:
        values = parse_section(self._opened(name).session, name, "session")
        return _notes(values.get("metadata", {}), seen=True)

    def _opened(self, name: str) -> Any:
        if self.store is not None:
            try:
                check_name(name)
                return self.store.open(name)
            except (CorruptSnapshotError, ApiError):
                raise
            except (InvalidArgumentError, StorageError):
                pass
            except PagerError:
                raise
        raise not_found("session", name, "id", "session_not_found")

    def _touch(self, name: str, kept: Kept) -> None:
        kept.used = time.time()
        self._kept.move_to_end(name)

    def _forget(self, name: str, *, chunks: bool = False) -> None:
        """Lets a conversation go; `chunks`: also those that would stay for prefix reuse."""
        kept = self._kept.pop(name, None)
        if kept is None:
            return
        if kept.seen and self._by_seen.get(kept.seen[-1]) == name:
            del self._by_seen[kept.seen[-1]]
        kept.session.close(forget=chunks)


def seen_of(session: Session) -> Digests:
    """What the client of a restored session has seen of it."""
    return tuple(_notes(session.metadata, seen=True)["seen"])


def _give_back() -> None:
    """Has the allocator give freed memory back to the system, where it can (glibc)."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def _notes(metadata: Any, *, seen: bool = False) -> dict[str, Any]:
    values = metadata.get(_NOTES, {}) if isinstance(metadata, dict) else {}
    notes = dict(values) if isinstance(values, dict) else {}
    told = notes.pop("seen", ())
    if seen:
        whole = isinstance(told, list) and all(isinstance(one, str) for one in told)
        notes["seen"] = told if whole else []
    return notes
