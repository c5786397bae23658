"""What the files of a directory store say: packs, manifests and sidecars.

A sidecar is a small file next to a manifest. Its modification time is the snapshot's last use; the
manifest's is the time of the save.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvpager import _core
from kvpager._model.layout import Layout
from kvpager._support.section_json import section_or_empty
from kvpager.errors import CorruptSnapshotError, PagerError
from kvpager.stores.base import tokens_of
from kvpager.stores.companions import named_companions, owner_of
from kvpager.stores.files import read_json, write_atomically
from kvpager.stores.origin import Origin, name_in
from kvpager.stores.segments import SegmentNote, noted_segment
from kvpager.stores.settings import NEVER, is_duration

Hashes: TypeAlias = tuple[bytes, bytes]  # chain hash and content id of a chunk
Uses: TypeAlias = Mapping[str, npt.NDArray[np.uint32]]  # chunks of packs
Opened: TypeAlias = Callable[[str], _core.SnapshotReader]  # opens a manifest or a pack by its path


class PackChunk(NamedTuple):
    """A chunk of a pack."""

    pack: str
    chunk: int


class Run(NamedTuple):
    """Consecutive chunks of a text that follow each other in a pack.

    first, chunks: of the text. place: the first one's number in the pack.
    """

    first: int
    chunks: int
    pack: str
    place: int


SIDECAR_BYTES = 256  # more than any sidecar has


@dataclass(frozen=True)
class Sidecar:
    """The sidecar of one snapshot.

    Attributes:
        pinned: whether it never expires and is never evicted.
        ttl_seconds: its time to live; None: the store's; infinity: it never expires.
        error: why the file could not be read; then the snapshot counts as pinned, to be safe.
    """

    pinned: bool = False
    ttl_seconds: float | None = None
    error: str | None = None

    def text(self) -> str:
        """The contents of the file."""
        ttl = NEVER if self.ttl_seconds == math.inf else self.ttl_seconds
        return json.dumps({"pinned": self.pinned, "ttl_seconds": ttl}) + "\n"

    def write(self, path: str, last_used_ns: int, mode: int) -> None:
        """Writes the file, with the given last use as its time."""
        write_atomically(path, self.text(), mode)
        os.utime(path, ns=(last_used_ns, last_used_ns))

    @classmethod
    def read(cls, path: str) -> Sidecar:
        """Reads the file; returns the defaults if there is none."""
        try:
            return cls.of(read_json(path), path)
        except FileNotFoundError:
            return cls()
        except OSError as error:
            return cls(pinned=True, error=f"{path}: cannot be read: {error.strerror}")
        except ValueError as error:
            return cls(pinned=True, error=f"{path}: not the notes of a snapshot: {error}")

    @classmethod
    def of(cls, values: Any, path: str) -> Sidecar:
        """Checks what the file at `path` holds."""
        try:
            pinned, ttl = values["pinned"], values["ttl_seconds"]
        except (TypeError, KeyError) as error:
            return cls(pinned=True, error=f"{path}: not the notes of a snapshot: {error}")
        number = is_duration(ttl)
        if ttl == NEVER:
            ttl, number = math.inf, True
        if type(pinned) is not bool or not (ttl is None or number):
            return cls(pinned=True, error=f"{path}: not the notes of a snapshot: {values!r}")
        return cls(pinned, ttl)


class Stamp(NamedTuple):
    """Distinguishes a file from a later one of the same name."""

    inode: int
    bytes: int
    mtime_ns: int


HASH_BYTES, CONTENT_BYTES = 32, 16  # of a chain hash and of a content id
HASHES_BYTES = HASH_BYTES + CONTENT_BYTES


def hashes_of(hashes: bytes, chunk: int) -> Hashes:
    """The hashes of a chunk, of those of all chunks one behind the other."""
    both = hashes[HASHES_BYTES * chunk : HASHES_BYTES * (chunk + 1)]
    return both[:HASH_BYTES], both[HASH_BYTES:]


@dataclass(frozen=True)
class Pack:
    """A file of sealed chunks. It never changes.

    Attributes:
        kind: identifies the layout; only chunks of one kind share a pack.
        hashes: the chain hash and the content id of each chunk, one behind the other.
        counts: [chunks] how many snapshots need each chunk.
        users: number of snapshots that need it.
        damaged: chunks known to be damaged; they are not shared any more.
        error: why the file cannot be used; then it has no chunks.
        corrupt: whether `error` means damage, rather than a failed read or a newer version.
    """

    id: str
    path: str
    stamp: Stamp
    chunks: int = 0
    kind: str = ""
    hashes: bytes = b""
    summary_checksums: npt.NDArray[np.uint64] = field(
        default_factory=lambda: np.zeros(0, dtype=np.uint64)
    )
    counts: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    users: int = 0
    damaged: frozenset[int] = frozenset()
    error: str | None = None
    corrupt: bool = False

    @property
    def bytes(self) -> int:
        """Size of the file."""
        return self.stamp.bytes

    def chunk(self, number: int) -> Hashes:
        """Chain hash and content id of a chunk."""
        return hashes_of(self.hashes, number)

    def is_sound(self, number: int) -> bool:
        """Whether it has this chunk, and no damage of it is known."""
        return 0 <= number < self.chunks and number not in self.damaged

    @classmethod
    def read(cls, pack: str, path: str, stamp: Stamp, opened: Opened) -> Pack:
        """Reads the table of the pack at `path`."""
        try:
            reader = opened(path)
            if reader.packs or reader.chunks != reader.sealed_chunks:
                why = f"{path}: not a pack of sealed chunks"
                return cls(pack, path, stamp, error=why, corrupt=True)
            return cls(
                pack,
                path,
                stamp,
                chunks=reader.chunks,
                kind=_kind(reader),
                hashes=reader.hashes,
                summary_checksums=reader.summary_checksums,
            )
        except PagerError as error:
            corrupt = isinstance(error, CorruptSnapshotError)
            return cls(pack, path, stamp, error=str(error), corrupt=corrupt)


@dataclass(frozen=True)
class Manifest:
    """A snapshot's file. Replaced, never changed.

    Attributes:
        companions: digests by kind of the companions it names.
        companion_of: name of the primary that it names.
        segment: the note of its segment; None for a session.
        saved_as: the name it records; None if it records none.
        origin: the salt and model it was saved under; None if it cannot be read.
        uses: the chunks it needs of each pack, packs in order of first use.
        error: why it cannot be opened; then the packs it needs are unknown.
        corrupt: whether `error` means damage, rather than a failed read or a newer version.
    """

    name: str
    path: str
    stamp: Stamp
    tokens: int = 0
    chunks: int = 0
    logical_digest: str = ""
    companions: Mapping[str, str] = field(default_factory=dict)
    companion_of: str | None = None
    segment: SegmentNote | None = None
    saved_as: str | None = None
    origin: Origin | None = None
    uses: Uses = field(default_factory=dict)
    error: str | None = None
    corrupt: bool = False

    @classmethod
    def read(cls, name: str, path: str, stamp: Stamp, opened: Opened) -> Manifest:
        """Reads the table of the manifest at `path`."""
        try:
            reader = opened(path)
            session = section_or_empty(reader.session, path, "session")
            places = np.asarray(reader.places, dtype=np.uint32).reshape(-1, 2)
            return cls(
                name,
                path,
                stamp,
                tokens=tokens_of(reader, session),
                chunks=reader.chunks,
                logical_digest=reader.logical_digest,
                companions=named_companions(session),
                companion_of=owner_of(session),
                segment=noted_segment(session, len(reader.tokens), path),
                saved_as=name_in(session),
                origin=Origin.of(reader.fingerprint, session, path),
                uses={
                    pack: places[places[:, 0] == number, 1]
                    for number, (pack, _) in enumerate(reader.packs)
                },
            )
        except PagerError as error:
            # The manifest itself exists, so a pack is missing: permanent damage.
            missing = os.strerror(errno.ENOENT) in str(error)
            corrupt = isinstance(error, CorruptSnapshotError) or missing
            return cls(name, path, stamp, error=str(error), corrupt=corrupt)


@dataclass(frozen=True)
class Snapshot:
    """A manifest, its sidecar, and the time of its last use.

    Attributes:
        owner: name of the primary that it is a companion of, if both say so. Sidecar and last use
            are then the primary's.
    """

    manifest: Manifest
    sidecar: Sidecar
    sidecar_bytes: int
    last_used_ns: int
    owner: str | None = None

    @cached_property
    def bytes(self) -> int:
        """Size of its own files: manifest and sidecar."""
        return self.manifest.stamp.bytes + self.sidecar_bytes

    def ttl(self, default: float | None) -> float | None:
        """Seconds it lives after its last use; None: forever. `default` is the store's."""
        if self.sidecar.ttl_seconds is None:
            return default
        return None if self.sidecar.ttl_seconds == math.inf else self.sidecar.ttl_seconds

    def mortal(self, default: float | None) -> bool:
        """Whether it can expire. A pinned one cannot."""
        return not self.sidecar.pinned and self.ttl(default) is not None

    def expired(self, now_ns: int, default: float | None) -> bool:
        """Whether it has expired."""
        ttl = self.ttl(default)
        return self.mortal(default) and ttl is not None and now_ns - self.last_used_ns > ttl * 1e9


def _kind(reader: Any) -> str:
    """A digest of what all chunks of a pack have in common."""
    layout = Layout.of(reader.layout)
    parts = (layout, reader.scorer, reader.summary_page_bytes, reader.fingerprint)
    return hashlib.sha256(repr(parts).encode()).hexdigest()
