"""Removes files of a directory store, in an order that a crash or power failure may interrupt.

Removes a manifest durably before any of its packs: no snapshot is ever visible without its bytes.
REQUIRES, of every function: the store's lock.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvpager.stores.catalogue import Catalogue
from kvpager.stores.files import sync_folder
from kvpager.stores.lock import in_use


def remove_snapshots(catalogue: Catalogue, names: Iterable[str]) -> list[str]:
    """Removes snapshots and their companions, then those of their packs no longer needed or held.

    Returns the ids of the removed packs.
    """
    packs: dict[str, None] = {}
    gone = False
    for name in names:
        for snapshot in (catalogue.snapshot(name), *catalogue.companions(name)):
            if snapshot is not None:
                packs.update(dict.fromkeys(snapshot.manifest.uses))
                catalogue.remove_snapshot(snapshot.manifest.name)
                gone = True
    if gone:
        sync_folder(catalogue.snapshots_folder)
    return remove_unneeded_packs(catalogue, packs)


def remove_unneeded_packs(catalogue: Catalogue, packs: Iterable[str] | None = None) -> list[str]:
    """Removes those of `packs` (None: all) that no snapshot needs and no reader or writer holds.

    Removes none while a manifest that may be undamaged cannot be read now or by this version: it
    may need any of them. Returns the ids of the removed packs.
    """
    if catalogue.may_need_any_pack():
        return []
    if packs is None:
        tables = catalogue.unneeded_packs()
    else:
        tables = [one for pack in packs if (one := catalogue.pack(pack)) is not None]
    gone = []
    for table in sorted(tables, key=lambda table: table.id):
        if not table.error and not table.users and not in_use(table.path):
            catalogue.remove_pack(table.id)
            gone.append(table.id)
    return gone


def remove_temporaries(catalogue: Catalogue) -> int:
    """Removes temporary files of dead writers; returns their number."""
    dead = [path for path in catalogue.files("temporary") if not in_use(path)]
    for path in dead:
        catalogue.remove_file(path)
    return len(dead)


def remove_strays(catalogue: Catalogue) -> int:
    """Removes sidecars and lists of damage whose snapshot or pack is gone; returns their number."""
    strays = catalogue.files("stray")
    for path in strays:
        catalogue.remove_file(path)
    return len(strays)
