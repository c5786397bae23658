"""`kvpager snapshot ls | verify | gc` of a store of blocks, which other engines use."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from kvpager._support.words import byte_rate, byte_size, counted, duration
from kvpager.cli.failure import DIFFERENT, CliError
from kvpager.cli.output import emit_result
from kvpager.cli.terminal import Look, work_progress
from kvpager.stores import ChunkStore, StoreKey
from kvpager.stores.settings import holds_blocks

_SHOWN = 40  # lines of damage; --format json has all of it

__all__ = ["collect_blocks", "holds_blocks", "list_blocks", "rewrap_blocks", "verify_blocks"]


def _opened(folder: str) -> ChunkStore:
    return ChunkStore(folder, {}, create=False)


def list_blocks(args: argparse.Namespace) -> int:
    """`ls`: identities, with their blocks and bytes."""
    with _opened(args.store) as store:
        totals, identities = store.stats(), store.identities()
    found = [
        {"identity": dict(identity), "blocks": blocks, "bytes": size}
        for identity, blocks, size in identities
    ]
    totals = {
        name: totals[name] for name in ("bytes", "byte_budget", "ttl_seconds", "packs", "blocks")
    }
    values = {
        "command": "snapshot ls",
        "store": args.store,
        "kind": "blocks",
        "identities": found,
        "totals": totals,
    }
    emit_result(args, values, lambda shown: _ls_lines(shown, values))
    return 0


def _ls_lines(shown: Look, values: dict[str, Any]) -> Iterator[str]:
    if values["identities"]:
        table = shown.table(values["store"], ">blocks", ">size", "identity")
        for one in values["identities"]:
            text = json.dumps(one["identity"], sort_keys=True)
            table.add_row(f"{one['blocks']:,}", byte_size(one["bytes"]), text)
        yield from shown.render(table)
    totals = values["totals"]
    used, budget = byte_size(totals["bytes"]), totals["byte_budget"]
    limit = ", no budget" if budget is None else f" of a budget of {byte_size(budget)}"
    blocks, packs = counted(totals["blocks"], "block"), counted(totals["packs"], "pack")
    yield f"{blocks} in {packs}, {used} on disk{limit}"


def verify_blocks(args: argparse.Namespace) -> int:
    """`verify`: reads every block of every identity."""
    with _opened(args.snapshot) as store, work_progress(args, "verify") as progress:
        totals, start = store.stats(), time.perf_counter()
        damage = store.verify(progress)
        seconds = time.perf_counter() - start
    values = {
        "command": "snapshot verify",
        "path": args.snapshot,
        "kind": "blocks",
        "blocks": totals["blocks"],
        "packs": totals["packs"],
        "bytes_read": totals["bytes"],
        "seconds": seconds,
        "bytes_per_second": totals["bytes"] / seconds,
        "whole": not damage,
        "damage": [
            asdict(one) | {"key": None if one.key is None else one.key.hex()} for one in damage
        ],
    }
    emit_result(args, values, lambda shown: _verify_lines(shown, values))
    return DIFFERENT if damage else 0


def _verify_lines(shown: Look, values: dict[str, Any]) -> Iterator[str]:
    what = f"{counted(values['blocks'], 'block')}, {counted(values['packs'], 'pack')}"
    read, seconds = values["bytes_read"], values["seconds"]
    cost = f"{byte_size(read)} in {duration(seconds)}, {byte_rate(read, seconds)}"
    yield from shown.fields([("checked", f"{values['path']}: {what}"), ("read", cost)], 8)
    damage = values["damage"]
    if not damage:
        yield "whole: every byte is what was written"
        return
    yield f"DAMAGED, and removed: {counted(len(damage), 'part')}"
    for one in damage[:_SHOWN]:
        where = "its table" if one["key"] is None else f"group {one['group']}, key {one['key']}"
        yield f"  {one['file']}: {where}: {one['message'].removeprefix(one['file'] + ': ')}"
    if len(damage) > _SHOWN:
        yield f"  ... and {len(damage) - _SHOWN:,} more; --format json lists all"


def rewrap_blocks(folder: str, key: StoreKey) -> None:
    """`rekey`: encrypts the store's secret with the current master key."""
    with _opened(folder) as store:
        store.rewrap(key)


def collect_blocks(args: argparse.Namespace) -> int:
    """`gc`: removes what is expired, damaged or left over. Raises CliError for --dry-run."""
    if args.dry_run:
        raise CliError(f"{args.store}: a store of blocks, for which there is no --dry-run")
    with _opened(args.store) as store:
        report, totals = store.gc(), store.stats()
    values = {
        "command": "snapshot gc",
        "store": args.store,
        "kind": "blocks",
        "bytes": totals["bytes"],
        "byte_budget": totals["byte_budget"],
        **asdict(report),
    }
    freed, kept = byte_size(report.bytes_freed), byte_size(totals["bytes"])
    counts = (
        (report.expired, "expired block"),
        (report.evicted, "evicted block"),
        (report.temporaries, "left-over temporary file"),
        (report.damaged_packs, "pack with a damaged table"),
    )
    gone = ", ".join(counted(count, noun) for count, noun in counts if count)
    removed = f"; removed {gone}" if gone else ""
    emit_result(args, values, lambda _: [f"{args.store}: {freed} freed, {kept} kept{removed}"])
    return 0
