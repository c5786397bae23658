"""`kvpager segment`: texts cached once in a store, to be used at any place of a prompt."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpager.cli.failure import CliError, UsageError
from kvpager.cli.models import load_model, load_tokenizer
from kvpager.cli.options import (
    add_mode,
    add_model_options,
    add_prompt_options,
    parse_ids,
    prompt_ids,
    read_prompt,
    read_text,
    require_model,
)
from kvpager.cli.output import emit_result, note, shows_progress
from kvpager.cli.pager_options import ALIASES, DEFAULTS, add_pager_options, pager_config
from kvpager.cli.parser import Parser
from kvpager.cli.segment_store import add_ls, add_rm, add_store
from kvpager.errors import FingerprintMismatchError, InvalidArgumentError
from kvpager.stores import DirectoryStore, StoreEntry
from kvpager.stores.segments import stored_name
from kvpager.words import byte_size, counted

if TYPE_CHECKING:
    from kvpager import Engine


def add(commands: Any, common: Parser) -> None:
    """Adds the command and its own subcommands."""
    parser = commands.add_parser(
        "segment",
        help="cache texts once in a store, to be used at any place of a prompt",
        description="Keeps the K/V of texts, such as documents, in a store; `kvpager generate "
        "--store DIR --segment NAME` puts them into a prompt at any place and in any order. In the "
        "store the segment NAME is the snapshot segment-NAME, which `kvpager snapshot` inspects, "
        "verifies, pins, exports and imports as any other.",
    )
    parser.set_defaults(parser=parser)
    verbs = parser.add_subparsers(metavar="VERB", required=True, title="verbs")
    for add_verb in (_add_add, add_ls, add_rm):
        add_verb(verbs, common)


def _add_add(verbs: Any, common: Parser) -> None:
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
    """The result of adding one text.

    Attributes:
        tokens: number of tokens of the text.
        computed: how many of them were computed; the store had the others.
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
    require_model(args)
    texts = read_texts(args)
    config = pager_config(args)
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
    added = [asdict(one) for one in done]
    values = {"command": "segment add", "store": args.store, "segments": added}
    emit_result(args, values, lambda: "".join(f"{one.line()}\n" for one in done))
    return 0


def _already_there(
    engine: Engine, store: DirectoryStore, ids: Mapping[str, Sequence[int]], *, replace: bool
) -> set[str]:
    """The names of texts that are stored already.

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
        if other is None and entry.error is None:  # a damaged one is written again
            there.add(name)
    return there


def _other(
    engine: Engine, store: DirectoryStore, entry: StoreEntry, name: str, tokens: Sequence[int]
) -> str | None:
    """Describes what has a segment's name in the store; None if it is this text of this engine."""
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
    """Computes a segment, saves it and releases its memory."""
    segment = engine.cache_segment(tokens, name=name, progress=shows_progress(args))
    assert segment.transcript is not None
    computed = segment.transcript.tokens_computed
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


@dataclass(frozen=True)
class NamedText:
    """A segment's name, and its text or token ids."""

    name: str
    text: str | list[int]

    def ids(self, args: argparse.Namespace, tokenizer: Any | None) -> list[int]:
        """Its token ids, without those a tokenizer puts around a whole prompt.

        Raises:
            CliError: it is text and the model has no tokenizer, or it has no tokens.
        """
        ids = prompt_ids(args, self.text, tokenizer, special_tokens=False)
        if not ids:
            raise CliError(f"{self.name}: its text has no tokens; expected at least one")
        return ids


def add_text_options(parser: Parser) -> None:
    """FILE..., --as-ids, --name, and --prompt, --prompt-file or --ids."""
    parser.add_argument(
        "files",
        metavar="FILE",
        nargs="*",
        help="UTF-8 texts, a segment each, called as the file is without its suffix",
    )
    parser.add_argument(
        "--as-ids", action="store_true", help='FILEs hold token ids such as "1,2,3", not text'
    )
    parser.add_argument("--name", metavar="NAME", help="of the segment, if it is one")
    add_prompt_options(parser, "One of these, with --name, in the place of FILEs.")


def read_texts(args: argparse.Namespace) -> list[NamedText]:
    """All of them, before a model is loaded.

    Raises:
        UsageError: the command line does not say which texts under which names.
        CliError: a file cannot be read.
    """
    prompt = read_prompt(args)
    if prompt is not None and args.files:
        raise UsageError("FILE and a prompt option were given; expected one of them")
    if prompt is None and not args.files:
        raise UsageError("a text is missing; give FILE, --prompt, --prompt-file or --ids")
    if args.as_ids and not args.files:
        raise UsageError("--as-ids has no meaning without FILE")
    if args.name is not None and len(args.files) > 1:
        raise UsageError(f"--name {args.name}: one name for {len(args.files)} FILEs; leave it out")
    if prompt is not None:
        if args.name is None:
            raise UsageError("--name is missing; expected what the segment is to be called")
        return [NamedText(_checked("--name", args.name), prompt)]
    files: dict[str, str] = {}
    for file in args.files:
        option = f"FILE {file}" if args.name is None else "--name"
        name = _checked(option, Path(file).stem if args.name is None else args.name)
        if name in files:
            raise UsageError(
                f"FILE {file}: its segment would be called {name}, as that of {files[name]}; "
                "rename one, or add them one by one with --name"
            )
        files[name] = file
    return [NamedText(name, _read(file, as_ids=args.as_ids)) for name, file in files.items()]


def _checked(option: str, name: str) -> str:
    try:
        stored_name(name)
    except InvalidArgumentError as error:
        raise UsageError(f"{option}: {error}; give another one with --name") from error
    return name


def _read(file: str, *, as_ids: bool) -> str | list[int]:
    text = read_text("FILE", file)
    return parse_ids(text, f"FILE {file}") if as_ids else text
