"""`kvpager snapshot`: looking into saved sessions."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvpager.cli.output import emit, emit_json
from kvpager.cli.parser import Parser


def add(commands: Any, common: Parser) -> None:
    """Adds the command and its own subcommands."""
    parser = commands.add_parser("snapshot", help="look into a saved session")
    parser.set_defaults(parser=parser)
    verbs = parser.add_subparsers(metavar="VERB", required=True, title="verbs")
    inspect = verbs.add_parser(
        "inspect",
        parents=[common],
        help="fingerprint, layout, tokens, chunks and digest, from metadata alone",
    )
    inspect.add_argument("file", metavar="FILE", help="what Session.save or --save wrote")
    inspect.set_defaults(run=run_inspect, parser=inspect)


def run_inspect(args: argparse.Namespace) -> int:
    """Runs `kvpager snapshot inspect`."""
    values = describe(args.file)
    if args.format == "json":
        emit_json(args, values)
    else:
        emit(args, _text(values))
    return 0


def describe(path: str) -> dict[str, Any]:
    """What a snapshot's verified metadata say.

    Raises:
        StorageError, CorruptSnapshotError, UnsupportedVersionError: it cannot be read.
    """
    from kvpager import open_snapshot

    info = open_snapshot(path)
    layout = info.layout
    return {
        "path": info.path,
        "file_bytes": Path(path).stat().st_size,
        "tokens": len(info.tokens),
        "chunks": info.reader.chunks,
        "sealed_chunks": info.reader.sealed_chunks,
        "layout": {**asdict(layout), "chunk_bytes": layout.chunk_bytes},
        "scorer": info.scorer,
        "session": info.session,
        "fingerprint": info.fingerprint,
        "logical_digest": info.logical_digest,
    }


def _text(values: dict[str, Any]) -> str:
    layout = values["layout"]
    shape = (
        f"{layout['layers']} layers x {layout['kv_heads']} kv heads, head_dim {layout['k_dim']} "
        f"({layout['k_dtype']}) and {layout['v_dim']} ({layout['v_dtype']})"
    )
    lines = [
        f"file       {values['path']} ({values['file_bytes']:,} bytes)",
        f"tokens     {values['tokens']:,}",
        f"chunks     {values['chunks']:,} of {layout['chunk_tokens']} tokens and "
        f"{layout['chunk_bytes']:,} bytes, {values['sealed_chunks']:,} sealed",
        f"layout     {shape}",
        f"scorer     {values['scorer']}",
        f"digest     {values['logical_digest']}",
        "session",
        *(f"  {name:22} {value}" for name, value in sorted(values["session"].items())),
        "fingerprint",
        *(f"  {name:22} {value}" for name, value in sorted(values["fingerprint"].items())),
    ]
    return "\n".join(lines) + "\n"
