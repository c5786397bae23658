"""Models and token ids from what a user types."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvpager.cli.failure import CliError, UsageError

DTYPES = ("auto", "float32", "bfloat16", "float16")


def add_model_options(parser: argparse.ArgumentParser, *, default: str) -> None:
    """--model, --dtype, --threads; `default` says what is used without --model."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model", metavar="PATH", help=f"folder of a transformers causal LM (default: {default})"
    )
    group.add_argument(
        "--dtype", choices=DTYPES, default="auto", help="dtype of the weights (default: the file's)"
    )
    group.add_argument(
        "--threads", type=positive, metavar="N", help="torch threads (default: torch's choice)"
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


def load_config(path: str | Path) -> Any:
    """A model's configuration. Raises CliError, as `load_model`."""
    from transformers import AutoConfig

    _check_folder(path)
    with _readable(path):
        return AutoConfig.from_pretrained(str(path), local_files_only=True)


def load_model(path: str | Path, dtype: str = "auto", device: str = "cpu") -> Any:
    """A causal LM in eval mode, from a local folder alone.

    Args:
        path: the folder.
        dtype: one of DTYPES.
        device: where it is to be paged, as `PagerConfig.device` has it; on the CPU unless a GPU is
            named.

    Raises:
        CliError: no such folder, or transformers cannot load what is in it.
        DeviceError: there is no such device.
    """
    place: Any = "cpu"
    if device.startswith("cuda"):
        from kvpager.device import torch_device

        place = torch_device(device)
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    _check_folder(path)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with _readable(path):
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(path), dtype=dtype, local_files_only=True
        )
    return model.eval().to(place)


def load_tokenizer(path: str | Path) -> Any | None:
    """The tokenizer in a model's folder; None where there is none."""
    from transformers import AutoTokenizer

    files = (
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
        "vocab.txt",
    )
    if not any((Path(path) / name).is_file() for name in files):
        return None
    with _readable(path):
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)


def parse_ids(text: str, option: str = "--ids") -> list[int]:
    """Token ids from "1,2,3" or "1 2 3". Raises UsageError for anything else."""
    words: Sequence[str] = text.replace(",", " ").split()
    for word in words:
        if not word.isascii() or not word.isdigit():
            raise UsageError(f'{option}: {word!r} is no token id; expected such as "1,2,3"')
    if not words:
        raise UsageError(f'{option} is empty; expected such as "1,2,3"')
    return [int(word) for word in words]


def _check_folder(path: str | Path) -> None:
    if not Path(path).exists():
        raise CliError(f"--model {path}: no such folder")
    if not (Path(path) / "config.json").is_file():
        raise CliError(f"--model {path}: no config.json in it; expected a transformers model")


@contextmanager
def _readable(path: str | Path) -> Iterator[None]:
    """A damaged folder makes transformers raise nearly anything; the first line says what."""
    loggers = [logging.getLogger(name) for name in ("transformers", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        yield
    except Exception as error:
        first = str(error).strip().split("\n")[0] or type(error).__name__
        raise CliError(f"--model {path}: {first}") from error
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)
