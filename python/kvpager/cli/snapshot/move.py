"""`kvpager snapshot export | import`: from one place to another, the same to the last bit."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from typing import Any

from kvpager.cli.failure import CliError
from kvpager.cli.options import add_mode, add_snapshot
from kvpager.cli.output import check_writable, emit_result
from kvpager.cli.parser import Parser
from kvpager.cli.snapshot.address import find_place, find_snapshot, stored_names
from kvpager.cli.snapshot.opened import Opened, sound_companions
from kvpager.cli.terminal import byte_progress, look
from kvpager.stores import DirectoryStore, FileStore, SaveReport, SnapshotStore
from kvpager.stores.names import SNAPSHOT_SUFFIX
from kvpager.stores.permissions import PRIVATE
from kvpager.words import byte_rate, byte_size, counted, duration


def add(verbs: Any, common: Parser) -> None:
    """Adds the verbs."""
    _add_export(verbs, common)
    _add_import(verbs, common)


def transfer(
    args: argparse.Namespace, label: str, opened: Opened, store: SnapshotStore, name: str
) -> SaveReport:
    """Saves an opened snapshot under `name`, and what was saved with it.

    The logical digests are seen to be what they were. A companion that the store cannot take is
    left out with a warning.

    Raises:
        CorruptSnapshotError: a byte of it is not what was written; nothing was changed.
        CapacityError, StorageError: no room, or the system refused; likewise.
    """
    reader = opened.reader
    companions = sound_companions(opened)
    with byte_progress(args, label) as progress:
        report = store.save(
            name,
            reader,
            fingerprint=reader.fingerprint,
            session=reader.session,
            progress=progress,
            companions=[companion.snapshot for companion in companions],
            overwrite=True,  # the command has asked
        )
    digests = {companion.reader.logical_digest for companion in companions}
    for copy, expected in (
        (report, {reader.logical_digest}),
        *((copy, digests) for copy in report.companions),
    ):
        if copy.logical_digest not in expected:
            raise CliError(
                f"{copy.path}: its logical digest is {copy.logical_digest}, that of "
                f"{opened.address.text} is {', '.join(sorted(expected))}; do not use the copy"
            )
    return report


def _tell_transfer(args: argparse.Namespace, verb: str, opened: Opened, report: SaveReport) -> None:
    """The command's result."""
    source = opened.address.text
    values = {"command": f"snapshot {verb}", "source": source, **asdict(report)}
    field = look(args).field
    rate = byte_rate(report.bytes_written, report.seconds)
    shared = (
        f", {byte_size(report.bytes_shared)} shared with other snapshots"
        if report.bytes_shared
        else ""
    )
    tokens, chunks = counted(report.tokens, "token"), counted(report.chunks, "chunk")
    lines = [
        field(f"{verb}ed", f"{source} to {report.path}: {tokens} in {chunks}", wide=8),
        field(
            "wrote",
            f"{report.bytes_written:,} bytes in {duration(report.seconds)}, {rate}{shared}",
            wide=8,
        ),
        field("digest", f"{report.logical_digest}, as before", wide=8),
        *(field("with", beside.path, wide=8) for beside in report.companions),
    ]
    emit_result(args, values, lambda: "\n".join(lines) + "\n")


def _add_export(verbs: Any, common: Parser) -> None:
    """Adds the verb."""
    parser = verbs.add_parser(
        "export",
        parents=[common],
        help="make one self-contained file of a snapshot in a store",
        description="Writes a snapshot as one file that needs no store: to carry it elsewhere, or "
        "to keep it. Every byte is verified on the way, and the logical digest stays the same. "
        "The file appears whole or not at all.",
    )
    add_snapshot(parser)
    parser.add_argument("file", metavar="FILE", help="to write")
    parser.add_argument("--force", action="store_true", help="replace FILE if it is there")
    add_mode(parser)
    parser.set_defaults(run=_run_export, parser=parser)


def _run_export(args: argparse.Namespace) -> int:
    """Runs the verb."""
    opened = Opened.at(find_snapshot(args.snapshot))
    opened.require_session("export")
    check_writable("FILE", args.file)
    if os.path.lexists(args.file) and not args.force:
        raise CliError(f"FILE {args.file}: it is there already; give --force to replace it")
    report = transfer(args, "export", opened, FileStore(mode=args.mode or PRIVATE), args.file)
    _tell_transfer(args, "export", opened, report)
    return 0


def _add_import(verbs: Any, common: Parser) -> None:
    """Adds the verb."""
    parser = verbs.add_parser(
        "import",
        parents=[common],
        help="take a snapshot into a store, sharing what the store has",
        description="Takes a snapshot into a directory store. Only chunks that no snapshot of the "
        "store has are written. Every byte that is written is verified, and the logical digest "
        "stays the same.",
    )
    add_snapshot(parser)
    parser.add_argument(
        "store",
        metavar="STORE[/NAME]",
        help="a store, made if there is no such folder; the name is by default the snapshot's own",
    )
    parser.add_argument("--force", action="store_true", help="replace NAME if it is there")
    add_mode(parser)
    parser.set_defaults(run=_run_import, parser=parser)


def _run_import(args: argparse.Namespace) -> int:
    """Runs the verb."""
    address = find_snapshot(args.snapshot)
    own_name = address.name or address.path.name.removesuffix(SNAPSHOT_SUFFIX)
    folder, name = find_place(args.store, own_name)
    opened = Opened.at(address)
    opened.require_session("import")
    if name in stored_names(folder) and not args.force:
        raise CliError(
            f"{folder}/{name}: it is there already; give --force to replace it, or another name"
        )
    report = transfer(args, "import", opened, DirectoryStore(folder, mode=args.mode), name)
    _tell_transfer(args, "import", opened, report)
    return 0
