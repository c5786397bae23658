"""`kvpager snapshot export | import`: from one place to another, the same to the last bit."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import asdict

from kvpager._support.words import byte_rate, byte_size, counted, duration
from kvpager.cli.failure import CliError
from kvpager.cli.options import SNAPSHOT, add_mode
from kvpager.cli.output import check_writable, emit_result
from kvpager.cli.parser import Commands, option
from kvpager.cli.snapshot.address import find_place, find_snapshot, stored_names
from kvpager.cli.snapshot.opened import SOUND, Opened, companions_of
from kvpager.cli.terminal import work_progress
from kvpager.stores import FileStore, SaveReport, SnapshotStore
from kvpager.stores.companions import CompanionSnapshot
from kvpager.stores.files import PRIVATE
from kvpager.stores.names import SNAPSHOT_SUFFIX
from kvpager.stores.opening import open_store


def add(verbs: Commands) -> None:
    """Adds the verbs."""
    parser = verbs.add(
        "export",
        _export,
        "make one self-contained file of a snapshot in a store",
        "Writes a snapshot as one file that needs no store: to carry it elsewhere, or to keep it. "
        "Every byte is verified on the way, and the logical digest stays the same. The file "
        "appears whole or not at all.",
    )
    option(parser, "snapshot SNAPSHOT", SNAPSHOT)
    option(parser, "file FILE", "to write")
    option(parser, "--force", "replace FILE if it is there")
    add_mode(parser)
    parser = verbs.add(
        "import",
        _import,
        "take a snapshot into a store, sharing what the store has",
        "Takes a snapshot into a directory store. Only chunks that no snapshot of the store has "
        "are written. Every byte that is written is verified, and the logical digest stays the "
        "same.",
    )
    option(parser, "snapshot SNAPSHOT", SNAPSHOT)
    about = "a store, made if there is no such folder; the name is by default the snapshot's own"
    option(parser, "store STORE[/NAME]", about)
    option(parser, "--force", "replace NAME if it is there")
    add_mode(parser)


def _export(args: argparse.Namespace) -> int:
    opened = Opened.at(find_snapshot(args.snapshot))
    opened.require_session("export")
    check_writable("FILE", args.file)
    if os.path.lexists(args.file) and not args.force:
        raise CliError(f"FILE {args.file}: it is there already; give --force to replace it")
    return _transfer(args, "export", opened, FileStore(mode=args.mode or PRIVATE), args.file)


def _import(args: argparse.Namespace) -> int:
    address = find_snapshot(args.snapshot)
    own_name = address.name or address.path.name.removesuffix(SNAPSHOT_SUFFIX)
    folder, name = find_place(args.store, own_name)
    opened = Opened.at(address)
    opened.require_session("import")
    if name in stored_names(folder) and not args.force:
        raise CliError(
            f"{folder}/{name}: it is there already; give --force to replace it, or another name"
        )
    return _transfer(args, "import", opened, open_store(str(folder), mode=args.mode), name)


def _transfer(
    args: argparse.Namespace, verb: str, opened: Opened, store: SnapshotStore, name: str
) -> int:
    """Saves an opened snapshot, and what was saved with it, under `name`; then says so.

    The logical digests are seen to be what they were. A companion that the store cannot take is
    left out with a warning.

    Raises:
        CorruptSnapshotError: a byte of it is not what was written; nothing was changed.
        CapacityError, StorageError: no room, or the system refused; likewise.
    """
    reader, source = opened.reader, opened.address.text
    companions = {
        companion.kind: companion.opened.reader
        for companion in companions_of(opened)
        if companion.state == SOUND and companion.opened is not None
    }
    with work_progress(args, verb) as progress:
        report = store.save(
            name,
            reader,
            fingerprint=reader.fingerprint,
            session=reader.session,
            progress=progress,
            companions=[
                CompanionSnapshot(kind, each, each.fingerprint, each.session)
                for kind, each in companions.items()
            ],
            overwrite=True,  # the command has asked
        )
    digests = {each.logical_digest for each in companions.values()}
    copies = [(report, {reader.logical_digest}), *((copy, digests) for copy in report.companions)]
    for copy, expected in copies:
        if copy.logical_digest not in expected:
            raise CliError(
                f"{copy.path}: its logical digest is {copy.logical_digest}, that of {source} is "
                f"{', '.join(sorted(expected))}; do not use the copy"
            )
    values = {"command": f"snapshot {verb}", "source": source, **asdict(report)}
    emit_result(args, values, lambda shown: shown.fields(_facts(verb, source, report), 8))
    return 0


def _facts(verb: str, source: str, report: SaveReport) -> Iterator[tuple[str, str]]:
    tokens, chunks = counted(report.tokens, "token"), counted(report.chunks, "chunk")
    yield f"{verb}ed", f"{source} to {report.path}: {tokens} in {chunks}"
    rate = byte_rate(report.bytes_written, report.seconds)
    shared = f", {byte_size(report.bytes_shared)} shared with other snapshots"
    wrote = f"{report.bytes_written:,} bytes in {duration(report.seconds)}, {rate}"
    yield "wrote", wrote + (shared if report.bytes_shared else "")
    yield "digest", f"{report.logical_digest}, as before"
    for beside in report.companions:
        yield "with", beside.path
