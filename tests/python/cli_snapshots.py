"""Small snapshots for the command line's tests, and ways to damage them to the bit.

The format is written down here once more, from docs/snapshot_format.md and without the package, so
that what the command line says of a file is compared with what is really in it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from kvpager.cli import main
from kvpager.config import Dense, PagerConfig
from kvpager.pager import Layout, Pager
from kvpager.stores import DirectoryStore

C = 16  # tokens of a chunk
FINGERPRINT = {"weights": "0123", "torch_version": "2.13.0", "rows": C}
FRONT = 4096
WIDTH = {"float32": 4, "float16": 2, "bfloat16": 2}
LAYOUT = Layout(2, 2, 32, 32, chunk_tokens=C)


def text(length: int, layout: Layout = LAYOUT, seed: int = 0):
    """Token ids [length] and k, v [layers, length, kv_heads, dim] of a made-up session."""
    random = np.random.default_rng(seed)
    ids = random.integers(0, 900, 4096, dtype=np.int32)[:length]
    shape = (layout.layers, 512, layout.kv_heads)
    k = random.standard_normal((*shape, layout.k_dim), dtype=np.float32)[:, :length]
    v = random.standard_normal((*shape, layout.v_dim), dtype=np.float32)[:, :length]
    return ids, k, v


@contextmanager
def sequence(
    length: int,
    *,
    layout: Layout = LAYOUT,
    fingerprint: Mapping[str, object] = FINGERPRINT,
    provenance: str = "exact",
    change: Any = None,
    seed: int = 0,
    salt: str = "",
):
    """A sequence of `length` positions; change(ids, k, v) may alter them before they are added."""
    config = PagerConfig(
        8 * C,
        chunk_tokens=layout.chunk_tokens,
        selection=Dense(),
        host_bytes=64 * layout.chunk_bytes,
    )
    pager = Pager(layout, config, rows=C, fingerprint=fingerprint, threads=1)
    ids, k, v = text(length, layout, seed)
    if change is not None:
        change(ids, k, v)
    with_ids = pager.sequence(salt=salt)
    with_ids.append(ids, k, v, provenance=provenance)
    try:
        yield with_ids
    finally:
        with_ids.close()
        pager.close()


def save_file(path: Path, length: int, *, session: Mapping[str, object] | None = None, **options):
    """A self-contained snapshot; returns its path."""
    with sequence(length, **options) as made:
        made.save(path, session=session or {"pending": 7})
    return path


def save_in(store: DirectoryStore, name: str, length: int, **options):
    """A snapshot in a store; returns its SaveReport."""
    with sequence(length, **options) as made:
        return store.save(
            name,
            made.freeze(),
            fingerprint=made.pager.fingerprint_json,
            session=made.session_text({"pending": 7}),
        )


# The format.


@dataclass(frozen=True)
class Cell:
    """One element of one page."""

    chunk: int
    layer: int
    part: str
    head: int
    row: int
    index: int


def offset_of(cell: Cell, layout: Layout) -> int:
    """Where the element begins in a self-contained file."""
    k = _tile(layout.k_dim, layout.k_dtype, layout.chunk_tokens)
    v = _tile(layout.v_dim, layout.v_dtype, layout.chunk_tokens)
    page = FRONT + ((cell.chunk * layout.layers + cell.layer) * layout.kv_heads + cell.head) * (
        k + v
    )
    if cell.part == "K":
        return page + (cell.index * layout.chunk_tokens + cell.row) * WIDTH[layout.k_dtype]
    return page + k + (cell.row * layout.v_dim + cell.index) * WIDTH[layout.v_dtype]


def flip(path: Path, offset: int, bit: int = 0) -> None:
    """Flips one bit of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


def reseal(path: Path, layout: Layout) -> None:
    """Makes every checksum of a self-contained file that of the bytes as they are now."""
    data = bytearray(path.read_bytes())
    count = struct.unpack_from("<I", data, 16)[0]
    table = {}
    for i in range(count):
        kind, _, _, _, offset, size, _ = struct.unpack_from("<HBBIQQQ", data, 64 + 32 * i)
        table[kind] = (64 + 32 * i, offset, size)
    heads = layout.kv_heads
    slice_bytes = heads * (
        _tile(layout.k_dim, layout.k_dtype, layout.chunk_tokens)
        + _tile(layout.v_dim, layout.v_dtype, layout.chunk_tokens)
    )
    _, chunks_at, chunks_size = table[7]
    record = 48 + 8 * layout.layers
    sums = b""
    for chunk in range(chunks_size // record):
        for layer in range(layout.layers):
            start = FRONT + (chunk * layout.layers + layer) * slice_bytes
            value = struct.pack("<Q", _xxh3(data[start : start + slice_bytes]))
            at = chunks_at + chunk * record + 48 + 8 * layer
            data[at : at + 8] = value
            sums += value
    struct.pack_into("<Q", data, table[1][0] + 24, _xxh3(sums))
    for kind in table.keys() - {1, 2}:
        entry, offset, size = table[kind]
        struct.pack_into("<Q", data, entry + 24, _xxh3(data[offset : offset + size]))
    struct.pack_into("<Q", data, 32, _xxh3(data[64 : 64 + 32 * count]))
    struct.pack_into("<Q", data, 56, _xxh3(data[:56]))
    path.write_bytes(data)


def make_major(path: Path, major: int) -> None:
    """Makes a file one of another major version, with a sound header."""
    data = bytearray(path.read_bytes())
    struct.pack_into("<H", data, 8, major)
    struct.pack_into("<Q", data, 56, _xxh3(data[:56]))
    path.write_bytes(data)


def _tile(dim: int, dtype: str, chunk_tokens: int) -> int:
    return -(-dim * chunk_tokens * WIDTH[dtype] // 64) * 64


def _xxh3(data: bytes | bytearray) -> int:
    return xxhash.xxh3_64_intdigest(bytes(data))


# The command line.


def told(capsys, *arguments, code: int = 0) -> str:
    """stdout of a command that ends with `code` and says nothing else."""
    got = main([*map(str, arguments)])
    out, err = capsys.readouterr()
    assert got == code, err or out
    assert err == ""
    return out


def told_json(capsys, *arguments, code: int = 0) -> dict[str, Any]:
    """The same with --format json."""
    return json.loads(told(capsys, *arguments, "--format", "json", code=code))


def refused(capsys, *arguments, code: int = 1) -> str:
    """The one line on stderr of a command that ends with `code` and gives no result."""
    got = main([*map(str, arguments)])
    out, err = capsys.readouterr()
    assert (got, out) == (code, ""), err or out
    assert err.startswith("kvpager: ")
    assert err.count("\n") == 1, err
    return err


def files_below(folder: Path) -> list[str]:
    """Every file below a folder, temporaries included, by relative name."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
