"""Names: of snapshots, and of the files that a directory store keeps."""

from __future__ import annotations

import re
import secrets

from kvpager.errors import InvalidArgumentError

SNAPSHOT_SUFFIX = ".kvsnap"
BLOCKS_SUFFIX = ".kvblocks"  # packs of a chunk store
SETTINGS_FILE = "store.json"
INDEX_FILE = "index.sqlite3"
INDEX_FILES = (INDEX_FILE, f"{INDEX_FILE}-wal", f"{INDEX_FILE}-shm")
SIDECAR_SUFFIX = ".json"
DAMAGE_SUFFIX = ".damaged"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_PACK = re.compile(r"([0-9a-f]{32})\.kvsnap")
_BLOCK_PACK = re.compile(r"([0-9a-f]{32})\.kvblocks")
_DAMAGE = re.compile(r"([0-9a-f]{32})\.damaged")
_TEMPORARY = re.compile(r"\.kvsnap-[0-9a-f]+\.tmp")


def check_name(name: object) -> str:
    """Returns `name` if a snapshot can have it.

    Raises:
        InvalidArgumentError: no snapshot can.
    """
    if isinstance(name, str) and _NAME.fullmatch(name):
        return name
    raise InvalidArgumentError(
        f"name is {name!r}; expected 1 to 200 letters, digits, '.', '_' or '-', the first of them "
        "a letter or digit"
    )


def snapshot_of(file: str) -> str | None:
    """The snapshot whose manifest has this file name."""
    name = file.removesuffix(SNAPSHOT_SUFFIX)
    return name if name != file and _NAME.fullmatch(name) else None


def sidecar_of(file: str) -> str | None:
    """The snapshot whose sidecar has this file name."""
    name = file.removesuffix(SIDECAR_SUFFIX)
    return name if name != file and _NAME.fullmatch(name) else None


def pack_of(file: str) -> str | None:
    """The id of the pack with this file name."""
    match = _PACK.fullmatch(file)
    return match[1] if match else None


def block_pack_of(file: str) -> str | None:
    """The id of the pack of blocks with this file name."""
    match = _BLOCK_PACK.fullmatch(file)
    return match[1] if match else None


def damage_of(file: str) -> str | None:
    """The id of the pack whose list of damaged chunks has this file name."""
    match = _DAMAGE.fullmatch(file)
    return match[1] if match else None


def is_temporary(file: str) -> bool:
    """Whether this is the name of a temporary file, whose writer may be dead."""
    return _TEMPORARY.fullmatch(file) is not None


def new_pack_id() -> str:
    """An id no other pack has: 32 hex digits."""
    return secrets.token_hex(16)


def temporary_name() -> str:
    """A name for a temporary file; once its lock is free, a sweep may remove it."""
    return f".kvsnap-{secrets.token_hex(8)}.tmp"
