"""Finds the longest prefix of a text among all snapshots of a store."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

from kvpager.stores.catalogue import Catalogue
from kvpager.stores.chunk_index import Place
from kvpager.stores.tables import Snapshot


def longest_prefix(
    catalogue: Catalogue, snapshots: Iterable[Snapshot], hashes: Sequence[bytes]
) -> tuple[Snapshot, int] | None:
    """The snapshot with the longest prefix, and the prefix's number of chunks; None without any.

    A chunk's name covers all tokens up to its end, and the fingerprint, salt and provenance they
    were computed under: so a snapshot whose chunk k has the k-th name has the chunks before it too.
    With the hashes of formats before 1.2 an attacker could make collisions, so callers compare the
    token ids. If several snapshots qualify, returns the one used last.

    Args:
        catalogue: of the store.
        snapshots: those that may be served.
        hashes: of the text's full chunks.
    """
    best: tuple[int, int, Snapshot] | None = None
    for snapshot in snapshots:
        chunks = _common(catalogue, snapshot, hashes)
        if chunks and (best is None or (chunks, snapshot.last_used_ns) > best[:2]):
            best = (chunks, snapshot.last_used_ns, snapshot)
    return None if best is None else (best[2], best[0])


def _common(catalogue: Catalogue, snapshot: Snapshot, hashes: Sequence[bytes]) -> int:
    """How many of the snapshot's first chunks have these hashes and are undamaged."""
    manifest = snapshot.manifest
    most = min(manifest.sealed_chunks, len(hashes))

    def differs(chunk: int) -> bool:
        return not _sound(catalogue, manifest.place(chunk), hashes[chunk])

    tables = [catalogue.packs.get(pack) for pack in manifest.packs]
    if all(table is not None and table.chunks and not table.damaged for table in tables):
        # Once a hash differs, all later ones do: so a binary search finds the place.
        return bisect.bisect_left(range(most), True, key=differs)
    return next((chunk for chunk in range(most) if differs(chunk)), most)


def _sound(catalogue: Catalogue, place: Place, expected: bytes) -> bool:
    table = catalogue.packs.get(place.pack)
    return (
        table is not None
        and place.chunk < table.chunks
        and table.chain_hashes[place.chunk] == expected
        and catalogue.is_sound(place)
    )
