"""Where a command's result goes: a file, a pipe, a link's target; never over its own files."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from cli_snapshots import files_below, refused, save_file

from kvpager.cli import main
from kvpager.cli.failure import CliError
from kvpager.cli.output import check_writable, write_file


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return save_file(tmp_path / "turn.kvsnap", 50)


def inspect(file: Path, output: Path) -> int:
    return main(["snapshot", "inspect", str(file), "--output", str(output)])


def test_a_result_goes_to_the_file_and_nowhere_else(
    capsys: pytest.CaptureFixture[str], file: Path, tmp_path: Path
) -> None:
    path = tmp_path / "result.json"
    told = ("snapshot", "inspect", str(file), "--format", "json", "--output", str(path))
    assert main(told) == 0
    assert capsys.readouterr() == ("", "")
    assert json.loads(path.read_text())["tokens"] == 50
    assert files_below(tmp_path) == ["result.json", "turn.kvsnap"]


def test_a_file_that_cannot_be_written_whole_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "result"
    path.write_bytes(b"old")

    def full(self: Path, target: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(CliError, match="No space left"):
        write_file(path, b"new")
    assert files_below(tmp_path) == ["result"]
    assert path.read_bytes() == b"old"


def test_a_pipe_is_written_and_stays_one(file: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    assert inspect(file, pipe) == 0
    reader.join(30)
    assert pipe.is_fifo()
    assert b"turn.kvsnap" in read[0]


def test_of_a_link_the_target_is_written(file: Path, tmp_path: Path) -> None:
    link, target = tmp_path / "link", tmp_path / "target"
    link.symlink_to(target)
    assert inspect(file, link) == 0
    assert link.is_symlink()
    assert "turn.kvsnap" in target.read_text(encoding="utf-8")


@pytest.mark.parametrize("option", ["--output", "--plot"])
def test_the_snapshot_that_is_looked_at_is_not_written_over(
    capsys: pytest.CaptureFixture[str], file: Path, tmp_path: Path, option: str
) -> None:
    before, link = file.read_bytes(), tmp_path / "link"
    link.symlink_to(file)
    for path in (file, link):
        said = refused(capsys, "snapshot", "inspect", file, option, path)
        assert f"{option} {path}: the command uses that file otherwise" in said
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("pipe", "it is no regular file"),
        ("folder/", "it is a folder"),
        ("n" * 300, "its name has more than 200 bytes"),
        ("half \udcff", "expected a path that is UTF-8"),
    ],
)
def test_what_cannot_be_saved_is_refused_before_anything_is_computed(
    tmp_path: Path, name: str, says: str
) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CliError, match=says):
        check_writable("--save", f"{tmp_path}/{name}")


def test_characters_that_stdout_has_not_are_escaped(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accented = file.with_name("é.kvsnap")
    file.rename(accented)
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert main(["snapshot", "inspect", str(accented), "--format", "json"]) == 0
    sys.stdout.flush()
    assert b"\\xe9.kvsnap" in written.getvalue()


def test_a_closed_stdout_is_said_to_be_closed() -> None:
    command = f"{sys.executable} -m kvpager info >&-"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == "kvpager: stdout is closed; give --output FILE"
