"""`kvpager snapshot ls`: what a directory store keeps."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpager.cli.output import check_writable, emit, emit_json
from kvpager.cli.parser import Parser
from kvpager.cli.snapshot.address import find_store
from kvpager.cli.terminal import Look, look
from kvpager.stores import DirectoryStore
from kvpager.stores.belonging import is_under
from kvpager.words import byte_size, counted, span

if TYPE_CHECKING:
    from rich.table import Table

    from kvpager.stores import StoreEntry

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
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Runs the verb."""
    check_writable("--output", args.output)
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
    if args.format == "json":
        emit_json(args, values)
    else:
        emit(args, _text(look(args), folder, entries, values))
    return 0


def _text(shown: Look, folder: Path, entries: list[StoreEntry], values: dict[str, Any]) -> str:
    tables = shown.render(_table(shown, folder, entries)) if entries else ""
    return tables + "\n".join(_footer(shown, entries, values)) + "\n"


def _table(shown: Look, folder: Path, entries: list[StoreEntry]) -> Table:
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


def _footer(shown: Look, entries: list[StoreEntry], values: dict[str, Any]) -> Iterator[str]:
    used, budget = byte_size(values["totals"]["bytes"]), values["totals"]["byte_budget"]
    limit = ", no budget" if budget is None else f" of a budget of {byte_size(budget)}"
    yield f"{counted(len(entries), 'snapshot')}, {used} on disk{limit}"
    if others := values["of_other_salts"]:
        yield f"{counted(others, 'snapshot')} of other salts: see --salt and --every-salt"
    for entry in entries:
        if entry.error:
            yield shown.field(f"{entry.name}:", entry.error, wide=len(entry.name) + 1)
