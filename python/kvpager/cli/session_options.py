"""Sources and destinations of `generate`'s session: files, a store, its segments."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpager.cli.failure import UsageError
from kvpager.cli.options import add_mode, parse_ids, prompt_ids, read_text
from kvpager.cli.output import check_writable, shows_progress
from kvpager.cli.segment_store import find_segments
from kvpager.cli.snapshot.address import Address, find_snapshot, find_store
from kvpager.config import KV_DTYPES
from kvpager.errors import InvalidArgumentError
from kvpager.fingerprint_rules import ON_MISMATCH
from kvpager.option_table import parse_bytes
from kvpager.stores import DirectoryStore, FileStore, SaveReport
from kvpager.stores.names import check_name
from kvpager.stores.permissions import PRIVATE
from kvpager.stores.settings import UNLIMITED, parse_ttl

if TYPE_CHECKING:
    from kvpager import Engine, Session
    from kvpager.segments import RepairPolicy


def add_session_options(parser: argparse.ArgumentParser) -> None:
    """--restore, --save, --store and what goes with them."""
    group = parser.add_argument_group("session")
    group.add_argument(
        "--restore",
        metavar="SNAPSHOT",
        help="continue a saved session: a file, STORE/NAME, or NAME with --store",
    )
    group.add_argument(
        "--save", metavar="FILE", help="save the session at the end; with --store a NAME in it"
    )
    group.add_argument(
        "--save-kv-dtype",
        choices=KV_DTYPES,
        help="K/V of --save are converted to it, such as q8, to take less room; only --restore "
        "with --on-mismatch takes that, as an approximation (default: as they are)",
    )
    group.add_argument(
        "--store",
        metavar="DIR",
        help="directory store, made if there is no such folder: what --save writes shares bytes "
        "with all that is in it, and a prompt whose beginning is in it starts from there",
    )
    group.add_argument(
        "--store-budget",
        metavar="BYTES",
        help='most bytes the store may have, such as "50GiB", or "unlimited" (default: what it '
        "was told before); the least recently used snapshots go first",
    )
    group.add_argument(
        "--store-ttl",
        metavar="DURATION",
        help='how long a snapshot lives after its last use, such as "12h" or "7d", or "never" '
        "(default: what the store was told before)",
    )
    add_mode(group)
    group.add_argument(
        "--on-corrupt",
        choices=("fail", "recompute"),
        default="fail",
        help="where bytes of --restore are damaged: fail (default), or compute those tokens again, "
        "with the bits that were saved",
    )
    group.add_argument(
        "--on-mismatch",
        choices=ON_MISMATCH,
        default="refuse",
        help="where --restore was saved under another release, processor or number of threads: "
        "refuse (default), or approximate: go on with results that may differ in their last bits; "
        "convert: also where it has K/V of another dtype, which are rounded to this one's",
    )


@dataclass(frozen=True)
class SessionPlaces:
    """Where a session is restored from and saved to.

    Attributes:
        args: the command line.
        store: of --store.
        source: of --restore.
    """

    args: argparse.Namespace
    store: DirectoryStore | None
    source: Address | None

    def restore(self, engine: Engine) -> Session:
        """The session to go on with; an empty one without --restore."""
        source = self.source
        if source is None:
            return engine.session()
        options = {"on_mismatch": self.args.on_mismatch, "on_corrupt": self.args.on_corrupt}
        if source.store is None or source.name is None:
            return engine.restore(source.path, **options)
        store = DirectoryStore(source.store, create=False)
        return engine.restore(source.name, store=store, **options)

    def save(self, session: Session, *, progress: bool) -> SaveReport | None:
        """Saves it where --save says, if it does."""
        if not self.args.save:
            return None
        store = self.store or FileStore(mode=self.args.mode or PRIVATE)
        return session.save(
            self.args.save, store=store, kv_dtype=self.args.save_kv_dtype, progress=progress
        )


def session_places(args: argparse.Namespace) -> SessionPlaces:
    """What the command line says, checked before a model is loaded. Makes the store.

    Raises:
        UsageError: a value that cannot be.
        CliError: --restore names nothing, or --save cannot be written.
    """
    for option, value in (
        ("--store-budget", args.store_budget),
        ("--store-ttl", args.store_ttl),
    ):
        if value is not None and args.store is None:
            raise UsageError(f"{option} has no meaning without --store")
    if args.mode is not None and args.store is None and args.save is None:
        raise UsageError("--file-mode has no meaning without --save or --store")
    if args.save_kv_dtype is not None and args.save is None:
        raise UsageError("--save-kv-dtype has no meaning without --save")
    for option, value in (
        ("--on-corrupt", args.on_corrupt != "fail"),
        ("--on-mismatch", args.on_mismatch != "refuse"),
    ):
        if value and args.restore is None:
            raise UsageError(f"{option} has no meaning without --restore")
    _check_values(args)
    if args.store is None:
        check_writable("--save", args.save)
        source = None if args.restore is None else find_snapshot(args.restore)
        return SessionPlaces(args, None, source)
    store = DirectoryStore(
        args.store, byte_budget=args.store_budget, ttl=args.store_ttl, mode=args.mode
    )
    source = None
    if args.restore is not None:
        named = os.sep not in args.restore  # else an address of its own, perhaps in another store
        source = find_snapshot(str(Path(args.store) / args.restore) if named else args.restore)
    return SessionPlaces(args, store, source)


def _check_values(args: argparse.Namespace) -> None:
    try:
        if args.store_budget not in (None, UNLIMITED):
            parse_bytes("--store-budget", args.store_budget)
        if args.store_ttl is not None:
            parse_ttl("--store-ttl", args.store_ttl)
        if args.store is not None and args.save is not None:
            check_name(args.save)
    except InvalidArgumentError as error:
        raise UsageError(str(error).replace("name is", "--save is", 1)) from error


def add_segment_options(parser: argparse.ArgumentParser) -> None:
    """--segment, --repair, --prefix, --prefix-file, --prefix-ids."""
    group = parser.add_argument_group(
        "segments",
        "The text is then the prefix, the segments in this order, and the prompt. What follows a "
        "segment that is not at the beginning is approximate.",
    )
    group.add_argument(
        "--segment",
        dest="segments",
        action="append",
        metavar="NAME",
        help="of a text that `kvpager segment add` has put into --store; may be given many times",
    )
    group.add_argument(
        "--repair",
        metavar="POLICY",
        help="which tokens of segments are computed again in place: none, full, head:N, tail:N "
        "(N tokens of each segment), deviation:F, query:F (a share of them), or several with + "
        "between them (default: the engine's)",
    )
    prefix = group.add_mutually_exclusive_group()
    prefix.add_argument(
        "--prefix",
        metavar="TEXT",
        help="such as a system prompt (default: what the tokenizer begins a text with)",
    )
    prefix.add_argument("--prefix-file", metavar="FILE", help="the same, from a UTF-8 file")
    prefix.add_argument("--prefix-ids", metavar="IDS", help='token ids such as "1,2,3"')


@dataclass(frozen=True)
class SegmentParts:
    """What comes before the prompt, checked.

    Attributes:
        names: of segments in the store, in order.
        prefix: text or token ids; "" for none.
        repair: None for the default.
    """

    names: tuple[str, ...]
    prefix: str | list[int]
    repair: RepairPolicy | None

    def assemble(
        self, args: argparse.Namespace, engine: Engine, question: list[int], tokenizer: Any | None
    ) -> Session:
        """A session of it all. question: the prompt's token ids.

        Raises:
            CliError: a prefix in words, and no tokenizer.
        """
        prefix: list[int] = []
        if self.prefix or tokenizer is not None:
            prefix = prompt_ids(args, self.prefix, tokenizer) or []
        parts: list[list[int] | str] = [prefix, *self.names, question]
        return engine.assemble(parts, repair=self.repair, progress=shows_progress(args))


def segment_parts(args: argparse.Namespace) -> SegmentParts | None:
    """What the command line says, checked before a model is loaded; None without --segment.

    Raises:
        UsageError: a value that cannot be.
        CliError: --store is none, or has no such segment.
    """
    if not args.segments:
        for option in ("repair", "prefix", "prefix_file", "prefix_ids"):
            if getattr(args, option) is not None:
                raise UsageError(f"--{option.replace('_', '-')} has no meaning without --segment")
        return None
    if args.store is None:
        raise UsageError(f"--segment {args.segments[0]}: no store; give --store DIR")
    if args.restore is not None:
        raise UsageError("--segment has no meaning with --restore, whose text is there already")
    repair = None if args.repair is None else _policy(args.repair)
    prefix: str | list[int] = args.prefix or ""
    if args.prefix_file is not None:
        prefix = read_text("--prefix-file", args.prefix_file)
    elif args.prefix_ids is not None:
        prefix = parse_ids(args.prefix_ids, "--prefix-ids")
    find_segments(find_store(args.store), args.segments)
    return SegmentParts(tuple(args.segments), prefix, repair)


def _policy(text: str) -> RepairPolicy:
    from kvpager.segments.policy_text import parse_policy  # loads torch

    try:
        return parse_policy(text)
    except InvalidArgumentError as error:
        raise UsageError(f"--{error}") from error
