"""Leases of writers, and the collection of packs that no snapshot needs.

A pack may go only if no manifest needs it and no writer is about to publish one that does. Neither
side waits for the other, and no two machines' clocks are compared:

    writer     W: write a lease that lists every pack the manifest will need
               R: read the list of condemned packs; share none of them
               P: publish the manifest            X: delete the lease
    collector  C: condemn packs that neither a manifest nor a lease lists
               in a later run  L: list the leases, then M: list the manifests;
               delete condemned packs that are in neither

If R comes after C, the writer sees that the pack is condemned. If R comes before C, then W comes
before L: either the lease is still there at L, or P came before X, so before L, and so before M:
the manifest is seen. A condemned pack stays condemned until it is deleted; so a writer that finds a
pack in the bucket after R has one that was not deleted, nor will be.

The lease of a writer that died expires: `lease_seconds` after it was written, by the bucket's own
clock. A writer renews its lease after a quarter of that by its own monotonic clock, and publishes
nothing after half of it.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass

from kvpager.errors import StorageError
from kvpager.stores.bucket import Bucket, ConflictError, ObjectVersion

LEASES = "leases/"
CONDEMNED = "gc/condemned.json"
_CLOCK = "gc/clock"


class Lease:
    """A writer's lease of packs and snapshot names."""

    def __init__(self, bucket: Bucket, lease_seconds: float) -> None:
        self._bucket = bucket
        self._seconds = lease_seconds
        self._path = f"{LEASES}{secrets.token_hex(16)}.json"
        self._packs: set[str] = set()
        self._names: set[str] = set()
        self._written: float | None = None

    def cover(self, packs: Iterable[str], names: Iterable[str]) -> None:
        """Adds packs and names (W)."""
        self._packs |= set(packs)
        self._names |= set(names)
        self._write()

    def _write(self) -> None:
        text = json.dumps({"packs": sorted(self._packs), "names": sorted(self._names)})
        before = time.monotonic()
        self._bucket.put(self._path, text.encode())
        self._written = before

    def renew(self) -> None:
        """Writes the lease again if a quarter of its time is over."""
        self.require()
        if self._age() > self._seconds / 4:
            self._write()

    def require(self) -> None:
        """Raises StorageError unless the lease certainly holds: before P."""
        if self._age() > self._seconds / 2:
            raise StorageError(
                f"{self._bucket.address}: the lease of this save was last renewed "
                f"{self._age():.0f} s ago, and counts for {self._seconds / 2:.0f}; save again"
            )

    def _age(self) -> float:
        return float("inf") if self._written is None else time.monotonic() - self._written

    def end(self) -> None:
        """Deletes the lease (X)."""
        if self._written is not None:
            with contextlib.suppress(StorageError):  # it expires
                self._bucket.delete(self._path)


def condemned_packs(bucket: Bucket) -> tuple[dict[str, float], ObjectVersion | None]:
    """The condemned packs with the times of their sentences, and the list's version (R)."""
    there = bucket.get(CONDEMNED)
    if there is None:
        return {}, None
    return json.loads(there[0])["packs"], there[1]


def live_leases(bucket: Bucket, now: float, lease_seconds: float) -> tuple[set[str], set[str]]:
    """Packs and names in leases that have not expired (L); deletes those that have."""
    packs: set[str] = set()
    names: set[str] = set()
    for version in bucket.list(LEASES):
        if now - version.modified > lease_seconds:
            bucket.delete(version.path)
        elif (there := bucket.get(version.path)) is not None:
            lease = json.loads(there[0])
            packs.update(lease["packs"])
            names.update(lease["names"])
    return packs, names


@dataclass(frozen=True)
class Collected:
    """Packs that a run deleted, or would delete, and those that it condemned."""

    deleted: dict[str, int]
    condemned: tuple[str, ...]


class Collector:
    """One run of the collection. Call `begin`, list the manifests (M), then call `finish`.

    Attributes:
        now: when it began, by the bucket's clock; set by `begin`.
    """

    def __init__(self, bucket: Bucket, *, grace: float, lease_seconds: float) -> None:
        self._bucket = bucket
        self._grace = grace
        self._lease_seconds = lease_seconds
        self.now = 0.0
        self._known: dict[str, float] = {}
        self._version: ObjectVersion | None = None
        self._there: dict[str, int] = {}
        self._leased: set[str] = set()

    def begin(self, packs: Callable[[], dict[str, int]]) -> set[str]:
        """Reads what earlier runs condemned, lists packs, then leases (L); returns leased names.

        packs: lists the packs of the bucket, with their sizes.
        """
        self.now = self._bucket.now(_CLOCK)
        self._known, self._version = condemned_packs(self._bucket)
        self._there = packs()
        self._leased, names = live_leases(self._bucket, self.now, self._lease_seconds)
        return names

    def finish(
        self, needed: Set[str], delete: Callable[[str], None], *, dry_run: bool
    ) -> Collected:
        """Deletes the packs whose time has come, then condemns others (C).

        Args:
            needed: packs of all manifests, which were listed since `begin`.
            delete: deletes a pack.
            dry_run: change nothing.
        """
        known = self._known
        kept = needed | self._leased
        unneeded = self._there.keys() - kept
        due = {
            pack: self._there.get(pack, 0)
            for pack, since in known.items()
            if pack not in kept and self.now - since >= self._grace
        }
        new = tuple(sorted(unneeded - known.keys()))
        if dry_run:
            return Collected(due, new)
        for pack in due:
            delete(pack)
        if due or new:
            self._write(set(due), new)
        return Collected(due, new)

    def _write(self, deleted: set[str], new: Iterable[str]) -> None:
        while True:
            added = dict.fromkeys(new, self.now) | self._known
            packs = {pack: since for pack, since in added.items() if pack not in deleted}
            text = json.dumps({"packs": packs})
            try:
                self._bucket.replace(CONDEMNED, text.encode(), self._version)
            except ConflictError:  # another collector; what it condemned stays so
                self._known, self._version = condemned_packs(self._bucket)
            else:
                return
