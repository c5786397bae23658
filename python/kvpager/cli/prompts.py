"""A prompt on the command line: text, a file of text, or token ids."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kvpager.cli.failure import CliError
from kvpager.cli.models import parse_ids


def add_prompt_options(
    parser: argparse.ArgumentParser, description: str
) -> argparse._MutuallyExclusiveGroup:
    """--prompt, --prompt-file, --ids; returns their group, of which only one may be given."""
    group = parser.add_argument_group("prompt", description).add_mutually_exclusive_group()
    group.add_argument("--prompt", metavar="TEXT", help="text, through the model's tokenizer")
    group.add_argument("--prompt-file", metavar="FILE", help="the same, from a UTF-8 file")
    group.add_argument("--ids", metavar="IDS", help='token ids such as "1,2,3"')
    return group


def read_prompt(args: argparse.Namespace) -> str | list[int] | None:
    """Text or token ids, before a model is loaded; None where none was given.

    Raises:
        UsageError: --ids are no token ids.
        CliError: --prompt-file cannot be read.
    """
    if args.ids is not None:
        return parse_ids(args.ids)
    if args.prompt_file is not None:
        return read_text("--prompt-file", args.prompt_file)
    text: str | None = args.prompt
    return text


def read_text(option: str, path: str) -> str:
    """What a UTF-8 file holds. Raises CliError, which names the option."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise CliError(f"{option} {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CliError(f"{option} {path}: not UTF-8 ({error.reason})") from error


def prompt_ids(
    args: argparse.Namespace,
    prompt: str | list[int] | None,
    tokenizer: Any | None,
    *,
    special_tokens: bool = True,
) -> list[int] | None:
    """Token ids of what `read_prompt` gave. Raises CliError for text without a tokenizer."""
    if not isinstance(prompt, str):
        return prompt
    if tokenizer is None:
        raise CliError(
            f"--model {args.model} has no tokenizer, so text cannot be read; give token ids with "
            "--ids"
        )
    ids: list[int] = tokenizer(prompt, add_special_tokens=special_tokens)["input_ids"]
    return ids
