"""Removes files of a directory store, in an order that a crash or power failure may interrupt.

Removes a manifest durably before any of its packs: no snapshot is ever visible without its bytes.
REQUIRES, of every function: the store's lock, and a catalogue refreshed under it, which the
function keeps up to date.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvpager.stores.catalogue import Catalogue
from kvpager.stores.durable import sync_folder
from kvpager.stores.lock import in_use


def remove_snapshots(catalogue: Catalogue, names: Iterable[str]) -> list[str]:
    """Removes snapshots and their companions, then those of their packs no longer needed or held.

    Returns the ids of the removed packs.
    """
    packs: set[str] = set()
    gone = 0
    wanted = [part for name in names for part in (name, *catalogue.companions(name))]
    for name in dict.fromkeys(wanted):
        snapshot = catalogue.snapshots[name]
        catalogue.remove(catalogue.manifest_path(name))
        catalogue.remove(catalogue.sidecar_path(name))
        packs.update(snapshot.manifest.packs)
        catalogue.bytes -= snapshot.bytes
        del catalogue.snapshots[name]
        gone += 1
    if gone:
        sync_folder(catalogue.snapshots_folder)
    return remove_unneeded_packs(catalogue, packs)


def remove_unneeded_packs(catalogue: Catalogue, packs: Iterable[str]) -> list[str]:
    """Removes those of `packs` that no readable snapshot needs and no reader or writer holds.

    Removes none while a manifest that may be undamaged cannot be read now or by this version: it
    may need any of them.
    """
    if any(not snapshot.manifest.corrupt for snapshot in catalogue.unreadable()):
        return []
    needed = catalogue.references()
    gone = []
    for pack in sorted(packs):
        table = catalogue.packs.get(pack)
        if table is None or table.error or needed[pack] or in_use(table.path):
            continue
        remove_pack(catalogue, pack)
        gone.append(pack)
    return gone


def remove_pack(catalogue: Catalogue, pack: str) -> None:
    """Removes a pack and its list of damage."""
    table = catalogue.packs.pop(pack)
    catalogue.index.discard(pack, table.chain_hashes, table.content_ids)
    catalogue.remove(table.path)
    catalogue.remove(catalogue.damage_path(pack))
    catalogue.bytes -= table.bytes


def remove_temporaries(catalogue: Catalogue) -> int:
    """Removes temporary files of dead writers; returns their number."""
    dead = [path for path in catalogue.temporaries if not in_use(path)]
    for path in dead:
        catalogue.remove(path)
        catalogue.bytes -= catalogue.temporaries.pop(path)
    return len(dead)


def remove_strays(catalogue: Catalogue) -> int:
    """Removes sidecars and lists of damage whose snapshot or pack is gone; returns their number."""
    count = len(catalogue.strays)
    for path in list(catalogue.strays):
        catalogue.remove(path)
        catalogue.bytes -= catalogue.strays.pop(path)
    return count
