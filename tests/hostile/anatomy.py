"""A snapshot file in pieces, from docs/snapshot_format.md alone: what the attacks take apart.

`take_apart` and `put_together` change whole sections and seal the file again, as an attacker would
who knows the format. `regions` names every byte of a file.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from itertools import pairwise

from xxhash import xxh3_64_intdigest as checksum_of

MAGIC = b"\x89KVSNAP\n"
FRONT, HEADER, ENTRY = 4096, 64, 32
PAYLOAD, SUMMARIES, LAYOUT, FINGERPRINT, SESSION, TOKENS, CHUNKS, HINTS, PACKS = range(1, 10)
NAMES = (
    "payload",
    "summaries",
    "layout",
    "fingerprint",
    "session",
    "tokens",
    "chunks",
    "hints",
    "packs",
)
# name: (offset, struct code), as in the document's tables
HEADER_FIELDS = {
    "magic": (0, "Q"),
    "major": (8, "H"),
    "minor": (10, "H"),
    "header_bytes": (12, "I"),
    "section_count": (16, "I"),
    "entry_bytes": (20, "I"),
    "file_bytes": (24, "Q"),
    "table_checksum": (32, "Q"),
    "reserved": (40, "16s"),
    "checksum": (56, "Q"),
}
ENTRY_FIELDS = {
    "type": (0, "H"),
    "version": (2, "B"),
    "flags": (3, "B"),
    "reserved": (4, "I"),
    "offset": (8, "Q"),
    "size": (16, "Q"),
    "checksum": (24, "Q"),
}
LAYOUT_FIELDS = {
    "layers": (0, "i"),
    "kv_heads": (4, "i"),
    "chunk_tokens": (8, "i"),
    "k_dim": (12, "i"),
    "v_dim": (16, "i"),
    "k_dtype": (20, "B"),
    "v_dtype": (21, "B"),
    "scorer_bytes": (22, "H"),
    "summary_page_bytes": (24, "q"),
}
RECORD_FIELDS = {
    "valid": (0, "i"),
    "provenance": (4, "B"),
    "reserved": (5, "3s"),
    "chain_hash": (8, "32s"),
    "summary_checksum": (40, "Q"),
}


def align64(n):
    return (n + 63) // 64 * 64


@dataclass
class Section:
    type: int
    data: bytes
    version: int = 1
    flags: int = 1

    @property
    def name(self):
        return NAMES[self.type - 1] if 1 <= self.type <= len(NAMES) else f"section {self.type}"


@dataclass
class Parts:
    sections: list[Section]
    major: int = 1
    minor: int = 0
    # Field of a table entry by (section index, name), written over what would be right.
    entry_overrides: dict = field(default_factory=dict)
    header_overrides: dict = field(default_factory=dict)

    def __getitem__(self, kind):
        return next(s for s in self.sections if s.type == kind)

    def has(self, kind):
        return any(s.type == kind for s in self.sections)

    @property
    def geometry(self):
        return Geometry.of(self[LAYOUT].data)

    def set(self, kind, fields, name, value, base=0):
        """Writes one field of a section."""
        offset, code = fields[name]
        data = bytearray(self[kind].data)
        struct.pack_into("<" + code, data, base + offset, value)
        self[kind].data = bytes(data)


@dataclass
class Geometry:
    layers: int
    kv_heads: int
    chunk_tokens: int
    k_dim: int
    v_dim: int
    k_bytes: int
    v_bytes: int
    summary_page_bytes: int

    @classmethod
    def of(cls, layout):
        *dims, k_dtype, v_dtype, _, page = struct.unpack_from("<5iBBHq", layout)
        return cls(*dims, 4 if k_dtype == 0 else 2, 4 if v_dtype == 0 else 2, page)

    @property
    def slice_bytes(self):
        k = align64(self.k_dim * self.chunk_tokens * self.k_bytes)
        v = align64(self.v_dim * self.chunk_tokens * self.v_bytes)
        return self.kv_heads * (k + v)

    @property
    def chunk_bytes(self):
        return self.layers * self.slice_bytes

    @property
    def summary_bytes(self):
        return self.layers * self.kv_heads * self.summary_page_bytes

    @property
    def record_bytes(self):
        return 48 + 8 * self.layers


def get(raw, fields, name, base=0):
    offset, code = fields[name]
    return struct.unpack_from("<" + code, raw, base + offset)[0]


def patched(raw, offset, code, value):
    """The file with one field changed and nothing else."""
    out = bytearray(raw)
    struct.pack_into("<" + code, out, offset, value)
    return bytes(out)


def flipped(raw, at, mask=0x10):
    out = bytearray(raw)
    out[at] ^= mask
    return bytes(out)


def take_apart(raw):
    sections = []
    for i in range(get(raw, HEADER_FIELDS, "section_count")):
        at = HEADER + i * ENTRY
        kind, version, flags, _, offset, size, _ = struct.unpack_from("<HBBIQQQ", raw, at)
        sections.append(Section(kind, raw[offset : offset + size], version, flags))
    major, minor = struct.unpack_from("<HH", raw, 8)
    return Parts(sections, major, minor)


def _bulk_checksums(parts):
    """Of payload and summaries: checksums of the checksums of the chunks that lie in the file."""
    geometry, records = parts.geometry, parts[CHUNKS].data
    own_slices, own_summaries = [], []
    for at in range(0, len(records) - geometry.record_bytes + 1, geometry.record_bytes):
        record = records[at : at + geometry.record_bytes]
        sealed = get(record, RECORD_FIELDS, "valid") == geometry.chunk_tokens
        if parts.has(PACKS) and sealed:
            continue
        own_slices.append(record[48:])
        if sealed:
            own_summaries.append(record[40:48])
    return {
        PAYLOAD: checksum_of(b"".join(own_slices)),
        SUMMARIES: checksum_of(b"".join(own_summaries)),
    }


def put_together(parts):
    """A file of these sections: offsets, sizes and checksums right, but for the overrides."""
    bulk = _bulk_checksums(parts) if parts.has(LAYOUT) and parts.has(CHUNKS) else {}
    out, table = bytearray(FRONT), bytearray()
    for i, section in enumerate(parts.sections):
        out.extend(bytes(align64(len(out)) - len(out)))
        entry = {
            "type": section.type,
            "version": section.version,
            "flags": section.flags,
            "reserved": 0,
            "offset": len(out),
            "size": len(section.data),
            "checksum": bulk.get(section.type, checksum_of(section.data)),
        }
        for (index, name), value in parts.entry_overrides.items():
            if index == i:
                entry[name] = value
        table += struct.pack("<HBBIQQQ", *entry.values())
        out += section.data
    out[HEADER : HEADER + len(table)] = table
    header = {
        "magic": int.from_bytes(MAGIC, "little"),
        "major": parts.major,
        "minor": parts.minor,
        "header_bytes": HEADER,
        "section_count": len(parts.sections),
        "entry_bytes": ENTRY,
        "file_bytes": len(out),
        "table_checksum": checksum_of(bytes(table)),
        "reserved": bytes(16),
        **parts.header_overrides,
    }
    struct.pack_into("<QHHIIIQQ16s", out, 0, *header.values())
    struct.pack_into("<Q", out, 56, checksum_of(bytes(out[:56])))
    return bytes(out)


def resealed_header(raw):
    """Table and header checksums made right; everything else stays as it is."""
    out = bytearray(raw)
    count = min(get(raw, HEADER_FIELDS, "section_count"), 64)
    struct.pack_into("<Q", out, 32, checksum_of(bytes(out[HEADER : HEADER + count * ENTRY])))
    struct.pack_into("<Q", out, 56, checksum_of(bytes(out[:56])))
    return bytes(out)


def regions(raw):
    """Every byte of a file, as (name, start, stop) in order, without gaps."""
    out = []
    for name, (offset, code) in HEADER_FIELDS.items():
        out.append((f"header.{name}", offset, offset + struct.calcsize("<" + code)))
    count = get(raw, HEADER_FIELDS, "section_count")
    parts = take_apart(raw)
    for i, section in enumerate(parts.sections):
        for name, (offset, code) in ENTRY_FIELDS.items():
            start = HEADER + i * ENTRY + offset
            out.append((f"table.{section.name}.{name}", start, start + struct.calcsize("<" + code)))
    end = HEADER + count * ENTRY
    geometry = parts.geometry
    for i, section in enumerate(parts.sections):
        start = get(raw, ENTRY_FIELDS, "offset", HEADER + i * ENTRY)
        if start > end:
            out.append((f"padding before {section.name}", end, start))
        end = start + len(section.data)
        step = {
            PAYLOAD: geometry.slice_bytes,
            SUMMARIES: geometry.summary_bytes,
            CHUNKS: geometry.record_bytes,
        }.get(section.type, len(section.data))
        for n, at in enumerate(range(start, end, max(step, 1))):
            out.append((f"{section.name}[{n}]", at, at + step))
    assert end == len(raw)
    assert all(a[2] == b[1] for a, b in pairwise(out))
    return out
