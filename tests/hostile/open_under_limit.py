"""Opens and reads every file of a folder under a small limit of address space; prints outcomes.

Usage: open_under_limit.py FILES PACKS_FOLDER MEBIBYTES
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

from kvpager import _core


def outcome(path, packs):
    try:
        reader = _core.SnapshotReader.open(str(path), packs)
        return "damaged" if reader.verify(1) else "sound"
    except Exception as error:
        return f"{type(error).__name__} {str(error)[:200]!r}"


def main():
    files, packs, limit = sys.argv[1:]
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    cap = used + (int(limit) << 20)
    resource.setrlimit(resource.RLIMIT_AS, (cap, cap))
    for path in sorted(Path(files).iterdir()):
        print(outcome(path, packs), path.name)


main()
