"""Finds the chunks of a text that a store has: a save shares them, a new prompt reuses them."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpager.stores.catalogue import Catalogue
from kvpager.stores.tables import PackChunk, Snapshot

_SOME = 16  # of several snapshots with the longest prefix, as many are compared
MAX_PACKS = 64  # of one manifest; a reader needs a descriptor for each
# If there would be more packs, the smallest are merged until this many are left. That is far below
# the maximum, so that a chunk is copied again only when its pack is among the smallest again: about
# log(turns) times, as in a log-structured store.
MERGED_PACKS = 32


@dataclass(frozen=True)
class WritePlan:
    """Sealed chunks by number: those to write, ascending, and the places of the others."""

    write: tuple[int, ...]
    shared: dict[int, PackChunk]

    @property
    def shared_packs(self) -> set[str]:
        """Ids of existing packs that the snapshot will need."""
        return {place.pack for place in self.shared.values()}


@dataclass(frozen=True)
class PackTable:
    """The pack table of a manifest; see docs/snapshot_format.md.

    Attributes:
        packs: (id, chunks in it), in order of first use.
        places: [sealed chunks, 2] pack number and chunk in it.
        summary_checksums: [sealed chunks].
    """

    packs: list[tuple[str, int]]
    places: npt.NDArray[np.uint32]
    summary_checksums: npt.NDArray[np.uint64]


def plan_write(found: Sequence[Sequence[PackChunk]]) -> WritePlan:
    """Chooses the chunks to write: as few bytes as possible with at most MAX_PACKS packs.

    found: the store's places of each of the snapshot's sealed chunks.
    """
    popularity = Counter(place.pack for places in found for place in places)
    shared = {
        chunk: max(places, key=lambda place: (popularity[place.pack], place))
        for chunk, places in enumerate(found)
        if places
    }
    used = Counter(place.pack for place in shared.values())
    write = len(shared) < len(found)
    if len(used) + write > MAX_PACKS:
        smallest = sorted(used, key=lambda pack: (used[pack], pack))
        merged = set(smallest[: len(used) + 1 - MERGED_PACKS])
        shared = {chunk: place for chunk, place in shared.items() if place.pack not in merged}
    return WritePlan(tuple(c for c in range(len(found)) if c not in shared), shared)


def table_of(
    places: Sequence[PackChunk],
    sizes: Callable[[str], int],
    summary_checksum: Callable[[int], int],
) -> PackTable:
    """The pack table of a manifest whose sealed chunk i is at places[i].

    Args:
        places: of all sealed chunks.
        sizes: returns the number of chunks of a pack.
        summary_checksum: returns that of a sealed chunk.
    """
    numbers: dict[str, int] = {}
    for place in places:
        numbers.setdefault(place.pack, len(numbers))
    return PackTable(
        [(pack, sizes(pack)) for pack in numbers],
        np.array([(numbers[place.pack], place.chunk) for place in places], dtype=np.uint32).reshape(
            -1, 2
        ),
        np.array([summary_checksum(i) for i in range(len(places))], dtype=np.uint64),
    )


def longest_prefix(
    catalogue: Catalogue, hashes: Sequence[bytes], now_ns: int, ttl_seconds: float | None
) -> tuple[Snapshot, int] | None:
    """The snapshot with the longest prefix, and the prefix's number of chunks; None without any.

    A chunk's name covers all tokens up to its end, and the fingerprint, salt and provenance they
    were computed under: so a snapshot whose chunk k has the k-th name has the chunks before it too,
    and a binary search finds the last one. Of several snapshots, one that was used lately.

    Args:
        catalogue: of the store.
        hashes: of the text's full chunks.
        now_ns: expired snapshots serve nothing.
        ttl_seconds: the store's own time to live.
    """

    @functools.cache
    def places(chunk: int) -> list[PackChunk]:
        return catalogue.chunks_named(hashes[chunk : chunk + 1])[0]

    def holders(chunk: int) -> Iterator[Snapshot]:
        for place in places(chunk):
            for snapshot in catalogue.holders(place):
                is_alive = not snapshot.expired(now_ns, ttl_seconds)
                if is_alive and _is_whole(catalogue, snapshot, hashes[: chunk + 1]):
                    yield snapshot

    everything = range(len(hashes))
    chunks = bisect.bisect_left(everything, True, key=lambda c: next(holders(c), None) is None)
    if not chunks:
        return None
    some = itertools.islice(holders(chunks - 1), _SOME)
    return max(some, key=lambda snapshot: snapshot.last_used_ns), chunks


def _is_whole(catalogue: Catalogue, snapshot: Snapshot, hashes: Sequence[bytes]) -> bool:
    """Whether a snapshot that has the last of these chunks has all of them undamaged."""
    uses = snapshot.manifest.uses
    tables = [catalogue.pack(pack) for pack in uses]
    if all(table is not None and not table.error and not table.damaged for table in tables):
        return True
    return all(
        any(place.pack in uses and place.chunk in uses[place.pack] for place in found)
        for found in catalogue.chunks_named(hashes)
    )
