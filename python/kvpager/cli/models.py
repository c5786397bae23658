"""Models and tokenizers from folders, or from the cache of the Hugging Face hub."""

from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvpager.cli.failure import CliError

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def load_config(path: str | Path) -> Any:
    """A model's configuration. Raises CliError, as `load_model`."""
    from transformers import AutoConfig

    folder = folder_of(path)
    with _readable(path):
        return AutoConfig.from_pretrained(str(folder), local_files_only=True)


def load_model(path: str | Path, dtype: str = "auto", device: str = "cpu") -> Any:
    """A causal LM in eval mode; nothing is downloaded.

    Args:
        path: its folder, or the name of a model in the cache of the Hugging Face hub.
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

    folder = folder_of(path)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with _readable(path):
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=dtype, local_files_only=True
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
    """The tokenizer of a model, which `load_model` has loaded; None where there is none."""
    from transformers import AutoTokenizer

    folder = folder_of(path)
    files = (
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
        "vocab.txt",
    )
    if not any((folder / name).is_file() for name in files):
        return None
    with _readable(path):
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def folder_of(path: str | Path) -> Path:
    """The folder of a model: `path`, or where the cache of the Hugging Face hub has it.

    Raises:
        CliError: there is no such folder or cached model, or it has no config.json.
    """
    folder = found(path)
    if not (folder / "config.json").is_file():
        raise CliError(f"--model {path}: no config.json in it; expected a transformers model")
    return folder


def found(path: str | Path, *, option: str = "--model", file: str = "") -> Path:
    """A path that there is, or where the cache of the Hugging Face hub has the model of a name.

    Args:
        path: it, or a name such as Qwen/Qwen3-0.6B.
        option: what an error says that it was given as.
        file: what is needed of the model; "": all.

    Raises:
        CliError: there is neither.
    """
    if Path(path).exists():
        return Path(path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    name = str(path)
    missing = f"{option} {name}: no such {'file or ' if file else ''}folder"
    if not _HUB_NAME.fullmatch(name):
        raise CliError(missing)
    try:
        return Path(snapshot_download(name, local_files_only=True))
    except LocalEntryNotFoundError as error:
        raise CliError(
            f"{missing}, and the cache of the Hugging Face hub has no model of that name; "
            f"`hf download {name}{file and ' ' + file}` gets {file or 'one'}"
        ) from error


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
