"""`kvpager snapshot verify`: reads every byte and checks it."""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvpager.cli.failure import DIFFERENT, or_impossible
from kvpager.cli.options import add_threads
from kvpager.cli.output import emit_result
from kvpager.cli.parser import Parser
from kvpager.cli.snapshot.address import find_snapshot, is_store
from kvpager.cli.snapshot.opened import Opened, companions_of, open_or_damaged
from kvpager.cli.snapshot.verify_store import (
    Damage,
    damage_lines,
    of_chunk,
    remember_damage,
    verify_store,
    whole_file,
)
from kvpager.cli.terminal import byte_progress, look
from kvpager.errors import CorruptSnapshotError
from kvpager.stores import DirectoryStore
from kvpager.stores.base import ProgressCallback
from kvpager.words import byte_rate, byte_size, counted, duration

DIGESTS = ("sha256", "blake2b")
_BLOCK = 4 << 20


def add(verbs: Any, common: Parser) -> None:
    """Adds the verb."""
    parser = verbs.add_parser(
        "verify",
        parents=[common],
        help="read every byte and list all damage",
        description="Reads every byte of a snapshot and its companions, or of a whole store, and "
        "checks it. Of a "
        "store every pack is read once, however many snapshots share it, and the store remembers "
        "damage: the chunk is shared no more, and written again by the next save that has it.",
        epilog="Exit codes: 0 all is whole, 1 damage was found, 2 wrong command line, 3 it could "
        "not be checked (no such file, no permission, another format version).",
    )
    parser.add_argument(
        "snapshot",
        metavar="SNAPSHOT",
        help="a snapshot file, STORE/NAME, or STORE for all that a directory store keeps",
    )
    add_threads(parser)
    parser.add_argument(
        "--digest",
        choices=DIGESTS,
        help="tell this digest of the file's bytes as well (of a manifest: of the manifest's)",
    )
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Runs the verb."""
    with or_impossible():
        values, found = _check(args)
    values |= {"whole": not found, "damage": [part.to_json() for part in found]}
    emit_result(args, values, lambda: "\n".join(_lines(args, values, found)) + "\n")
    return DIFFERENT if found else 0


def _check(args: argparse.Namespace) -> tuple[dict[str, Any], list[Damage]]:
    """What was checked, and all damage there is."""
    path = Path(args.snapshot)
    values: dict[str, Any] = {"command": "snapshot verify", "path": args.snapshot}
    if is_store(path):
        if args.digest is not None:
            args.parser.error(f"--digest {args.digest} is of one file, and {path} is a store")
        with byte_progress(args, "verify") as progress:
            start = time.perf_counter()
            report = verify_store(path, args.threads, progress)
            seconds = time.perf_counter() - start
        values |= {"kind": "store", "snapshots": report.snapshots, "packs": report.packs}
        found, read = report.damage, report.bytes_read
    else:
        values |= {"kind": None, "tokens": None, "chunks": None, "logical_digest": None}
        with byte_progress(args, "verify") as progress:
            start = time.perf_counter()
            found, read = _check_snapshot(args, values, progress)
            seconds = time.perf_counter() - start
    values |= {"bytes_read": read, "seconds": seconds, "bytes_per_second": read / seconds}
    values["threads"] = args.threads
    if args.digest is not None:
        values["file_digest"] = {args.digest: _file_digest(find_snapshot(args.snapshot).path, args)}
    return values, found


def _check_snapshot(
    args: argparse.Namespace, values: dict[str, Any], progress: ProgressCallback | None
) -> tuple[list[Damage], int]:
    """All damage, and bytes read; fills in `values`."""
    address = find_snapshot(args.snapshot)
    opened = open_or_damaged(address)
    if isinstance(opened, CorruptSnapshotError):
        size = address.path.stat().st_size
        return [whole_file(str(address.path), address.text, opened)], size
    reader = opened.reader
    values["kind"] = opened.kind
    values["tokens"], values["chunks"] = len(reader.tokens), reader.chunks
    values["logical_digest"] = reader.logical_digest
    found, read = _check_payload(args, opened, progress)
    values["companions"] = []
    for companion in companions_of(opened):
        values["companions"].append({"kind": companion.kind, "state": companion.state})
        if companion.damage is not None:
            path, text = str(companion.address.path), companion.address.text
            found.append(whole_file(path, text, companion.damage))
        elif companion.opened is not None:
            more, more_read = _check_payload(args, companion.opened, progress)
            found, read = found + more, read + more_read
    return found, read


def _check_payload(
    args: argparse.Namespace, opened: Opened, progress: ProgressCallback | None
) -> tuple[list[Damage], int]:
    """Damage of an opened snapshot's chunks, which its store records, and bytes read."""
    address, reader = opened.address, opened.reader
    bad = reader.verify(args.threads, progress)
    if address.store is not None and bad:
        store = DirectoryStore(address.store, create=False)
        for chunk in sorted({chunk for chunk, _, _ in bad}):
            remember_damage(store, opened, chunk)
    found = [
        of_chunk(opened, address.text, chunk, layer if layer >= 0 else None, message)
        for chunk, layer, message in bad
    ]
    return found, reader.payload_bytes_read + opened.metadata_bytes


def _file_digest(path: Path, args: argparse.Namespace) -> str:
    digest = hashlib.new(args.digest)
    size, done = path.stat().st_size, 0
    with path.open("rb") as file, byte_progress(args, args.digest) as progress:
        while block := file.read(_BLOCK):
            digest.update(block)
            done += len(block)
            if progress is not None:
                progress(done, size)
    return digest.hexdigest()


def _lines(args: argparse.Namespace, values: dict[str, Any], found: list[Damage]) -> Iterator[str]:
    shown = look(args)
    speed = byte_rate(values["bytes_read"], values["seconds"])
    cost = f"{byte_size(values['bytes_read'])} in {duration(values['seconds'])}, {speed}"
    if values["kind"] == "store":
        what = f"{counted(values['snapshots'], 'snapshot')}, {counted(values['packs'], 'pack')}"
    elif values["kind"] is None:
        what = "cannot be opened"
    else:
        tokens, chunks = counted(values["tokens"], "token"), counted(values["chunks"], "chunk")
        what = f"{values['kind']}, {tokens} in {chunks}"
    yield shown.field("checked", f"{values['path']}: {what}", wide=8)
    yield shown.field("read", f"{cost} with {counted(values['threads'], 'thread')}", wide=8)
    if values.get("logical_digest"):
        yield shown.field("digest", values["logical_digest"], wide=8)
    for companion in values.get("companions", []):
        yield shown.field(companion["kind"], companion["state"], wide=8)
    for name, value in values.get("file_digest", {}).items():
        yield shown.field(name, value, wide=8)
    if not found:
        yield "whole: every byte is what was written"
        return
    yield f"DAMAGED: {counted(len(found), 'part')}"
    yield from damage_lines(found)
