"""`kvpager snapshot diff`: where two snapshots first differ, to the bit."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpager import _core
from kvpager.cli.failure import DIFFERENT, or_impossible
from kvpager.cli.options import add_snapshot
from kvpager.cli.output import emit_result
from kvpager.cli.parser import Parser
from kvpager.cli.snapshot.address import find_snapshot
from kvpager.cli.snapshot.opened import Opened, fingerprint_rules
from kvpager.cli.terminal import Look, look
from kvpager.layout import Layout
from kvpager.words import counted

_NAME = 12


def add(verbs: Any, common: Parser) -> None:
    """Adds the verb."""
    parser = verbs.add_parser(
        "diff",
        parents=[common],
        help="the first token, layer and element at which two snapshots differ",
        description="Compares layout, fingerprint, tokens and K/V of two snapshots. Checksums say "
        "which slices can differ, and only those are read, so that equal snapshots of any size "
        "compare in milliseconds. Says what the files record: `verify` says whether they are "
        "whole. Session state, scores and last uses are no part of a snapshot's identity.",
        epilog="Exit codes: 0 equal, 1 different, 2 wrong command line, 3 they could not be "
        "compared (no such file, damage where bytes had to be read).",
    )
    add_snapshot(parser, "a", "A")
    add_snapshot(parser, "b", "B")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Runs the verb."""
    with or_impossible():
        values = compare(Opened.at(find_snapshot(args.a)), Opened.at(find_snapshot(args.b)))
    emit_result(args, values, lambda: "\n".join(_lines(look(args), values)) + "\n")
    return 0 if values["equal"] else DIFFERENT


def compare(a: Opened, b: Opened) -> dict[str, Any]:
    """All differences, JSON-able; `equal` is equality of the logical digests."""
    layouts = _fields(a.layout.to_json(), b.layout.to_json()) | _fields(
        {"scorer": a.reader.scorer, "summary_page_bytes": a.reader.summary_page_bytes},
        {"scorer": b.reader.scorer, "summary_page_bytes": b.reader.summary_page_bytes},
    )
    fingerprint = _fields(a.fingerprint, b.fingerprint)
    rules = fingerprint_rules(fingerprint) if fingerprint else {}
    comparable = a.layout == b.layout
    return {
        "command": "snapshot diff",
        "a": a.address.text,
        "b": b.address.text,
        "equal": a.reader.logical_digest == b.reader.logical_digest,
        "logical_digest": [a.reader.logical_digest, b.reader.logical_digest],
        "layout": layouts,
        "fingerprint": {
            name: {"a": values[0], "b": values[1], "rule": rules[name]}
            for name, values in fingerprint.items()
        },
        "tokens": _tokens(a, b),
        "records": _records(a, b) if comparable else None,
        "payload": asdict(compare_payload(a.reader, b.reader)) if comparable else None,
        "session": _fields(a.session, b.session),
    }


def _fields(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, list[Any]]:
    """[a's value, b's value] of every field in which they differ."""
    names = [*a, *(name for name in b if name not in a)]
    return {name: [a.get(name), b.get(name)] for name in names if a.get(name) != b.get(name)}


def _tokens(a: Opened, b: Opened) -> dict[str, Any]:
    mine, theirs = np.asarray(a.reader.tokens), np.asarray(b.reader.tokens)
    first = first_difference(mine, theirs)
    at = [
        int(tokens[first]) if first is not None and first < len(tokens) else None
        for tokens in (mine, theirs)
    ]
    return {
        "count": [len(mine), len(theirs)],
        "first_difference": first,
        "a": at[0],
        "b": at[1],
    }


def _records(a: Opened, b: Opened) -> dict[str, Any]:
    """First chunk, and how many, whose provenance, summary or chain hash differ."""
    mine, theirs = a.reader, b.reader
    sealed = min(mine.sealed_chunks, theirs.sealed_chunks)
    chunks = min(mine.chunks, theirs.chunks)
    columns: dict[str, tuple[Any, Any]] = {
        "provenance": (mine.provenance[:chunks], theirs.provenance[:chunks]),
        "summary": (mine.summary_checksums[:sealed], theirs.summary_checksums[:sealed]),
        "chain_hash": (mine.chain_hashes[:sealed], theirs.chain_hashes[:sealed]),
    }
    result = {}
    for name, (x, y) in columns.items():
        differs = [i for i, (p, q) in enumerate(zip(x, y)) if p != q]
        result[name] = {"chunks": len(differs), "first_chunk": differs[0] if differs else None}
    return result


def _lines(shown: Look, values: dict[str, Any]) -> Iterator[str]:
    def line(name: str, value: str) -> str:
        return shown.field(name, value, wide=_NAME)

    digests = values["logical_digest"]
    if values["equal"]:
        yield line("equal", f"logical digest {digests[0]}")
    else:
        yield line("DIFFERENT", f"a: {values['a']}  {digests[0]}")
        yield line("", f"b: {values['b']}  {digests[1]}")
        for name, (a, b) in values["layout"].items():
            yield line("layout", f"{name}: {a} / {b}")
        yield line("fingerprint", _fingerprint_verdict(values["fingerprint"]))
        for name, field in values["fingerprint"].items():
            yield line("", f"{name}: {field['a']!r} / {field['b']!r} ({field['rule']})")
        yield line("tokens", _token_verdict(values["tokens"]))
        if values["payload"] is None:
            yield line("K/V", "not compared: the layouts differ")
        else:
            yield from _payload_lines(shown, values["payload"])
            for name, found in values["records"].items():
                if found["chunks"]:
                    chunks = counted(found["chunks"], "chunk")
                    label = name.replace("_", " ")
                    yield line(label, f"differs in {chunks}, first {found['first_chunk']:,}")
    for name, (a, b) in values["session"].items():
        yield line("session", f"{name}: {a!r} / {b!r} (no part of the digest)")


def _fingerprint_verdict(fields: Mapping[str, Any]) -> str:
    if not fields:
        return "equal"
    return "1 field differs" if len(fields) == 1 else f"{len(fields)} fields differ"


def _token_verdict(tokens: dict[str, Any]) -> str:
    mine, theirs = tokens["count"]
    first = tokens["first_difference"]
    if first is None:
        return f"equal, {mine:,}"
    if tokens["a"] is None or tokens["b"] is None:
        return f"{mine:,} / {theirs:,}, equal as far as both go"
    counts = f"{mine:,} / {theirs:,}, " if mine != theirs else f"{mine:,}, "
    return f"{counts}first different at position {first:,}: {tokens['a']} / {tokens['b']}"


def _payload_lines(shown: Look, payload: dict[str, Any]) -> Iterator[str]:
    chunks, slices = payload["chunks"], payload["slices"]
    if not chunks:
        yield shown.field("K/V", "equal in all positions that both have", wide=_NAME)
        return
    yield shown.field(
        "K/V",
        f"differ in {chunks:,} of {counted(payload['chunks_compared'], 'chunk')}, {slices:,} of "
        f"{counted(payload['slices_compared'], 'slice')} (layers of a chunk)",
        wide=_NAME,
    )
    first = payload["first"]
    if first is None:
        yield shown.field("", "only in bytes that belong to no element", wide=_NAME)
        return
    yield shown.field(
        "first",
        f"token {first['token']:,} (chunk {first['chunk']:,}, row {first['row']}), layer "
        f"{first['layer']}, {first['part']}, kv head {first['head']}, element {first['index']}",
        wide=_NAME,
    )
    for name in ("a", "b"):
        yield shown.field("", f"{name}: {first[name]!r} ({first[name + '_bits']})", wide=_NAME)


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
        self._layout = Layout.of(a.layout).of_layer(layer)
        self._chunk, self._layer = chunk, layer
        self._rows = (a.read_rows(chunk, layer), b.read_rows(chunk, layer))

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
        for head in range(self._layout.kv_heads):
            for part, x, y in zip(("K", "V"), *self._rows, strict=True):
                yield part, head, x[:, head], y[:, head]


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
