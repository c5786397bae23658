"""`kvpager segment add`: computes the K/V of texts, each alone, and keeps them in a store."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvpager.cli.failure import CliError, UsageError
from kvpager.cli.file_mode import add_mode
from kvpager.cli.models import add_model_options, load_model, load_tokenizer
from kvpager.cli.output import check_writable, emit, emit_json, note, shows_progress
from kvpager.cli.pager_options import ALIASES, DEFAULTS, add_pager_options, pager_config
from kvpager.cli.parser import Parser
from kvpager.cli.segment.stored import add_store
from kvpager.cli.segment.texts import add_text_options, read_texts
from kvpager.errors import FingerprintMismatchError
from kvpager.stores import DirectoryStore, StoreEntry
from kvpager.stores.segments import stored_name
from kvpager.words import byte_size, counted

if TYPE_CHECKING:
    from kvpager import Engine


def add(verbs: Any, common: Parser) -> None:
    """Adds the verb."""
    parser = verbs.add_parser(
        "add",
        parents=[common],
        help="compute the K/V of texts and keep them in a store",
        description="Computes the K/V of each text as if nothing came before it, and keeps them "
        "in a directory store, made if there is no such folder. A text that is there under its "
        "name, for the same model and numerics, is left as it is and nothing is computed.",
    )
    add_model_options(parser, default="none: it has to be given")
    add_text_options(parser)
    add_store(parser)
    add_mode(parser)
    parser.add_argument(
        "--replace", action="store_true", help="replace another text that has a name already"
    )
    add_pager_options(parser, DEFAULTS, ALIASES)
    parser.set_defaults(run=run, parser=parser)


@dataclass(frozen=True)
class Added:
    """What became of one text.

    Attributes:
        tokens: of the text.
        computed: of these, how many had to be; the store knew the others.
        bytes_written, bytes_shared: as of its SaveReport; 0 where nothing had to be saved.
    """

    name: str
    tokens: int
    computed: int
    bytes_written: int
    bytes_shared: int
    was_there: bool

    def line(self) -> str:
        """For a person."""
        tokens = counted(self.tokens, "token")
        if self.was_there:
            return f"{self.name}: {tokens}, was there already"
        shared = f" ({byte_size(self.bytes_shared)} shared)" if self.bytes_shared else ""
        return (
            f"{self.name}: {tokens}, {self.computed:,} computed, "
            f"{byte_size(self.bytes_written)} written{shared}"
        )


def run(args: argparse.Namespace) -> int:
    """Runs the verb."""
    if args.model is None:
        raise UsageError("--model is missing; expected the folder of a transformers causal LM")
    texts = read_texts(args)
    config = pager_config(args)
    check_writable("--output", args.output)
    store = DirectoryStore(args.store, mode=args.mode)
    model = load_model(args.model, args.dtype, config.device)
    tokenizer = load_tokenizer(args.model)
    ids = {text.name: text.ids(args, tokenizer) for text in texts}

    from kvpager import Engine

    done: list[Added] = []
    with Engine(
        model, config, threads=args.threads, store=store, progress=shows_progress(args)
    ) as engine:
        there = _already_there(engine, store, ids, replace=args.replace)
        for name, tokens in ids.items():
            done.append(
                Added(name, len(tokens), 0, 0, 0, was_there=True)
                if name in there
                else _add(args, engine, name, tokens)
            )
            if len(ids) > 1:
                note(args, f"{len(done)} of {len(ids)}: {name}")
    if args.format == "json":
        added = [asdict(one) for one in done]
        emit_json(args, {"command": "segment add", "store": args.store, "segments": added})
    else:
        emit(args, "".join(f"{one.line()}\n" for one in done))
    return 0


def _already_there(
    engine: Engine, store: DirectoryStore, ids: Mapping[str, Sequence[int]], *, replace: bool
) -> set[str]:
    """The names of those that need nothing.

    Raises:
        CliError: a name belongs to something else, without `replace`; nothing was computed.
    """
    entries = {entry.name: entry for entry in store.entries()}
    there = set()
    for name, tokens in ids.items():
        entry = entries.get(stored_name(name))
        if entry is None:
            continue
        other = _other(engine, store, entry, name, tokens)
        if other is not None and not replace:
            raise CliError(
                f"{name}: in the store {store.path} the name belongs to {other}; give --replace "
                "to replace it, or another name. Nothing was added"
            )
        if other is None and entry.error is None:  # else what is damaged is written again
            there.add(name)
    return there


def _other(
    engine: Engine, store: DirectoryStore, entry: StoreEntry, name: str, tokens: Sequence[int]
) -> str | None:
    """What has a segment's name in the store; None if it is this text, for this engine."""
    if entry.segment is None:
        return "a snapshot that cannot be read" if entry.error else "a snapshot of another kind"
    try:
        found = engine.segments.load(name, store)
    except FingerprintMismatchError as error:
        return f"one of another model or other numerics ({error})"
    engine.segments.remove(found.name)
    same = found.tokens.tolist() == list(tokens)
    return None if same else f"another text, of {counted(len(found), 'token')}"


def _add(args: argparse.Namespace, engine: Engine, name: str, tokens: Sequence[int]) -> Added:
    """Computes a segment and saves it; its memory is given back."""
    segment = engine.cache_segment(tokens, name=name, progress=shows_progress(args))
    assert segment.session is not None
    computed = segment.session.tokens_computed
    report = engine.segments.save(name, progress=shows_progress(args), overwrite=args.replace)
    padding = report.tokens - len(segment)  # of the last chunk, and computed with it
    engine.segments.remove(name)
    return Added(
        name,
        len(segment),
        max(0, computed - padding),
        report.bytes_written,
        report.bytes_shared,
        was_there=False,
    )
