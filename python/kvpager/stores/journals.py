"""Journals of a directory store: one file each, whose lines are parts with a checksum.

The holder of a journal has flock() on its file, and marks the file as modified as long as it lives.
A line that begins with "@" names the holder's machine; it is written by whoever takes the journal.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import platform
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path

from kvpager import _core
from kvpager.errors import CorruptSnapshotError
from kvpager.stores.encryption import LineCipher, Secret, stored_name
from kvpager.stores.files import make_folder, set_mode, sync_folder
from kvpager.stores.lock import in_use
from kvpager.stores.names import check_name

LEASE_SECONDS = 10.0  # a holder on another machine that marks its file no more is dead by then
BATCH_TOKENS, BATCH_SECONDS = 16, 0.25  # a part has so many tokens, or waited for so long
MOST = 1024  # journals that nobody holds; the oldest are removed
_PRUNE_EVERY = 64  # journals made
_SUFFIX = ".journal"
_HOLDER = b"@"
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW


class Leases:
    """Journals whose holders may live elsewhere, and since when they have not changed.

    Time is this process's own: no two machines' clocks are compared.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[object, float]] = {}

    def has_expired(self, name: str, change: object) -> bool:
        """Whether nobody has written a journal, or marked it, for LEASE_SECONDS.

        change: differs after each of them.
        """
        now = time.monotonic()
        with self._lock:
            known, since = self._seen.get(name, (None, now))
            if known != change:
                self._seen[name] = change, now
                return False
        return now - since >= LEASE_SECONDS

    def forget(self, name: str) -> None:
        """Begins anew with a journal."""
        with self._lock:
            self._seen.pop(name, None)


def checked(part: bytes) -> bytes:
    """A part with its checksum."""
    return b"%08x %s" % (zlib.crc32(part), part)


def sound_part(line: bytes) -> bytes | None:
    """The part of `checked`; None if it is damaged."""
    check, _, part = line.partition(b" ")
    return part if check == b"%08x" % zlib.crc32(part) else None


class DirectoryJournal:
    """A journal that this process holds. Any thread may use it."""

    batch_tokens, batch_seconds = BATCH_TOKENS, BATCH_SECONDS

    def __init__(
        self, path: str, file: _core.OwnedFile, cipher: LineCipher | None, *, locked: bool
    ) -> None:
        """Takes over the file.

        Args:
            path: of the file.
            file: opened for appending.
            cipher: of its lines; None: they are plain.
            locked: whether it has the file's lock, which a holder that hangs keeps.
        """
        self._cipher = cipher
        self._lock = threading.Lock()
        self._open = True
        self._path = path
        self._file = file
        self._locked = locked
        self._end = os.fstat(file.fileno()).st_size
        self._torn = self._end > 0 and os.pread(file.fileno(), 1, self._end - 1) != b"\n"

    def begin(self, *parts: bytes) -> None:
        """Writes the first parts."""
        self._append(*parts)

    def append(self, part: bytes) -> bool:
        """See `Journal.append`."""
        with self._lock:
            return self._open and self._append(part)

    def _append(self, *parts: bytes) -> bool:
        if not self._is_held():
            return False
        file = self._file.fileno()
        if self._cipher is not None:
            parts = tuple(map(self._cipher.seal, parts))
        lines = b"\n" * self._torn + b"".join(checked(part) + b"\n" for part in parts)
        written = os.write(file, lines)
        self._end += written
        self._torn = written < len(lines)
        if self._torn:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._path)
        os.fdatasync(file)
        return True

    def _is_held(self) -> bool:
        """Whether nobody else has written to it, as whoever takes it does, or removed it."""
        status = os.fstat(self._file.fileno())
        return status.st_size == self._end and status.st_nlink > 0

    def renew(self) -> None:
        """See `Journal.renew`."""
        with self._lock:
            if self._open:
                self._locked = self._locked or self._file.lock(fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.utime(self._file.fileno())

    def release(self) -> None:
        """See `Journal.release`."""
        with contextlib.suppress(OSError):
            self.append(_holder(None))
        self.close()

    def delete(self) -> None:
        """See `Journal.delete`."""
        with self._lock, contextlib.suppress(OSError):
            if self._open and self._is_held():
                Path(self._path).unlink()
        self.close()

    def close(self) -> None:
        """Stops holding it, as the process's end does."""
        with self._lock:
            self._open = False
            self._file.unlock()
            self._file.close()


class DirectoryJournals:
    """Journals in a folder. Any thread may use it."""

    poll_seconds = 0.05

    def __init__(self, folder: str, mode: Callable[[], int], secret: Secret | None = None) -> None:
        """Nothing is read or made yet.

        Args:
            folder: of the files.
            mode: returns the permissions of new files.
            secret: that they and their names are encrypted with; None: they are plain.
        """
        self._folder = folder
        self._secret = secret
        self._mode = mode
        self._made = 0
        self._lock = threading.Lock()
        self._leases = Leases()

    def create(self, name: str, first: bytes) -> DirectoryJournal:
        """See `Journals.create`."""
        path, mode = self._path(name), self._mode()
        make_folder(self._folder, mode)
        self._prune()
        file = _core.OwnedFile(path, _FLAGS | os.O_CREAT | os.O_EXCL)
        locked = file.lock(fcntl.LOCK_EX | fcntl.LOCK_NB)
        journal = DirectoryJournal(path, file, self._cipher(path), locked=locked)
        try:
            set_mode(file.fileno(), mode)
            journal.begin(_holder(_machine()), first)
            sync_folder(self._folder)
        except BaseException:
            journal.delete()
            raise
        return journal

    def take(self, name: str, *, force: bool = False) -> DirectoryJournal | None:
        """See `Journals.take`."""
        path = self._path(name)
        try:
            file = _core.OwnedFile(path, _FLAGS)
        except FileNotFoundError:
            self._leases.forget(name)
            return None
        locked = file.lock(fcntl.LOCK_EX | fcntl.LOCK_NB)
        journal = DirectoryJournal(path, file, self._cipher(path), locked=locked)
        if os.fstat(file.fileno()).st_nlink and (
            force or (locked and self._is_of_this_machine(name)) or self._has_expired(name, file)
        ):
            self._leases.forget(name)
            if journal.append(_holder(_machine())):
                return journal
        journal.close()
        return None

    def read(self, name: str, cursor: int = 0) -> tuple[list[bytes], int] | None:
        """See `Journals.read`."""
        lines = self._lines(name, cursor)
        if lines is None:
            return None
        found, cursor = lines
        return [part for part in found if not part.startswith(_HOLDER)], cursor

    def delete(self, name: str) -> bool:
        """See `Journals.delete`."""
        try:
            Path(self._path(name)).unlink()
        except FileNotFoundError:
            return False
        return True

    def _path(self, name: str) -> str:
        return f"{self._folder}/{stored_name(self._secret, check_name(name))}{_SUFFIX}"

    def _cipher(self, path: str) -> LineCipher | None:
        return None if self._secret is None else self._secret.lines(f"journals/{Path(path).name}")

    def _lines(self, name: str, cursor: int) -> tuple[list[bytes], int] | None:
        """The sound lines from `cursor` on, and where the last whole one ends."""
        try:
            with Path(self._path(name)).open("rb") as file:
                file.seek(cursor)
                data = file.read()
        except FileNotFoundError:
            return None
        whole = data[: data.rfind(b"\n") + 1]
        sound = [part for line in whole.split(b"\n") if (part := sound_part(line)) is not None]
        cipher = self._cipher(self._path(name))
        if cipher is not None:
            sound = [part for sealed in sound if (part := unsealed(cipher, sealed)) is not None]
        return sound, cursor + len(whole)

    def _is_of_this_machine(self, name: str) -> bool:
        """Whether its last holder was a process of this machine, or has released it."""
        found = self._lines(name, 0)
        holders = [part for part in found[0] if part.startswith(_HOLDER)] if found else []
        return not holders or holders[-1] in (_holder(None), _holder(_machine()))

    def _has_expired(self, name: str, file: _core.OwnedFile) -> bool:
        """Whether nobody has written it, or marked it, for LEASE_SECONDS that passed here."""
        status = os.fstat(file.fileno())
        return self._leases.has_expired(name, (status.st_size, status.st_mtime_ns))

    def _prune(self) -> None:
        """Removes the oldest journals beyond MOST that nobody holds."""
        with self._lock:
            self._made += 1
            if self._made % _PRUNE_EVERY != 1:
                return
        with contextlib.suppress(OSError):
            files = Path(self._folder).glob(f"*{_SUFFIX}")
            known = sorted((file.stat().st_mtime_ns, str(file)) for file in files)
            for _, path in known[:-MOST]:
                if not in_use(path):
                    Path(path).unlink(missing_ok=True)


def unsealed(cipher: LineCipher, sealed: bytes) -> bytes | None:
    """The part of `LineCipher.seal`; None if it is damaged."""
    try:
        return cipher.unseal(sealed)
    except CorruptSnapshotError:  # then it is missing, as a part that was not finished
        return None


def _holder(machine: str | None) -> bytes:
    return _HOLDER + json.dumps(machine).encode()


def _machine() -> str:
    """A name of this machine, until it is started again. Its processes see each other's locks."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return platform.node()
