"""`kvpager snapshot diff`: where two snapshots first differ, to the bit."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from kvpager.cli.output import check_writable, emit, emit_json
from kvpager.cli.parser import Parser
from kvpager.cli.snapshot.address import find_snapshot
from kvpager.cli.snapshot.difference import compare_payload, first_difference
from kvpager.cli.snapshot.fields import fingerprint_rules
from kvpager.cli.snapshot.opened import Opened
from kvpager.cli.snapshot.options import DIFFERENT, add_snapshot, or_impossible
from kvpager.cli.terminal import Look, look
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
    check_writable("--output", args.output)
    with or_impossible():
        values = compare(Opened.at(find_snapshot(args.a)), Opened.at(find_snapshot(args.b)))
    if args.format == "json":
        emit_json(args, values)
    else:
        emit(args, "\n".join(_lines(look(args), values)) + "\n")
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
