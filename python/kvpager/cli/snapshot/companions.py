"""What was saved beside a snapshot: a draft model's cache of its text, recurrent states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvpager import _core
from kvpager.cli.snapshot.address import SNAPSHOTS, Address, is_store
from kvpager.cli.snapshot.opened import Opened
from kvpager.errors import CorruptSnapshotError, PagerError
from kvpager.stores.companions import CompanionSnapshot, companion_name, named_companions
from kvpager.stores.names import SNAPSHOT_SUFFIX

SOUND = "saved with it"
_OTHER = "of another save: left out by a restore"
_MISSING = "missing: left out by a restore"


@dataclass(frozen=True)
class Companion:
    """One that a snapshot names.

    Attributes:
        kind: of `kvpager.stores.companions.KINDS`.
        address: where it is, or should be.
        state: SOUND, or why a restore goes on without it, for people.
        opened: the snapshot it is; None where it cannot be opened.
        damage: why not, where its bytes are the reason.
    """

    kind: str
    address: Address
    state: str
    opened: Opened | None = None
    damage: CorruptSnapshotError | None = None

    @property
    def reader(self) -> _core.SnapshotReader:
        """REQUIRES: it is opened."""
        assert self.opened is not None
        return self.opened.reader

    @property
    def snapshot(self) -> CompanionSnapshot:
        """As a store takes it. REQUIRES: it is opened."""
        reader = self.reader
        return CompanionSnapshot(self.kind, reader, reader.fingerprint, reader.session)


def companions_of(primary: Opened) -> Iterator[Companion]:
    """Those that a snapshot names, whether they are there or not."""
    for kind, digest in named_companions(primary.session).items():
        address = _beside(primary.address, kind)
        if not address.path.is_file():
            yield Companion(kind, address, _MISSING)
            continue
        try:
            opened = Opened.at(address)
        except PagerError as error:
            damage = error if isinstance(error, CorruptSnapshotError) else None
            yield Companion(kind, address, f"{error}: left out by a restore", None, damage)
        else:
            state = SOUND if opened.reader.logical_digest == digest else _OTHER
            yield Companion(kind, address, state, opened)


def sound_companions(primary: Opened) -> list[Companion]:
    """Those that a restore would take."""
    return [companion for companion in companions_of(primary) if companion.state == SOUND]


def _beside(address: Address, kind: str) -> Address:
    """Where a companion is: in a store under a name of its own, else a file beside the file."""
    text = companion_name(address.text, kind)
    folder = address.path.parent
    if address.store is None and not (folder.name == SNAPSHOTS and is_store(folder.parent)):
        return Address(text, folder / companion_name(address.path.name, kind))
    name = companion_name(address.path.name.removesuffix(SNAPSHOT_SUFFIX), kind)
    return Address(text, folder / (name + SNAPSHOT_SUFFIX), address.store, name)
