"""Options of several commands, defined once, and parsers of their values."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvpager.cli.failure import CliError, UsageError
from kvpager.errors import InvalidArgumentError
from kvpager.stores.permissions import parse_mode
from kvpager.unicode import is_unicode

DTYPES = ("auto", "float32", "bfloat16", "float16")


def add_model_options(parser: argparse.ArgumentParser, *, default: str) -> None:
    """--model, --dtype, --threads; `default` says what is used without --model."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        metavar="MODEL",
        help="folder of a transformers causal LM, or the name of one in the cache of the Hugging "
        f"Face hub, such as Qwen/Qwen3-0.6B (default: {default})",
    )
    group.add_argument(
        "--dtype", choices=DTYPES, default="auto", help="dtype of the weights (default: the file's)"
    )
    group.add_argument(
        "--threads", type=positive, metavar="N", help="torch threads (default: torch's choice)"
    )


def require_model(args: argparse.Namespace) -> None:
    """Raises UsageError where --model was left out by a command that has no default for it."""
    if args.model is None:
        raise UsageError(
            "--model is missing; expected the folder of a transformers causal LM, or the name of "
            "one in the cache of the Hugging Face hub"
        )


def positive(text: str) -> int:
    """An integer of at least 1, for argparse."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no integer of at least 1")
    return int(text)


def natural(text: str) -> int:
    """An integer of at least 0, for argparse."""
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no integer of at least 0")
    return int(text)


def parse_ids(text: str, option: str = "--ids") -> list[int]:
    """Token ids from "1,2,3" or "1 2 3". Raises UsageError for anything else."""
    words: Sequence[str] = text.replace(",", " ").split()
    for word in words:
        if not word.isascii() or not word.isdigit():
            raise UsageError(f'{option}: {word!r} is no token id; expected such as "1,2,3"')
    if not words:
        raise UsageError(f'{option} is empty; expected such as "1,2,3"')
    return [int(word) for word in words]


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
    return text if text is None else as_unicode("--prompt", text)


def as_unicode(option: str, text: str) -> str:
    """Text of the command line. Raises CliError, which names the option, if it is no UTF-8."""
    if not is_unicode(text):
        raise CliError(
            f"{option}: the text is not UTF-8, or the locale is not (LC_ALL, PYTHONUTF8)"
        )
    return text


def read_text(option: str, path: str) -> str:
    """The text of a UTF-8 file, without a mark of its encoding. Raises CliError with the option."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
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


def add_mode(parser: argparse._ActionsContainer) -> None:
    """--file-mode, None where it is not given."""
    parser.add_argument(
        "--file-mode",
        dest="mode",
        type=_permissions,
        metavar="OCTAL",
        help="permissions of the snapshot files that are written, whatever the umask, such as 640 "
        "for the group to read them (default: 600, as they hold prompts; a store remembers what it "
        "was told); a file that is replaced keeps the permissions that it lacks",
    )


def _permissions(text: str) -> int:
    try:
        return parse_mode("mode", text)
    except InvalidArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


_SNAPSHOT = "a snapshot file, or STORE/NAME for one that a directory store keeps"


_MOST_THREADS = 16  # a disk is busy long before


def add_snapshot(
    parser: argparse.ArgumentParser, name: str = "snapshot", metavar: str = "SNAPSHOT"
) -> None:
    """A positional argument that names a snapshot; see `address.find_snapshot`."""
    parser.add_argument(name, metavar=metavar, help=_SNAPSHOT)


def add_threads(parser: argparse.ArgumentParser) -> None:
    """--threads, of reading and checksums."""
    parser.add_argument(
        "--threads",
        type=positive,
        default=min(_MOST_THREADS, len(os.sched_getaffinity(0))),
        metavar="N",
        help="that read and check at a time (default: one per processor, %(default)s here)",
    )
