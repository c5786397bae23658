"""The settings of a directory store, STORE/store.json, and how a folder becomes a store."""

from __future__ import annotations

import contextlib
import json
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpager._support.arguments import is_finite, is_one_of
from kvpager._support.option_table import parse_bytes
from kvpager.errors import (
    CorruptSnapshotError,
    InvalidArgumentError,
    StorageError,
    UnsupportedVersionError,
)
from kvpager.stores.encryption import StoreKey, make_key
from kvpager.stores.files import (
    PRIVATE,
    make_folder,
    parse_mode,
    read_json,
    sync_folder,
    widen,
    write_atomically,
)
from kvpager.stores.holes import require_holes
from kvpager.stores.lock import exclusive
from kvpager.stores.names import INDEX_FILES, SETTINGS_FILE, is_temporary

if TYPE_CHECKING:
    from typing_extensions import TypeIs


STORE_VERSION = 1
SNAPSHOTS, BLOCKS = "kvpager_store", "kvpager_chunk_store"  # kinds of stores, as settings name them
_CLASSES = {SNAPSHOTS: "DirectoryStore", BLOCKS: "ChunkStore"}
_FOLDERS = {SNAPSHOTS: ("packs", "snapshots"), BLOCKS: ("packs",)}
UNLIMITED = "unlimited"
NEVER = "never"

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_DURATION = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]?)\s*")


@dataclass(frozen=True)
class StoreSettings:
    """Budget and time to live (None: unlimited), permissions of new files, encryption.

    kind: of the store, SNAPSHOTS or BLOCKS.
    encryption: the store's secret, encrypted with its key (`StoreKey.wrap`); None: files are plain.
    """

    byte_budget: int | None = None
    ttl_seconds: float | None = None
    mode: int = PRIVATE
    encryption: dict[str, str] | None = None
    kind: str = SNAPSHOTS

    def updated(self, byte_budget: object, ttl: object, mode: object = None) -> StoreSettings:
        """A copy with the given values; None keeps the old one."""
        changed = self
        if byte_budget is not None:
            changed = replace(changed, byte_budget=parse_budget(byte_budget))
        if ttl is not None:
            changed = replace(changed, ttl_seconds=parse_ttl("ttl", ttl))
        if mode is not None:
            changed = replace(changed, mode=parse_mode("mode", mode))
        return changed

    def rewrapped(self, key: StoreKey | bytes, folder: str) -> StoreSettings:
        """A copy whose secret is encrypted with the first of these keys.

        Raises:
            InvalidArgumentError: the store is not encrypted.
            StorageError: none of the keys opens it.
        """
        given = make_key(key)
        assert given is not None
        if self.encryption is None:
            raise InvalidArgumentError(f"{folder} is a store without encryption")
        wrapped = given.rewrap(self.encryption, f"{folder}/{SETTINGS_FILE}")
        return replace(self, encryption=wrapped)

    def write(self, folder: str) -> None:
        """Makes these the store's, atomically."""
        values: dict[str, Any] = {
            self.kind: STORE_VERSION,
            "byte_budget": self.byte_budget,
            "ttl_seconds": self.ttl_seconds,
        }
        if self.mode != PRIVATE:
            values["mode"] = f"{self.mode:o}"
        if self.encryption is not None:
            values["encryption"] = self.encryption
        write_atomically(f"{folder}/{SETTINGS_FILE}", json.dumps(values) + "\n", self.mode)

    @classmethod
    def read(cls, folder: str, kind: str = SNAPSHOTS) -> StoreSettings:
        """Reads the file of a store of this kind.

        Raises:
            FileNotFoundError: the folder is no store.
            InvalidArgumentError: it is a store of another kind.
            UnsupportedVersionError: a newer version made it.
            CorruptSnapshotError: the file is damaged.
        """
        path = f"{folder}/{SETTINGS_FILE}"
        found: str | None = None
        try:
            values = read_json(path)
            found = next((one for one in (kind, *_CLASSES) if one in values), None)
            version, budget, ttl = (
                values[found or kind],
                values.get("byte_budget"),
                values.get("ttl_seconds"),
            )
            mode = parse_mode("mode", values.get("mode", PRIVATE))
            encryption = values.get("encryption")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CorruptSnapshotError(
                f"{path}: not the settings of a store ({error}); write "
                f'{{"{kind}": {STORE_VERSION}}} to it, or restore it from a copy'
            ) from error
        if found != kind:
            raise InvalidArgumentError(
                f"{folder}: the folder is a {_CLASSES[str(found)]}; expected a {_CLASSES[kind]}, "
                "an empty folder or a new name"
            )
        if type(version) is int and version > STORE_VERSION:
            raise UnsupportedVersionError(
                f"{path}: {kind} is {version}, this version knows {STORE_VERSION}; use the "
                "version of kvpager that made the store, or a newer one"
            )
        sound = (ttl is None or is_duration(ttl)) and (
            budget is None or (type(budget) is int and budget >= 0)
        )
        if version != STORE_VERSION or not sound:
            raise CorruptSnapshotError(
                f"{path}: holds {values!r}; expected {kind} {STORE_VERSION}, and "
                "byte_budget and ttl_seconds, each null or a number, 0 or more"
            )
        return cls(budget, ttl, mode, encryption, kind)


def parse_budget(value: object) -> int | None:
    """Bytes from an int, "50GiB" or "unlimited"."""
    return None if is_one_of(value, (UNLIMITED,)) else parse_bytes("byte_budget", value)


def parse_ttl(field: str, value: object) -> float | None:
    """Seconds from a number, "90s", "30m", "12h", "7d", "2w" or "never".

    Raises:
        InvalidArgumentError: names `field`, for anything else.
    """
    if is_one_of(value, (NEVER,)):
        return None
    seconds: float = -1.0
    if is_duration(value):
        seconds = float(value)
    elif isinstance(value, str) and (match := _DURATION.fullmatch(value)) and match[2] in _UNITS:
        seconds = float(match[1]) * _UNITS[match[2]]
    if not math.isfinite(seconds) or seconds < 0:
        raise InvalidArgumentError(
            f'{field} is {value!r}; expected seconds, a duration such as "90s", "30m", "12h", "7d" '
            'or "2w", or "never"'
        )
    return seconds


def is_duration(value: object) -> TypeIs[float]:
    """Whether a value is a finite number, 0 or more, that a float has room for."""
    return is_finite(value) and value >= 0


def holds_blocks(folder: str) -> bool:
    """Whether a folder is a store of blocks, a `ChunkStore`."""
    try:
        values = read_json(f"{folder}/{SETTINGS_FILE}")
    except (OSError, ValueError):
        return False
    return isinstance(values, dict) and BLOCKS in values


_OWN = ("lock", "packs", "snapshots", "journals", SETTINGS_FILE, *INDEX_FILES)


def open_or_create(
    folder: str, settings: StoreSettings, *, create: bool, lock_timeout: float
) -> None:
    """Makes a store at `folder` if there is none; an existing one keeps its own settings.

    Takes the store's lock only to make one.

    Raises:
        StorageError: there is no store and `create` is False, another holder kept the lock for
            `lock_timeout` seconds, or blocks need holes and the file system has none.
        InvalidArgumentError: the folder has other things in it.
        UnsupportedVersionError, CorruptSnapshotError: the store's own file cannot be used, or is
            missing from a folder with snapshots or packs.
    """
    kind = settings.kind
    if _is_store(folder, kind):
        return
    _refuse_without_settings(folder, kind)
    if not create:
        raise StorageError(f"{folder}: there is no store here; create=True makes one")
    _make_folder(folder, settings.mode)
    foreign = foreign_files(folder)
    if foreign and not _is_store(folder, kind):
        raise InvalidArgumentError(
            f"{folder}: the folder is no store and not empty (it has {foreign[0]!r}); expected a "
            "store, an empty folder or a new name"
        )
    with exclusive(f"{folder}/lock", lock_timeout):
        if not _is_store(folder, kind):
            widen(f"{folder}/lock", settings.mode)
            _refuse_without_settings(folder, kind)
            for inner in _FOLDERS[kind]:
                make_folder(f"{folder}/{inner}", settings.mode)
            if kind == BLOCKS:
                require_holes(f"{folder}/packs")
            sync_folder(folder)  # its folders must be on disk before store.json
            settings.write(folder)


def foreign_files(folder: str) -> list[str]:
    """Names in a folder that neither a store nor one in the making has."""
    return sorted(
        path.name
        for path in Path(folder).iterdir()
        if path.name not in _OWN and not is_temporary(path.name)
    )


def _make_folder(folder: str, mode: int) -> None:
    """Makes a folder and its parents, durably."""
    place = Path(folder)
    above = [place.parent]  # an earlier attempt may have made it without syncing
    above += [made.parent for made in place.parents if not made.exists()]
    place.parent.mkdir(parents=True, exist_ok=True)
    make_folder(folder, mode)
    for one in above:
        with contextlib.suppress(PermissionError):  # a parent may be usable but not readable
            sync_folder(str(one))


def _refuse_without_settings(folder: str, kind: str) -> None:
    """Raises if a store has lost its settings: it must not go on without its budget."""
    for place in ("packs", "snapshots"):
        try:
            inside = sorted(path.name for path in Path(folder, place).iterdir())
        except (FileNotFoundError, NotADirectoryError):
            continue
        if there := [name for name in inside if not is_temporary(name)]:
            if _is_store(folder, kind):  # another process has made it in the meantime
                return
            raise CorruptSnapshotError(
                f"{folder}/{SETTINGS_FILE}: missing, though {place}/{there[0]} is there; restore "
                f'it from a copy, or write {{"{kind}": 1, "byte_budget": null, '
                '"ttl_seconds": null} to it with the budget and the time to live that the store '
                "had"
            )


def _is_store(folder: str, kind: str) -> bool:
    try:
        StoreSettings.read(folder, kind)
    except FileNotFoundError:
        return False
    return True
