"""The released beginning of a text (chunks behind a window) in a snapshot.

A snapshot of such a sequence holds chunks from the first kept one on. The token ids before them are
in its session section, because a restore computes all chain hashes again, which cover them.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvpager import _core
from kvpager.errors import CorruptSnapshotError

_TOKENS = "released_tokens"  # base64 of little-endian int32
_PROVENANCE = "released_provenance"  # chunks: exact, decode, approximate
_WINDOW = "released_window"  # tokens
_MOST_WINDOW = 2**40


@dataclass(frozen=True)
class ReleasedText:
    """The text before the first held chunk.

    Attributes:
        tokens: int32 ids, a multiple of chunk_tokens.
        provenance: how many of their chunks were exact, decode and approximate, in this order.
        window: of the pager that released them, in tokens.
    """

    tokens: np.ndarray[Any, Any]
    provenance: tuple[int, int, int]
    window: int

    def session_values(self) -> dict[str, object]:
        """Its entries in a snapshot's session section."""
        ids = np.ascontiguousarray(self.tokens, dtype="<i4")
        return {
            _TOKENS: base64.b64encode(ids.tobytes()).decode("ascii"),
            _PROVENANCE: list(self.provenance),
            _WINDOW: self.window,
        }

    @classmethod
    def of_content(cls, content: _core.SnapshotContent) -> ReleasedText | None:
        """The released text of a frozen sequence; None if it has all chunks."""
        text = _core.released_text(content)
        if text is None:
            return None
        tokens, (exact, decode, approximate), window = text
        return cls(tokens, (exact, decode, approximate), window)

    @classmethod
    def of_session(
        cls, session: Mapping[str, Any], path: str, chunk_tokens: int
    ) -> ReleasedText | None:
        """Reads the session section of `path`; None if nothing was released.

        Raises:
            CorruptSnapshotError: names the field that is invalid.
        """
        if not {_TOKENS, _PROVENANCE, _WINDOW} & session.keys():
            return None
        tokens = _ids(session.get(_TOKENS), path, chunk_tokens)
        counts = session.get(_PROVENANCE)
        if not (
            isinstance(counts, list)
            and len(counts) == 3
            and all(type(n) is int and n >= 0 for n in counts)
            and sum(counts) * chunk_tokens == len(tokens)
        ):
            raise CorruptSnapshotError(
                f"{path}: {_PROVENANCE} is {counts!r}, expected three counts that add up to the "
                f"{len(tokens) // chunk_tokens} chunks of {_TOKENS}"
            )
        window = session.get(_WINDOW)
        if type(window) is not int or not 1 <= window <= _MOST_WINDOW:
            raise CorruptSnapshotError(
                f"{path}: {_WINDOW} is {window!r}, expected 1 to {_MOST_WINDOW} tokens"
            )
        return cls(tokens, (counts[0], counts[1], counts[2]), window)


def _ids(text: object, path: str, chunk_tokens: int) -> np.ndarray[Any, Any]:
    """[n] int32, n a positive multiple of `chunk_tokens`, none negative."""
    expected = f"base64 of int32 ids, whole chunks of {chunk_tokens} tokens"
    if not isinstance(text, str):
        raise CorruptSnapshotError(
            f"{path}: {_TOKENS} is {type(text).__name__}, expected {expected}"
        )
    try:
        raw = base64.b64decode(text.encode("ascii"), validate=True)
    except (UnicodeEncodeError, binascii.Error) as error:
        raise CorruptSnapshotError(
            f"{path}: {_TOKENS} is not base64 ({error}), expected {expected}"
        ) from error
    if not raw or len(raw) % (4 * chunk_tokens):
        raise CorruptSnapshotError(
            f"{path}: {_TOKENS} has {len(raw)} bytes, expected {expected}: a positive multiple of "
            f"{4 * chunk_tokens}"
        )
    ids = np.frombuffer(raw, dtype="<i4").astype(np.int32)
    if int(ids.min()) < 0:
        raise CorruptSnapshotError(
            f"{path}: {_TOKENS} has the id {int(ids.min())}, expected 0 or more"
        )
    return ids
