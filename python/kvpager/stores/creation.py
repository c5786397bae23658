"""Making a folder a store, or seeing that it is one."""

from __future__ import annotations

from pathlib import Path

from kvpager.errors import InvalidArgumentError, StorageError
from kvpager.stores.lock import exclusive
from kvpager.stores.names import is_temporary
from kvpager.stores.settings import SETTINGS_FILE, StoreSettings

_OWN = ("lock", "packs", "snapshots", SETTINGS_FILE)


def open_or_create(folder: str, settings: StoreSettings, *, create: bool) -> None:
    """Sees that there is a store at `folder`; an existing one keeps its own settings.

    Raises:
        StorageError: there is none, and `create` is False.
        InvalidArgumentError: there is something else.
        UnsupportedVersionError, CorruptSnapshotError: of the store's own file.
    """
    if _is_store(folder):
        return
    if not create:
        raise StorageError(f"{folder}: there is no store here; create=True makes one")
    Path(folder).mkdir(parents=True, exist_ok=True)
    foreign = sorted(
        path.name
        for path in Path(folder).iterdir()
        if path.name not in _OWN and not is_temporary(path.name)
    )
    if foreign and not _is_store(folder):
        raise InvalidArgumentError(
            f"{folder}: the folder is no store and not empty (it has {foreign[0]!r}); expected a "
            "store, an empty folder or a new name"
        )
    with exclusive(f"{folder}/lock"):
        if not _is_store(folder):
            Path(folder, "packs").mkdir(exist_ok=True)
            Path(folder, "snapshots").mkdir(exist_ok=True)
            settings.write(folder)


def _is_store(folder: str) -> bool:
    try:
        StoreSettings.read(folder)
    except FileNotFoundError:
        return False
    return True
