"""Saves where the system refuses, in a process that may be confined for it; prints what happened.

Usage: failing_storage.py FOLDER

Each scenario runs in a fork of its own: it prepares a refusal, says where to save, and takes the
refusal away again. `attempt` saves there, looks at what is left and goes on with the same session.
One line of JSON per scenario.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
import threading
from pathlib import Path

from specimens import C, bits, fill, make_pager, open_descriptors

from kvpager import _core
from kvpager.errors import StorageError

LENGTH = 600  # the file has some 200 KiB
OLD = 21
CLONE_NEWNS, MS_RDONLY, MS_REMOUNT, MS_REC, MS_PRIVATE = 0x20000, 1, 32, 16384, 1 << 18
NOBODY = 65534


class CannotTellError(Exception):
    """This machine does not let the refusal be set up; says why."""


def _call(function, *arguments):
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, function)(*arguments) != 0:
        number = ctypes.get_errno()
        raise CannotTellError(f"{function}: {os.strerror(number)}")


def _tmpfs(folder, size):
    """A small file system of this process alone."""
    _call("unshare", CLONE_NEWNS)
    _call("mount", b"none", b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None)
    options = f"size={size}".encode()
    _call("mount", b"none", os.fsencode(folder), b"tmpfs", ctypes.c_ulong(0), options)


@contextlib.contextmanager
def disk_full(folder, old):
    _tmpfs(folder, "64k")
    old(folder / "x")
    yield folder / "x"
    _call("mount", b"none", os.fsencode(folder), None, ctypes.c_ulong(MS_REMOUNT), b"size=4m")


@contextlib.contextmanager
def read_only(folder, old):
    _tmpfs(folder, "4m")
    old(folder / "x")
    flags = ctypes.c_ulong(MS_REMOUNT | MS_RDONLY)
    _call("mount", b"none", os.fsencode(folder), None, flags, None)
    yield folder / "x"
    _call("mount", b"none", os.fsencode(folder), None, ctypes.c_ulong(MS_REMOUNT), None)


@contextlib.contextmanager
def permission_denied(folder, old):
    old(folder / "x")
    folder.chmod(0o555)
    if os.geteuid() == 0:  # whom no mode stops
        os.seteuid(NOBODY)
    yield folder / "x"
    with contextlib.suppress(PermissionError):
        os.seteuid(os.getuid())
    folder.chmod(0o755)


@contextlib.contextmanager
def size_limit(folder, old):
    """A quota: the file may not grow beyond it."""
    old(folder / "x")
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, before[1]))
    yield folder / "x"
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def missing_folder(folder, old):
    yield folder / "not" / "there"


@contextlib.contextmanager
def name_of_a_folder(folder, old):
    (folder / "x").mkdir()
    yield folder / "x"


@contextlib.contextmanager
def name_too_long(folder, old):
    yield folder / ("n" * 300)


@contextlib.contextmanager
def path_through_a_file(folder, old):
    old(folder / "file")
    yield folder / "file" / "x"


@contextlib.contextmanager
def folder_removed_meanwhile(folder, old):
    """By another thread, while the save runs; see `saves_into`."""
    (folder / "doomed").mkdir()
    yield folder / "doomed" / "x"


@contextlib.contextmanager
def descriptors_used_up(folder, old):
    old(folder / "x")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    in_use = open_descriptors()
    resource.setrlimit(resource.RLIMIT_NOFILE, (in_use, before[1]))
    held = []
    with contextlib.suppress(OSError):
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    yield folder / "x"
    for fd in held:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


SCENARIOS = {
    f.__name__: f
    for f in (
        disk_full,
        read_only,
        permission_denied,
        size_limit,
        missing_folder,
        name_of_a_folder,
        name_too_long,
        path_through_a_file,
        folder_removed_meanwhile,
        descriptors_used_up,
    )
}


def saves_into(path, sequence, scenario):
    """The StorageError of a save; for a folder that goes, the first save that meets it gone."""
    if scenario != "folder_removed_meanwhile":
        sequence.save(path)
        return

    def remove():
        for _ in range(2000):
            try:
                for file in list(path.parent.iterdir()):
                    file.unlink()
                path.parent.rmdir()
            except OSError:
                continue
            return

    for _ in range(200):
        path.parent.mkdir(exist_ok=True)
        thread = threading.Thread(target=remove)
        thread.start()
        try:
            sequence.save(path)
        finally:
            thread.join()


def digest(path):
    return _core.SnapshotReader.open(str(path)).logical_digest


def contents(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


def attempt(scenario, folder, pager, small, sequence):
    held = bits(sequence)
    small.save(folder.parent / "old")
    old_digest = digest(folder.parent / "old")
    result = {"scenario": scenario, "error": None}
    with SCENARIOS[scenario](folder, small.save) as path:
        result["path"] = str(path)
        listed = [] if scenario == "descriptors_used_up" else contents(folder)
        try:
            saves_into(path, sequence, scenario)
        except Exception as error:
            result["error"], result["message"] = type(error).__name__, str(error)
            result["oserror"] = isinstance(error, OSError) and isinstance(error, StorageError)
    left = contents(folder)
    if scenario == "descriptors_used_up":
        listed = ["x"]
    result["left"] = [n for n in left if n not in listed]
    result["gone"] = [n for n in listed if n not in left]
    if "x" in left and path.is_file():
        result["old_kept"] = digest(path) == old_digest
    pager.check_invariants()
    result["same_bits"] = bits(sequence) == held
    untouched = fill(make_pager(pool_chunks=16, host_bytes="4MiB").sequence(), LENGTH, seed=2)
    for one in (sequence, untouched):
        fill(one, 2 * C, seed=3)
    result["goes_on"] = bits(sequence) == bits(untouched)
    if scenario not in ("name_too_long", "path_through_a_file"):
        if path.is_dir():
            path.rmdir()
        path.parent.mkdir(parents=True, exist_ok=True)
        sequence.save(path)
        reader = _core.SnapshotReader.open(str(path))
        result["saved_after"] = not reader.verify(1) and len(reader.tokens) == LENGTH + 2 * C
    return result


def main():
    base = Path(sys.argv[1])
    for scenario in SCENARIOS:
        folder = base / scenario / "saves"
        folder.mkdir(parents=True)
        child = os.fork()
        if child == 0:
            pager = make_pager(pool_chunks=16, host_bytes="4MiB")
            small = fill(pager.sequence(), OLD, seed=1)
            sequence = fill(pager.sequence(), LENGTH, seed=2)
            try:
                result = attempt(scenario, folder, pager, small, sequence)
            except CannotTellError as why:
                result = {"scenario": scenario, "skip": str(why)}
            os.write(1, (json.dumps(result) + "\n").encode())
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status != 0:
            sys.exit(f"{scenario}: wait status {status}")


main()
