"""Sources and destinations of `generate`'s session: files, a store."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from kvpager._model.fingerprint_rules import ON_MISMATCH
from kvpager._support.option_table import parse_bytes
from kvpager.cli.failure import UsageError
from kvpager.cli.models import found
from kvpager.cli.options import add_mode
from kvpager.cli.output import check_writable
from kvpager.cli.parser import option
from kvpager.cli.snapshot.address import Address, find_snapshot
from kvpager.config import KV_DTYPES
from kvpager.errors import InvalidArgumentError
from kvpager.stores import FileStore
from kvpager.stores.files import PRIVATE
from kvpager.stores.names import check_name
from kvpager.stores.opening import NamedStore, open_store
from kvpager.stores.settings import UNLIMITED, parse_ttl

if TYPE_CHECKING:
    from kvpager import Engine, Session

NEEDS = {
    "--store-budget": ["--store"],
    "--store-ttl": ["--store"],
    "--file-mode": ["--save", "--store"],
    "--save-kv-dtype": ["--save"],
    "--on-corrupt": ["--restore"],
    "--on-mismatch": ["--restore"],
}


def add_session_options(parser: argparse.ArgumentParser) -> None:
    """--restore, --save, --store and what goes with them, as NEEDS says."""
    group = parser.add_argument_group("session")
    about = "continue a saved session: a file, STORE/NAME, or NAME with --store"
    option(group, "--restore SNAPSHOT", about)
    option(group, "--save FILE", "save the session at the end; with --store a NAME in it")
    about = (
        "K/V of --save are converted to it, such as q8, to take less room; only --restore with "
        "--on-mismatch takes that, as an approximation (default: as they are)"
    )
    option(group, "--save-kv-dtype", about, choices=KV_DTYPES)
    about = (
        "store, made if there is none: a folder, or a bucket such as s3://BUCKET/PREFIX; what "
        "--save writes shares bytes with all that is in it, and a prompt whose beginning is in it "
        "starts from there"
    )
    option(group, "--store STORE", about)
    about = (
        'most bytes the store may have, such as "50GiB", or "unlimited" (default: what it was told '
        "before); the least recently used snapshots go first; of a bucket, most bytes of its cache"
    )
    option(group, "--store-budget BYTES", about)
    about = (
        'how long a snapshot lives after its last use, such as "12h" or "7d", or "never" (default: '
        "what the store was told before)"
    )
    option(group, "--store-ttl DURATION", about)
    add_mode(group)
    about = (
        "where bytes of --restore are damaged: fail (default), or compute those tokens again, with "
        "the bits that were saved"
    )
    option(group, "--on-corrupt", about, choices=("fail", "recompute"), default="fail")
    about = (
        "where --restore was saved under another release, processor or number of threads: refuse "
        "(default), or approximate: go on with results that may differ in their last bits; "
        "convert: also where it has K/V of another dtype, which are rounded to this one's"
    )
    option(group, "--on-mismatch", about, choices=ON_MISMATCH, default="refuse")


def session_places(
    args: argparse.Namespace,
) -> tuple[NamedStore | None, FileStore | NamedStore, Address | None]:
    """The store of --store, which is made, where --save goes to, and what --restore names.

    All of it is checked before a model is loaded.

    Raises:
        UsageError: a value that cannot be.
        CliError: there is no --model, --restore names nothing, or --save cannot be written.
    """
    try:
        if args.store_budget not in (None, UNLIMITED):
            parse_bytes("--store-budget", args.store_budget)
        if args.store_ttl is not None:
            parse_ttl("--store-ttl", args.store_ttl)
        if args.store is not None and args.save is not None:
            check_name(args.save)
    except InvalidArgumentError as error:
        raise UsageError(str(error).replace("name is", "--save is", 1)) from error
    found(args.model)  # before a store is made for it
    store = None
    if args.store is None:
        check_writable("--save", args.save)
    else:
        limits = {"byte_budget": args.store_budget, "ttl": args.store_ttl}
        store = open_store(args.store, mode=args.mode, **limits)
    source = args.restore
    if store is not None and source is not None and os.sep not in source:
        source = f"{args.store.rstrip('/')}/{source}"  # else an address, perhaps in another store
    place = store or FileStore(mode=args.mode or PRIVATE)
    return store, place, None if source is None else find_snapshot(source)


def restored(args: argparse.Namespace, engine: Engine, source: Address | None) -> Session:
    """The session to go on with; an empty one without --restore."""
    if source is None:
        return engine.session()
    options = {"on_mismatch": args.on_mismatch, "on_corrupt": args.on_corrupt}
    if source.store is None or source.name is None:
        return engine.restore(source.path, **options)
    return engine.restore(source.name, store=open_store(str(source.store), create=False), **options)
