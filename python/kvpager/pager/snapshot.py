"""Opened snapshots: metadata are read first, the payload when it is needed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvpager import _core
from kvpager._model.layout import Layout
from kvpager._runtime.released import ReleasedText
from kvpager._support.arguments import usable_path
from kvpager._support.section_json import parse_section
from kvpager.errors import InvalidArgumentError

SALT_FIELD = "salt_digest"  # in a snapshot's session section
_PACK = "pack"  # likewise: the file keeps chunks of a directory store, of no one conversation


@dataclass(frozen=True)
class SnapshotInfo:
    """An opened snapshot: metadata are read and verified, the payload when it is needed.

    Attributes:
        path: of the file, or the reader's own name.
        fingerprint: of the engine that saved it.
        session: the session section, which the runtime writes beside the K/V.
        layout: shape of its chunks.
        scorer: the scorer that made its summaries.
        tokens: int32 ids of all committed positions, also of released chunks.
        released: the released beginning of the text; None: the file has all chunks.
    """

    path: str
    fingerprint: dict[str, Any]
    session: dict[str, Any]
    layout: Layout
    scorer: str
    tokens: np.ndarray[Any, Any]
    reader: _core.SnapshotReader
    released: ReleasedText | None = None

    @classmethod
    def of(cls, reader: _core.SnapshotReader) -> SnapshotInfo:
        """Makes it from a reader of a file, of a store's manifest, or of gathered chunks.

        Raises:
            CorruptSnapshotError: fingerprint or session are no JSON objects, or the session's
                released tokens are invalid.
        """
        native = reader.layout
        session = parse_section(reader.session, reader.path, "session")
        released = ReleasedText.of_session(session, reader.path, native.chunk_tokens)
        tokens = reader.tokens
        if released is not None:
            tokens = np.concatenate([released.tokens, tokens])
        return cls(
            path=reader.path,
            fingerprint=parse_section(reader.fingerprint, reader.path, "fingerprint"),
            session=session,
            layout=Layout.of(native),
            scorer=reader.scorer,
            tokens=tokens,
            reader=reader,
            released=released,
        )

    @property
    def released_tokens(self) -> np.ndarray[Any, Any]:
        """Ids (int32) of the first positions, whose chunks were released before the save."""
        return np.zeros(0, dtype=np.int32) if self.released is None else self.released.tokens

    @property
    def logical_digest(self) -> str:
        """Hex digest of tokens, payload, summaries and provenance; computed on demand."""
        return self.reader.logical_digest

    @property
    def is_pack(self) -> bool:
        """Whether the file is a pack of a directory store rather than a snapshot."""
        return self.session.get(_PACK) is True

    def require_restorable(self) -> None:
        """Raises InvalidArgumentError if it is a pack, whose chunks belong to no one sequence."""
        if self.is_pack:
            raise InvalidArgumentError(
                f"{self.path} is a pack of a store; restore the snapshot by its name"
            )


def open_snapshot(path: str | os.PathLike[str]) -> SnapshotInfo:
    """Opens a snapshot without a pager; reads only metadata. See `Pager.open_snapshot`.

    Also opens a manifest of a directory store, with its packs.
    """
    return SnapshotInfo.of(_core.SnapshotReader.open(usable_path(path, "path")))
