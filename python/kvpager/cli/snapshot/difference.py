"""Where the K/V of two snapshots of one layout first differ, to the bit.

Slice checksums tell which slices can differ. Only those are read, and verified as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpager import _core

_ALIGNMENT = 64  # of tiles, docs/snapshot_format.md
_WORDS: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<u4"),
    "float16": np.dtype("<u2"),
    "bfloat16": np.dtype("<u2"),
}

Words = npt.NDArray[Any]


@dataclass(frozen=True)
class Element:
    """One number of K or V that differs.

    Attributes:
        token: position in the session.
        chunk: token // chunk_tokens.
        row: position in the chunk.
        layer: 0-based.
        part: "K" or "V".
        head: kv head, 0-based.
        index: element of the head's vector.
        a: value in the first snapshot.
        b: value in the second.
        a_bits: raw bits in hex.
        b_bits: likewise.
    """

    token: int
    chunk: int
    row: int
    layer: int
    part: str
    head: int
    index: int
    a: float
    b: float
    a_bits: str
    b_bits: str


@dataclass(frozen=True)
class PayloadDifference:
    """How much differs in the positions that both have, and the first of it."""

    chunks_compared: int
    chunks: int
    slices: int
    slices_compared: int
    first: Element | None


def compare_payload(a: _core.SnapshotReader, b: _core.SnapshotReader) -> PayloadDifference:
    """Compares the positions that both hold. REQUIRES: equal layouts.

    The first difference is that of the lowest token; of that, the lowest layer, K before V, the
    lowest head and element.

    Raises:
        CorruptSnapshotError, StorageError: a slice that has to be read cannot be trusted.
    """
    layout = a.layout
    tokens = min(len(a.tokens), len(b.tokens))
    chunks = -(-tokens // layout.chunk_tokens)
    differs = np.asarray(a.slice_checksums)[:chunks] != np.asarray(b.slice_checksums)[:chunks]
    if chunks and _rows(a, chunks - 1) != _rows(b, chunks - 1):
        # Here checksums differ already because one file has more rows in this chunk.
        last = chunks - 1
        rows = tokens - last * layout.chunk_tokens
        for layer in np.flatnonzero(differs[last]):
            differs[last, layer] = _Slices(a, b, last, int(layer)).differ(rows)
    first = None
    for chunk in np.flatnonzero(differs.any(axis=1)):
        rows = min(layout.chunk_tokens, tokens - int(chunk) * layout.chunk_tokens)
        first = _first_of_chunk(a, b, int(chunk), np.flatnonzero(differs[chunk]), rows)
        if first is not None:
            break
    return PayloadDifference(
        chunks_compared=chunks,
        chunks=int(differs.any(axis=1).sum()),
        slices=int(differs.sum()),
        slices_compared=int(differs.size),
        first=first,
    )


def first_difference(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> int | None:
    """The first index at which two arrays differ, or where the shorter ends; None: equal."""
    common = min(len(a), len(b))
    different = np.flatnonzero(a[:common] != b[:common])
    if len(different):
        return int(different[0])
    return None if len(a) == len(b) else common


def _rows(reader: _core.SnapshotReader, chunk: int) -> int:
    size = reader.layout.chunk_tokens
    return min(size, len(reader.tokens) - chunk * size)


def _first_of_chunk(
    a: _core.SnapshotReader,
    b: _core.SnapshotReader,
    chunk: int,
    layers: npt.NDArray[np.int64],
    rows: int,
) -> Element | None:
    best: Element | None = None
    for layer in layers:
        found = _Slices(a, b, chunk, int(layer)).first(rows if best is None else best.row)
        best = found or best  # of a later layer only an earlier row counts
    return best


class _Slices:
    """One slice of each file, both verified when read."""

    def __init__(
        self, a: _core.SnapshotReader, b: _core.SnapshotReader, chunk: int, layer: int
    ) -> None:
        self._layout = a.layout
        self._chunk, self._layer = chunk, layer
        self._bytes = (a.read_slice(chunk, layer), b.read_slice(chunk, layer))

    def differ(self, rows: int) -> bool:
        """Whether the first `rows` rows do."""
        return any((x[:rows] != y[:rows]).any() for _, _, x, y in self._tiles())

    def first(self, rows: int) -> Element | None:
        """The first difference in the first `rows` rows: by row, then K before V, head, element."""
        best: tuple[tuple[int, str, int, int], Words, Words] | None = None
        for part, head, x, y in self._tiles():
            row, index = _first_cell(x[:rows], y[:rows])
            key = (row, part, head, index)
            if row >= 0 and (best is None or key < best[0]):
                best = key, x, y
        if best is None:
            return None
        (row, part, head, index), x, y = best
        dtype = self._layout.k_dtype if part == "K" else self._layout.v_dtype
        return Element(
            token=self._chunk * self._layout.chunk_tokens + row,
            chunk=self._chunk,
            row=row,
            layer=self._layer,
            part=part,
            head=head,
            index=index,
            a=_value(x[row, index], dtype),
            b=_value(y[row, index], dtype),
            a_bits=_hex(x[row, index]),
            b_bits=_hex(y[row, index]),
        )

    def _tiles(self) -> Iterator[tuple[str, int, Words, Words]]:
        """(K or V, head, words [chunk_tokens, dim] of both files) of every tile."""
        layout = self._layout
        size, offset = layout.chunk_tokens, 0
        parts = (("K", layout.k_dim, layout.k_dtype), ("V", layout.v_dim, layout.v_dtype))
        for head in range(layout.kv_heads):
            for part, dim, dtype in parts:
                count = dim * size * _WORDS[dtype].itemsize
                x, y = (
                    np.asarray(data)[offset : offset + count].view(_WORDS[dtype])
                    for data in self._bytes
                )
                if part == "K":  # kept transposed
                    yield part, head, x.reshape(dim, size).T, y.reshape(dim, size).T
                else:
                    yield part, head, x.reshape(size, dim), y.reshape(size, dim)
                offset += -(-count // _ALIGNMENT) * _ALIGNMENT


def _first_cell(x: Words, y: Words) -> tuple[int, int]:
    """(row, column) of the first difference in row order; (-1, -1) without any."""
    where = np.argwhere(x != y)
    return (int(where[0][0]), int(where[0][1])) if len(where) else (-1, -1)


def _value(word: Any, dtype: str) -> float:
    if dtype == "bfloat16":
        return float((np.uint32(word) << np.uint32(16)).view(np.float32))
    kind = np.dtype(np.float16 if dtype == "float16" else np.float32)
    return float(np.asarray(word).view(kind))


def _hex(word: Any) -> str:
    return f"0x{int(word):0{2 * word.dtype.itemsize}x}"
