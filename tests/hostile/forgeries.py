"""Files whose checksums are all right and whose contents are not, by attack number.

Each forgery takes the parts of a sound file and yields (label, file, what the refusal must name).
The numbers are those of docs/snapshot_attacks.md.
"""

from __future__ import annotations

import copy
import math
import struct

from anatomy import (
    CHUNKS,
    ENTRY,
    ENTRY_FIELDS,
    FINGERPRINT,
    HEADER,
    HEADER_FIELDS,
    HINTS,
    LAYOUT,
    LAYOUT_FIELDS,
    PACKS,
    PAYLOAD,
    RECORD_FIELDS,
    SESSION,
    SUMMARIES,
    TOKENS,
    Section,
    align64,
    get,
    patched,
    put_together,
    resealed_header,
    take_apart,
)

U32 = (0, 1, 6, 65, 2**31, 2**32 - 2, 2**32 - 1)
U64 = (0, 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 64, 2**64 - 2, 2**64 - 1)
I32 = (0, -1, 2**30, 2**31 - 2, 2**31 - 1, -(2**31))

FORGERIES = {}
_ALL = ("self-contained", "pack", "manifest")


def forgery(number, kinds=_ALL):
    def register(function):
        FORGERIES[number] = (kinds, function)
        return function

    return register


def forged(number, kind, raw):
    """The forgeries of one number of a sound file of this kind."""
    kinds, function = FORGERIES[number]
    return list(function(raw)) if kind in kinds else []


def numbers_for(kind):
    return [n for n, (kinds, _) in FORGERIES.items() if kind in kinds]


def _with(raw, change):
    """The file with its parts changed and everything sealed again."""
    parts = copy.deepcopy(take_apart(raw))
    change(parts)
    return put_together(parts)


def _header(raw, name, value):
    offset, code = HEADER_FIELDS[name]
    return resealed_header(patched(raw, offset, code, value))


def _entry(raw, index, name, value):
    offset, code = ENTRY_FIELDS[name]
    return resealed_header(patched(raw, HEADER + index * ENTRY + offset, code, value))


@forgery(15)
def file_size_lies(raw):
    for value in (*U64, len(raw) - 1, len(raw) + 1, len(raw) + 64):
        yield f"file_bytes={value}", _header(raw, "file_bytes", value), "header.file_bytes"


@forgery(16)
def section_count_lies(raw):
    count = get(raw, HEADER_FIELDS, "section_count")
    for value in (*U32, count - 1, count + 1, 64):
        yield (
            f"section_count={value}",
            _header(raw, "section_count", value),
            "section_count|padding|type|offset|file size|table",
        )


@forgery(17)
def fixed_header_fields_differ(raw):
    for name, right in (("header_bytes", HEADER), ("entry_bytes", ENTRY)):
        for value in (*U32, right - 1, right + 1):
            yield f"{name}={value}", _header(raw, name, value), f"header.{name}"
    yield "reserved", _header(raw, "reserved", b"\0" * 15 + b"\1"), "header.reserved"


@forgery(18)
def section_offsets_lie(raw):
    for i, section in enumerate(take_apart(raw).sections):
        right = get(raw, ENTRY_FIELDS, "offset", HEADER + i * ENTRY)
        for value in (*U64, right - 64, right + 64, right + 1, len(raw)):
            if value != right:
                label = f"{section.name}.offset={value}"
                yield label, _entry(raw, i, "offset", value), f"{section.name}.offset"


@forgery(19)
def section_sizes_lie(raw):
    """Also sizes that bring offset + size around 2^64."""
    for i, section in enumerate(take_apart(raw).sections):
        at = get(raw, ENTRY_FIELDS, "offset", HEADER + i * ENTRY)
        right = len(section.data)
        for value in (
            *U64,
            right + 1,
            right + 64,
            max(right - 1, 0),
            2**64 - at,
            2**64 - at + right,
        ):
            if value % 2**64 != right:
                yield (
                    f"{section.name}.size={value}",
                    _entry(raw, i, "size", value % 2**64),
                    r"size|offset|checksum|padding",
                )


@forgery(20)
def layout_fields_at_their_extremes(raw):
    for name in ("layers", "kv_heads", "chunk_tokens", "k_dim", "v_dim"):
        for value in I32:
            yield (
                f"{name}={value}",
                _with(raw, lambda p, n=name, v=value: p.set(LAYOUT, LAYOUT_FIELDS, n, v)),
                f"layout.{name}",
            )
    for value in (-1, -(2**63), 2**63 - 1, 2**31):
        yield (
            f"summary_page_bytes={value}",
            _with(raw, lambda p, v=value: p.set(LAYOUT, LAYOUT_FIELDS, "summary_page_bytes", v)),
            "layout.summary_page_bytes",
        )
    for name in ("k_dtype", "v_dtype"):
        # A layout with codes is longer.
        for value, field in ((3, name), (4, "size"), (5, f"(size|{name})"), (6, name), (255, name)):
            yield (
                f"{name}={value}",
                _with(raw, lambda p, n=name, v=value: p.set(LAYOUT, LAYOUT_FIELDS, n, v)),
                f"layout.{field}",
            )
    for value in (0, 254, 255, 256, 65535):
        yield (
            f"scorer_bytes={value}",
            _with(raw, lambda p, v=value: p.set(LAYOUT, LAYOUT_FIELDS, "scorer_bytes", v)),
            r"layout\.(size|scorer)",
        )


@forgery(21)
def a_layout_in_range_whose_product_is_another(raw):
    """Every field legal by itself; together they claim up to 2^40 bytes a chunk."""
    extremes = {"layers": 1024, "kv_heads": 1024, "k_dim": 512, "v_dim": 512}
    for fields in (
        extremes,
        {**extremes, "chunk_tokens": 256},
        {"layers": 1},
        {"kv_heads": 2},
        {"k_dim": 32},
        {"v_dim": 32},
        {"summary_page_bytes": 2**30},
        {"summary_page_bytes": 2**30, **extremes},
    ):

        def change(parts, fields=fields):
            for name, value in fields.items():
                parts.set(LAYOUT, LAYOUT_FIELDS, name, value)

        yield str(fields), _with(raw, change), "size|checksum|layout|scorer|summar|shape"


@forgery(22)
def tokens_that_do_not_fit_the_chunks(raw):
    for extra in (1, 2, 3):

        def grow(parts, extra=extra):
            parts[TOKENS].data += bytes(extra)

        yield f"{extra} bytes more", _with(raw, grow), "tokens.size"
    for count in (0, 1, 2, 4096, 1 << 20):

        def resize(parts, count=count):
            parts[TOKENS].data = bytes(4 * count)

        yield f"{count} tokens", _with(raw, resize), r"\.size|packs|chunks"


@forgery(23)
def chunk_records_that_contradict_the_tokens(raw):
    geometry, records = take_apart(raw).geometry, take_apart(raw)[CHUNKS].data
    stride = geometry.record_bytes
    for c in range(len(records) // stride):
        base = c * stride
        right = get(records, RECORD_FIELDS, "valid", base)
        sealed = right == geometry.chunk_tokens

        def record(name, value, base=base):
            return _with(raw, lambda p: p.set(CHUNKS, RECORD_FIELDS, name, value, base))

        for value in (*I32, right - 1, right + 1):
            if value != right:
                yield f"chunks[{c}].valid={value}", record("valid", value), "chunks|checksum"
        for value in (3, 255):
            label = f"chunks[{c}].provenance={value}"
            yield label, record("provenance", value), rf"chunks\[{c}\].provenance"
        yield f"chunks[{c}].reserved", record("reserved", b"\0\0\1"), rf"chunks\[{c}\].reserved"
        yield (
            f"chunks[{c}].chain_hash",
            record("chain_hash", bytes(32) if sealed else b"\1" * 32),
            rf"chunks\[{c}\].chain_hash",
        )
        if not sealed:
            label = f"chunks[{c}].summary_checksum"
            yield label, record("summary_checksum", 1), rf"chunks\[{c}\].summary_checksum"
    for size in (0, 1, stride - 1, len(records) - 1, len(records) + stride, 1 << 20):

        def resize(parts, size=size):
            parts[CHUNKS].data = records[:size].ljust(size, b"\0")

        yield f"chunks of {size} bytes", _with(raw, resize), "chunks.size"


@forgery(24)
def bulk_checksums_that_contradict_the_chunk_table(raw):
    for kind in (PAYLOAD, SUMMARIES):
        name = ("payload", "summaries")[kind - 1]
        yield name, _entry(raw, kind - 1, "checksum", 12345), f"{name}.checksum"


def _hints(scores, uses, claimed=None):
    """A hints section; `claimed` overrides the two counts."""
    counts = claimed or (len(scores), len(uses))
    return struct.pack(f"<II{len(scores)}d{len(uses)}Q", *counts, *scores, *uses)


@forgery(25)
def hints_that_contradict_the_chunks(raw):
    parts = take_apart(raw)
    n = len(parts[CHUNKS].data) // parts.geometry.record_bytes
    fine, used = [0.5] * n, [1] * n

    def hints(data):
        def change(parts):
            parts.sections = [s for s in parts.sections if s.type != HINTS]
            at = sum(s.type < HINTS for s in parts.sections)
            parts.sections.insert(at, Section(HINTS, data, flags=0))

        return _with(raw, change)

    for bad in (math.nan, math.inf, -math.inf):
        yield f"score {bad}", hints(_hints([*fine[1:], bad], used)), "hints.qk_score"
    for claimed in ((0, 0), (n + 1, n), (n, n - 1), (2**31, n), (2**32 - 1, 2**32 - 1)):
        yield f"counts {claimed}", hints(_hints(fine, used, claimed)), "hints"
    yield "too many scores", hints(_hints([*fine, 0.0], [])), "hints.qk_score"
    yield "too few uses", hints(_hints([], used[1:])), "hints.last_use" if n > 1 else "hints"
    yield "empty", hints(_hints([], [])), "hints"
    for size in (0, 1, 7):
        yield f"{size} bytes", hints(bytes(size)), "hints"


@forgery(26)
def sections_out_of_order(raw):
    for i in range(len(take_apart(raw).sections) - 1):

        def swap(parts, i=i):
            s = parts.sections
            s[i], s[i + 1] = s[i + 1], s[i]

        yield f"{i} and {i + 1} swapped", _with(raw, swap), r"\.type"


@forgery(27)
def sections_twice(raw):
    for i in range(len(take_apart(raw).sections)):

        def double(parts, i=i):
            parts.sections.insert(i, parts.sections[i])

        yield f"section {i} twice", _with(raw, double), r"\.type"


@forgery(28)
def sections_missing(raw):
    parts = take_apart(raw)
    for i, section in enumerate(parts.sections):
        if section.type == HINTS:
            continue  # optional

        def drop(parts, i=i):
            del parts.sections[i]

        if section.type in (LAYOUT, CHUNKS):  # without these nothing can be sealed
            continue
        yield (
            f"without {section.name}",
            _with(raw, drop),
            r"\.type|section_count|size",
        )
    yield "no section", _with(raw, lambda p: p.sections.clear()), "section_count"


@forgery(29)
def sections_that_overlap_or_leave_gaps(raw):
    parts = take_apart(raw)
    for i in range(1, len(parts.sections)):
        at = get(raw, ENTRY_FIELDS, "offset", HEADER + i * ENTRY)
        before = get(raw, ENTRY_FIELDS, "offset", HEADER + (i - 1) * ENTRY)
        name = parts.sections[i].name
        if before != at:
            yield f"{name} over its neighbour", _entry(raw, i, "offset", before), f"{name}.offset"
        gap = raw[:at] + bytes(64) + raw[at:]
        for j in range(i, len(parts.sections)):
            where = HEADER + j * ENTRY + 8
            gap = patched(gap, where, "Q", get(gap, ENTRY_FIELDS, "offset", where - 8) + 64)
        gap = _header(gap, "file_bytes", len(gap))
        yield f"a gap before {name}", gap, f"{name}.offset"


@forgery(30)
def flags_versions_and_reserved_bits(raw):
    for i, section in enumerate(take_apart(raw).sections):
        yield f"{section.name} reserved", _entry(raw, i, "reserved", 1), f"{section.name}.reserved"
        for flags in (section.flags ^ 1, section.flags | 2, 0xFF):
            label = f"{section.name} flags {flags}"
            yield label, _entry(raw, i, "flags", flags), section.name
        if section.flags & 1:
            for version in (0, 2, 255):
                label = f"{section.name} version {version}"
                yield label, _entry(raw, i, "version", version), f"{section.name}.version"


@forgery(31)
def an_unknown_required_section(raw):
    for kind in (10, 77, 65535):

        def add(parts, kind=kind):
            parts.sections.append(Section(kind, b"must be understood", flags=1))

        yield f"type {kind}", _with(raw, add), f"section {kind}.*required"


@forgery(32)
def another_major_version(raw):
    for major in (0, 2, 65535):
        yield f"major {major}", _header(raw, "major", major), rf"header\.version is {major}\.0"


@forgery(33)
def another_minor_version(raw):
    for minor in (1, 2, 3, 65535):
        yield f"minor {minor}", _header(raw, "minor", minor), rf"header\.version is 1\.{minor}"


def _packs(parts):
    """Fields of the packs section: [(id, chunks)], [(pack, chunk)]."""
    data = parts[PACKS].data
    count, _ = struct.unpack_from("<II", data)
    packs = [struct.unpack_from("<16sI", data, 8 + 24 * i) for i in range(count)]
    places = [struct.unpack_from("<II", data, at) for at in range(8 + 24 * count, len(data), 8)]
    return packs, places


def packs_section(packs, places, *, count=None, reserved=0, pack_reserved=0):
    out = struct.pack("<II", len(packs) if count is None else count, reserved)
    out += b"".join(struct.pack("<16sII", *pack, pack_reserved) for pack in packs)
    return out + b"".join(struct.pack("<II", *place) for place in places)


def _repacked(raw, change, **options):
    """The manifest with its packs and places changed by `change(packs, places)`."""

    def on_parts(parts):
        packs, places = _packs(parts)
        changed = change(list(packs), list(places))
        parts[PACKS].data = packs_section(*(changed or (packs, places)), **options)

    return _with(raw, on_parts)


def same(packs, places):
    return packs, places


@forgery(34, ("manifest",))
def a_pack_count_that_lies(raw):
    for count in (0, 1, 3, 256, 257, 2**31, 2**32 - 1):
        yield f"count={count}", _repacked(raw, same, count=count), r"packs[.\[]"
    many = [(struct.pack("<QQ", i + 1, 0), 1) for i in range(257)]
    yield "257 packs", _repacked(raw, lambda packs, places: (many, places)), r"packs\.count"
    yield "no packs", _repacked(raw, lambda packs, places: ([], places)), r"packs\.count"
    for size in (0, 1, 7, 8, 31):

        def cut(parts, size=size):
            parts[PACKS].data = parts[PACKS].data[:size]

        yield f"{size} bytes", _with(raw, cut), r"packs\.(size|count)"


@forgery(35, ("manifest",))
def reserved_words_of_the_packs_section(raw):
    yield "of the section", _repacked(raw, same, reserved=1), r"packs\.reserved"
    yield "of a pack", _repacked(raw, same, pack_reserved=1), r"packs\[0\]\.reserved"


@forgery(36, ("manifest",))
def places_out_of_range(raw):
    for field in (0, 1):
        for value in (2, 3, 2**31, 2**32 - 1):

            def move(packs, places, field=field, value=value):
                place = list(places[-1])
                place[field] = value
                return packs, [*places[:-1], tuple(place)]

            name = ("pack", "chunk")[field]
            yield f"{name}={value}", _repacked(raw, move), rf"packs\.places\[2\]\.{name}"


@forgery(37, ("manifest",))
def places_and_packs_listed_twice_unused_or_out_of_order(raw):
    def doubled_place(packs, places):
        return packs, [places[0], places[1], places[0]]

    def doubled_pack(packs, places):
        return [packs[0], packs[0]], places

    def unused(packs, places):
        return [*packs, (b"\x77" * 16, 1)], places

    def renumbered(packs, places):
        return packs[::-1], [(1 - pack, chunk) for pack, chunk in places]

    for change in (doubled_place, doubled_pack, unused, renumbered):
        yield change.__name__, _repacked(raw, change), "packs"


@forgery(38, ("manifest",))
def a_pack_whose_number_of_chunks_is_another(raw):
    for chunks in (0, 1, 3, 2**31 - 1, 2**31, 2**32 - 1):

        def lie(packs, places, chunks=chunks):
            return [(packs[0][0], chunks), packs[1]], places

        yield f"{chunks} chunks", _repacked(raw, lie), "pack"


@forgery(39, ("manifest",))
def sealed_chunks_in_the_manifest_itself(raw):
    parts = take_apart(raw)
    chunk, summary = parts.geometry.chunk_bytes, parts.geometry.summary_bytes

    def payload(parts):
        parts[PAYLOAD].data = bytes(chunk) + parts[PAYLOAD].data

    def no_tail(parts):
        parts[PAYLOAD].data = b""

    def summaries(parts):
        parts[SUMMARIES].data = bytes(summary)

    yield "a chunk more", _with(raw, payload), "payload.size"
    yield "no tail", _with(raw, no_tail), "payload.size"
    yield "a summary", _with(raw, summaries), "summaries.size"


@forgery(40, ("self-contained", "pack"))
def a_packs_section_in_a_file_that_has_its_chunks(raw):
    n = len(take_apart(raw)[CHUNKS].data) // take_apart(raw).geometry.record_bytes
    sealed = len(take_apart(raw)[TOKENS].data) // 4 // take_apart(raw).geometry.chunk_tokens
    places = [(0, i) for i in range(sealed)]

    def add(parts):
        parts.sections.append(Section(PACKS, packs_section([(b"\x11" * 16, n)], places)))

    yield "packs", _with(raw, add), "size"


def claims_of_terabytes(raw):
    """Sparse files that are as large as they claim: (label, first bytes, size, what is named)."""
    huge = 1 << 42
    last = len(take_apart(raw).sections) - 1
    at = get(raw, ENTRY_FIELDS, "offset", HEADER + last * ENTRY)
    grown = _entry(raw, last, "size", huge - at)
    yield "metadata", _header(grown, "file_bytes", huge), huge, "metadata size"
    first = len(take_apart(raw)[PAYLOAD].data)
    move = align64(huge)
    grown = patched(raw, HEADER + 16, "Q", first + move)
    for i in range(1, last + 1):
        where = HEADER + i * ENTRY + 8
        grown = patched(grown, where, "Q", get(raw, ENTRY_FIELDS, "offset", where - 8) + move)
    yield "payload", _header(grown, "file_bytes", len(raw) + move), len(raw) + move, "checksum|size"


JSON_ATTACKS = {
    # number: (label, text, what is wrong)
    54: [("deep", b"[" * 100_000), ("deep object", b'{"a":' * 100_000)],
    55: [("over the limit", b'{"a":"' + b"x" * (16 << 20) + b'"}')],
    56: [("bad UTF-8", b'{"a":"\xff"}'), ("a surrogate half", b'{"a":"\xed\xa0\x80"}')],
    57: [("twice", b'{"model":"a","model":"specimen"}'), ("twice inside", b'{"a":{"b":1,"b":1}}')],
    58: [("NaN", b'{"a":NaN}'), ("infinite", b'{"a":-Infinity}')],
    59: [
        ("empty", b""),
        ("a list", b"[1]"),
        ("null", b"null"),
        ("two objects", b"{}{}"),
        ("cut off", b'{"a":'),
        ("a NUL", b'{"a":1}\0'),
        ("a byte order mark", b"\xef\xbb\xbf{}"),
        ("a huge integer", b'{"a":' + b"9" * 5000 + b"}"),
    ],
}


def with_json(raw, section, text):
    def change(parts):
        parts[section].data = text

    return _with(raw, change)


JSON_SECTIONS = {"fingerprint": FINGERPRINT, "session": SESSION}
