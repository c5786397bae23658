"""What was found out about this machine and this model before, kept on disk between processes.

A finding is kept under everything that it depends on. Where the folder cannot be read or written,
nothing is remembered, and everything is found out anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)

VARIABLE = "KVPAGER_CACHE"
OFF = "off"


def cache_folder() -> Path | None:
    """KVPAGER_CACHE, or kvpager's in the user's folder of caches; None: KVPAGER_CACHE is "off"."""
    said = os.environ.get(VARIABLE, "")
    if said == OFF:
        return None
    if said:
        return Path(said)
    own = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(own) / "kvpager"


def remembers() -> bool:
    """Whether there is a folder to remember in."""
    return _folder() is not None


def recall(kind: str, key: Mapping[str, Any]) -> Any:
    """What was remembered under a kind and a key of JSON values; None: nothing was.

    A file that is damaged, or of another key, is nothing.
    """
    path = _path(kind, key)
    if path is None:
        return None
    try:
        if not path.is_file():  # a pipe would be waited for
            return None
        found = json.loads(path.read_text(encoding="utf-8"))
        digest = found.pop("digest")
        same = found["key"] == json.loads(json.dumps(key)) and digest == _digest(found)
        return found["value"] if same else None
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return None


def remember(kind: str, key: Mapping[str, Any], value: Any) -> None:
    """Keeps a value of JSON under a kind and a key, in place of what was kept there."""
    path = _path(kind, key)
    if path is None:
        return
    found = {"key": key, "value": value}
    text = json.dumps({**found, "digest": _digest(found)}, indent=1)
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.parent.mkdir(exist_ok=True, mode=0o700)
        try:
            with open(beside, "w", encoding="utf-8", opener=_private) as file:
                file.write(text)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        _log.info("%s cannot be written, so that it is found out anew next time: %s", path, error)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _folder() -> Path | None:
    try:
        return cache_folder()
    except RuntimeError:  # nobody's home
        return None


def _path(kind: str, key: Mapping[str, Any]) -> Path | None:
    folder = _folder()
    if folder is None:
        return None
    return folder / kind / f"{_digest(key)}.json"


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
