"""Loads models and tokenizers from folders, GGUF files and the cache of the Hugging Face hub."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvpager._model import unpacked
from kvpager.errors import InvalidArgumentError

GGUF = ".gguf"
DTYPES = ("auto", "float32", "bfloat16", "float16")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_GGUF_NEEDS = ("gguf", "accelerate")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)


def is_hub_name(name: str) -> bool:
    """Whether a text can be the name of a model on the Hugging Face hub."""
    return _HUB_NAME.fullmatch(name) is not None


def find_model(name: str | os.PathLike[str]) -> Path | None:
    """The path of a model: a folder, a GGUF file, or the hub's snapshot of a name; None: neither.

    Nothing is downloaded.
    """
    if Path(name).exists():
        return Path(name)
    if not is_hub_name(str(name)):
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(name), local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def load_config(source: str | os.PathLike[str], *, download: bool = False) -> Any:
    """A model's configuration; arguments and errors are those of `load_model`."""
    with _reading(source, download) as arguments:
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(**_of_copy(arguments))


def load_model(
    source: str | os.PathLike[str], dtype: str = "auto", *, download: bool = False
) -> Any:
    """A causal LM in eval mode, on the CPU.

    Weights of a GGUF file are unpacked: the model computes with plain matrices of `dtype`.

    Args:
        source: a folder, a GGUF file, a folder with one GGUF file, or a name on the hub.
        dtype: of the weights, one of DTYPES; "auto": the dtype of the checkpoint, and bfloat16 for
            a GGUF file.
        download: whether transformers may download a name that the hub's cache does not have.

    Raises:
        InvalidArgumentError: there is no such model, transformers cannot load it, or a package
            that GGUF files need is not installed.
    """
    with _reading(source, download) as arguments:
        from transformers import AutoModelForCausalLM

        if "gguf_file" in arguments:
            model: Any = _load_gguf(arguments, "bfloat16" if dtype == "auto" else dtype)
        else:
            model = AutoModelForCausalLM.from_pretrained(**arguments, dtype=dtype)
    return model.eval()


def load_tokenizer(source: str | os.PathLike[str], *, download: bool = False) -> Any | None:
    """A model's tokenizer; None if it has none. Arguments and errors are those of `load_model`."""
    with _reading(source, download) as arguments:
        from transformers import AutoTokenizer

        folder = Path(arguments["pretrained_model_name_or_path"])
        has_files = any((folder / name).is_file() for name in _TOKENIZER_FILES)
        if folder.is_dir() and not has_files and "gguf_file" not in arguments:
            return None
        return AutoTokenizer.from_pretrained(**_of_copy(arguments))


@contextmanager
def _reading(source: str | os.PathLike[str], download: bool) -> Iterator[dict[str, Any]]:
    """Yields arguments of `from_pretrained`; makes errors in the block InvalidArgumentErrors.

    transformers and huggingface_hub log errors only in the block.
    """
    name = os.fspath(source)
    arguments = _arguments(name, download)
    loggers = [logging.getLogger(name) for name in ("transformers", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        yield arguments
    except Exception as error:
        first = str(error).strip().split("\n")[0] or type(error).__name__
        raise InvalidArgumentError(f"model {name}: {first}") from error
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)


def _arguments(name: str, download: bool) -> dict[str, Any]:
    path = find_model(name)
    if path is None:
        if download and is_hub_name(name):
            return {"pretrained_model_name_or_path": name}
        raise InvalidArgumentError(f"model {name}: {missing(name)}")
    file = _gguf_file(name, path)
    if file is None:
        return {"pretrained_model_name_or_path": str(path), "local_files_only": True}
    packages = [one for one in _GGUF_NEEDS if importlib.util.find_spec(one) is None]
    if packages:
        raise InvalidArgumentError(
            f"model {name}: GGUF files need {' and '.join(packages)}; pip install 'kvpager[gguf]'"
        )
    return {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}


def missing(name: str, file: str = "") -> str:
    """Why there is no model of a name, and how to get it; file: the only one that is needed."""
    if name.endswith(GGUF):
        return "no such file"
    what = f"no such {'file or ' if file else ''}folder"
    if not is_hub_name(name):
        return what
    return (
        f"{what}, and the cache of the Hugging Face hub has no model of that name; "
        f"`hf download {name}{file and ' ' + file}` gets {file or 'one'}"
    )


def _gguf_file(name: str, path: Path) -> Path | None:
    """The GGUF file that a path is, or that a folder without config.json has; None for a model."""
    if path.is_file():
        if path.suffix == GGUF:
            return path
        raise InvalidArgumentError(f"model {name}: a file; expected a folder, or a .gguf file")
    if (path / "config.json").is_file():
        return None
    files = sorted(path.glob(f"*{GGUF}"))
    if not files:
        raise InvalidArgumentError(
            f"model {name}: no config.json in it; expected a transformers model, or a .gguf file"
        )
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise InvalidArgumentError(f"model {name}: has {names}; expected the path of one of them")
    return files[0]


def _of_copy(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments that read the unpacked copy of a GGUF file, where there is one."""
    if "gguf_file" not in arguments:
        return arguments
    file = Path(arguments["pretrained_model_name_or_path"], arguments["gguf_file"])
    copy = unpacked.find(file)
    if copy is None:
        return arguments
    return {"pretrained_model_name_or_path": str(copy), "local_files_only": True}


def _load_gguf(arguments: dict[str, Any], dtype: str) -> Any:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    folder = Path(arguments["pretrained_model_name_or_path"])
    file = folder / arguments["gguf_file"]
    copy = unpacked.find(file, dtype)
    if copy is None:
        with _quiet_bar():
            model: Any = AutoModelForCausalLM.from_pretrained(
                **arguments, **_unpacked(), dtype=dtype
            )
        # Of packed weights, of which nothing is left; with them no copy could be written.
        model.config.__dict__.pop("quantization_config", None)
        model.__dict__.pop("hf_quantizer", None)
        copy = unpacked.keep(file, dtype, model, AutoTokenizer.from_pretrained(**arguments))
    if copy is not None:  # also at the first start, so that all starts have one model
        model = AutoModelForCausalLM.from_pretrained(copy, dtype=dtype, local_files_only=True)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


@contextmanager
def _quiet_bar() -> Iterator[None]:
    """Keeps the bar of unpacking a GGUF file from stderr unless that is a terminal."""
    from functools import partial

    reader: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    bar = reader.tqdm
    reader.tqdm = partial(bar, disable=None, leave=False)
    try:
        yield
    finally:
        reader.tqdm = bar


def _unpacked() -> dict[str, Any]:
    """Arguments with which transformers unpacks weights of every architecture, as 5.22 did."""
    try:
        from transformers import GgufConfig  # since 5.23
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}
