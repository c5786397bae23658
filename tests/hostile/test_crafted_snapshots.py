"""The committed corpus of crafted snapshots (tests/fuzz/crafted.h says what is wrong with each)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
CORPUS = sorted((HERE.parent / "fuzz" / "crafted").glob("*.kvsnap"))


def test_every_crafted_snapshot_is_refused_by_the_reader_and_by_the_command_line(tmp_path):
    last = tmp_path / "last"
    child = subprocess.run(
        [sys.executable, "-X", "faulthandler", HERE / "crafted_child.py", last, *CORPUS],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert child.returncode == 0, f"ended by {last.read_text()}\n{child.stderr[-3000:]}"
    lines = child.stdout.splitlines()
    assert len(CORPUS) > 40
    assert len(lines) == 2 * len(CORPUS)
    for path, refused, verified in zip(CORPUS, lines[::2], lines[1::2], strict=True):
        assert refused.startswith(str(path)), (path.name, refused)
        assert "expected" in refused or "reader knows" in refused or "No such file" in refused
        code, _, said = verified.partition(": ")
        assert int(code) > 0, (path.name, verified)
        assert path.name in said
        assert "Traceback" not in said


def test_a_layout_of_65536_by_65536_does_not_end_the_command():
    """Its tile had no bytes in 32 bits, and `verify` divided by them."""
    path = HERE.parent / "fuzz" / "crafted" / "tile_of_no_bytes.kvsnap"
    child = subprocess.run(
        [sys.executable, "-m", "kvpager", "snapshot", "verify", path],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert child.returncode > 0
    assert "layout.chunk_tokens is 65536, expected 16, 32, 64, 128 or 256" in child.stdout
