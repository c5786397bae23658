"""LMCache beside us: the bytes of a state through its adapters for files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvpager_bench.harness import Timing
from kvpager_bench.peers import environments

NAME = "lmcache"
ADAPTERS = ("fs", "fs_native")  # in Python, in C++
TIMEOUT = 600.0


@dataclass(frozen=True)
class Files:
    """One adapter with objects of one size; `state`: of the files when they are loaded."""

    adapter: str
    object_bytes: int
    state: str
    store: Timing
    load: Timing


def title() -> str:
    """What tables call it, with its version."""
    return environments.PEERS[NAME].title


def missing() -> str | None:
    """Why it cannot be had; None when it can."""
    found = environments.find(NAME)
    return found.reason if isinstance(found, environments.Missing) else None


def files(
    folder: Path,
    total_bytes: int,
    object_bytes: Sequence[int],
    states: Sequence[str],
    *,
    runs: int = 3,
) -> list[Files]:
    """Stores and loads `total_bytes` with every adapter, object size and state of the files.

    Raises PeerError when the peer is missing or fails.
    """
    task = {
        "folder": str(folder.resolve()),
        "adapters": list(ADAPTERS),
        "object_bytes": list(object_bytes),
        "total_bytes": total_bytes,
        "states": list(states),
        "runs": runs,
    }
    answer = environments.call(NAME, "lmcache_files", task, TIMEOUT)
    return [
        Files(
            row["adapter"],
            row["object_bytes"],
            row["state"],
            Timing(tuple(row["store_s"])),
            Timing(tuple(row["load_s"])),
        )
        for row in answer["rows"]
    ]
