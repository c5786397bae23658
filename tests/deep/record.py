"""What a run has found, kept as JSON for the tables of docs/testing.md."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

COMMIT_VARIABLE = "KVPAGER_COMMIT"  # for a copy of the tree that is no checkout
HERE = Path(__file__).resolve().parent


def chosen(names: Iterable[str], parts: Sequence[str]) -> list[str]:
    """Those of `names` that are one of `parts`, or have in them one that is no name itself."""
    known = list(names)
    return [
        name
        for name in known
        if any(part == name or (part not in known and part in name) for part in parts)
    ]


def commit() -> str:
    """Of the tree this runs from."""
    if told := os.environ.get(COMMIT_VARIABLE):
        return told
    said = subprocess.run(
        ["git", "describe", "--always", "--dirty=+"],
        cwd=HERE,
        capture_output=True,
        text=True,
        check=False,
    )
    return said.stdout.strip() or "unknown"


def write(path: Path, part: str, rows: Mapping[str, Any], **more: Any) -> None:
    """Puts the rows (dataclasses, by name) of one part, and what else is to be known, in a file."""
    values = {
        "part": part,
        "commit": commit(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        **more,
        "rows": {name: asdict(row) for name, row in rows.items()},
    }
    path.write_text(json.dumps(values, indent=1) + "\n")
