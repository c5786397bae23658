"""Plans a save: which chunks to write, and where the store has the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpager.stores.chunk_index import Place

MAX_PACKS = 64  # of one manifest; a reader needs a descriptor for each
# If there would be more packs, the smallest are merged until this many are left. That is far below
# the maximum, so that a chunk is copied again only when its pack is among the smallest again: about
# log(turns) times, as in a log-structured store.
MERGED_PACKS = 32


@dataclass(frozen=True)
class WritePlan:
    """Sealed chunks by number: those to write, ascending, and the places of the others."""

    write: tuple[int, ...]
    shared: dict[int, Place]

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


def plan_write(
    chain_hashes: Sequence[bytes],
    content_ids: Sequence[bytes],
    find: Callable[[bytes, bytes], Sequence[Place]],
) -> WritePlan:
    """Chooses the chunks to write: as few bytes as possible with at most MAX_PACKS packs.

    Args:
        chain_hashes: of the snapshot's sealed chunks.
        content_ids: likewise.
        find: returns the store's places of a chunk with this chain hash and content id.
    """
    found = [find(chain, content) for chain, content in zip(chain_hashes, content_ids)]
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
    places: Sequence[Place],
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
