"""Reads every crafted snapshot by every way Python has, in a process that one of them may end.

python crafted_child.py LAST FILE...     the file that was read last is named in LAST
"""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

from kvpager import _core
from kvpager.cli import main


def read_everything(path: str) -> None:
    reader = _core.SnapshotReader.open(path)
    reader.verify(2)
    for chunk in range(reader.chunks):
        reader.read_chunk(chunk)
        for layer in range(reader.layout.layers):
            reader.read_slice(chunk, layer)
            reader.read_rows(chunk, layer)


def outcome(path: str) -> str:
    try:
        read_everything(path)
    except (_core.CorruptSnapshotError, _core.UnsupportedVersionError, _core.StorageError) as error:
        return str(error)
    return "was read"


def verified(path: str) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main(["snapshot", "verify", path])
    return f"{code}: {said.getvalue()}"


for name in sys.argv[2:]:
    Path(sys.argv[1]).write_text(name)
    for line in (outcome(name), verified(name)):
        print(" ".join(line.split()))
