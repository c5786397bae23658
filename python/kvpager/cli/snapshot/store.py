"""`kvpager snapshot ls | pin | unpin | ttl | rekey | rm | gc | reindex`: what a store keeps."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvpager._support.words import byte_size, counted, span
from kvpager.cli.failure import CliError, UsageError
from kvpager.cli.output import emit_result
from kvpager.cli.parser import Commands, option
from kvpager.cli.snapshot import blocks
from kvpager.cli.snapshot.address import (
    find_entry,
    find_folder_store,
    find_store,
)
from kvpager.cli.terminal import Look, work_progress
from kvpager.errors import InvalidArgumentError
from kvpager.stores import StoreKey
from kvpager.stores.encryption import KEY_FILE_VARIABLE, KEY_VARIABLE
from kvpager.stores.opening import NamedStore
from kvpager.stores.origin import is_under
from kvpager.stores.settings import parse_ttl

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


def add(verbs: Commands) -> None:
    """Adds the verbs."""
    parser = verbs.add(
        "ls",
        _ls,
        "list a store: sizes, ages, pins, digests",
        "Lists the snapshots of a directory store. Own bytes are those that go when the snapshot "
        "goes; shared ones are needed by others too. Of a store of other engines' blocks it lists "
        "the identities.",
    )
    option(parser, "store STORE", "folder of a directory store")
    about = "by name (default), most tokens, largest size, oldest age, or last used first"
    option(parser, "--sort", about, choices=tuple(_ORDERS), default="name")
    about = (
        "list companions too (what draft models and recurrent layers hold of a snapshot's text), "
        "whose bytes are their snapshot's otherwise"
    )
    option(parser, "--all", about)
    about = "list what engines with this salt saved, in the place of those without one"
    option(parser, "--salt SALT", about, default="")
    option(parser, "--every-salt", "list what any engine saved")

    for verb, run, about in (
        ("pin", _pin, "keep a snapshot whatever its age and the store's budget"),
        ("unpin", _pin, "let a pinned snapshot go again"),
        ("ttl", _ttl, "say how long a snapshot lives after its last use"),
    ):
        parser = verbs.add(verb, run, about, f"{about[0].upper()}{about[1:]}.")
        option(parser, "snapshot STORE/NAME", "")
        parser.set_defaults(verb=verb)
    option(parser, "ttl DURATION", '"90s", "30m", "12h", "7d", "2w", or "never"')

    parser = verbs.add(
        "rekey",
        _rekey,
        "encrypt a store's key with the current master key",
        "Encrypts the key of an encrypted store with the first master key of KVPAGER_STORE_KEY or "
        "KVPAGER_STORE_KEY_FILE; older ones, on further lines, open it until then. No snapshot is "
        "written again.",
    )
    option(parser, "store STORE", "folder of a directory store, or address of a bucket")

    parser = verbs.add(
        "rm",
        _rm,
        "take snapshots out of a store",
        "Takes snapshots out of a store, and those of their bytes that no other snapshot needs. "
        "One that is pinned, or of an engine with a salt, is refused without --force.",
    )
    option(parser, "snapshots STORE/NAME", "", nargs="+")
    option(parser, "--force", "pinned ones, and those of any salt, as well")

    parser = verbs.add(
        "gc",
        _gc,
        "remove what nobody needs from a store",
        "Removes expired snapshots, left-overs of writers that died and packs that no snapshot "
        "needs, evicts the least recently used where the store is over its budget, and gathers "
        "what is needed of packs that mostly are not. Others can use the store meanwhile.",
    )
    option(parser, "store STORE", "folder of a directory store")
    about = "files that are damaged beyond use go too (by default they are reported)"
    option(parser, "--remove-damaged", about)
    option(parser, "--dry-run", "list what would go, and leave everything as it is")

    parser = verbs.add(
        "reindex",
        _reindex,
        "make a store's index anew from its files",
        "Makes the index of a directory store anew. A store does so by itself where it sees that "
        "files changed; this is for files that were changed in place by hand.",
    )
    option(parser, "store STORE", "folder of a directory store")


def _ls(args: argparse.Namespace) -> int:
    if blocks.holds_blocks(args.store):
        return blocks.list_blocks(args)
    store, folder = find_store(args.store), args.store
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
    emit_result(args, values, lambda shown: _ls_lines(shown, entries, values))
    return 0


def _ls_lines(shown: Look, entries: list[StoreEntry], values: dict[str, Any]) -> Iterator[str]:
    if entries:
        yield from shown.render(_ls_table(shown, values["store"], entries))
    used, budget = byte_size(values["totals"]["bytes"]), values["totals"]["byte_budget"]
    limit = ", no budget" if budget is None else f" of a budget of {byte_size(budget)}"
    yield f"{counted(len(entries), 'snapshot')}, {used} on disk{limit}"
    if others := values["of_other_salts"]:
        yield f"{counted(others, 'snapshot')} of other salts: see --salt and --every-salt"
    for entry in entries:
        if entry.error:
            yield from shown.fields([(f"{entry.name}:", entry.error)], len(entry.name) + 1)


def _ls_table(shown: Look, title: str, entries: list[StoreEntry]) -> Table:
    now = time.time()
    numbers = (">tokens", ">own", ">shared", ">age", ">used", ">ttl")
    table = shown.table(title, "name", *numbers)
    for name in ("", "digest"):
        table.add_column(name, no_wrap=True)
    for entry in entries:
        kinds = [name.removeprefix(f"{entry.name}.") for name in entry.companions]
        marks = ["pinned"] * entry.pinned + ["segment"] * (entry.segment is not None)
        table.add_row(
            entry.name,
            f"{entry.tokens:,}",
            byte_size(entry.bytes_own),
            byte_size(entry.bytes_shared),
            span(now - entry.created),
            span(now - entry.last_used),
            "-" if entry.ttl_seconds is None else span(entry.ttl_seconds),
            " ".join([*marks, *(f"+{kind}" for kind in kinds)]),
            "DAMAGED" if entry.error else entry.logical_digest[:_DIGITS],
        )
    return table


def _pin(args: argparse.Namespace) -> int:
    store, name = find_entry(args.snapshot)
    pinned = args.verb == "pin"
    (store.pin if pinned else store.unpin)(name)
    told = "pinned: kept until it is unpinned" if pinned else "not pinned"
    return _say(args, told, pinned=pinned)


def _ttl(args: argparse.Namespace) -> int:
    try:
        seconds = parse_ttl("DURATION", args.ttl)
    except InvalidArgumentError as error:
        raise UsageError(str(error)) from error
    store, name = find_entry(args.snapshot)
    store.set_ttl(name, args.ttl)
    told = "lives for ever" if seconds is None else f"lives {args.ttl} after its last use"
    return _say(args, told, ttl_seconds=seconds)


def _rekey(args: argparse.Namespace) -> int:
    key = StoreKey.from_environment()
    if key is None:
        raise CliError(f"no master key; expected {KEY_VARIABLE} or {KEY_FILE_VARIABLE}")
    if blocks.holds_blocks(args.store):
        blocks.rewrap_blocks(args.store, key)
    else:
        find_store(args.store).rewrap(key)
    values = {"command": "snapshot rekey", "store": args.store}
    emit_result(
        args, values, lambda _: [f"{args.store}: its key is encrypted with the current one"]
    )
    return 0


def _say(args: argparse.Namespace, told: str, **changed: object) -> int:
    values = {"command": f"snapshot {args.verb}", "snapshot": args.snapshot, **changed}
    emit_result(args, values, lambda _: [f"{args.snapshot}: {told}"])
    return 0


def _rm(args: argparse.Namespace) -> int:
    """All snapshots must be there and removable, or none is removed."""
    texts = list(dict.fromkeys(args.snapshots))
    found = {text: find_entry(text) for text in texts}
    stores = {store.path: store for store, _ in found.values()}
    entries = {
        (store.path, entry.name): entry for store in stores.values() for entry in store.entries()
    }
    for text, (store, name) in found.items():
        entry = entries.get((store.path, name))
        why = ""
        if entry is not None and entry.pinned:
            why = "it is pinned; unpin it, or give --force"
        elif entry is not None and not is_under("", entry.salt_digest):
            why = "it was saved under a salt; give --force"
        if why and not args.force:
            raise CliError(f"{text}: {why}. Nothing was removed")
    before = _bytes(stores)
    for path, name in dict.fromkeys((store.path, name) for store, name in found.values()):
        if (path, name) in entries and entries[path, name].pinned:
            stores[path].unpin(name)
        stores[path].delete(name, force=args.force)
    freed = before - _bytes(stores)
    values = {"command": "snapshot rm", "removed": texts, "bytes_freed": freed}
    told = f"removed {counted(len(texts), 'snapshot')}, {byte_size(freed)} freed"
    emit_result(args, values, lambda _: [told])
    return 0


def _bytes(stores: dict[str, NamedStore]) -> int:
    return sum(int(store.stats()["bytes"] or 0) for store in stores.values())


def _gc(args: argparse.Namespace) -> int:
    if blocks.holds_blocks(args.store):
        return blocks.collect_blocks(args)
    store, folder = find_store(args.store), args.store
    with work_progress(args, "compact") as progress:
        report = store.gc(progress, remove_damaged=args.remove_damaged, dry_run=args.dry_run)
    stats = store.stats()
    values = {
        "command": "snapshot gc",
        "store": str(folder),
        "dry_run": args.dry_run,
        "bytes": stats["bytes"],
        "byte_budget": stats["byte_budget"],
        **asdict(report),
    }
    freed, kept = byte_size(report.bytes_freed), byte_size(stats["bytes"] or 0)
    done = f"would free {freed} of {kept}" if args.dry_run else f"{freed} freed, {kept} kept"
    facts = _gc_facts(report, dry_run=args.dry_run)
    emit_result(
        args, values, lambda shown: [f"{folder}: {done}", *shown.fields(facts, 9, indent="  ")]
    )
    return 0


def _reindex(args: argparse.Namespace) -> int:
    store, folder = find_folder_store(args.store), args.store
    with work_progress(args, "reindex", in_bytes=False) as progress:
        store.reindex(progress)
    stats = store.stats()
    counts = {key: stats[key] for key in ("snapshots", "companions", "packs", "chunks", "damaged")}
    told = ", ".join(counted(int(stats[f"{noun}s"] or 0), noun) for noun in ("snapshot", "pack"))
    values = {"command": "snapshot reindex", "store": str(folder), **counts}
    emit_result(args, values, lambda _: [f"{folder}: indexed {told}"])
    return 0


def _gc_facts(report: GcReport, *, dry_run: bool) -> Iterator[tuple[str, str]]:
    for name, names in (
        ("expired", report.expired),
        ("evicted", report.evicted),
        ("orphaned", report.orphans),
    ):
        if names:
            yield name, ", ".join(names)
    counts = (
        (report.temporaries, "left-over temporary file"),
        (report.packs_removed, "unneeded pack"),
        (report.sidecars, "stray note"),
    )
    if gone := [counted(count, noun) for count, noun in counts if count]:
        yield "removed", ", ".join(gone)
    if report.packs_compacted:
        moved = "" if dry_run else f", {counted(report.chunks_moved, 'chunk')} moved"
        yield "compacted", counted(report.packs_compacted, "pack") + moved
    for path in report.would_remove:
        yield "to go", path
    for name, found in (
        ("removed", report.damaged_removed),
        ("DAMAGED", report.damaged),
        ("skipped", report.skipped),
    ):
        for path, why in found:
            yield name, why if why.startswith(path) else f"{path}: {why}"
