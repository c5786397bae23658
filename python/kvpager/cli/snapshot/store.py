"""`kvpager snapshot ls | pin | unpin | ttl | rm | gc`: what a directory store keeps."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpager.cli.failure import CliError, UsageError
from kvpager.cli.output import emit_result
from kvpager.cli.parser import Parser
from kvpager.cli.snapshot.address import Address, find_entry, find_store
from kvpager.cli.terminal import Look, byte_progress, look
from kvpager.errors import InvalidArgumentError
from kvpager.stores import DirectoryStore
from kvpager.stores.belonging import is_under
from kvpager.stores.settings import parse_ttl
from kvpager.words import byte_size, counted, span

if TYPE_CHECKING:
    from rich.table import Table

    from kvpager.stores import GcReport, StoreEntry


_DIGITS = 12  # of a digest in the table; --format json has all of it

# --sort: (key, whether the largest comes first).
_ORDERS: dict[str, tuple[Callable[[StoreEntry], Any], bool]] = {
    "name": (lambda entry: entry.name, False),
    "tokens": (lambda entry: entry.tokens, True),
    "size": (lambda entry: entry.bytes_own + entry.bytes_shared, True),
    "age": (lambda entry: entry.created, False),
    "used": (lambda entry: entry.last_used, True),
}


def add(verbs: Any, common: Parser) -> None:
    """Adds the verbs."""
    _add_ls(verbs, common)
    _add_notes(verbs, common)
    _add_rm(verbs, common)
    _add_gc(verbs, common)


def _add_ls(verbs: Any, common: Parser) -> None:
    """Adds the verb."""
    parser = verbs.add_parser(
        "ls",
        parents=[common],
        help="list a store: sizes, ages, pins, digests",
        description="Lists the snapshots of a directory store. Own bytes are those that go when "
        "the snapshot goes; shared ones are needed by others too.",
    )
    parser.add_argument("store", metavar="STORE", help="folder of a directory store")
    parser.add_argument(
        "--sort",
        choices=tuple(_ORDERS),
        default="name",
        help="by name (default), most tokens, largest size, oldest age, or last used first",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="list companions too (what draft models and recurrent layers hold of a snapshot's "
        "text), whose bytes are their snapshot's otherwise",
    )
    parser.add_argument(
        "--salt",
        default="",
        metavar="SALT",
        help="list what engines with this salt saved, in the place of those without one",
    )
    parser.add_argument("--every-salt", action="store_true", help="list what any engine saved")
    parser.set_defaults(run=_run_ls, parser=parser)


def _run_ls(args: argparse.Namespace) -> int:
    """Runs the verb."""
    folder = find_store(args.store)
    store = DirectoryStore(folder, create=False)
    key, descending = _ORDERS[args.sort]
    every = store.entries(companions=args.all)
    shown = [one for one in every if args.every_salt or is_under(args.salt, one.salt_digest)]
    entries = sorted(shown, key=key, reverse=descending)
    values = {
        "command": "snapshot ls",
        "store": str(folder),
        "snapshots": [asdict(entry) for entry in entries],
        "of_other_salts": len(every) - len(shown),
        "totals": store.stats(),
    }
    emit_result(args, values, lambda: _ls_text(look(args), folder, entries, values))
    return 0


def _ls_text(shown: Look, folder: Path, entries: list[StoreEntry], values: dict[str, Any]) -> str:
    tables = shown.render(_ls_table(shown, folder, entries)) if entries else ""
    return tables + "\n".join(_ls_footer(shown, entries, values)) + "\n"


def _ls_table(shown: Look, folder: Path, entries: list[StoreEntry]) -> Table:
    now = time.time()
    table = shown.table(f"{folder}")
    table.add_column("name", overflow="fold")
    for name in ("tokens", "own", "shared", "age", "used", "ttl"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("digest", no_wrap=True)
    for entry in entries:
        table.add_row(
            entry.name,
            f"{entry.tokens:,}",
            byte_size(entry.bytes_own),
            byte_size(entry.bytes_shared),
            span(now - entry.created),
            span(now - entry.last_used),
            "-" if entry.ttl_seconds is None else span(entry.ttl_seconds),
            _mark(entry),
            "DAMAGED" if entry.error else entry.logical_digest[:_DIGITS],
        )
    return table


def _mark(entry: StoreEntry) -> str:
    """Pinned or not, a segment or not, and the kinds of its companions."""
    kinds = [name.removeprefix(f"{entry.name}.") for name in entry.companions]
    words = ["pinned"] * entry.pinned + ["segment"] * (entry.segment is not None)
    return " ".join([*words, *(f"+{kind}" for kind in kinds)])


def _ls_footer(shown: Look, entries: list[StoreEntry], values: dict[str, Any]) -> Iterator[str]:
    used, budget = byte_size(values["totals"]["bytes"]), values["totals"]["byte_budget"]
    limit = ", no budget" if budget is None else f" of a budget of {byte_size(budget)}"
    yield f"{counted(len(entries), 'snapshot')}, {used} on disk{limit}"
    if others := values["of_other_salts"]:
        yield f"{counted(others, 'snapshot')} of other salts: see --salt and --every-salt"
    for entry in entries:
        if entry.error:
            yield shown.field(f"{entry.name}:", entry.error, wide=len(entry.name) + 1)


def _add_rm(verbs: Any, common: Parser) -> None:
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
    parser.set_defaults(run=_run_rm, parser=parser)


def _run_rm(args: argparse.Namespace) -> int:
    """Runs the verb."""
    addresses = [find_entry(text) for text in args.snapshots]  # all must exist, or none is removed
    freed = remove(addresses, force=args.force)
    removed = list(dict.fromkeys(args.snapshots))
    told = f"removed {counted(len(removed), 'snapshot')}, {byte_size(freed)} freed\n"
    values = {"command": "snapshot rm", "removed": removed, "bytes_freed": freed}
    emit_result(args, values, lambda: told)
    return 0


def remove(addresses: Sequence[Address], *, force: bool) -> int:
    """Removes snapshots from their stores; returns the bytes by which these shrank.

    Raises:
        CliError: one is pinned, or was saved under a salt, without `force`; nothing was removed.
        StorageError: a system call failed.
    """
    stores = {
        str(address.store): DirectoryStore(str(address.store), create=False)
        for address in addresses
    }
    entries = {
        (folder, entry.name): entry for folder, store in stores.items() for entry in store.entries()
    }
    pinned = {place for place, entry in entries.items() if entry.pinned}
    for address in addresses:
        place = str(address.store), str(address.name)
        if place in pinned and not force:
            raise CliError(
                f"{address.text}: it is pinned; unpin it, or give --force. Nothing was removed"
            )
        if not force and place in entries and not is_under("", entries[place].salt_digest):
            raise CliError(
                f"{address.text}: it was saved under a salt; give --force. Nothing was removed"
            )
    before = _bytes(stores)
    for folder, name in dict.fromkeys((str(a.store), str(a.name)) for a in addresses):
        if (folder, name) in pinned:
            stores[folder].unpin(name)
        stores[folder].delete(name, force=force)
    return before - _bytes(stores)


def _bytes(stores: Mapping[str, DirectoryStore]) -> int:
    return sum(int(store.stats()["bytes"] or 0) for store in stores.values())


_STORED = "STORE/NAME"


def _add_notes(verbs: Any, common: Parser) -> None:
    """Adds the verbs."""
    for verb, text in (
        ("pin", "keep a snapshot whatever its age and the store's budget"),
        ("unpin", "let a pinned snapshot go again"),
    ):
        parser = verbs.add_parser(verb, parents=[common], help=text, description=_sentence(text))
        parser.add_argument("snapshot", metavar=_STORED)
        parser.set_defaults(run=_run_pin, verb=verb, parser=parser)
    text = "say how long a snapshot lives after its last use"
    parser = verbs.add_parser("ttl", parents=[common], help=text, description=_sentence(text))
    parser.add_argument("snapshot", metavar=_STORED)
    parser.add_argument(
        "ttl", metavar="DURATION", help='"90s", "30m", "12h", "7d", "2w", or "never"'
    )
    parser.set_defaults(run=_run_ttl, verb="ttl", parser=parser)


def _run_pin(args: argparse.Namespace) -> int:
    """Runs `pin` and `unpin`."""
    address = find_entry(args.snapshot)
    assert address.store is not None
    assert address.name is not None
    store = DirectoryStore(address.store, create=False)
    pinned = args.verb == "pin"
    (store.pin if pinned else store.unpin)(address.name)
    told = "pinned: kept until it is unpinned" if pinned else "not pinned"
    return _print(args, {"pinned": pinned}, f"{args.snapshot}: {told}")


def _run_ttl(args: argparse.Namespace) -> int:
    """Runs `ttl`."""
    try:
        seconds = parse_ttl("DURATION", args.ttl)
    except InvalidArgumentError as error:
        raise UsageError(str(error)) from error
    address = find_entry(args.snapshot)
    assert address.store is not None
    assert address.name is not None
    DirectoryStore(address.store, create=False).set_ttl(address.name, args.ttl)
    told = "lives for ever" if seconds is None else f"lives {args.ttl} after its last use"
    return _print(args, {"ttl_seconds": seconds}, f"{args.snapshot}: {told}")


def _print(args: argparse.Namespace, values: dict[str, Any], text: str) -> int:
    values = {"command": f"snapshot {args.verb}", "snapshot": args.snapshot, **values}
    emit_result(args, values, lambda: text + "\n")
    return 0


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def _add_gc(verbs: Any, common: Parser) -> None:
    """Adds the verb."""
    parser = verbs.add_parser(
        "gc",
        parents=[common],
        help="remove what nobody needs from a store",
        description="Removes expired snapshots, left-overs of writers that died and packs that no "
        "snapshot needs, evicts the least recently used where the store is over its budget, and "
        "gathers what is needed of packs that mostly are not. Others can use the store meanwhile.",
    )
    parser.add_argument("store", metavar="STORE", help="folder of a directory store")
    parser.add_argument(
        "--remove-damaged",
        action="store_true",
        help="files that are damaged beyond use go too (by default they are reported)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="list what would go, and leave everything as it is"
    )
    parser.set_defaults(run=_run_gc, parser=parser)


def _run_gc(args: argparse.Namespace) -> int:
    """Runs the verb."""
    folder = find_store(args.store)
    store = DirectoryStore(folder, create=False)
    with byte_progress(args, "compact") as progress:
        report = store.gc(progress, remove_damaged=args.remove_damaged, dry_run=args.dry_run)
    stats = store.stats()
    said = {"command": "snapshot gc", "store": str(folder), "dry_run": args.dry_run}
    kept = {"bytes": stats["bytes"], "byte_budget": stats["byte_budget"]}
    freed, kept_bytes = byte_size(report.bytes_freed), byte_size(stats["bytes"] or 0)
    done = (
        f"would free {freed} of {kept_bytes}"
        if args.dry_run
        else f"{freed} freed, {kept_bytes} kept"
    )
    lines = [f"{folder}: {done}", *_gc_lines(args, report)]
    emit_result(args, {**said, **kept, **asdict(report)}, lambda: "\n".join(lines) + "\n")
    return 0


def _gc_lines(args: argparse.Namespace, report: GcReport) -> Iterator[str]:
    field = look(args).field
    for name, names in (
        ("expired", report.expired),
        ("evicted", report.evicted),
        ("orphaned", report.orphans),
    ):
        if names:
            yield field(name, ", ".join(names), wide=9, indent="  ")
    counts = (
        (report.temporaries, "left-over temporary file"),
        (report.packs_removed, "unneeded pack"),
        (report.sidecars, "stray note"),
    )
    gone = ", ".join(counted(count, noun) for count, noun in counts if count)
    if gone:
        yield field("removed", gone, wide=9, indent="  ")
    if report.packs_compacted:
        packs = counted(report.packs_compacted, "pack")
        moved = "" if args.dry_run else f", {counted(report.chunks_moved, 'chunk')} moved"
        yield field("compacted", packs + moved, wide=9, indent="  ")
    for path in report.would_remove:
        yield field("to go", path, wide=9, indent="  ")
    for name, found in (
        ("removed", report.damaged_removed),
        ("DAMAGED", report.damaged),
        ("skipped", report.skipped),
    ):
        for path, why in found:
            told = why if why.startswith(path) else f"{path}: {why}"
            yield field(name, told, wide=9, indent="  ")
