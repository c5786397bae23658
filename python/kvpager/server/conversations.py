"""A tenant's conversations: those in memory, and those that are saved.

An answer is always computed in a fork, so that a request that fails or is cancelled leaves its
conversation as it was.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, TypeVar

from kvpager._support.section_json import parse_section
from kvpager.engine import Engine
from kvpager.errors import CorruptSnapshotError, InvalidArgumentError, PagerError, StorageError
from kvpager.server.errors import ApiError, not_found
from kvpager.server.metrics import RestoreOutcome
from kvpager.server.schema.sessions import SessionInfo
from kvpager.server.tenants import Tenant
from kvpager.session import Session
from kvpager.stores import SaveReport, StoreEntry
from kvpager.stores.bucket import UnreachableError
from kvpager.stores.names import check_name
from kvpager.stores.opening import NamedStore

_DIGEST = re.compile("[0-9a-f]{32}")
_NOTES = "kvpager.server"  # of a session's metadata
# Names of conversations that no client chose, see `unnamed` and `new_id`.
_MADE = re.compile("(conversation-|prompt-|key-|resp_|chatcmpl-)[0-9a-f]{32}")
_LOOKED_FOR = 8  # beginnings of a conversation, the longest ones, that a shared store may have
_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")
Digests = tuple[str, ...]
Named = Callable[[str], bool]


@dataclass
class Kept:
    """A conversation in memory.

    Attributes:
        session: with its text; only `Conversations` uses it, others get forks. It is closed
            as soon as it leaves memory, in any thread.
        seen: one digest for each beginning of its messages as the client knows them.
        salt: of its chunks.
        notes: JSON values saved with it, such as a response.
        used: time of its last use.
        created: time at which it was first kept.
        saved: logical digest of its snapshot; None: it has none.
        length: tokens of its text.
        restored_tokens: those read from a snapshot or a store.
    """

    session: Session
    seen: Digests = ()
    salt: str | None = None
    notes: dict[str, Any] = field(default_factory=dict)
    used: float = field(default_factory=time.time)
    created: float = field(default_factory=time.time)
    saved: str | None = None
    length: int = field(init=False)
    restored_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.length, self.restored_tokens = self.session.length, self.session.restored_tokens


class UnderWay:
    """A restore or a turn that has not ended.

    Attributes:
        outdated: whether the conversation was kept again or deleted meanwhile.
        deleted: whether it was deleted.
    """

    outdated = deleted = False


_canonical_text = json.JSONEncoder(sort_keys=True, ensure_ascii=False).encode


def digests(messages: Sequence[dict[str, Any]], salt: str | None, before: Digests = ()) -> Digests:
    """Returns one digest for each beginning of a conversation, as the client has it.

    Ids of tool calls are left out: clients may make their own.

    before: those of the messages before these.
    """
    found, chain = list(before), bytes.fromhex(before[-1]) if before else (salt or "").encode()
    for message in messages:
        text = _canonical_text(canonical(message))
        chain = blake2b(chain + b"\0" + text.encode(), digest_size=16).digest()
        found.append(chain.hex())
    return tuple(found)


def canonical(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message's values without what clients change."""
    calls = [
        [function.get("name"), _loaded(function.get("arguments"))]
        for call in message.get("tool_calls") or ()
        for function in [call.get("function") or call]
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

    Those that leave memory are restored from the store for their next turn.
    """

    def __init__(
        self,
        engine: Engine,
        tenant: Tenant,
        store: NamedStore | None,
        *,
        shared: bool = False,
        on_kept: Callable[[], object],
        on_restore: Callable[[RestoreOutcome], object],
    ) -> None:
        """Nothing is read yet.

        Args:
            engine: of the sessions.
            tenant: that they belong to.
            store: of the tenant.
            shared: whether other processes save conversations in the store.
            on_kept: called when memory has one more.
            on_restore: called with a restore's outcome.
        """
        self.tenant = tenant
        self.store = store
        self.shared = shared
        self._engine = engine
        self._on_kept = on_kept
        self._on_restore = on_restore
        self._lock = threading.RLock()
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._by_seen: dict[str, str] = {}  # the last digest of a conversation: its name
        self._under_way: dict[str | None, list[UnderWay]] = {}

    def fresh(self, salt: str | None) -> Session:
        """Returns a new session, which may reuse chunks of the store."""
        return self._engine.session(salt=salt, store=self.store)

    def apart(self) -> Session:
        """Returns a new session that reuses nothing, since its salt is nobody's."""
        return self._engine.session(salt=secrets.token_hex(16))

    def fork(self, name: str, salt: str | None, on_corrupt: str) -> tuple[Session, Kept]:
        """Returns a fork of a conversation, which the caller closes, and its record.

        Restores it first if it is not in memory.

        Raises:
            ApiError: 404, there is none.
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
        """Returns what `use` returns for a conversation; raises as `fork`. It changes nothing.

        keep: whether a conversation restored for it stays in memory.
        """
        while True:
            self._forget_outdated(name)
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
            self.begin(name, restoring := UnderWay())
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
                    result = use(kept)  # before `on_kept`, which may evict it
            finally:
                self.end(name, restoring)
            self._on_kept()
            return result

    def begin(self, name: str | None, one: UnderWay) -> None:
        """Registers a turn, so that its end does not bring back a conversation deleted meanwhile.

        name: that it will be kept as; None: the server makes one.
        """
        with self._lock:
            self._under_way.setdefault(name, []).append(one)

    def end(self, name: str | None, one: UnderWay) -> None:
        """Forgets what `begin` registered. May be called twice, or without it."""
        with self._lock:
            if one in (noted := self._under_way.get(name, [])):
                noted.remove(one)
                if not noted:
                    del self._under_way[name]

    def under_way(self, name: str | None = None) -> list[UnderWay]:
        """Turns and restores that have begun and not ended; `name`: those of one conversation."""
        with self._lock:
            if name is not None:
                return list(self._under_way.get(name, ()))
            return [one for noted in self._under_way.values() for one in noted]

    def fork_of_beginning(self, seen: Digests, salt: str | None) -> tuple[Session, Kept] | None:
        """Returns a fork of the conversation with the longest beginning of `seen`.

        It is in memory, or was saved in a shared store without a name.
        """
        for before, digest in enumerate(reversed(seen)):
            if (known := self._by_seen.get(digest)) is not None:
                self._forget_outdated(known)
            with self._lock:
                name = self._by_seen.get(digest)
                kept = self._kept.get(name) if name is not None else None
                if kept is not None and kept.salt == salt:
                    assert name is not None
                    self._touch(name, kept)
                    return kept.session.fork(), kept
            if self.shared and before < _LOOKED_FOR:
                found = self.fork_if_usable(unnamed(digest), salt)
                if found is not None:
                    return found
        return None

    def fork_if_usable(self, name: str, salt: str | None) -> tuple[Session, Kept] | None:
        """Returns as `fork`, or None if that fails."""
        try:
            return self.fork(name, salt, "fail") if self.has(name) else None
        except (PagerError, ApiError) as error:  # then its tokens are computed
            _log.warning("conversation %s cannot be used: %s", name, error)
            return None

    def has(self, name: str) -> bool:
        """Returns whether a conversation of this name is in memory or saved."""
        self._forget_outdated(name)
        with self._lock:
            if name in self._kept:
                return True
        return self.entry(name) is not None

    def keep(
        self,
        name: str,
        kept: Kept,
        *,
        save: bool = False,
        ttl: str | float | None = None,
        turn: UnderWay | None = None,
    ) -> SaveReport | None:
        """Keeps a conversation in memory, and replaces an older one of its name.

        Args:
            name: of the conversation.
            kept: owns its session from now on.
            save: whether it is saved first, so that one evicted at once is in the store.
            ttl: lifetime of the saved one after its last use; None: the store's default.
            turn: its turn; a conversation that was deleted during it stays deleted.

        Returns:
            The report of the save; None where nothing is saved.

        Raises:
            PagerError: it cannot be saved; it is kept nevertheless.
        """
        kept.session.metadata = {_NOTES: {"seen": " ".join(kept.seen), **kept.notes}}
        turn, report = turn or UnderWay(), None
        try:
            if save and not turn.deleted:
                report = self._write(name, kept.session, ttl)
                kept.saved = None if report is None else report.logical_digest
        finally:
            with self._lock:
                deleted = turn.deleted
                if not deleted:
                    self._put(name, kept)
                    self._outdate(name)
            if deleted:
                kept.session.close(forget=True)
                if report is not None and self.kept(name) is None:  # it was deleted meanwhile
                    self._delete_saved(name)
                _give_back()
            else:
                self._on_kept()
        return report

    def take(self, name: str, kept: Kept) -> None:
        """Saves and keeps a conversation; after an error the older one of its name stays."""
        kept.session.metadata = {_NOTES: {"seen": " ".join(kept.seen)}}
        try:
            self._write(name, kept.session, None)
        except BaseException:
            kept.session.close()
            raise
        self.keep(name, kept)

    def save(
        self, name: str, salt: str | None, on_corrupt: str, ttl: str | float | None = None
    ) -> SaveReport | None:
        """Saves a conversation; None without a store. Raises as `fork`, and PagerError."""
        twin, _ = self.fork(name, salt, on_corrupt)  # no other request waits for the disk
        with twin:
            return self._write(name, twin, ttl)

    def delete(self, name: str) -> None:
        """Deletes a conversation from memory and from the store. Raises ApiError 404."""
        with self._lock:
            under_way = self._under_way.get(name, ())
            known = name in self._kept or bool(under_way)
            self._forget(name, chunks=True)
            self._outdate(name)
            for one in under_way:
                one.deleted = True
        if not self._delete_saved(name) and not known:
            raise not_found("session", name, "id", "session_not_found")
        _give_back()

    def rename(self, name: str, to: str, salt: str | None, on_corrupt: str) -> None:
        """Gives a conversation another name; its pin and lifetime stay. Raises as `fork`.

        REQUIRES: none of the other name.
        """
        session, kept = self.fork(name, salt, on_corrupt)
        entry = self.entry(name)
        copy = Kept(session, kept.seen, kept.salt, dict(kept.notes), created=kept.created)
        self.keep(to, copy, save=True)
        new = self.entry(to)
        if self.store is not None and entry is not None and new is not None:
            if new.ttl_seconds != entry.ttl_seconds:
                ttl = "never" if entry.ttl_seconds is None else entry.ttl_seconds
                self.store.set_ttl(to, ttl)
            if entry.pinned:
                self.store.pin(to)
                self.store.unpin(name)
        self.delete(name)

    def notes(self, name: str) -> dict[str, Any]:
        """Returns a conversation's notes without restoring it. Raises ApiError 404."""
        self._forget_outdated(name)
        with self._lock:
            kept = self._kept.get(name)
            if kept is not None:
                return dict(kept.notes)
        notes = self._saved_notes(name)
        del notes["seen"]
        return notes

    def names(self) -> list[str]:
        """Names of the conversations in memory, the least recently used first."""
        with self._lock:
            return list(self._kept)

    def kept(self, name: str) -> Kept | None:
        """Returns the record of a conversation in memory."""
        with self._lock:
            return self._kept.get(name)

    def entry(self, name: str) -> StoreEntry | None:
        """Returns a saved conversation's entry; None if there is none, or no store."""
        return None if self.store is None else self.store.entry(name)

    def latest(
        self, most: int, after: tuple[float, str], named: Named | None = None
    ) -> dict[str, StoreEntry]:
        """Returns the saved conversations that were used last, by name.

        after: leaves out all up to this time of last use and name.
        named: leaves out names for which it returns False.
        """
        if self.store is None:
            return {}
        found = self.store.entries(latest_first=True, after=after, limit=most, named=named)
        return {entry.name: entry for entry in found}

    def count(self) -> int:
        """Returns how many there are, in memory or saved."""
        names = self.names()
        if self.store is None:
            return len(names)
        return int(self.store.stats()["snapshots"] or 0) + len(names) - len(self.store.saved(names))

    def release_oldest(self) -> bool:
        """Evicts the least recently used conversation; False if there is none."""
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
        """Returns the one in memory if it has this salt, and marks it as used."""
        kept = self._kept.get(name)
        if kept is None or kept.salt != salt:
            return None
        self._touch(name, kept)
        return kept

    def _forget_outdated(self, name: str) -> None:
        """Evicts a conversation whose snapshot another process has replaced or deleted."""
        kept = self.kept(name) if self.shared else None
        if kept is None or kept.saved is None:
            return
        try:
            entry = self.entry(name)
        except UnreachableError:  # nobody can tell: it stays as it is here
            return
        if entry is None or entry.logical_digest != kept.saved:
            with self._lock:
                if self._kept.get(name) is kept:
                    self._forget(name)

    def _put(self, name: str, kept: Kept) -> None:
        before = self._kept.get(name)
        if before is not None:
            kept.created = before.created
        self._forget(name)
        self._kept[name] = kept
        if kept.seen:
            self._by_seen[kept.seen[-1]] = name

    def _outdate(self, name: str) -> None:
        for one in self._under_way.get(name, ()):
            one.outdated = True

    def _write(self, name: str, session: Session, ttl: str | float | None) -> SaveReport | None:
        if self.store is None:
            return None
        report = session.save(name, store=self.store)
        if ttl is not None:
            self.store.set_ttl(name, ttl)
        return report

    def _delete_saved(self, name: str) -> bool:
        """Deletes a saved conversation; returns whether there was one. Raises StorageError."""
        if self.store is None:
            return False
        try:
            self.store.delete(name, force=True)
        except StorageError:
            if self.entry(name) is not None:
                raise
            return False
        return True

    def _restored(self, name: str, salt: str | None, on_corrupt: str) -> Kept:
        outcome: RestoreOutcome = "unknown"
        try:
            entry = self.entry(name) if self.shared else None  # first: a newer one is seen later
            notes = self._saved_notes(name)
            outcome = "refused"
            session = self._engine.restore(name, store=self.store, on_corrupt=on_corrupt, salt=salt)
            outcome = "exact"
        except CorruptSnapshotError:
            outcome = "damaged"
            raise
        finally:
            self._on_restore(outcome)
        saved = None if entry is None else entry.logical_digest
        return Kept(session, tuple(notes.pop("seen")), salt, notes, saved=saved)

    def _saved_notes(self, name: str) -> dict[str, Any]:
        """Returns a saved conversation's notes, `seen` among them. Raises ApiError 404."""
        if self.store is not None:
            try:
                section = self.store.open(check_name(name)).session
                return _notes(parse_section(section, name, "session").get("metadata"))
            except UnreachableError:
                raise
            except (InvalidArgumentError, StorageError):
                pass
        raise not_found("session", name, "id", "session_not_found")

    def _touch(self, name: str, kept: Kept) -> None:
        kept.used = time.time()
        self._kept.move_to_end(name)

    def _forget(self, name: str, *, chunks: bool = False) -> None:
        """Evicts a conversation; `chunks`: also chunks kept for prefix reuse."""
        kept = self._kept.pop(name, None)
        if kept is None:
            return
        if kept.seen and self._by_seen.get(kept.seen[-1]) == name:
            del self._by_seen[kept.seen[-1]]
        kept.session.close(forget=chunks)


def unnamed(digest: str) -> str:
    """Returns the name of a conversation without one. digest: the last one of what was seen."""
    return f"conversation-{digest}"


def seen_of(session: Session) -> Digests:
    """Returns the digests saved with a restored session."""
    return tuple(_notes(session.metadata)["seen"])


def _give_back() -> None:
    """Returns freed memory to the system, if the allocator can (glibc)."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def _notes(metadata: Any) -> dict[str, Any]:
    """Returns the notes in a session's metadata, `seen` among them."""
    values = metadata.get(_NOTES) if isinstance(metadata, dict) else None
    notes = dict(values) if isinstance(values, dict) else {}
    seen = str(notes.get("seen", "")).split()
    return {**notes, "seen": seen if all(map(_DIGEST.fullmatch, seen)) else []}


def names_with(contained: str | None, *, chosen: bool) -> Named | None:
    """Returns a predicate for the names that contain a text, whatever their case; None: for all.

    chosen: only names that clients chose.
    """
    if not contained and not chosen:
        return None
    wanted = (contained or "").lower()
    return lambda name: wanted in name.lower() and not (chosen and _MADE.fullmatch(name))


def listed(
    source: Conversations, most: int, after: str | None = None, named: Named | None = None
) -> list[SessionInfo]:
    """Returns a tenant's conversations, the most recently used first.

    Args:
        source: the tenant's.
        most: largest number.
        after: the one that the page before ended with.
        named: leaves out names for which it returns False.

    Raises:
        ApiError: there is none of that name.
    """
    begin = (float("inf"), "")
    if after is not None:
        last = described(source, after, source.entry(after))
        if last is None:
            raise not_found("session", after, "after", "session_not_found")
        begin = (last.last_used, after)
    inside = {
        name: kept.used
        for name in source.names()
        if (named is None or named(name)) and (kept := source.kept(name))
    }
    places = [(used, name) for name, used in inside.items() if (used, name) < begin]
    saved: dict[str, StoreEntry] = {}
    behind: tuple[float, str] | None = begin
    while behind is not None:  # pages of the store, which may have many that are in memory
        page = source.latest(most, behind, named)
        saved.update(page)
        read = [(entry.last_used, name) for name, entry in page.items()]
        behind = read[-1] if len(read) == most else None
        places += [place for place in read if place[1] not in inside]
        places = sorted(places, reverse=True)[:most]
        if behind is not None and len(places) == most and places[-1] > behind:
            break
    names = [name for _, name in places]
    infos = (described(source, name, saved.get(name) or source.entry(name)) for name in names)
    return [info for info in infos if info is not None]


def described(source: Conversations, name: str, entry: StoreEntry | None) -> SessionInfo | None:
    """Returns a conversation in memory, saved, or both; None if it is neither.

    entry: of the saved one.
    """
    kept = source.kept(name)
    if kept is None and entry is None:
        return None
    tier: Any = "memory+disk" if kept and entry else "memory" if kept else "disk"
    used = kept.used if kept else entry.last_used if entry else 0.0
    tokens = kept.length if kept else entry.tokens if entry else 0
    return SessionInfo(
        id=name,
        tokens=tokens,
        bytes=entry.bytes_own if entry else 0,
        bytes_shared=entry.bytes_shared if entry else 0,
        tier=tier,
        created=entry.created if entry else kept.created if kept else used,
        last_used=used,
        age_s=max(0.0, time.time() - used),
        pinned=bool(entry and entry.pinned),
        ttl_s=entry.ttl_seconds if entry else None,
        error=entry.error if entry else None,
    )
