"""Names of snapshots on the command line: a file, or STORE/NAME in a folder or a bucket."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvpager.cli.failure import CliError
from kvpager.cli.parser import closest
from kvpager.stores import DirectoryStore
from kvpager.stores.bucket import is_bucket
from kvpager.stores.names import SETTINGS_FILE, SNAPSHOT_SUFFIX, snapshot_of
from kvpager.stores.opening import NamedStore, open_store
from kvpager.stores.settings import foreign_files, holds_blocks

SNAPSHOTS = "snapshots"  # of a store
PACKS = "packs"
_SHOWN = 8  # names in a message


@dataclass(frozen=True)
class Address:
    """Where a snapshot is.

    Attributes:
        text: as it was given.
        path: its file; of one in a store, the manifest, or its local copy.
        store: the store's folder, or a bucket's address as text; None for a file that was named
            itself.
        name: in that store.
    """

    text: str
    path: Path
    store: Path | str | None = None
    name: str | None = None


def is_store(path: Path) -> bool:
    """Whether a folder is a directory store."""
    return (path / SETTINGS_FILE).is_file()


def find_snapshot(text: str) -> Address:
    """The snapshot that `text` names.

    Raises:
        CliError: there is none; names the closest ones there are.
    """
    if is_bucket(text):
        return _in_bucket(text)
    path = Path(text)
    store = path.parent
    if is_store(store) and not path.exists():
        name = path.name.removesuffix(SNAPSHOT_SUFFIX)
        manifest = Path(DirectoryStore(store, create=False).path_of(name))
        if manifest.is_file():
            return Address(text, manifest, store, name)
        why = f"no snapshot {name!r} in the store {store}{_offer(name, store)}"
    elif holds_blocks(text):
        why = "a store of blocks, which has no snapshots; `kvpager snapshot ls` lists it"
    elif is_store(path):
        name = f"{text.rstrip('/')}/NAME"
        why = f"a whole store; expected one snapshot of it, {name}{_offer('', path)}"
    elif path.is_dir():
        why = "a folder, and no store; expected a snapshot file or STORE/NAME"
    elif os.path.lexists(path):
        return Address(text, path)
    elif not store.is_dir():
        why = f"no such file, and there is no folder {store}"
    else:
        files = []
        with suppress(OSError):
            files = [entry.name for entry in store.iterdir() if snapshot_of(entry.name)]
        why = f"no such file{closest(path.name, files, most=3)}"
    raise CliError(f"{text}: {why}")


def _in_bucket(text: str) -> Address:
    address, _, name = text.rstrip("/").rpartition("/")
    if not is_bucket(address):
        raise CliError(f"{text}: a whole store; expected one snapshot of it, {text}/NAME")
    store = open_store(address, create=False)
    entry = store.entry(name)
    if entry is None:
        hint = closest(name, [one.name for one in store.entries()], most=3)
        raise CliError(f"{text}: no snapshot {name!r} in the store {address}{hint}")
    return Address(text, Path(entry.path), address, name)


def find_store(text: str) -> NamedStore:
    """The store that `text` names.

    Raises:
        CliError: it is none.
    """
    return open_store(text, create=False) if is_bucket(text) else find_folder_store(text)


def find_folder_store(text: str) -> DirectoryStore:
    """The directory store that `text` names. Raises CliError: it is none."""
    return DirectoryStore(find_folder(text), create=False)


def find_folder(text: str) -> Path:
    """The folder of the directory store that `text` names. Raises CliError: it is none."""
    if is_bucket(text):
        raise CliError(f"{text}: a bucket; expected the folder of a directory store")
    path = Path(text)
    if is_store(path):
        return path
    if is_store(path.parent) and not path.exists():
        raise CliError(f"{text}: a name in a store; expected the store itself, {path.parent}")
    if not path.exists():
        raise CliError(f"{text}: no such folder")
    what = "a folder without" if path.is_dir() else "a file; expected a folder with"
    raise CliError(
        f"{text}: no store ({what} {SETTINGS_FILE}); stores are made by `kvpager snapshot import` "
        "and `kvpager generate --store`"
    )


def find_entry(text: str) -> tuple[NamedStore, str]:
    """The store of a snapshot that must be in one, and its name there.

    Raises:
        CliError: it is a plain file, or is not there.
    """
    address = find_snapshot(text)
    store, name = address.store, address.name
    folder = address.path.parent
    if store is None and folder.name == SNAPSHOTS and is_store(folder.parent):
        store, name = folder.parent, snapshot_of(address.path.name)
    if store is None or name is None:
        raise CliError(f"{text}: a file outside any store; expected STORE/NAME")
    return open_store(str(store), create=False), name


def find_place(text: str, name: str) -> tuple[Path | str, str]:
    """The destination of an import: a store, existing or new, and a name in it.

    Args:
        text: STORE or STORE/NAME; of a bucket, STORE alone.
        name: for where `text` has none.

    Raises:
        CliError: it can be neither.
    """
    if is_bucket(text):
        return text, name
    path = Path(text)
    if is_store(path):
        return path, name
    if is_store(path.parent):
        return path.parent, path.name.removesuffix(SNAPSHOT_SUFFIX)
    if path.is_dir() and foreign_files(text):
        raise CliError(f"{text}: a folder with other files in it, and no store; name another one")
    if path.exists() and not path.is_dir():
        raise CliError(f"{text}: a file; expected the folder of a store, or STORE/NAME")
    if not path.parent.is_dir():
        raise CliError(f"{text}: there is no folder {path.parent}")
    return path, name


def stored_names(store: Path | str) -> list[str]:
    """Names of a store's snapshots, in order."""
    if isinstance(store, str):
        return [entry.name for entry in open_store(store).entries(companions=True)]
    folder = store / SNAPSHOTS
    if not folder.is_dir():
        return []
    opened = DirectoryStore(store, create=False)
    if opened.is_encrypted:
        return [entry.name for entry in opened.entries(companions=True)]
    return sorted(filter(None, (snapshot_of(entry.name) for entry in folder.iterdir())))


def _offer(name: str, store: Path) -> str:
    """The end of a refusal: the store's closest names, or those it has."""
    known = stored_names(store)
    more = f" and {len(known) - _SHOWN:,} more" if len(known) > _SHOWN else ""
    there = ", ".join(known[:_SHOWN]) + more
    return closest(name, known, most=3) or f"; it has {there or 'none'}"
