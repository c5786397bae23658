"""Keeps a directory store within its budget and removes files that no snapshot needs.

REQUIRES, of every function: the store's lock, and a catalogue refreshed under it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpager.stores import removal
from kvpager.stores.catalogue import Catalogue
from kvpager.stores.eviction import Held, Room, choose_victims
from kvpager.stores.lock import in_use
from kvpager.stores.settings import StoreSettings


@dataclass(frozen=True)
class Tidied:
    """What `tidy` removed."""

    expired: tuple[str, ...]
    orphans: tuple[str, ...]
    temporaries: int
    strays: int
    packs: int


def tidy(catalogue: Catalogue, settings: StoreSettings, now_ns: int) -> Tidied:
    """Removes expired snapshots, files of dead writers, orphans, and unneeded packs.

    While there is a damaged manifest, packs that seem unneeded stay, because it may need them.
    """
    orphans = tuple(sorted(catalogue.orphans()))
    owners = catalogue.owners()
    expired = tuple(
        sorted(
            name
            for name, snapshot in catalogue.snapshots.items()
            if not snapshot.manifest.error
            and name not in owners
            and name not in orphans
            and snapshot.expired(now_ns, settings.ttl_seconds)
        )
    )
    temporaries = removal.remove_temporaries(catalogue)
    strays = removal.remove_strays(catalogue)
    packs = removal.remove_snapshots(catalogue, [*orphans, *expired])
    if not catalogue.unreadable():
        packs += removal.remove_unneeded_packs(catalogue, catalogue.packs)
    return Tidied(expired, orphans, temporaries, strays, len(packs))


def make_room(
    catalogue: Catalogue,
    settings: StoreSettings,
    needed: int,
    *,
    kept: str | None = None,
    wanted: frozenset[str] = frozenset(),
) -> list[str]:
    """Evicts until `needed` more bytes fit into the budget; returns the evicted names.

    Args:
        catalogue: of the store, tidied.
        settings: have the budget.
        needed: bytes about to be written.
        kept: the snapshot that needs the room; it and its companions stay.
        wanted: packs that the new snapshot refers to; they stay.

    Raises:
        CapacityError: not enough may be evicted; nothing was removed.
    """
    evicted: list[str] = []
    budget = settings.byte_budget
    if budget is None or catalogue.bytes + needed <= budget:
        return evicted
    damaged = catalogue.unreadable()
    if damaged and not any(snapshot.sidecar.pinned for snapshot in damaged):
        removal.remove_unneeded_packs(catalogue, catalogue.packs)
    # Repeats only if another process opens a file between the choice and the removal.
    while catalogue.bytes + needed > budget:
        room = Room(
            needed=needed,
            total=catalogue.bytes,
            budget=budget,
            pack_bytes={pack: table.bytes for pack, table in catalogue.packs.items()},
            wanted=wanted,
            in_use=lambda pack: pack in catalogue.packs and in_use(catalogue.packs[pack].path),
        )
        victims = choose_victims(_held(catalogue, kept), room)
        removal.remove_snapshots(catalogue, victims)
        evicted += victims
    return evicted


def _held(catalogue: Catalogue, kept: str | None) -> list[Held]:
    """All snapshots, each with its companions, which are evicted with it."""

    def fixed(name: str) -> str | None:
        snapshot = catalogue.snapshots[name]
        if name == kept:
            return "kept until this is done"
        if snapshot.sidecar.pinned:
            return "pinned"
        return "unreadable, kept for gc(remove_damaged=True)" if snapshot.manifest.error else None

    def held(name: str) -> Held:
        snapshot = catalogue.snapshots[name]
        parts = [snapshot, *(catalogue.snapshots[beside] for beside in catalogue.companions(name))]
        return Held(
            name,
            sum(part.bytes for part in parts),
            tuple(dict.fromkeys(pack for part in parts for pack in part.manifest.packs)),
            snapshot.last_used_ns,
            fixed(name),
        )

    owners = catalogue.owners()
    return [held(name) for name in catalogue.snapshots if name not in owners]
