"""Copies of GGUF files with unpacked weights, which the next start reads instead of unpacking.

Unpacking takes transformers ten seconds for 100 MB, reading a copy half a second. Copies are in the
folder "gguf" of the user's cache (`KVPAGER_CACHE`) and may be deleted at any time. A new copy
evicts the least recently used ones beyond 4 GiB.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
import time
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from blake3 import blake3

from kvpager._support.private_folder import NotPrivateError, private_folder
from kvpager._support.remembered import cache_folder

_log = logging.getLogger(__name__)

_MOST_BYTES = 1 << 30  # of a file; its copy is two to seven times as large
_BUDGET_BYTES = 4 << 30  # of all copies together
_ABANDONED_SECONDS = 24 * 3600  # age of an unfinished copy whose writer is dead
_ABOUT = "kvpager.json"  # written last, touched by every use


def find(file: Path, dtype: str = "*") -> Path | None:
    """The folder with the copy of a file in a dtype, "*": in any; None: there is none."""
    folder = _folder(file, dtype)
    found = [] if folder is None else sorted(folder.parent.glob(folder.name))
    copy = next(filter(_is_whole, found), None)
    if copy is not None:
        with suppress(OSError):  # in a folder that cannot be written
            os.utime(copy / _ABOUT)
    return copy


def keep(file: Path, dtype: str, model: Any, tokenizer: Any) -> Path | None:
    """Writes the copy of a file, whole or not at all; None: it could not, which is logged.

    Args:
        file: the GGUF file.
        dtype: of the model's weights, as `find` gets it.
        model: with plain weights.
        tokenizer: the file's.
    """
    folder = _folder(file, dtype)
    if folder is None:
        return None
    try:
        with private_folder(folder.parent, make=True):
            made = Path(tempfile.mkdtemp(prefix=".", dir=folder.parent))
        try:
            model.save_pretrained(made)
            tokenizer.save_pretrained(made)
            (made / _ABOUT).write_text(json.dumps(_about(file)))
            _delete(folder)  # of another release of transformers
            made.rename(folder)
            with suppress(OSError):  # another process deletes too
                _clean(folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except (OSError, NotPrivateError) as error:
        _log.info("%s is not kept unpacked: %s", file, error)
        return None
    return folder


def _folder(file: Path, dtype: str) -> Path | None:
    """Where the copy is, or would be; None: no copy is kept of this file."""
    try:
        cache = cache_folder()
    except RuntimeError:  # nobody's home
        return None
    found = file.stat()
    if cache is None or found.st_size > _MOST_BYTES:
        return None
    digest = _digest(file.absolute(), found.st_ino, found.st_size, found.st_ctime_ns)
    return cache.absolute() / "gguf" / f"{digest}-{dtype}"


@lru_cache(maxsize=16)  # loading the configuration, the tokenizer and the model each ask for it
def _digest(file: Path, *state: int) -> str:
    """The hash of a file's bytes; `state` changes whenever they do."""
    return blake3(max_threads=os.cpu_count() or 1).update_mmap(file).hexdigest(length=16)


def _clean(new: Path) -> None:
    """Deletes the least recently used copies beyond the budget, never `new`, and abandoned ones."""
    copies = []
    for folder in new.parent.iterdir():
        if not folder.name.startswith("."):
            copies += [folder] if folder.is_dir() else []
        elif time.time() - folder.stat().st_mtime > _ABANDONED_SECONDS:
            _delete(folder)
    total = 0
    for folder in sorted(copies, key=lambda one: (one == new, _last_use(one)), reverse=True):
        total += sum(file.stat().st_size for file in folder.iterdir())
        if total > _BUDGET_BYTES and folder != new:
            _delete(folder)


def _last_use(folder: Path) -> float:
    about = folder / _ABOUT
    return about.stat().st_mtime if about.exists() else 0.0


def _delete(folder: Path) -> None:
    (folder / _ABOUT).unlink(missing_ok=True)  # first, so that nobody reads half a copy
    shutil.rmtree(folder, ignore_errors=True)


def _is_whole(folder: Path) -> bool:
    try:
        with private_folder(folder, make=False) as private:
            found = private.read(_ABOUT)
        return found is not None and json.loads(found)["transformers"] == version("transformers")
    except (OSError, NotPrivateError, ValueError, KeyError, TypeError):
        return False


def _about(file: Path) -> dict[str, str]:
    return {"file": file.name, "transformers": version("transformers")}
