"""Journals in a bucket: each part an object of its own, which is created once.

    journals/<name>/00000000    a part, with its checksum; parts count from 0
    journals/<name>/alive       written again by the holder as long as it lives

Parts of an encrypted store are encrypted, each for its object, and names are `Secret.stored`.

Whoever takes a journal creates the next part, which begins with "@". So its former holder, whose
next part is then there already, loses it.
"""

from __future__ import annotations

import secrets
import threading

from kvpager.stores.bucket import Bucket, ConflictError
from kvpager.stores.encryption import Secret, stored_name
from kvpager.stores.journals import MOST, Leases, checked, sound_part, unsealed
from kvpager.stores.names import check_name

JOURNALS = "journals/"
_ALIVE = "alive"
_HOLDER, _RELEASED = b"@", b"@released"
_PRUNE_EVERY = 64  # journals made
_PRUNED_SECONDS = 3600.0  # since the last change of a journal that is removed


class BucketJournal:
    """A journal that this process holds. Any thread may use it."""

    batch_tokens, batch_seconds = 256, 1.0  # a request costs more than a write to a file

    def __init__(self, bucket: Bucket, secret: Secret | None, prefix: str, parts: int) -> None:
        self._secret = secret
        self._lock = threading.Lock()
        self._bucket = bucket
        self._prefix = prefix
        self._parts = parts
        self._renewals = 0
        self._open = True

    def append(self, part: bytes) -> bool:
        """See `Journal.append`."""
        with self._lock:
            if not self._open or (
                self._parts and self._bucket.head(_path(self._prefix, 0)) is None
            ):
                return False
            path = _path(self._prefix, self._parts)
            data = _sealed(self._secret, path, part)
            try:
                self._bucket.replace(path, data, None)
            except ConflictError:
                there = self._bucket.get(path)
                if there is None or there[0] != data:  # else its own, whose answer was lost
                    return False
            self._parts += 1
            return True

    def renew(self) -> None:
        """See `Journal.renew`."""
        with self._lock:
            if self._open:
                self._renewals += 1
                self._bucket.put(self._prefix + _ALIVE, b"%d" % self._renewals)

    def release(self) -> None:
        """See `Journal.release`."""
        self.append(_RELEASED)
        with self._lock:
            self._open = False

    def delete(self) -> None:
        """See `Journal.delete`."""
        if self.append(_holder()):
            _delete(self._bucket, self._prefix)
        with self._lock:
            self._open = False


class BucketJournals:
    """Journals in a bucket. Any thread may use it."""

    poll_seconds = 0.5

    def __init__(self, bucket: Bucket, secret: Secret | None = None) -> None:
        """`secret`: that parts and names are encrypted with; None: they are plain."""
        self._bucket = bucket
        self._secret = secret
        self._lock = threading.Lock()
        self._leases = Leases()
        self._made = 0

    def create(self, name: str, first: bytes) -> BucketJournal:
        """See `Journals.create`."""
        self._prune()
        prefix = self._prefix(name)
        journal = BucketJournal(self._bucket, self._secret, prefix, 0)
        if not journal.append(first):
            raise FileExistsError(f"{self._bucket.address}/{prefix}")
        return journal

    def take(self, name: str, *, force: bool = False) -> BucketJournal | None:
        """See `Journals.take`."""
        prefix = self._prefix(name)
        there = {one.path.removeprefix(prefix): one for one in self._bucket.list(prefix)}
        alive = there.pop(_ALIVE, None)
        if not there:
            self._leases.forget(name)
            return None
        change = len(there), None if alive is None else (alive.etag, alive.modified)
        last = there[max(there)]
        if not force and not self._leases.has_expired(name, change):
            if last.size != len(_sealed(self._secret, last.path, _RELEASED)):
                return None
            found = self._bucket.get(last.path)
            if found is None or _unsealed(self._secret, last.path, found[0]) != _RELEASED:
                return None
        self._leases.forget(name)
        journal = BucketJournal(self._bucket, self._secret, prefix, len(there))
        return journal if journal.append(_holder()) else None

    def read(self, name: str, cursor: int = 0) -> tuple[list[bytes], int] | None:
        """See `Journals.read`."""
        prefix, parts = self._prefix(name), []
        if cursor and self._bucket.head(_path(prefix, 0)) is None:
            return None
        while (found := self._bucket.get(path := _path(prefix, cursor))) is not None:
            part, cursor = _unsealed(self._secret, path, found[0]), cursor + 1
            if part is not None and not part.startswith(_HOLDER):
                parts.append(part)
        return (parts, cursor) if cursor else None

    def delete(self, name: str) -> bool:
        """See `Journals.delete`."""
        return _delete(self._bucket, self._prefix(name))

    def _prefix(self, name: str) -> str:
        return f"{JOURNALS}{stored_name(self._secret, check_name(name))}/"

    def _prune(self) -> None:
        """Removes the oldest journals beyond MOST that did not change for a while."""
        with self._lock:
            self._made += 1
            if self._made % _PRUNE_EVERY:
                return
        changed: dict[str, float] = {}
        for one in self._bucket.list(JOURNALS):
            prefix = one.path.rpartition("/")[0] + "/"
            changed[prefix] = max(one.modified, changed.get(prefix, 0.0))
        order = sorted(changed, key=changed.__getitem__)
        for prefix in order[:-MOST]:
            if changed[order[-1]] - changed[prefix] > _PRUNED_SECONDS:
                _delete(self._bucket, prefix)


def _path(prefix: str, part: int) -> str:
    return f"{prefix}{part:08}"


def _sealed(secret: Secret | None, path: str, part: bytes) -> bytes:
    """The bytes of the object at `path`."""
    return checked(part if secret is None else secret.lines(path).seal(part))


def _unsealed(secret: Secret | None, path: str, data: bytes) -> bytes | None:
    """The part of `_sealed`; None if it is damaged."""
    part = sound_part(data)
    return part if part is None or secret is None else unsealed(secret.lines(path), part)


def _holder() -> bytes:
    """Differs from that of any other holder."""
    return _HOLDER + secrets.token_hex(8).encode()


def _delete(bucket: Bucket, prefix: str) -> bool:
    """Deletes a journal's objects, the first part first, without which there is none."""
    found = sorted(one.path for one in bucket.list(prefix))
    for path in found:
        bucket.delete(path)
    return bool(found)
