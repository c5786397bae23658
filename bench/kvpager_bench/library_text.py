"""The sources of the standard library: what tiny-coder was trained on, and what it never saw.

The modules of HELD_OUT are in every Python from 3.11 to 3.14. They are never trained on, so the
loss on them says what a model, or a pager of its K/V, does with text that is new to it.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

HELD_OUT: tuple[str, ...] = (
    "_pydecimal.py",
    "argparse.py",
    "difflib.py",
    "doctest.py",
    "enum.py",
    "inspect.py",
    "ipaddress.py",
    "json/decoder.py",
    "pickletools.py",
    "shutil.py",
    "statistics.py",
    "tarfile.py",
    "textwrap.py",
    "turtle.py",
    "typing.py",
)

_LEFT_OUT_FOLDERS = frozenset(
    {
        "__pycache__",
        "encodings",  # tables
        "idle_test",
        "lib-dynload",
        "pydoc_data",  # one string
        "site-packages",
        "test",  # they repeat what they test, held-out modules too
        "tests",
        "turtledemo",  # shows a held-out module
    }
)
_LEFT_OUT_FILES = ("_sysconfigdata",)  # how this machine's Python was built


def standard_library() -> Path:
    """The folder of the running Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def held_out_texts() -> list[tuple[str, str]]:
    """(name within the library, source) of every module of HELD_OUT, in its order."""
    return [(name, _source(standard_library() / name)) for name in HELD_OUT]


def training_texts() -> list[tuple[str, str]]:
    """(name within the library, source) of what a model may be trained on, sorted by name.

    Without HELD_OUT, installed packages, tests, tables, and what describes this machine.
    """
    library = standard_library()
    texts = []
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library)
        if name.as_posix() in HELD_OUT or not _LEFT_OUT_FOLDERS.isdisjoint(name.parts):
            continue
        if name.parts[0].startswith("config-") or name.name.startswith(_LEFT_OUT_FILES):
            continue
        texts.append((name.as_posix(), _source(path)))
    return [(name, source) for name, source in texts if source.strip()]


def _source(path: Path) -> str:
    """As text: bytes of other encodings than UTF-8 are replaced."""
    return path.read_text(encoding="utf-8", errors="replace")
