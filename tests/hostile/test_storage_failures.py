"""The system refuses a save: a clear error, nothing left behind, and a session that goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

WORDS = {
    "disk_full": "No space left on device",
    "read_only": "Read-only file system",
    "permission_denied": "Permission denied",
    "size_limit": "File too large",
    "missing_folder": "No such file or directory",
    "name_of_a_folder": "Is a directory",
    "name_too_long": "File name too long",
    "path_through_a_file": "Not a directory",
    "folder_removed_meanwhile": "No such file or directory",
    "descriptors_used_up": "Too many open files",
}
KEEPS_AN_OLD_FILE = {"disk_full", "read_only", "permission_denied", "size_limit"}
KEEPS_AN_OLD_FILE |= {"descriptors_used_up"}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each scenario did, in a process that may be confined for it."""
    # Not below pytest's own folder, which is closed to the user that "permission denied" needs.
    with tempfile.TemporaryDirectory(prefix="kvpager-storage-") as folder:
        Path(folder).chmod(0o755)
        script = Path(__file__).with_name("failing_storage.py")
        ran = subprocess.run(
            [sys.executable, script, folder],
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    assert ran.returncode == 0, ran.stderr
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    return {result["scenario"]: result for result in lines}


# attacks 76, 77, 78, 79, 80, 81, 82, 83
@pytest.mark.parametrize("scenario", WORDS)
def test_a_save_the_system_refuses_says_why_and_leaves_nothing(results, scenario):
    result = results[scenario]
    if "skip" in result:
        pytest.skip(f"this machine cannot show it: {result['skip']}")
    assert result["error"] == "StorageError", result.get("message", "the save went through")
    assert result["oserror"]
    assert result["message"].startswith(result["path"])
    assert WORDS[scenario] in result["message"]
    assert result["left"] == []
    if scenario != "folder_removed_meanwhile":
        assert result["gone"] == []
    if scenario in KEEPS_AN_OLD_FILE:
        assert result["old_kept"]
    assert result["same_bits"]
    assert result["goes_on"]
    assert result.get("saved_after", True)
