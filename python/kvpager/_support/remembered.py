"""Facts about this machine and this model, kept on disk between processes.

A finding is kept under everything that it depends on, with a code that only who knows the user's
secret can make, in a folder that only the user can write in. Where the folder is another's or
cannot be read or written, nothing is remembered, and everything is found out anew.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import secrets
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from kvpager._support.private_folder import NotPrivateError, PrivateFolder, private_folder

_log = logging.getLogger(__name__)

VARIABLE = "KVPAGER_CACHE"
OFF = "off"

_SECRET = "secret"  # name of a file
_SECRET_BYTES = 32

_Found = TypeVar("_Found")


def cache_folder() -> Path | None:
    """KVPAGER_CACHE, or kvpager's in the user's folder of caches; None: KVPAGER_CACHE is "off"."""
    value = os.environ.get(VARIABLE, "")
    if value == OFF:
        return None
    if value:
        return Path(value)
    own = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(own) / "kvpager"


def data_folder() -> Path:
    """Kvpager's folder in the user's data folder. Raises RuntimeError: the user has no home."""
    own = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(own) / "kvpager"


def remembers() -> bool:
    """Whether there is to be a folder to remember in."""
    return _path() is not None


def recall(kind: str, key: Mapping[str, Any]) -> Any:
    """Returns the value kept under a kind and a key of JSON values; None if there is none.

    A file that is damaged, of another key, another's, or written without the secret is nothing.
    """

    def read(folder: PrivateFolder) -> Any:
        secret = _secret_in(folder)
        if secret is None:
            return None
        with folder.folder(kind, make=False) as inner:
            content = inner.read(_name(key))
        return None if content is None else _checked(content, kind, key, secret)

    return _in_folder(read, make=False)


def remember(kind: str, key: Mapping[str, Any], value: Any) -> None:
    """Keeps a value of JSON under a kind and a key, in place of what was kept there."""

    def write(folder: PrivateFolder) -> None:
        found = {"kind": kind, "key": key, "value": value}
        code = _code(found, _secret_of(folder))
        with folder.folder(kind, make=True) as inner:
            inner.write(_name(key), json.dumps({**found, "code": code}, indent=1).encode())

    _in_folder(write, make=True)


def own_number(purpose: str) -> int | None:
    """A number of 64 bits that only this user knows, the same at every start.

    Args:
        purpose: what it is for; another purpose has another number.

    Returns:
        The number; None: nothing can be remembered.
    """

    def made(folder: PrivateFolder) -> int:
        secret = _secret_of(folder)
        digest = hashlib.blake2b(purpose.encode(), key=secret, digest_size=8).digest()
        return int.from_bytes(digest, "little")

    return _in_folder(made, make=True)


def _in_folder(work: Callable[[PrivateFolder], _Found], *, make: bool) -> _Found | None:
    """What work gives in the folder; None: there is to be none, or it is logged what is wrong."""
    path = _path()
    if path is None:
        return None
    try:
        with private_folder(path, make=make) as folder:
            return work(folder)
    except NotPrivateError as error:
        _warn(str(error))
    except FileNotFoundError:
        pass
    except OSError as error:
        _log.info("%s cannot be used, so that all is found out anew: %s", path, error)
    return None


def _path() -> Path | None:
    try:
        return cache_folder()
    except RuntimeError:  # nobody's home
        return None


@lru_cache(maxsize=64)  # once of each
def _warn(why: str) -> None:
    _log.warning("%s; nothing is remembered there, and %s says where else", why, VARIABLE)


def _secret_in(folder: PrivateFolder) -> bytes | None:
    found = folder.read(_SECRET, secret=True)
    return found if found is not None and len(found) == _SECRET_BYTES else None


def _secret_of(folder: PrivateFolder) -> bytes:
    """The secret of the folder, made if there is none."""
    found = _secret_in(folder)
    if found is not None:
        return found
    folder.write(_SECRET, secrets.token_bytes(_SECRET_BYTES))
    found = _secret_in(folder)  # another process may have written its own just after
    if found is None:
        raise OSError(f"{_SECRET} was changed while it was written")
    return found


def _checked(content: bytes, kind: str, key: Mapping[str, Any], secret: bytes) -> Any:
    try:
        found = json.loads(content)
        code = found.pop("code")
        same = found["kind"] == kind and found["key"] == json.loads(json.dumps(key))
        return found["value"] if same and hmac.compare_digest(code, _code(found, secret)) else None
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return None


def _code(found: Mapping[str, Any], secret: bytes) -> str:
    return hashlib.blake2b(_canonical(found), key=secret, digest_size=32).hexdigest()


def _name(key: Mapping[str, Any]) -> str:
    return f"{hashlib.blake2b(_canonical(key), digest_size=16).hexdigest()}.json"


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
