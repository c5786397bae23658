"""`kvpager snapshot pin | unpin | ttl`: which snapshots of a store stay, and for how long."""

from __future__ import annotations

import argparse
from typing import Any

from kvpager.cli.failure import UsageError
from kvpager.cli.output import check_writable, emit, emit_json
from kvpager.cli.parser import Parser
from kvpager.cli.snapshot.address import find_entry
from kvpager.errors import InvalidArgumentError
from kvpager.stores import DirectoryStore
from kvpager.stores.settings import parse_ttl

_STORED = "STORE/NAME"


def add(verbs: Any, common: Parser) -> None:
    """Adds the verbs."""
    for verb, text in (
        ("pin", "keep a snapshot whatever its age and the store's budget"),
        ("unpin", "let a pinned snapshot go again"),
    ):
        parser = verbs.add_parser(verb, parents=[common], help=text, description=_sentence(text))
        parser.add_argument("snapshot", metavar=_STORED)
        parser.set_defaults(run=run_pin, verb=verb, parser=parser)
    text = "say how long a snapshot lives after its last use"
    parser = verbs.add_parser("ttl", parents=[common], help=text, description=_sentence(text))
    parser.add_argument("snapshot", metavar=_STORED)
    parser.add_argument(
        "ttl", metavar="DURATION", help='"90s", "30m", "12h", "7d", "2w", or "never"'
    )
    parser.set_defaults(run=run_ttl, parser=parser)


def run_pin(args: argparse.Namespace) -> int:
    """Runs `pin` and `unpin`."""
    check_writable("--output", args.output)
    address = find_entry(args.snapshot)
    assert address.store is not None
    assert address.name is not None
    store = DirectoryStore(address.store, create=False)
    pinned = args.verb == "pin"
    (store.pin if pinned else store.unpin)(address.name)
    told = "pinned: kept until it is unpinned" if pinned else "not pinned"
    return _tell(args, {"pinned": pinned}, f"{args.snapshot}: {told}")


def run_ttl(args: argparse.Namespace) -> int:
    """Runs `ttl`."""
    check_writable("--output", args.output)
    try:
        seconds = parse_ttl("DURATION", args.ttl)
    except InvalidArgumentError as error:
        raise UsageError(str(error)) from error
    address = find_entry(args.snapshot)
    assert address.store is not None
    assert address.name is not None
    DirectoryStore(address.store, create=False).set_ttl(address.name, args.ttl)
    told = "lives for ever" if seconds is None else f"lives {args.ttl} after its last use"
    return _tell(args, {"ttl_seconds": seconds}, f"{args.snapshot}: {told}")


def _tell(args: argparse.Namespace, values: dict[str, Any], text: str) -> int:
    if args.format == "json":
        verb = getattr(args, "verb", "ttl")
        emit_json(args, {"command": f"snapshot {verb}", "snapshot": args.snapshot, **values})
    else:
        emit(args, text + "\n")
    return 0


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."
