"""Options of several commands, and parsers of their values."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvpager._model.pretrained import DTYPES
from kvpager._support.arguments import is_unicode
from kvpager.cli.failure import CliError, UsageError
from kvpager.cli.parser import option
from kvpager.errors import InvalidArgumentError
from kvpager.stores.files import parse_mode

SNAPSHOT = "a snapshot file, or STORE/NAME for one that a directory store keeps"


def _at_least(low: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < low:
            raise argparse.ArgumentTypeError(f"{text!r} must be an integer of at least {low}")
        return int(text)

    return read


positive, natural = _at_least(1), _at_least(0)  # for argparse


def add_model_options(parser: argparse.ArgumentParser, *, default: str | None = None) -> None:
    """--model, --dtype, --threads; `default` says what is used without --model, if that may be."""
    group = parser.add_argument_group("model")
    about = (
        "folder of a transformers causal LM, a GGUF file, or the name of a model in the cache of "
        "the Hugging Face hub, such as Qwen/Qwen3-0.6B"
    )
    about += "" if default is None else f" (default: {default})"
    option(group, "--model MODEL", about, required=default is None)
    about = "dtype of the weights (default: the file's; bfloat16 for a GGUF file)"
    option(group, "--dtype", about, choices=DTYPES, default="auto")
    option(group, "--threads N", "torch threads (default: torch's choice)", type=positive)


def add_prompt_options(parser: argparse.ArgumentParser, description: str) -> Any:
    """--prompt, --prompt-file, --ids; returns their group, of which only one may be given."""
    group = parser.add_argument_group("prompt", description).add_mutually_exclusive_group()
    option(group, "--prompt TEXT", "text, through the model's tokenizer")
    option(group, "--prompt-file FILE", "the same, from a UTF-8 file")
    option(group, "--ids IDS", 'token ids such as "1,2,3"')
    return group


def add_mode(parser: argparse._ActionsContainer) -> None:
    """--file-mode, None where it is not given."""
    about = (
        "permissions of the snapshot files that are written, whatever the umask, such as 640 for "
        "the group to read them (default: 600, as they hold prompts; a store remembers what it was "
        "told); a file that is replaced keeps the permissions that it lacks"
    )
    option(parser, "--file-mode OCTAL", about, dest="mode", type=_permissions)


def _permissions(text: str) -> int:
    try:
        return parse_mode("mode", text)
    except InvalidArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def require_extra(what: str, extra: str, packages: Sequence[str]) -> None:
    """Raises CliError, which names the extra, where a package that it brings is missing."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise CliError(
            f"{what} needs {', '.join(missing)}; pip install 'kvpager[{extra}]', or "
            f"'.[{extra}]' in a checkout"
        )


def read_prompt(args: argparse.Namespace) -> str | list[int] | None:
    """Text or token ids, before a model is loaded; None where none was given.

    Raises:
        UsageError: --ids are no token ids.
        CliError: --prompt-file cannot be read.
    """
    if args.ids is not None:
        return _parse_ids(args.ids)
    if args.prompt_file is not None:
        return read_text("--prompt-file", args.prompt_file)
    return as_unicode("--prompt", args.prompt)


def _parse_ids(text: str) -> list[int]:
    """Token ids from "1,2,3" or "1 2 3"."""
    words = text.replace(",", " ").split()
    if not words:
        raise UsageError('--ids is empty; expected such as "1,2,3"')
    for word in words:
        if not word.isascii() or not word.isdigit():
            raise UsageError(f'--ids: {word!r} is no token id; expected such as "1,2,3"')
    return [int(word) for word in words]


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


def as_unicode(name: str, text: str | None) -> str | None:
    """Text of the command line. Raises CliError, which names the option, if it is no UTF-8."""
    if text is not None and not is_unicode(text):
        raise CliError(f"{name}: the text is not UTF-8, or the locale is not (LC_ALL, PYTHONUTF8)")
    return text


def read_text(name: str, path: str) -> str:
    """The text of a UTF-8 file, without a mark of its encoding. Raises CliError with the option."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise CliError(f"{name} {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CliError(f"{name} {path}: not UTF-8 ({error.reason})") from error


def read_json(name: str, path: str) -> Any:
    """The value in a JSON file. Raises CliError with the option."""
    try:
        return json.loads(read_text(name, path))
    except (ValueError, RecursionError) as error:
        raise CliError(f"{name} {path}: no JSON ({error})") from error
