"""A folder that only its owner can change, opened so that what was checked is what is read.

Everything is opened relative to a descriptor of the folder, without following links, and checked
through the descriptor: nobody can exchange it between the check and the use.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_MOST_BYTES = 16 << 20  # of a file
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe has no writer


class NotPrivateError(Exception):
    """A folder or a file that somebody else may have written, named in the message."""


class PrivateFolder:
    """An open folder of the user's own; read and write take names of files in it."""

    def __init__(self, path: Path, descriptor: int) -> None:
        """Checks the folder that `descriptor` has open and `path` names in messages.

        Raises:
            NotPrivateError: it belongs to another user, or others can write in it.
        """
        self._path = path
        self._descriptor = descriptor
        _check(path, os.fstat(descriptor), _OTHERS_WRITE)

    @contextmanager
    def folder(self, name: str, *, make: bool) -> Iterator[PrivateFolder]:
        """Opens a folder in this one. make: create it where it is missing.

        Raises NotPrivateError and OSError.
        """
        if make:
            _make(name, self._descriptor)
        with _opened(self._path / name, name, self._descriptor) as folder:
            yield folder

    def read(self, name: str, *, secret: bool = False) -> bytes | None:
        """The bytes of a file; None: there is no such file. secret: others must not read it.

        Raises NotPrivateError and OSError.
        """
        path = self._path / name
        try:
            _refuse_link(path, name, self._descriptor)
            descriptor = os.open(name, _FILE_FLAGS, dir_fd=self._descriptor)
        except FileNotFoundError:
            return None
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise NotPrivateError(f"{path} is no plain file")
            if found.st_nlink > 1:
                raise NotPrivateError(f"{path} is a hard link: the file has other names too")
            _check(path, found, _OTHERS if secret else _OTHERS_WRITE)
            return file.read(_MOST_BYTES)

    def write(self, name: str, content: bytes) -> None:
        """Puts a file in the place of what has this name, whole or not at all.

        Raises OSError.
        """
        beside = f"{name}.{os.getpid()}.{threading.get_ident()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        own = self._descriptor
        _remove(beside, own)  # left by a process of this number
        try:
            with os.fdopen(os.open(beside, flags, 0o600, dir_fd=own), "wb") as file:
                file.write(content)
            os.replace(beside, name, src_dir_fd=own, dst_dir_fd=own)
        finally:
            _remove(beside, own)


@contextmanager
def private_folder(path: Path, *, make: bool) -> Iterator[PrivateFolder]:
    """Opens a folder of the user's own.

    Args:
        path: of the folder; folders above it may be links, it may not.
        make: create it, for its owner alone, and the folders above it where they are missing.

    Raises:
        NotPrivateError: it is a link, belongs to another user, or others can write in it or
            exchange it.
        OSError: it cannot be opened or created.
    """
    path = path.absolute()
    _check_parents(path)
    if make:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _make(path, None)
    with _opened(path, path, None) as folder:
        yield folder


@contextmanager
def _opened(path: Path, name: str | Path, inside: int | None) -> Iterator[PrivateFolder]:
    _refuse_link(path, name, inside)
    descriptor = os.open(name, _FOLDER_FLAGS, dir_fd=inside)
    try:
        yield PrivateFolder(path, descriptor)
    finally:
        os.close(descriptor)


def _make(name: str | Path, inside: int | None) -> None:
    try:
        os.mkdir(name, 0o700, dir_fd=inside)
    except FileExistsError:
        return


def _remove(name: str, inside: int) -> None:
    try:
        os.unlink(name, dir_fd=inside)
    except FileNotFoundError:
        return


def _refuse_link(path: Path, name: str | Path, inside: int | None) -> None:
    """Says what a link is; opening it fails too, with an error that does not say so."""
    if stat.S_ISLNK(os.stat(name, dir_fd=inside, follow_symlinks=False).st_mode):
        raise NotPrivateError(f"{path} is a symbolic link; name what it leads to")


def _check(path: Path, found: os.stat_result, forbidden: int) -> None:
    own = os.geteuid()
    if found.st_uid != own:
        raise NotPrivateError(f"{path} belongs to user {found.st_uid}, and this is user {own}")
    if found.st_mode & forbidden:
        does = "written" if found.st_mode & _OTHERS_WRITE else "read"
        mode = stat.S_IMODE(found.st_mode)
        raise NotPrivateError(f"{path} can be {does} by others (mode {mode:04o}); chmod go-rwx it")


def _check_parents(path: Path) -> None:
    """Refuses what anybody can exchange: in a folder that all may write in, but /tmp and the like.

    Whoever owns a folder above could do so too, and would gain nothing: files in the other folder
    are checked as well.
    """
    for parent in {*path.parents, *path.parent.resolve().parents, path.parent.resolve()}:
        try:
            mode = parent.stat().st_mode
        except FileNotFoundError:
            continue
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise NotPrivateError(
                f"{parent}, above {path}, can be written by everybody (mode "
                f"{stat.S_IMODE(mode):04o}); chmod o-w it"
            )
