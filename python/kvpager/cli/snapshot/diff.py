"""`kvpager snapshot diff`: where two snapshots first differ, to the bit."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpager import _core
from kvpager._model.layout import Layout
from kvpager._support.words import counted
from kvpager.cli.failure import DIFFERENT, or_impossible
from kvpager.cli.options import SNAPSHOT
from kvpager.cli.output import emit_result
from kvpager.cli.parser import Commands, option
from kvpager.cli.snapshot.address import find_snapshot
from kvpager.cli.snapshot.opened import Opened, fingerprint_rules
from kvpager.cli.snapshot.words import session_differences

Ids = npt.NDArray[np.int32]


def add(verbs: Commands) -> None:
    """Adds the verb."""
    parser = verbs.add(
        "diff",
        run,
        "the first token, layer and element at which two snapshots differ",
        "Compares layout, fingerprint, tokens and K/V of two snapshots. Checksums say which slices "
        "can differ, and only those are read, so that equal snapshots of any size compare in "
        "milliseconds. Says what the files record: `verify` says whether they are whole. Session "
        "state, scores and last uses are no part of a snapshot's identity.",
        epilog="Exit codes: 0 equal, 1 different, 2 wrong command line, 3 they could not be "
        "compared (no such file, damage where bytes had to be read).",
    )
    option(parser, "a A", SNAPSHOT)
    option(parser, "b B", SNAPSHOT)


def run(args: argparse.Namespace) -> int:
    """Runs the verb."""
    with or_impossible():
        values = compare(Opened.at(find_snapshot(args.a)), Opened.at(find_snapshot(args.b)))
    emit_result(args, values, lambda shown: shown.fields(_facts(values), 12))
    return 0 if values["equal"] else DIFFERENT


def compare(a: Opened, b: Opened) -> dict[str, Any]:
    """All differences, JSON-able; `equal` is equality of the logical digests."""
    fingerprint = _fields(a.fingerprint, b.fingerprint)
    rules = fingerprint_rules(fingerprint)
    comparable = a.layout == b.layout
    return {
        "command": "snapshot diff",
        "a": a.address.text,
        "b": b.address.text,
        "equal": a.reader.logical_digest == b.reader.logical_digest,
        "logical_digest": [a.reader.logical_digest, b.reader.logical_digest],
        "layout": _fields(*(_layout(one) for one in (a, b))),
        "fingerprint": {
            name: {"a": values[0], "b": values[1], "rule": rules[name]}
            for name, values in fingerprint.items()
        },
        "tokens": _tokens(a.reader.tokens, b.reader.tokens),
        "records": _records(a.reader, b.reader) if comparable else None,
        "payload": _payload(a.reader, b.reader) if comparable else None,
        "session": _fields(a.session, b.session),
    }


def _layout(one: Opened) -> dict[str, Any]:
    reader = one.reader
    summaries = {"scorer": reader.scorer, "summary_page_bytes": reader.summary_page_bytes}
    return one.layout.to_json() | summaries


def _fields(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, list[Any]]:
    """[a's value, b's value] of every field in which they differ."""
    return {name: [a.get(name), b.get(name)] for name in {**a, **b} if a.get(name) != b.get(name)}


def _tokens(a: Ids, b: Ids) -> dict[str, Any]:
    """Counts, and the first position at which ids differ, or one text ends."""
    common = min(len(a), len(b))
    differ = np.flatnonzero(a[:common] != b[:common])
    first = int(differ[0]) if len(differ) else None if len(a) == len(b) else common
    at = {
        name: None if first is None or first >= len(ids) else int(ids[first])
        for name, ids in (("a", a), ("b", b))
    }
    return {"count": [len(a), len(b)], "first_difference": first, **at}


def _records(a: _core.SnapshotReader, b: _core.SnapshotReader) -> dict[str, Any]:
    """First chunk, and how many, whose provenance, summary or chain hash differ."""
    columns: dict[str, list[Any]] = {
        "provenance": [reader.provenance for reader in (a, b)],
        "summary": [reader.summary_checksums[: reader.sealed_chunks] for reader in (a, b)],
        "chain_hash": [reader.chain_hashes[: reader.sealed_chunks] for reader in (a, b)],
    }
    result = {}
    for name, (x, y) in columns.items():
        differs = [i for i, (p, q) in enumerate(zip(x, y)) if p != q]
        result[name] = {"chunks": len(differs), "first_chunk": differs[0] if differs else None}
    return result


def _payload(a: _core.SnapshotReader, b: _core.SnapshotReader) -> dict[str, Any]:
    """How many slices differ in the positions that both have, and the first element that does.

    Raises:
        CorruptSnapshotError, StorageError: a slice that has to be read cannot be trusted.
    """
    size = a.layout.chunk_tokens
    tokens = min(len(a.tokens), len(b.tokens))
    chunks = -(-tokens // size)
    differs = np.asarray(a.slice_checksums)[:chunks] != np.asarray(b.slice_checksums)[:chunks]
    if len(a.tokens) != len(b.tokens) and tokens % size:
        # Checksums of the last chunk differ already because one file has more rows in it.
        for layer in np.flatnonzero(differs[-1]):
            differs[-1, layer] = bool(_firsts(a, b, chunks - 1, int(layer), tokens))
    first = None
    for chunk in np.flatnonzero(differs.any(axis=1)):
        layers = np.flatnonzero(differs[chunk])
        found = [one for layer in layers for one in _firsts(a, b, int(chunk), int(layer), tokens)]
        if found:
            first = _element(a.layout, int(chunk), *min(found))
            break
    return {
        "chunks_compared": chunks,
        "chunks": int(differs.any(axis=1).sum()),
        "slices": int(differs.sum()),
        "slices_compared": int(differs.size),
        "first": first,
    }


# Row, layer, K or V, head, index: the least of them comes first. Then the words of both files.
_Cell = tuple[int, int, str, int, int, Any, Any]


def _firsts(
    a: _core.SnapshotReader, b: _core.SnapshotReader, chunk: int, layer: int, tokens: int
) -> list[_Cell]:
    """The first key and the first value that differ in a slice's rows below `tokens`, if any do."""
    rows = tokens - chunk * a.layout.chunk_tokens
    found = []
    for part, x, y in zip("KV", a.read_rows(chunk, layer), b.read_rows(chunk, layer)):
        for row, head, index in np.argwhere(x[:rows] != y[:rows])[:1].tolist():
            found.append((row, layer, part, head, index, x[row, head, index], y[row, head, index]))
    return found


def _element(
    layout: _core.Layout,
    chunk: int,
    row: int,
    layer: int,
    part: str,
    head: int,
    index: int,
    *words: Any,
) -> dict[str, Any]:
    """One number of K or V: where it is, its value and its bits in both files."""
    own = Layout.of(layout).of_layer(layer)
    dtype = own.k_dtype if part == "K" else own.v_dtype
    return {
        "token": chunk * own.chunk_tokens + row,
        "chunk": chunk,
        "row": row,
        "layer": layer,
        "part": part,
        "head": head,
        "index": index,
        **{name: _value(word, dtype) for name, word in zip("ab", words)},
        **{
            f"{name}_bits": f"0x{int(word):0{2 * word.dtype.itemsize}x}"
            for name, word in zip("ab", words)
        },
    }


def _value(word: Any, dtype: str) -> float:
    if dtype == "bfloat16":
        return float((np.uint32(word) << np.uint32(16)).view(np.float32))
    return float(word.view(np.float16 if dtype == "float16" else np.float32))


def _facts(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    digests, payload = values["logical_digest"], values["payload"]
    if values["equal"]:
        yield "equal", f"logical digest {digests[0]}"
    else:
        yield "DIFFERENT", f"a: {values['a']}  {digests[0]}"
        yield "", f"b: {values['b']}  {digests[1]}"
        for name, (a, b) in values["layout"].items():
            yield "layout", f"{name}: {a} / {b}"
        count = len(values["fingerprint"])
        one = "1 field differs" if count == 1 else f"{count} fields differ"
        yield "fingerprint", one if count else "equal"
        for name, field in values["fingerprint"].items():
            yield "", f"{name}: {field['a']!r} / {field['b']!r} ({field['rule']})"
        yield "tokens", _token_verdict(**values["tokens"])
        if payload is None:
            yield "K/V", "not compared: the layouts differ"
        else:
            yield from _payload_facts(**payload)
            for name, found in values["records"].items():
                if found["chunks"]:
                    chunks = counted(found["chunks"], "chunk")
                    told = f"differs in {chunks}, first {found['first_chunk']:,}"
                    yield name.replace("_", " "), told
    for name, told in session_differences(values["session"]):
        yield "session", f"{name}: {told} (no part of the digest)"


def _token_verdict(
    count: Sequence[int], first_difference: int | None, a: int | None, b: int | None
) -> str:
    mine, theirs = count
    if first_difference is None:
        return f"equal, {mine:,}"
    counts = f"{mine:,}" if mine == theirs else f"{mine:,} / {theirs:,}"
    if a is None or b is None:
        return f"{counts}, equal as far as both go"
    return f"{counts}, first different at position {first_difference:,}: {a} / {b}"


def _payload_facts(
    *,
    chunks: int,
    chunks_compared: int,
    slices: int,
    slices_compared: int,
    first: Mapping[str, Any] | None,
) -> Iterator[tuple[str, str]]:
    if not chunks:
        yield "K/V", "equal in all positions that both have"
        return
    yield (
        "K/V",
        f"differ in {chunks:,} of {counted(chunks_compared, 'chunk')}, {slices:,} of "
        f"{counted(slices_compared, 'slice')} (layers of a chunk)",
    )
    if first is None:
        yield "", "only in bytes that belong to no element"
        return
    yield (
        "first",
        f"token {first['token']:,} (chunk {first['chunk']:,}, row {first['row']}), layer "
        f"{first['layer']}, {first['part']}, kv head {first['head']}, element {first['index']}",
    )
    for name in "ab":
        yield "", f"{name}: {first[name]!r} ({first[name + '_bits']})"
