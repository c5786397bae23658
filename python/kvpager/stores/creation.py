"""Makes a folder a store, or checks that it is one."""

from __future__ import annotations

import contextlib
from pathlib import Path

from kvpager.errors import CorruptSnapshotError, InvalidArgumentError, StorageError
from kvpager.stores.durable import sync_folder
from kvpager.stores.lock import exclusive
from kvpager.stores.names import SETTINGS_FILE, is_temporary
from kvpager.stores.permissions import make_folder, widen
from kvpager.stores.settings import StoreSettings

_OWN = ("lock", "packs", "snapshots", SETTINGS_FILE)


def open_or_create(
    folder: str, settings: StoreSettings, *, create: bool, lock_timeout: float
) -> None:
    """Makes a store at `folder` if there is none; an existing one keeps its own settings.

    Takes the store's lock only to make one.

    Raises:
        StorageError: there is no store and `create` is False, or another holder kept the lock for
            `lock_timeout` seconds.
        InvalidArgumentError: the folder has other things in it.
        UnsupportedVersionError, CorruptSnapshotError: the store's own file cannot be used, or is
            missing from a folder with snapshots or packs.
    """
    if _is_store(folder):
        return
    _refuse_without_settings(folder)
    if not create:
        raise StorageError(f"{folder}: there is no store here; create=True makes one")
    _make_folder(folder, settings.mode)
    foreign = foreign_files(folder)
    if foreign and not _is_store(folder):
        raise InvalidArgumentError(
            f"{folder}: the folder is no store and not empty (it has {foreign[0]!r}); expected a "
            "store, an empty folder or a new name"
        )
    with exclusive(f"{folder}/lock", lock_timeout):
        if not _is_store(folder):
            widen(f"{folder}/lock", settings.mode)
            _refuse_without_settings(folder)
            make_folder(f"{folder}/packs", settings.mode)
            make_folder(f"{folder}/snapshots", settings.mode)
            sync_folder(folder)  # both folders must be on disk before store.json
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


def _refuse_without_settings(folder: str) -> None:
    """Raises if a store has lost its settings: it must not go on without its budget."""
    for place in ("packs", "snapshots"):
        try:
            inside = sorted(path.name for path in Path(folder, place).iterdir())
        except (FileNotFoundError, NotADirectoryError):
            continue
        if there := [name for name in inside if not is_temporary(name)]:
            if _is_store(folder):  # another process has made it in the meantime
                return
            raise CorruptSnapshotError(
                f"{folder}/{SETTINGS_FILE}: missing, though {place}/{there[0]} is there; restore "
                'it from a copy, or write {"kvpager_store": 1, "byte_budget": null, '
                '"ttl_seconds": null} to it with the budget and the time to live that the store '
                "had"
            )


def _is_store(folder: str) -> bool:
    try:
        StoreSettings.read(folder)
    except FileNotFoundError:
        return False
    return True
