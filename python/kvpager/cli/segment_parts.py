"""What `generate` puts before a prompt: segments of a store, and what comes before them."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvpager.cli.failure import UsageError
from kvpager.cli.models import parse_ids
from kvpager.cli.output import shows_progress
from kvpager.cli.prompts import prompt_ids, read_text
from kvpager.cli.segment.stored import find_segments
from kvpager.cli.snapshot.address import find_store
from kvpager.errors import InvalidArgumentError

if TYPE_CHECKING:
    from kvpager import Engine, RepairPolicy, Session


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
    from kvpager.runtime.segments.policy_text import parse_policy  # loads torch

    try:
        return parse_policy(text)
    except InvalidArgumentError as error:
        raise UsageError(f"--{error}") from error
