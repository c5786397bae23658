"""An opened snapshot, its kind of file, and its companions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvpager import _core
from kvpager._model.fingerprint_rules import RULES
from kvpager._model.layout import Layout
from kvpager._support.section_json import parse_section
from kvpager.cli.failure import CliError
from kvpager.cli.snapshot.address import SNAPSHOTS, Address, is_store
from kvpager.errors import CorruptSnapshotError, PagerError, StorageError
from kvpager.stores import DirectoryStore, FileStore, ObjectStore
from kvpager.stores.companions import companion_name, named_companions
from kvpager.stores.names import SNAPSHOT_SUFFIX
from kvpager.stores.opening import open_store

# The beginning of the reader's message for a manifest whose pack cannot be opened.
_PACK_IS_GONE = "cannot open the snapshot: No such file"

SELF_CONTAINED, MANIFEST, PACK = "self-contained", "manifest", "pack"


@dataclass(frozen=True)
class Opened:
    """A reader with its JSON sections parsed. Opening it does not count as a use in its store."""

    address: Address
    reader: _core.SnapshotReader
    fingerprint: Mapping[str, Any]
    session: Mapping[str, Any]

    @classmethod
    def at(cls, address: Address) -> Opened:
        """Opens a snapshot: metadata are verified, payload is not read.

        Raises:
            StorageError, CorruptSnapshotError, UnsupportedVersionError: it cannot be read.
        """
        path = str(address.path)
        folder = address.store or address.path.parent.parent
        if isinstance(folder, str):
            store = open_store(folder, create=False)
            assert isinstance(store, ObjectStore)
            reader = store.mirror.store.open_file(path)
        elif is_store(folder):
            reader = DirectoryStore(folder, create=False).open_file(path)
        else:
            reader = FileStore().open(path)
        fingerprint = parse_section(reader.fingerprint, path, "fingerprint")
        return cls(address, reader, fingerprint, parse_section(reader.session, path, "session"))

    @property
    def kind(self) -> str:
        """SELF_CONTAINED, MANIFEST or PACK."""
        if self.reader.packs:
            return MANIFEST
        return PACK if self.session.get("pack") is True else SELF_CONTAINED

    @property
    def layout(self) -> Layout:
        """Shape of a chunk."""
        return Layout.of(self.reader.layout)

    @property
    def summary_bytes(self) -> int:
        """Of one sealed chunk."""
        layout = self.reader.layout
        return self.reader.summary_page_bytes * layout.layers * layout.kv_heads

    @property
    def metadata_bytes(self) -> int:
        """Of the file, all but K/V and summaries."""
        reader = self.reader
        sealed = 0 if reader.packs else reader.sealed_chunks  # a manifest's are elsewhere
        chunks = sealed + (reader.tail_tokens > 0)
        own = chunks * reader.layout.chunk_bytes + sealed * self.summary_bytes
        return reader.file_bytes - own

    def require_session(self, what: str) -> None:
        """Raises CliError if this is a pack, which holds no session to `what`."""
        if self.kind == PACK:
            raise CliError(
                f"{self.address.text}: a pack, which is part of a store and holds no session to "
                f"{what}; expected a snapshot file or STORE/NAME"
            )

    def token_range(self, chunk: int) -> tuple[int, int]:
        """Positions [start, stop) of a chunk."""
        size = self.reader.layout.chunk_tokens
        return chunk * size, min((chunk + 1) * size, len(self.reader.tokens))


def open_or_damaged(address: Address) -> Opened | CorruptSnapshotError:
    """Opens a snapshot, or returns the damage that prevents it; a missing pack counts as damage.

    Raises:
        StorageError, UnsupportedVersionError: whether it is damaged is unknown.
    """
    try:
        return Opened.at(address)
    except CorruptSnapshotError as error:
        return error
    except StorageError as error:
        if address.path.is_file() and _PACK_IS_GONE in str(error):
            return CorruptSnapshotError(str(error))
        raise


SOUND = "saved with it"
_OTHER = "of another save: left out by a restore"
_MISSING = "missing: left out by a restore"


@dataclass(frozen=True)
class Companion:
    """A companion that a snapshot names.

    Attributes:
        kind: of `kvpager.stores.companions.KINDS`.
        address: where it is, or should be.
        state: SOUND, or in words why a restore skips it.
        opened: its snapshot; None if that cannot be opened.
        damage: the error, if damage prevents opening it.
    """

    kind: str
    address: Address
    state: str
    opened: Opened | None = None
    damage: CorruptSnapshotError | None = None


def companions_of(primary: Opened) -> Iterator[Companion]:
    """All companions that a snapshot names, missing ones included."""
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


def _beside(address: Address, kind: str) -> Address:
    """A companion's address: in a store a name of its own, otherwise a file beside the file."""
    text = companion_name(address.text, kind)
    folder = address.path.parent
    if address.store is None and not (folder.name == SNAPSHOTS and is_store(folder.parent)):
        return Address(text, folder / companion_name(address.path.name, kind))
    name = companion_name(address.path.name.removesuffix(SNAPSHOT_SUFFIX), kind)
    return Address(text, folder / (name + SNAPSHOT_SUFFIX), address.store, name)


REFUSE, WAIVABLE = "refuse", "waivable"


def fingerprint_rules(names: Iterable[str]) -> dict[str, str]:
    """REFUSE or WAIVABLE, by name."""
    return {name: RULES[name].on_mismatch if name in RULES else REFUSE for name in names}
