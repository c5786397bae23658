"""Bits flipped in saved files, as a disk would."""

from __future__ import annotations

import struct
from pathlib import Path

PAYLOAD_AT = 4096
TABLE_AT = 64


def flip(path, offset):
    """Changes one bit of a file in place, so that whoever has it open sees it too."""
    with Path(path).open("r+b", buffering=0) as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 4]))


def damage_chunk(path, engine, chunk, layer=0):
    """Flips a bit of one layer's keys of a chunk of a self-contained file or a pack."""
    layout = engine.layout.native()
    before = sum(layout.slice_bytes(earlier) for earlier in range(layer))
    flip(path, PAYLOAD_AT + chunk * layout.chunk_bytes + before + 5)


def damage_summary(path, engine, chunk):
    """Flips a bit of a sealed chunk's summary."""
    flip(path, sections(path)[2][0] + chunk * engine.stats()["summary_bytes_per_chunk"] + 3)


def sections(path):
    """(offset, size) of each section of a file by its type."""
    front = Path(path).read_bytes()[:PAYLOAD_AT]
    (count,) = struct.unpack_from("<I", front, 16)
    entries = [struct.unpack_from("<HBBIQQQ", front, TABLE_AT + 32 * i) for i in range(count)]
    return {entry[0]: (entry[4], entry[5]) for entry in entries}


def packs(store):
    """The pack files of a directory store, oldest first."""
    return sorted(Path(store.path).glob("packs/*.kvsnap"), key=lambda path: path.stat().st_mtime_ns)
