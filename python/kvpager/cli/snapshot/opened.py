"""An opened snapshot, and what kind of file it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvpager import _core
from kvpager.cli.failure import CliError
from kvpager.cli.snapshot.address import Address
from kvpager.errors import CorruptSnapshotError, StorageError
from kvpager.paths import usable_path
from kvpager.section_json import parse_section

# As the reader says it of a manifest: its pack cannot be opened.
_PACK_IS_GONE = "cannot open the snapshot: No such file"

SELF_CONTAINED, MANIFEST, PACK = "self-contained", "manifest", "pack"


@dataclass(frozen=True)
class LayoutFields:
    """Shape of a chunk, as the file has it."""

    layers: int
    kv_heads: int
    k_dim: int
    v_dim: int
    chunk_tokens: int
    k_dtype: str
    v_dtype: str

    @classmethod
    def of(cls, layout: _core.Layout) -> LayoutFields:
        """Of the core's value."""
        return cls(
            layers=layout.layers,
            kv_heads=layout.kv_heads,
            k_dim=layout.k_dim,
            v_dim=layout.v_dim,
            chunk_tokens=layout.chunk_tokens,
            k_dtype=layout.k_dtype,
            v_dtype=layout.v_dtype,
        )

    def to_json(self) -> dict[str, Any]:
        """By name."""
        return asdict(self)


@dataclass(frozen=True)
class Opened:
    """A reader with its JSON sections parsed. Opening it counts as no use in its store."""

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
        reader = _core.SnapshotReader.open(usable_path(path, "path"))
        return cls(
            address,
            reader,
            parse_section(reader.fingerprint, path, "fingerprint"),
            parse_section(reader.session, path, "session"),
        )

    @property
    def kind(self) -> str:
        """SELF_CONTAINED, MANIFEST or PACK."""
        if self.reader.packs:
            return MANIFEST
        return PACK if self.session.get("pack") is True else SELF_CONTAINED

    @property
    def layout(self) -> LayoutFields:
        """Shape of a chunk."""
        return LayoutFields.of(self.reader.layout)

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
    """An opened snapshot, or what is wrong with its bytes; a pack that is missing is wrong too.

    Raises:
        StorageError, UnsupportedVersionError: it cannot be told.
    """
    try:
        return Opened.at(address)
    except CorruptSnapshotError as error:
        return error
    except StorageError as error:
        if address.path.is_file() and _PACK_IS_GONE in str(error):
            return CorruptSnapshotError(str(error))
        raise
