"""Keeps a directory store within its budget: evicts the least recently used snapshots that it may.

REQUIRES, of `tidy` and `make_room`: the store's lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from kvpager.errors import CapacityError
from kvpager.stores import removal
from kvpager.stores.catalogue import Catalogue
from kvpager.stores.lock import in_use
from kvpager.stores.settings import StoreSettings


@dataclass(frozen=True)
class EvictionCandidate:
    """A snapshot, as far as eviction is concerned.

    Attributes:
        bytes: size of its own files.
        packs: ids of the packs it needs; twice if it and its companion need one.
        fixed: why it may not be evicted; None if it may.
        shown: the name that users know it by; None: the same.
    """

    name: str
    bytes: int
    packs: tuple[str, ...]
    last_used_ns: int
    fixed: str | None = None
    shown: str | None = None


@dataclass(frozen=True)
class Room:
    """The room that is needed, and the room there is.

    Attributes:
        needed: bytes about to be written.
        total: bytes of all files of the store.
        budget: the most that both together may be.
        pack: returns a pack's size in bytes and the number of snapshots that need it.
        wanted: packs that the new snapshot refers to; they stay.
        in_use: whether a reader or writer holds a pack.
    """

    needed: int
    total: int
    budget: int
    pack: Callable[[str], tuple[int, int]]
    wanted: frozenset[str]
    in_use: Callable[[str], bool]


def choose_victims(snapshots: Iterable[EvictionCandidate], room: Room) -> list[str]:
    """Names of the snapshots to evict; none if there is room already.

    Evicting a snapshot frees its own files and the packs that no other one needs. It stays if one
    of those packs is in use. Looks at no more snapshots than it has to.

    Args:
        snapshots: all, the least recently used first.
        room: that is needed.

    Raises:
        CapacityError: not enough may be evicted; the message says why.
    """
    excess = room.total + room.needed - room.budget
    sizes: dict[str, int] = {}
    left: dict[str, int] = {}  # snapshots that need each pack, victims not counted
    busy: dict[str, bool] = {}
    known: list[EvictionCandidate] = []
    victims: list[EvictionCandidate] = []
    blocked: list[str] = []
    freed = 0
    for held in snapshots:
        if freed >= excess:
            break
        known.append(held)
        if held.fixed:
            continue
        needs = Counter(held.packs)
        for pack in needs:
            if pack not in left:
                sizes[pack], users = room.pack(pack)
                left[pack] = users + (pack in room.wanted)
        gone = [pack for pack, times in needs.items() if left[pack] == times]
        for pack in gone:
            if pack not in busy:
                busy[pack] = room.in_use(pack)
        if any(busy[pack] for pack in gone):
            blocked.append(held.shown or held.name)
            continue
        for pack, times in needs.items():
            left[pack] -= times
        freed += held.bytes + sum(sizes[pack] for pack in gone)
        victims.append(held)
    if freed < excess:
        raise _refusal(known, room, freed, blocked)
    # Keep those that are not needed after all, the most recently used first.
    chosen = []
    for held in reversed(victims):
        needs = Counter(held.packs)
        kept = held.bytes + sum(sizes[pack] for pack in needs if not left[pack])
        if freed - kept >= excess:
            freed -= kept
            for pack, times in needs.items():
                left[pack] += times
        else:
            chosen.append(held.name)
    return chosen[::-1]


def _refusal(
    known: list[EvictionCandidate], room: Room, freed: int, blocked: list[str]
) -> CapacityError:
    fixed: dict[str, list[EvictionCandidate]] = {}
    for held in known:
        if held.fixed:
            fixed.setdefault(held.fixed, []).append(held)
    reasons = [
        f"{reason}: {_some([h.shown or h.name for h in held])}" for reason, held in fixed.items()
    ]
    if blocked:
        reasons.append(f"open elsewhere: {_some(blocked)}")
    return CapacityError(
        f"byte_budget is {room.budget}; {room.needed} bytes are needed and the store's files take "
        f"{room.total}, of which {freed} may go"
        + "".join(f"; {reason}" for reason in reasons)
        + "; raise byte_budget, or delete, unpin or close snapshots"
    )


def _some(names: list[str], most: int = 5) -> str:
    shown = ", ".join(sorted(names)[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


@dataclass(frozen=True)
class Tidied:
    """The snapshots that `tidy` removed by name, and the numbers of removed files."""

    expired: tuple[str, ...]
    orphans: tuple[str, ...]
    temporaries: int
    strays: int
    packs: int


def tidy(catalogue: Catalogue, settings: StoreSettings, now_ns: int) -> Tidied:
    """Removes expired snapshots, files of dead writers, orphans, and unneeded packs.

    While there is a damaged manifest, packs that seem unneeded stay, because it may need them.
    """
    orphans = tuple(catalogue.orphans())
    expired = tuple(catalogue.expired(now_ns, settings.ttl_seconds))
    temporaries = removal.remove_temporaries(catalogue)
    strays = removal.remove_strays(catalogue)
    shown = [tuple(catalogue.shown_names(names)) for names in (expired, orphans)]
    packs = removal.remove_snapshots(catalogue, [*orphans, *expired])
    if not catalogue.unreadable():
        packs += removal.remove_unneeded_packs(catalogue)
    return Tidied(shown[0], shown[1], temporaries, strays, len(packs))


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
    if budget is None or catalogue.size + needed <= budget:
        return evicted
    damaged = catalogue.unreadable()
    if damaged and not any(snapshot.sidecar.pinned for snapshot in damaged):
        removal.remove_unneeded_packs(catalogue)
    # Repeats only if another process opens a file between the choice and the removal.
    while (total := catalogue.size) + needed > budget:
        room = Room(
            needed=needed,
            total=total,
            budget=budget,
            pack=lambda pack: _bytes_and_users(catalogue, pack),
            wanted=wanted,
            in_use=lambda pack: (
                catalogue.pack(pack) is not None and in_use(catalogue.pack_path(pack))
            ),
        )
        victims = choose_victims(_held(catalogue, kept), room)
        evicted += catalogue.shown_names(victims)
        removal.remove_snapshots(catalogue, victims)
    return evicted


def _bytes_and_users(catalogue: Catalogue, pack: str) -> tuple[int, int]:
    table = catalogue.pack(pack)
    return (0, 1) if table is None else (table.bytes, table.users)


def _held(catalogue: Catalogue, kept: str | None) -> Iterator[EvictionCandidate]:
    """All snapshots, each with its companions, which are evicted with it."""
    for snapshot in catalogue.least_recently_used():
        manifest, fixed = snapshot.manifest, None
        if manifest.name == kept:
            fixed = "kept until this is done"
        elif snapshot.sidecar.pinned:
            fixed = "pinned"
        elif manifest.error:
            fixed = "unreadable, kept for gc(remove_damaged=True)"
        parts = [snapshot, *catalogue.companions(manifest.name)]
        yield EvictionCandidate(
            manifest.name,
            sum(part.bytes for part in parts),
            tuple(pack for part in parts for pack in part.manifest.uses),
            snapshot.last_used_ns,
            fixed,
            catalogue.shown(snapshot),
        )
