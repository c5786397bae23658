"""Holes in files: frees parts of a file, and finds out which were freed."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterable

from kvpager import _core
from kvpager.errors import StorageError
from kvpager.stores.files import remove
from kvpager.stores.names import temporary_name

_PROBE_BYTES = 4096
_PUNCH_HOLE = 3  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def punch(path: str, ranges: Iterable[tuple[int, int]]) -> None:
    """Frees ranges (start, bytes) of a file, if it exists; its time stays. Raises OSError."""
    try:
        with _core.OwnedFile(path, os.O_RDWR | os.O_NOFOLLOW) as file:
            status = os.fstat(file.fileno())
            for start, size in ranges:
                if _libc.fallocate(file.fileno(), _PUNCH_HOLE, start, size):
                    code = ctypes.get_errno()
                    raise OSError(code, os.strerror(code), path)
            os.utime(file.fileno(), ns=(status.st_atime_ns, status.st_mtime_ns))
    except FileNotFoundError:
        pass


def is_hole(descriptor: int, start: int, size: int) -> bool:
    """Whether a range of a file has no bytes on disk."""
    try:
        return os.lseek(descriptor, start, os.SEEK_DATA) >= start + size
    except OSError as error:
        if error.errno == errno.ENXIO:  # no bytes from there on
            return True
        raise


def require_holes(folder: str) -> None:
    """Raises StorageError if the folder's file system cannot free a part of a file."""
    path = f"{folder}/{temporary_name()}"
    try:
        with _core.OwnedFile(path, os.O_RDWR | os.O_CREAT | os.O_EXCL) as file:
            os.ftruncate(file.fileno(), _PROBE_BYTES)
            punch(path, [(0, _PROBE_BYTES)])
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        raise StorageError(
            f"{folder}: its file system cannot free a part of a file ({error.strerror}); use a "
            "folder of a local file system"
        ) from error
    finally:
        remove(path)
