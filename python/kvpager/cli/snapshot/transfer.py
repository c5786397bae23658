"""A snapshot from one place to another, the same to the last bit."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from kvpager.cli.failure import CliError
from kvpager.cli.output import emit, emit_json
from kvpager.cli.snapshot.companions import sound_companions
from kvpager.cli.snapshot.opened import Opened
from kvpager.cli.snapshot.progress import byte_progress
from kvpager.cli.terminal import look
from kvpager.stores import SaveReport, SnapshotStore
from kvpager.words import byte_rate, byte_size, counted, duration


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


def tell_transfer(args: argparse.Namespace, verb: str, opened: Opened, report: SaveReport) -> None:
    """The command's result."""
    source = opened.address.text
    if args.format == "json":
        emit_json(args, {"command": f"snapshot {verb}", "source": source, **asdict(report)})
        return
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
    emit(args, "\n".join(lines) + "\n")
