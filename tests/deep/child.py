"""A part of the deep tests, run for a test of the fast suite."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from deep.interposer import TESTS


def deep(part: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """The rows of a run of one part."""
    record = folder / "record.json"
    site = ["-S"] if sys.flags.no_site else []
    command = [sys.executable, *site, "-m", "deep", part, *arguments, "--json", str(record)]
    ran = subprocess.run(
        command, cwd=TESTS, capture_output=True, text=True, check=False, timeout=300
    )
    assert record.exists(), ran.stderr
    rows: dict[str, Any] = json.loads(record.read_text())["rows"]
    assert {name: row["wrong"] for name, row in rows.items() if row["wrong"]} == {}
    assert ran.returncode == 0, ran.stderr
    return rows
