"""Files of torch, transformers and peft, as they were released.

A release is what a package's installer recorded: the digest of every file. A file that was edited
by hand, or that no installer put there, is of no release.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cached_property, lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from kvpager._support.remembered import recall, remember

RELEASED = ("torch", "transformers", "peft")

_KIND = "released_files"
_RELEASE = re.compile(r"\d+(\.\d+)*(\.post\d+)?(\+[\w.]+)?")  # no alpha, candidate or nightly
_NAME = re.compile(r"[\w.-]+")
_ALGORITHM = "sha256="


class UnknownStateError(Exception):
    """A model runs code, or holds an object, of which nothing is known; named in the message."""


Stamp = list[int]  # what changes with a file's bytes; nobody but root can set them all


def package_of(name: str) -> str:
    """The package that a module of this name is in."""
    return name.partition(".")[0]


def stamp(path: str) -> Stamp:
    """Size, times of change and number of a file.

    Raises OSError.
    """
    found = os.stat(path)  # noqa: PTH116  # of some thousand files at each start
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def require_released_modules() -> None:
    """Requires all files of loaded modules of RELEASED to have the bytes they were released with.

    Raises:
        UnknownStateError: one of them is of no release, or was changed.
    """
    loaded: dict[str, set[str]] = {name: set() for name in RELEASED}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if package_of(name) in loaded and isinstance(file, str) and file.startswith(os.sep):
            loaded[package_of(name)].add(file)
    for package, files in loaded.items():
        if files:
            _release(package).require(files)


def is_released(file: str) -> bool:
    """Whether a file is one of RELEASED, with the bytes it was released with."""
    for package in RELEASED:
        if package in sys.modules and file.startswith(_release(package).folder):
            try:
                _release(package).require([file])
            except UnknownStateError:
                return False
            return True
    return False


@lru_cache(maxsize=1)
def required_packages() -> frozenset[str]:
    """Packages whose functions released code may import: what RELEASED require, extras too."""
    found: set[str] = set()
    for package in RELEASED:
        try:
            requirements = metadata.requires(package) or ()
        except metadata.PackageNotFoundError:
            continue
        names = (_NAME.match(one) for one in requirements)
        found.update(name[0].lower().replace("-", "_") for name in names if name)
    return frozenset(found)


class _Release:
    """An installed distribution; remembers which files were found as released, by their stamps."""

    def __init__(self, package: str) -> None:
        try:
            found = metadata.distribution(package)
        except metadata.PackageNotFoundError:
            raise UnknownStateError(f"{package}, which no installer has recorded") from None
        self.name = f"{package} {found.version}"
        if not _RELEASE.fullmatch(found.version):
            raise UnknownStateError(f"{self.name}, which is no release")
        self._base = f"{found.locate_file('')}{os.sep}"
        self.folder = f"{self._base}{package}{os.sep}"
        self._record = found.read_text("RECORD") or ""
        summary = hashlib.blake2b(self._record.encode(), digest_size=16).hexdigest()
        self._key: dict[str, Any] = {"release": self.name, "at": self._base, "record": summary}
        self._stamps: dict[str, Stamp] = {}
        self._recalled = False

    def require(self, files: Iterable[str]) -> None:
        """Raises UnknownStateError unless all are as they were released."""
        new = {}
        for file in files:
            try:
                now = stamp(file)
            except OSError:
                raise self._changed(file) from None
            if self._stamps.get(file) != now:
                new[file] = now
        if new and not self._recalled:
            self._recall()
        unknown = [file for file, now in new.items() if self._stamps.get(file) != now]
        for file in unknown:
            if not self._is_released(file):
                raise self._changed(file)
            self._stamps[file] = new[file]
        if unknown:
            remember(_KIND, self._key, self._stamps)

    @cached_property
    def _digests(self) -> dict[str, str]:
        return dict(_recorded(self._record))  # ten thousand lines, which few starts need

    def _changed(self, file: str) -> UnknownStateError:
        return UnknownStateError(f"{file}, which is not as {self.name} was released")

    def _recall(self) -> None:
        self._recalled = True
        found = recall(_KIND, self._key)
        if isinstance(found, dict):
            self._stamps = {**found, **self._stamps}

    def _is_released(self, file: str) -> bool:
        if not file.startswith(self._base):
            return False
        recorded = self._digests.get(file.removeprefix(self._base).replace(os.sep, "/"))
        digest = hashlib.sha256(Path(file).read_bytes()).digest()
        return recorded == base64.urlsafe_b64encode(digest).decode().rstrip("=")


@lru_cache(maxsize=len(RELEASED))
def _release(package: str) -> _Release:
    return _Release(package)


def _recorded(text: str) -> Iterator[tuple[str, str]]:
    """Yields (path, digest) of each file in a RECORD."""
    for line in text.splitlines():
        path, _, rest = line.rpartition(f",{_ALGORITHM}")
        if path:
            yield path.strip('"'), rest.partition(",")[0]
