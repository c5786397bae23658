"""Takes a folder store's lock, and brings its index up to date with the files."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import time
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from kvpager import _core
from kvpager.errors import PagerError, StorageError
from kvpager.stores.index import Index
from kvpager.stores.names import INDEX_FILE
from kvpager.stores.settings import SNAPSHOTS, StoreSettings

_log = logging.getLogger(__name__)


class Indexed(Protocol):
    """What a store's folder holds, by its index. REQUIRES, of every method: the store's lock."""

    index: Index

    def begin(self, mode: int) -> None:
        """Begins a transaction of the index, up to date with the files. mode: of a new index."""
        ...

    def settle(self) -> None:
        """Records that the index is up to date, and ends the transaction."""
        ...

    def rebuild(self, mode: int) -> None:
        """Makes the index again from the files."""
        ...


_Contents = TypeVar("_Contents", bound=Indexed)


class Locked(_core.ExclusiveLock, Generic[_Contents]):
    """A store's lock. Taking it brings the index up to date with the files."""

    def __init__(
        self, folder: str, contents: _Contents, timeout_seconds: float, kind: str = SNAPSHOTS
    ) -> None:
        super().__init__(f"{folder}/lock", timeout_seconds)
        self._folder = folder
        self._contents = contents
        self._kind = kind

    def entered(self) -> tuple[_Contents, StoreSettings, int]:  # type: ignore[override]
        """Contents, settings and time in ns, read with the lock held."""
        with system_errors(self._folder):
            settings = StoreSettings.read(self._folder, self._kind)
            try:
                self._contents.begin(settings.mode)
            except sqlite3.DatabaseError:
                _log.warning("%s: its index is damaged, and made anew", self._folder)
                self._contents.rebuild(settings.mode)
        return self._contents, settings, time.time_ns()

    def undone(self) -> None:
        """Takes back the transaction of an interrupted call, which others would wait for."""
        self._contents.index.rollback()

    def leaving(self, error: BaseException | None) -> None:
        """Raises StorageError for an OSError of the block."""
        with system_errors(self._folder):
            try:
                if error is None:
                    self._contents.settle()
                else:  # what the block has changed is found out when the lock is taken next
                    self._contents.index.rollback()
            except (OSError, sqlite3.DatabaseError) as failed:
                _log.warning("%s: its index cannot be written: %s", self._folder, failed)
                self._contents.index.close()
            if isinstance(error, (OSError, sqlite3.DatabaseError)) and not isinstance(
                error, PagerError
            ):
                raise error


@contextlib.contextmanager
def system_errors(folder: str) -> Iterator[None]:
    """Turns an OSError into a StorageError with the same message."""
    try:
        yield
    except PagerError:  # StorageError is a subclass of OSError
        raise
    except OSError as error:
        words = error.strerror or type(error).__name__
        raise StorageError(f"{error.filename or folder}: {words}") from error
    except sqlite3.DatabaseError as error:
        raise StorageError(f"{folder}/{INDEX_FILE}: {error}") from error
