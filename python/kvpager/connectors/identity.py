"""What the K/V of another engine depend on, as JSON: digests of weights, and comparisons."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from kvpager._support.arguments import refusal
from kvpager._support.remembered import recall, remember
from kvpager.errors import StorageError

if TYPE_CHECKING:
    from logging import Logger

    from kvpager.stores.chunks import ChunkStore

_KIND = "files"  # of what is remembered
_WEIGHTS = ("*.safetensors", "*.gguf", "*.bin", "*.pt", "*.pth")
_CONFIG = "config.json"
_NOT_OF_THE_MODEL = {"_name_or_path", "transformers_version"}
_BESIDE = ("*.py", "*quantize_config.json", "*quant_config.json", "*quantization_config.json")
_ADAPTER = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
    "adapter_model.pt",
)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_MOST_DIFFERENCES = 20
_MOST_CHARACTERS = 80  # of a value in a difference


def weights_digests(
    model: str, revision: str | None = None, download_folder: str | None = None
) -> dict[str, str]:
    """Digests of all files of weights that a model's name or path leads to, whichever are loaded.

    A folder's code and descriptions of its quantisation are among them.

    Args:
        model: a folder, a file, or the name of a repository that has been downloaded.
        revision: of the repository.
        download_folder: where repositories are; None: where Hugging Face keeps them.

    Returns:
        BLAKE3 in hex by name of file.

    Raises:
        InvalidArgumentError: there are no such files here.
    """
    files = _weights_files(model, revision, download_folder)
    return {file.name: file_digest(file) for file in files}


def model_identity(model: str, revision: str | None = None) -> dict[str, Any]:
    """Digests of a model's weights, and its config.json without what is not of the model.

    See `weights_digests`.

    Raises:
        InvalidArgumentError: there are no such files here, or config.json is not JSON.
    """
    files = _weights_files(model, revision, None)
    config = files[0].parent / _CONFIG
    try:
        found = json.loads(config.read_text()) if config.is_file() else None
    except ValueError as error:
        raise refusal("config.json", str(config), f"JSON ({error})") from error
    return {
        "weights": {file.name: file_digest(file) for file in files},
        "config": of_the_model(found) if isinstance(found, dict) else found,
    }


def model_stamp(model: str, revision: str | None = None) -> list[Any]:
    """Equal as long as no file that `model_identity` reads was changed. Reads no contents."""
    files = _weights_files(model, revision, None)
    config = files[0].parent / _CONFIG
    return [_file_key(file) for file in ([*files, config] if config.is_file() else files)]


def of_the_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """A model's configuration without where it came from and which transformers read it."""
    return {name: value for name, value in config.items() if name not in _NOT_OF_THE_MODEL}


def _weights_files(model: str, revision: str | None, download_folder: str | None) -> list[Path]:
    path = Path(model)
    if path.is_file():
        return [path]
    folder = path if path.is_dir() else _downloaded(model, revision, download_folder)
    if folder is not None:
        files = {file for pattern in _WEIGHTS for file in folder.glob(pattern)}
        if files:
            beside = (file for pattern in _BESIDE for file in folder.glob(pattern))
            files |= {file for file in beside if file.is_file()}
            return sorted(files)
    raise refusal(
        "model",
        model,
        'files of weights on this machine, or the option "weights", which identifies them',
    )


def adapter_digest(adapter: str) -> bytes:
    """Digest (32 bytes) of a LoRA adapter's weights and configuration.

    Raises:
        InvalidArgumentError: it is not on this machine.
    """
    path = Path(adapter)
    folder = path if path.is_dir() else _downloaded(adapter, None, None)
    files = [] if folder is None else [folder / name for name in _ADAPTER]
    found = {file.name: file_digest(file) for file in files if file.is_file()}
    if not any(name.startswith("adapter_model") for name in found):
        raise refusal("adapter", adapter, "a folder with adapter_model.safetensors")
    return hashlib.blake2b(_canonical(found), digest_size=32).digest()


def file_digest(path: Path) -> str:
    """BLAKE3 of a file in hex, remembered under its path, size, times, inode and device.

    Raises:
        StorageError: it was changed while it was read.
        OSError: it cannot be read.
    """
    key = _file_key(path)
    known = recall(_KIND, key)
    if isinstance(known, str):
        return known
    digest = blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()
    if _file_key(path) != key:
        raise StorageError(f"{path} was changed while it was read")
    remember(_KIND, key, digest)
    return digest


def key_of_adapter(digest: bytes, block: bytes) -> bytes:
    """The key (32 bytes) of a block that was computed with an adapter of this digest."""
    return hashlib.blake2b(block, key=digest, digest_size=32).digest()


def digest_of(identity: Mapping[str, Any]) -> str:
    """The name of an identity: 32 hex digits."""
    return hashlib.blake2b(_canonical(identity), digest_size=16).hexdigest()


def as_json(value: Any) -> Any:
    """Returns a value of configuration as JSON that is the same in every process.

    Classes and functions become their names; numbers that JSON lacks, and other objects, their
    representation.
    """
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in sorted(value.items(), key=_by_name)}
    if isinstance(value, (set, frozenset)):
        return sorted((as_json(item) for item in value), key=json.dumps)
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    if isinstance(value, enum.Enum):
        return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {"": type(value).__qualname__, **as_json(fields)}
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return _ADDRESS.sub("", str(value))


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns a line for each field that differs: `config.rope_theta: 10000.0, now 50000.0`."""
    old, new = dict(_fields(before)), dict(_fields(now))
    names = [name for name in sorted({*old, *new}) if old.get(name, _GONE) != new.get(name, _GONE)]
    lines = [f"{name}: {_shown(old, name)}, now {_shown(new, name)}" for name in names]
    if len(lines) > _MOST_DIFFERENCES:
        lines[_MOST_DIFFERENCES:] = [f"and {len(lines) - _MOST_DIFFERENCES} more"]
    return lines


def log_identity(log: Logger, store: ChunkStore, identity: Mapping[str, Any]) -> None:
    """Logs what is stored under an identity, or how the closest other one differs."""
    found = store.identities()
    here = next((blocks for other, blocks, _ in found if other == identity), 0)
    others = [(differences(other, identity), blocks) for other, blocks, _ in found]
    log.info("kvpager: %d chunks of identity %s in %s", here, digest_of(identity), store.path)
    if not here and others:
        lines, blocks = min(others, key=lambda other: len(other[0]))
        log.info("kvpager: %d chunks there are not used, which differ in:", blocks)
        for line in lines:
            log.info("kvpager:   %s", line)


def message_of(error: Exception) -> str:
    """An error's message. Its frames hold views of host memory, and are let go."""
    error.__traceback__ = None
    return str(error)


_GONE = object()


def _shown(fields: Mapping[str, Any], name: str) -> str:
    text = json.dumps(fields[name]) if name in fields else "absent"
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


def _fields(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Each leaf with its dotted name; an empty list or object is a leaf."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    empty = True
    for key, item in items:
        empty = False
        yield from _fields(item, f"{name}.{key}" if name else str(key))
    if empty and name:
        yield name, value


def _file_key(path: Path) -> dict[str, Any]:
    path = path.resolve()  # what a link of a cache of repositories leads to
    found = path.stat()
    return {
        "path": os.fspath(path),
        "size": found.st_size,
        "mtime_ns": found.st_mtime_ns,
        "ctime_ns": found.st_ctime_ns,  # which no program can set back
        "inode": found.st_ino,
        "device": found.st_dev,
    }


def _downloaded(name: str, revision: str | None, folder: str | None) -> Path | None:
    try:
        from huggingface_hub import snapshot_download

        found = snapshot_download(name, revision=revision, cache_dir=folder, local_files_only=True)
    except (ImportError, OSError, ValueError):  # its errors are of these kinds
        return None
    return Path(found)


def _by_name(item: tuple[Any, Any]) -> str:
    return str(item[0])


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
