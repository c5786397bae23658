"""Chooses the snapshots to evict: the least recently used ones that may be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from kvpager.errors import CapacityError


@dataclass(frozen=True)
class Held:
    """A snapshot, as far as eviction is concerned.

    Attributes:
        bytes: size of its own files.
        packs: ids of the packs it needs.
        fixed: why it may not be evicted; None if it may.
    """

    name: str
    bytes: int
    packs: tuple[str, ...]
    last_used_ns: int
    fixed: str | None = None


@dataclass(frozen=True)
class Room:
    """The room that is needed, and the room there is.

    Attributes:
        needed: bytes about to be written.
        total: bytes of all files of the store.
        budget: the most that both together may be.
        pack_bytes: size of every pack.
        wanted: packs that the new snapshot refers to; they stay.
        in_use: whether a reader or writer holds a pack.
    """

    needed: int
    total: int
    budget: int
    pack_bytes: Mapping[str, int]
    wanted: frozenset[str]
    in_use: Callable[[str], bool]


def choose_victims(snapshots: Iterable[Held], room: Room) -> list[str]:
    """Names of the snapshots to evict; none if there is room already.

    Evicting a snapshot frees its own files and the packs that no other one needs. It stays if one
    of those packs is in use.

    Raises:
        CapacityError: not enough may be evicted; the message says why.
    """
    known = list(snapshots)
    excess = room.total + room.needed - room.budget
    references = Counter(pack for held in known for pack in held.packs)
    references.update(room.wanted)
    busy: dict[str, bool] = {}
    victims: list[Held] = []
    blocked: list[str] = []
    left = references.copy()
    bytes_freed = 0
    for held in sorted(known, key=lambda held: (held.last_used_ns, held.name)):
        if bytes_freed >= excess:
            break
        if held.fixed:
            continue
        gone = [pack for pack in held.packs if left[pack] == 1]
        for pack in gone:
            if pack not in busy:
                busy[pack] = room.in_use(pack)
        if any(busy[pack] for pack in gone):
            blocked.append(held.name)
            continue
        left.subtract(held.packs)
        bytes_freed += held.bytes + sum(room.pack_bytes.get(pack, 0) for pack in gone)
        victims.append(held)
    if bytes_freed < excess:
        raise _refusal(known, room, bytes_freed, blocked)
    # Keep those that are not needed after all, the most recently used first.
    needed = victims
    for held in reversed(victims):
        others = [other for other in needed if other is not held]
        if _freed(others, references, room) >= excess:
            needed = others
    return [held.name for held in needed]


def _freed(victims: list[Held], references: Counter[str], room: Room) -> int:
    """Bytes that evicting these snapshots frees. references: how many need each pack."""
    left = references.copy()
    left.subtract(pack for held in victims for pack in held.packs)
    packs = {pack for held in victims for pack in held.packs if left[pack] == 0}
    own = sum(held.bytes for held in victims)
    return own + sum(room.pack_bytes.get(pack, 0) for pack in packs)


def _refusal(known: list[Held], room: Room, freed: int, blocked: list[str]) -> CapacityError:
    fixed: dict[str, list[Held]] = {}
    for held in known:
        if held.fixed:
            fixed.setdefault(held.fixed, []).append(held)
    reasons = [f"{reason}: {_some([h.name for h in held])}" for reason, held in fixed.items()]
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
