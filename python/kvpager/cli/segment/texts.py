"""The texts that `kvpager segment add` is given, and their names."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpager.cli.failure import CliError, UsageError
from kvpager.cli.models import parse_ids
from kvpager.cli.parser import Parser
from kvpager.cli.prompts import add_prompt_options, prompt_ids, read_prompt, read_text
from kvpager.errors import InvalidArgumentError
from kvpager.stores.segments import stored_name


@dataclass(frozen=True)
class NamedText:
    """What a segment is to be called, and its text or token ids."""

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
