"""Tables of the packs and manifests of a directory store, read once each."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpager import _core
from kvpager.errors import CorruptSnapshotError, PagerError
from kvpager.layout import Layout
from kvpager.stores.base import tokens_of
from kvpager.stores.belonging import Belonging
from kvpager.stores.chunk_index import Place
from kvpager.stores.companions import links_of
from kvpager.stores.own_name import name_in
from kvpager.stores.segments import SegmentNote, noted_segment
from kvpager.stores.sidecar import Sidecar

KNOWN_MINOR = 2  # newest format this store writes; newer files are read and never rewritten


class Stamp(NamedTuple):
    """Distinguishes a file from a later one of the same name."""

    inode: int
    bytes: int
    mtime_ns: int


@dataclass(frozen=True)
class Pack:
    """A file of sealed chunks. It never changes, so each process reads it once.

    Attributes:
        kind: identifies the layout; only chunks of one kind share a pack.
        damaged: chunks known to be damaged; they are not shared any more.
        error: why the file cannot be used; then it has no chunks.
        corrupt: whether `error` means damage, rather than a failed read or a newer version.
    """

    id: str
    path: str
    stamp: Stamp
    chunks: int = 0
    kind: tuple[object, ...] = ()
    chain_hashes: tuple[bytes, ...] = ()
    content_ids: tuple[bytes, ...] = ()
    summary_checksums: npt.NDArray[np.uint64] = field(
        default_factory=lambda: np.zeros(0, dtype=np.uint64)
    )
    damaged: frozenset[int] = frozenset()
    error: str | None = None
    corrupt: bool = False

    @property
    def bytes(self) -> int:
        """Size of the file."""
        return self.stamp.bytes

    @classmethod
    def read(cls, pack: str, path: str, stamp: Stamp) -> Pack:
        """Reads the table of the pack at `path`."""
        try:
            reader = _core.SnapshotReader.open(path)
            if reader.packs or reader.chunks != reader.sealed_chunks:
                why = f"{path}: not a pack of sealed chunks"
                return cls(pack, path, stamp, error=why, corrupt=True)
            return cls(
                pack,
                path,
                stamp,
                chunks=reader.chunks,
                kind=_kind(reader),
                chain_hashes=tuple(reader.chain_hashes),
                content_ids=tuple(reader.content_ids),
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
        belonging: the salt and model it was saved under; None if it cannot be read.
        packs: ids of the packs it needs, in order of first use.
        pack_places: [sealed chunks, 2] pack number and chunk in it.
        error: why it cannot be opened; then the packs it needs are unknown.
        corrupt: whether `error` means damage, rather than a failed read or a newer version.
    """

    name: str
    path: str
    stamp: Stamp
    tokens: int = 0
    chunks: int = 0
    minor_version: int = 0
    logical_digest: str = ""
    companions: Mapping[str, str] = field(default_factory=dict)
    companion_of: str | None = None
    segment: SegmentNote | None = None
    saved_as: str | None = None
    belonging: Belonging | None = None
    packs: tuple[str, ...] = ()
    pack_places: npt.NDArray[np.uint32] = field(
        default_factory=lambda: np.zeros((0, 2), dtype=np.uint32)
    )
    error: str | None = None
    corrupt: bool = False

    @property
    def sealed_chunks(self) -> int:
        """Number of chunks that lie in packs."""
        return len(self.pack_places)

    def place(self, chunk: int) -> Place:
        """The place of a sealed chunk."""
        pack, number = self.pack_places[chunk].tolist()
        return Place(self.packs[pack], number)

    @cached_property
    def uses(self) -> dict[str, npt.NDArray[np.uint32]]:
        """The chunks it needs, by pack."""
        numbers, chunks = self.pack_places[:, 0], self.pack_places[:, 1]
        return {pack: chunks[numbers == number] for number, pack in enumerate(self.packs)}

    @classmethod
    def read(cls, name: str, path: str, stamp: Stamp, packs_folder: str) -> Manifest:
        """Reads the table of the manifest at `path`."""
        try:
            reader = _core.SnapshotReader.open(path, packs_folder)
            companions, owner = links_of(reader.session, path)
            return cls(
                name,
                path,
                stamp,
                tokens=tokens_of(reader, reader.session),
                chunks=reader.chunks,
                minor_version=reader.minor_version,
                logical_digest=reader.logical_digest,
                companions=companions,
                companion_of=owner,
                segment=noted_segment(reader.session, len(reader.tokens), path),
                saved_as=name_in(reader.session, path),
                belonging=Belonging.of(reader.fingerprint, reader.session, path),
                packs=tuple(pack for pack, _ in reader.packs),
                pack_places=np.asarray(reader.places, dtype=np.uint32).reshape(-1, 2),
            )
        except PagerError as error:
            # The manifest itself exists, so a pack is missing: permanent damage.
            missing = os.strerror(errno.ENOENT) in str(error)
            corrupt = isinstance(error, CorruptSnapshotError) or missing
            return cls(name, path, stamp, error=str(error), corrupt=corrupt)


@dataclass(frozen=True)
class Snapshot:
    """A manifest, its sidecar, and the time of its last use."""

    manifest: Manifest
    sidecar: Sidecar
    sidecar_bytes: int
    last_used_ns: int

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


def _kind(reader: Any) -> tuple[object, ...]:
    return (
        Layout.of(reader.layout),
        reader.scorer,
        reader.summary_page_bytes,
        reader.fingerprint,
        reader.legacy_names,
    )
