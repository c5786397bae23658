"""Models and tokenizers from folders, and text from their tokens."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvpager.cli.failure import CliError


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
        from kvpager.pager.device import torch_device

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


def given_model(args: argparse.Namespace) -> Path:
    """The folder that --model names, or the shipped model's. Raises CliError without either."""
    from kvpager.needles import shipped_model_path

    if args.model is not None:
        return Path(args.model)
    try:
        return shipped_model_path()
    except FileNotFoundError as error:
        raise CliError(f"{error}; give --model") from error


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


def _check_folder(path: str | Path) -> None:
    if not Path(path).exists():
        raise CliError(f"--model {path}: no such folder")
    if not (Path(path) / "config.json").is_file():
        raise CliError(f"--model {path}: no config.json in it; expected a transformers model")


@contextmanager
def _readable(path: str | Path) -> Iterator[None]:
    """Turns errors of transformers, which a damaged folder causes, into a CliError of one line."""
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


_UNFINISHED = "\ufffd"  # a tokenizer's text for an incomplete character


class TextPieces:
    """Turns tokens into printable pieces; without a tokenizer, into numbers."""

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []  # since the last line end: context that spacing depends on
        self._shown = 0
        self._first = True

    def push(self, token: int) -> str:
        """The text that this token completes; may be empty."""
        if self._tokenizer is None:
            piece = f"{'' if self._first else ' '}{token}"
            self._first = False
            return piece
        self._tokens.append(token)
        text = self._text()
        if text.endswith(_UNFINISHED):
            return ""
        piece = text[self._shown :]
        self._shown = len(text)
        if text.endswith("\n"):
            self._tokens, self._shown = [], 0
        return piece

    def finish(self) -> str:
        """The rest of the text."""
        return "" if self._tokenizer is None else self._text()[self._shown :]

    def _text(self) -> str:
        assert self._tokenizer is not None
        text: str = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        return text
