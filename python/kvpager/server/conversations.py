"""A tenant's conversations: those in memory, and those that are saved.

An answer is always computed in a fork, so that a request that fails or is cancelled leaves its
conversation as it was.
"""

from __future__ import annotations

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
        session: with its text; nobody but `Conversations` uses it, others get forks.
        seen: digests of the beginnings of its messages as the client knows them, one each.
        salt: that it was computed under.
        notes: JSON values that are saved with it, such as a response.
    """

    session: Session
    seen: Digests = ()
    salt: str | None = None
    notes: dict[str, Any] = field(default_factory=dict)
    used: float = field(default_factory=time.time)
    created: float = field(default_factory=time.time)


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
    return {"role": message["role"], "content": message.get("content") or "", "calls": calls}


def _loaded(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
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
        self, name: str, salt: str | None, on_corrupt: str, use: Callable[[Kept], _Result]
    ) -> _Result:
        """What `use` returns of a conversation, which stays as it is; else as `fork`."""
        with self._lock:
            kept = self._kept.get(name)
            if kept is not None and kept.salt == salt:
                self._touch(name, kept)
                return use(kept)
        self._restore(name, salt, on_corrupt)
        with self._lock:
            return use(self._named(name))

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

    def keep(self, name: str, kept: Kept) -> None:
        """Keeps a conversation in memory, instead of an older one of its name."""
        kept.session.metadata = {_NOTES: {"seen": list(kept.seen), **kept.notes}}
        with self._lock:
            before = self._kept.get(name)
            if before is not None:
                kept.created = before.created
            self._forget(name)
            self._kept[name] = kept
            if kept.seen:
                self._by_seen[kept.seen[-1]] = name
        self._on_kept()

    def save(self, name: str, ttl: str | float | None = None) -> SaveReport | None:
        """Saves a conversation in memory; None without a store. Raises PagerError."""
        if self.store is None:
            return None
        with self._lock:
            kept = self._named(name)
            twin = kept.session.fork()  # so that nobody waits for the disk
        try:
            report = twin.save(name, store=self.store)
        finally:
            twin.close()
        if ttl is not None:
            self.store.set_ttl(name, ttl)
        return report

    def delete(self, name: str) -> None:
        """Forgets a conversation, and deletes it from the store. Raises ApiError 404."""
        with self._lock:
            known = name in self._kept
            self._forget(name)
        if self.store is not None:
            try:
                self.store.delete(name, force=True)
            except StorageError:
                if not known and not self.has(name):
                    raise not_found("conversation", name, "id") from None
                if not known:
                    raise
        elif not known:
            raise not_found("conversation", name, "id")

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

    def _restore(self, name: str, salt: str | None, on_corrupt: str) -> None:
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
        seen = tuple(notes.pop("seen", ()))
        self.keep(name, Kept(session, seen, salt, notes))

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
        raise not_found("conversation", name, "id")

    def _named(self, name: str) -> Kept:
        kept = self._kept.get(name)
        if kept is None:
            raise not_found("conversation", name, "id")
        return kept

    def _touch(self, name: str, kept: Kept) -> None:
        kept.used = time.time()
        self._kept.move_to_end(name)

    def _forget(self, name: str, *, close: bool = True) -> None:
        kept = self._kept.pop(name, None)
        if kept is None:
            return
        if kept.seen and self._by_seen.get(kept.seen[-1]) == name:
            del self._by_seen[kept.seen[-1]]
        if close:
            kept.session.close()


def _notes(metadata: Any, *, seen: bool = False) -> dict[str, Any]:
    values = metadata.get(_NOTES, {}) if isinstance(metadata, dict) else {}
    notes = dict(values) if isinstance(values, dict) else {}
    if not seen:
        notes.pop("seen", None)
    return notes
