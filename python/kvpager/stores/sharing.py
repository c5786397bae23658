"""Finds the chunks of a text that a store has: a save shares them, a new prompt reuses them."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpager.stores.catalogue import Catalogue
from kvpager.stores.tables import HASHES_BYTES, Pack, PackChunk, Run, Snapshot, hashes_of

_LOOKED_UP = 512  # most chunks at once
_SOME = 16  # of several snapshots with the longest prefix, as many are compared
MAX_PACKS = 64  # of one manifest; a reader needs a descriptor for each
# If there would be more packs, the smallest are merged until this many are left. That is far below
# the maximum, so that a chunk is copied again only when its pack is among the smallest again: about
# log(turns) times, as in a log-structured store.
MERGED_PACKS = 32


@dataclass(frozen=True)
class WritePlan:
    """Sealed chunks by number: those to write, ascending, and where the others are.

    shared: by ascending chunks, which do not overlap.
    """

    write: tuple[int, ...]
    shared: tuple[Run, ...]

    @property
    def shared_packs(self) -> set[str]:
        """Ids of existing packs that the snapshot will need."""
        return {run.pack for run in self.shared}

    @property
    def shared_chunks(self) -> int:
        """How many chunks are not written."""
        return sum(run.chunks for run in self.shared)

    def runs(self, pack: str) -> list[Run]:
        """All sealed chunks, those to write one behind the other in a pack of this id."""
        written = [Run(chunk, 1, pack, i) for i, chunk in enumerate(self.write)]
        return sorted([*self.shared, *written])


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


def shared_runs(catalogue: Catalogue, hashes: bytes, avoid: Set[str] = frozenset()) -> list[Run]:
    """Where undamaged chunks with these hashes are: from the first one on the longest runs.

    A chunk is looked up only where a run begins, or none is: a text that goes on costs what is new.

    Args:
        catalogue: of the store.
        hashes: of the chunks, one behind the other.
        avoid: packs that are not used.
    """
    chunks = len(hashes) // HASHES_BYTES

    def run_at(chunk: int, place: PackChunk) -> Run:
        pack = catalogue.pack(place.pack)
        equal = 0 if pack is None else _equal_chunks(pack, place.chunk, hashes, chunk)
        return Run(chunk, equal, *place)

    runs, chunk, some = [], 0, 1
    while chunk < chunks:
        first, stop = chunk, min(chunks, chunk + some)
        chains = [hashes_of(hashes, each)[0] for each in range(first, stop)]
        looked_up = catalogue.chunks_of_keys(chains)
        while chunk < stop:
            places = [place for place in looked_up[chunk - first] if place.pack not in avoid]
            found = [run_at(chunk, place) for place in places]
            best = max(found, key=lambda run: (run.chunks, run.pack, run.place), default=None)
            if best is None or not best.chunks:
                chunk += 1
                continue
            runs.append(best)
            chunk += best.chunks
        some = min(2 * some, _LOOKED_UP)
    return runs


def _equal_chunks(pack: Pack, place: int, wanted: bytes, chunk: int) -> int:
    """How many undamaged chunks of a pack, from `place` on, have the hashes from `chunk` on."""
    damaged = (each for each in pack.damaged if each >= place)
    end = min(damaged, default=pack.chunks)
    most = min(end - place, len(wanted) // HASHES_BYTES - chunk)
    equal, some = 0, 16
    while equal < most:
        some = min(some, most - equal)
        own = pack.hashes[HASHES_BYTES * (place + equal) : HASHES_BYTES * (place + equal + some)]
        other = wanted[HASHES_BYTES * (chunk + equal) : HASHES_BYTES * (chunk + equal + some)]
        if own != other:
            rows = (
                np.frombuffer(each, np.uint8).reshape(-1, HASHES_BYTES) for each in (own, other)
            )
            return equal + int(np.not_equal(*rows).any(1).argmax())
        equal += some
        some *= 4
    return equal


def plan_write(chunks: int, found: Sequence[Run]) -> WritePlan:
    """Chooses the chunks to write: those that were not found, and more for at most MAX_PACKS packs.

    chunks: of the text. found: ascending.
    """
    used: Counter[str] = Counter()
    for run in found:
        used[run.pack] += run.chunks
    writes = used.total() < chunks
    if len(used) + writes > MAX_PACKS:
        smallest = sorted(used, key=lambda pack: (used[pack], pack))
        merged = set(smallest[: len(used) + 1 - MERGED_PACKS])
        found = [run for run in found if run.pack not in merged]
    missing = np.ones(chunks, dtype=bool)
    for run in found:
        missing[run.first : run.first + run.chunks] = False
    return WritePlan(tuple(np.flatnonzero(missing).tolist()), tuple(found))


def table_of(
    runs: Sequence[Run],
    sizes: Callable[[str], int],
    summary_checksums: npt.NDArray[np.uint64],
) -> PackTable:
    """The pack table of a manifest whose sealed chunks are in these runs, ascending.

    Args:
        runs: of all sealed chunks.
        sizes: returns the number of chunks of a pack.
        summary_checksums: [sealed chunks].
    """
    numbers: dict[str, int] = {}
    places = np.empty((len(summary_checksums), 2), dtype=np.uint32)
    for run in runs:
        some = slice(run.first, run.first + run.chunks)
        places[some, 0] = numbers.setdefault(run.pack, len(numbers))
        places[some, 1] = np.arange(run.place, run.place + run.chunks)
    return PackTable([(pack, sizes(pack)) for pack in numbers], places, summary_checksums)


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
                if is_alive and _is_whole(catalogue, snapshot, map(places, range(chunk + 1))):
                    yield snapshot

    everything = range(len(hashes))
    chunks = bisect.bisect_left(everything, True, key=lambda c: next(holders(c), None) is None)
    if not chunks:
        return None
    some = itertools.islice(holders(chunks - 1), _SOME)
    return max(some, key=lambda snapshot: snapshot.last_used_ns), chunks


def _is_whole(
    catalogue: Catalogue, snapshot: Snapshot, places: Iterable[Sequence[PackChunk]]
) -> bool:
    """Whether a snapshot has all these chunks undamaged.

    places: undamaged ones, of each chunk; the snapshot has the last chunk. Looked at only where
    its packs are damaged or missing.
    """
    uses = snapshot.manifest.uses
    tables = [catalogue.pack(pack) for pack in uses]
    if all(table is not None and not table.error and not table.damaged for table in tables):
        return True
    return all(
        any(place.pack in uses and place.chunk in uses[place.pack] for place in found)
        for found in places
    )
