"""Names of snapshots on the command line: a file, or STORE/NAME in a directory store."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvpager.cli.failure import CliError
from kvpager.stores.creation import foreign_files
from kvpager.stores.names import SETTINGS_FILE, SNAPSHOT_SUFFIX, snapshot_of

SNAPSHOTS = "snapshots"  # of a store
PACKS = "packs"
_SHOWN = 8  # names in a message


@dataclass(frozen=True)
class Address:
    """Where a snapshot is.

    Attributes:
        text: as it was given.
        path: its file; of one in a store, the manifest.
        store: the store's folder, None for a file that was named itself.
        name: in that store.
    """

    text: str
    path: Path
    store: Path | None = None
    name: str | None = None


def is_store(path: Path) -> bool:
    """Whether a folder is a directory store."""
    return (path / SETTINGS_FILE).is_file()


def find_snapshot(text: str) -> Address:
    """The snapshot that `text` names.

    Raises:
        CliError: there is none; names the closest ones there are.
    """
    path = Path(text)
    store = path.parent
    if is_store(store) and not path.exists():
        return _in_store(text, store, path.name.removesuffix(SNAPSHOT_SUFFIX))
    if is_store(path):
        raise CliError(
            f"{text}: a whole store; expected one snapshot of it, {text.rstrip('/')}/NAME"
            + offer("", stored_names(path))
        )
    if path.is_dir():
        raise CliError(f"{text}: a folder, and no store; expected a snapshot file or STORE/NAME")
    if not os.path.lexists(path):
        raise CliError(_missing(text, path))
    return Address(text, path)


def find_store(text: str) -> Path:
    """The folder of the store that `text` names.

    Raises:
        CliError: it is none.
    """
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


def find_entry(text: str) -> Address:
    """A snapshot that must be in a store.

    Raises:
        CliError: it is a plain file, or is not there.
    """
    address = find_snapshot(text)
    if address.store is not None:
        return address
    folder, name = address.path.parent, snapshot_of(address.path.name)
    if name is not None and folder.name == SNAPSHOTS and is_store(folder.parent):
        return Address(text, address.path, folder.parent, name)
    raise CliError(f"{text}: a file outside any store; expected STORE/NAME")


def find_place(text: str, name: str) -> tuple[Path, str]:
    """The destination of an import: a store, existing or new, and a name in it.

    Args:
        text: STORE or STORE/NAME.
        name: for where `text` has none.

    Raises:
        CliError: it can be neither.
    """
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


def stored_names(store: Path) -> list[str]:
    """Names of a store's snapshots, in order."""
    folder = store / SNAPSHOTS
    if not folder.is_dir():
        return []
    return sorted(filter(None, (snapshot_of(entry.name) for entry in folder.iterdir())))


def offer(name: str, names: Iterable[str], *, closest_only: bool = False) -> str:
    """The end of a refusal: the closest names, or those there are."""
    known = sorted(names)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5) if name else []
    if close:
        return "; did you mean " + " or ".join(close) + "?"
    if closest_only:
        return ""
    if not known:
        return "; it has none"
    more = f" and {len(known) - _SHOWN:,} more" if len(known) > _SHOWN else ""
    return "; it has " + ", ".join(known[:_SHOWN]) + more


def _in_store(text: str, store: Path, name: str) -> Address:
    path = store / SNAPSHOTS / (name + SNAPSHOT_SUFFIX)
    if not path.is_file():
        names = stored_names(store)
        raise CliError(f"{text}: no snapshot {name!r} in the store {store}" + offer(name, names))
    return Address(text, path, store, name)


def _missing(text: str, path: Path) -> str:
    if not path.parent.is_dir():
        return f"{text}: no such file, and there is no folder {path.parent}"
    try:
        files = [entry.name for entry in path.parent.iterdir() if snapshot_of(entry.name)]
    except OSError:
        files = []
    return f"{text}: no such file" + offer(path.name, files, closest_only=True)
