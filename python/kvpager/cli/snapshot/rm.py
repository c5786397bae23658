"""`kvpager snapshot rm`: takes snapshots out of a store."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from kvpager.cli.failure import CliError
from kvpager.cli.output import check_writable, emit, emit_json
from kvpager.cli.parser import Parser
from kvpager.cli.snapshot.address import Address, find_entry
from kvpager.stores import DirectoryStore
from kvpager.words import byte_size, counted


def add(verbs: Any, common: Parser) -> None:
    """Adds the verb."""
    parser = verbs.add_parser(
        "rm",
        parents=[common],
        help="take snapshots out of a store",
        description="Takes snapshots out of a store, and those of their bytes that no other "
        "snapshot needs. One that is pinned, or of an engine with a salt, is refused without "
        "--force.",
    )
    parser.add_argument("snapshots", metavar="STORE/NAME", nargs="+")
    parser.add_argument(
        "--force", action="store_true", help="pinned ones, and those of any salt, as well"
    )
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Runs the verb."""
    check_writable("--output", args.output)
    addresses = [find_entry(text) for text in args.snapshots]  # all are there, or none is removed
    freed = remove(addresses, force=args.force)
    if args.format == "json":
        emit_json(args, {"command": "snapshot rm", "removed": args.snapshots, "bytes_freed": freed})
    else:
        emit(
            args, f"removed {counted(len(args.snapshots), 'snapshot')}, {byte_size(freed)} freed\n"
        )
    return 0


def remove(addresses: Sequence[Address], *, force: bool) -> int:
    """Takes snapshots out of their stores; returns the bytes by which these shrank.

    Raises:
        CliError: one is pinned, without `force`; nothing was removed.
        StorageError: the system refused.
    """
    stores = {
        str(address.store): DirectoryStore(str(address.store), create=False)
        for address in addresses
    }
    pinned = {
        (folder, entry.name)
        for folder, store in stores.items()
        for entry in store.entries()
        if entry.pinned
    }
    for address in addresses:
        if (str(address.store), address.name) in pinned and not force:
            raise CliError(
                f"{address.text}: it is pinned; unpin it, or give --force. Nothing was removed"
            )
    before = _bytes(stores)
    for folder, name in dict.fromkeys((str(a.store), str(a.name)) for a in addresses):
        if (folder, name) in pinned:
            stores[folder].unpin(name)
        stores[folder].delete(name, force=force)
    return before - _bytes(stores)


def _bytes(stores: Mapping[str, DirectoryStore]) -> int:
    return sum(int(store.stats()["bytes"] or 0) for store in stores.values())
