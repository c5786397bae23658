"""Peers in virtual environments of their own, and calls into them.

A peer is installed once, into $KVPAGER_BENCH_PEERS or ~/.cache/kvpager/bench-peers, under its name
and version. The stamp that makes a folder count as installed is written last: what an interrupted
installation left behind is not taken for a whole one, and the next one begins again.

A call is a process of the peer's own Python that runs one of `scripts/`: a JSON object on stdin,
a JSON object as the last line of stdout, everything else is for people. Scripts import nothing of
kvpager, so that nothing of ours can change how the peer runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from kvpager_bench.peers.recipes import PEERS as PEERS
from kvpager_bench.peers.recipes import Recipe, Step
from kvpager_bench.places import scratch_folder, write_text

SCRIPTS = Path(__file__).parent / "scripts"
_STAMP = "installed.json"
_SHOWN_LINES = 12  # of a log, when something failed


class PeerError(Exception):
    """A peer could not be installed, or a call into it failed; the message has its last lines."""


@dataclass(frozen=True)
class Peer:
    """An installed peer. packages: {distribution: version} of all that lies in its environment."""

    recipe: Recipe
    folder: Path
    packages: Mapping[str, str]

    @property
    def title(self) -> str:
        return self.recipe.title

    @property
    def python(self) -> Path:
        return _python(self.folder)


@dataclass(frozen=True)
class Missing:
    """Why a peer cannot be had, in words for a table."""

    recipe: Recipe
    reason: str

    @property
    def title(self) -> str:
        return self.recipe.title


def root() -> Path:
    """The folder that holds the peers."""
    named = os.environ.get("KVPAGER_BENCH_PEERS")
    return Path(named) if named else Path.home() / ".cache" / "kvpager" / "bench-peers"


def find(name: str) -> Peer | Missing:
    """The peer, or why it is not there.

    Raises ValueError for a name that is none of PEERS.
    """
    recipe = _recipe(name)
    folder = root() / recipe.folder
    remedy = f"`kvpager bench peers install {name}`"
    try:
        stamp = json.loads((folder / _STAMP).read_text(encoding="utf-8"))
    except FileNotFoundError:
        failure = _beside(recipe, "failed")
        if failure.is_file():
            said = failure.read_text(encoding="utf-8").strip()
            return Missing(recipe, f"its installation failed: {said} (again: {remedy})")
        if folder.exists():
            return Missing(recipe, f"its installation was not finished; {remedy} begins again")
        return Missing(recipe, f"not installed; {remedy} does it ({recipe.cost})")
    if stamp["recipe"] != recipe.digest:
        return Missing(recipe, f"was installed in another way; {remedy} does it again")
    if not _python(folder).exists():
        return Missing(recipe, f"the Python it was installed with is gone; {remedy} does it again")
    return Peer(recipe, folder, stamp["packages"])


def install(name: str, report: Callable[[str], object] = print) -> Peer:
    """Installs a peer unless it is there already; `report` is given lines about what is done.

    Raises PeerError with the last lines of the log; what failed is remembered for `find`.
    """
    recipe = _recipe(name)
    root().mkdir(parents=True, exist_ok=True)
    with _lock(recipe, report):
        found = find(name)
        if isinstance(found, Peer):
            report(f"{recipe.title} is installed: {found.folder}")
            return found
        report(f"{recipe.title}: {recipe.cost}")
        folder = root() / recipe.folder
        shutil.rmtree(folder, ignore_errors=True)
        _beside(recipe, "failed").unlink(missing_ok=True)
        start = time.monotonic()
        try:
            with _beside(recipe, "log").open("w", encoding="utf-8") as log:
                _make(recipe, folder, log, report)
            packages = _packages(folder)
        except PeerError as error:
            shutil.rmtree(folder, ignore_errors=True)
            write_text(_beside(recipe, "failed"), f"{error}\n")
            raise PeerError(f"{recipe.title}: {error}\nlog: {_beside(recipe, 'log')}") from None
        stamp = {"recipe": recipe.digest, "python": sys.version, "packages": packages}
        write_text(folder / _STAMP, json.dumps(stamp, indent=1) + "\n")
        report(f"{recipe.title} is installed after {time.monotonic() - start:.0f} s: {folder}")
    peer = find(name)
    assert isinstance(peer, Peer)
    return peer


def remove(name: str) -> None:
    """Deletes a peer's folder, log and record of failure."""
    recipe = _recipe(name)
    folder = root() / recipe.folder
    if folder.exists():
        with _lock(recipe, lambda line: None):
            (folder / _STAMP).unlink(missing_ok=True)  # half a folder must not count as a peer
            shutil.rmtree(folder)
    for ending in ("failed", "log", "lock"):
        _beside(recipe, ending).unlink(missing_ok=True)


def call(name: str, script: str, task: Mapping[str, Any], timeout: float = 600.0) -> dict[str, Any]:
    """Runs `scripts/SCRIPT.py` with the peer's Python; returns the object that it answers.

    task: what it reads from stdin as JSON. timeout: seconds, after which it is killed. Raises
    PeerError when the peer is missing, does not answer in time, fails or answers something else
    than a JSON object.
    """
    found = find(name)
    if isinstance(found, Missing):
        raise PeerError(f"{found.title}: {found.reason}")
    return run(found, SCRIPTS / f"{script}.py", task, timeout)


def run(peer: Peer, script: Path, task: Mapping[str, Any], timeout: float) -> dict[str, Any]:
    """`call` for any script. Errors as there."""
    where = f"{peer.title}, {script.stem}"
    with (
        scratch_folder() as folder,
        (folder / "stderr").open("w", encoding="utf-8") as log,
        subprocess.Popen(
            [peer.python, script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=variables(peer.recipe),
            cwd=folder,
            text=True,
        ) as process,
    ):
        try:
            answer, _ = process.communicate(json.dumps(dict(task)), timeout)
        except subprocess.TimeoutExpired:
            raise PeerError(f"{where}: no answer within {timeout:g} s{_said(log)}") from None
        finally:
            process.kill()
        said = _said(log)
    if process.returncode:
        raise PeerError(f"{where}: exit code {process.returncode}{said}")
    lines = answer.strip().splitlines()
    try:
        value = json.loads(lines[-1]) if lines else None
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        last = lines[-1] if lines else "nothing"
        raise PeerError(f"{where}: expected a JSON object as its last line, got {last!r}{said}")
    return value


def _make(recipe: Recipe, folder: Path, log: IO[str], report: Callable[[str], object]) -> None:
    report(f"  a virtual environment in {folder}")
    _logged([sys.executable, "-m", "venv", str(folder)], recipe, log)
    for number, step in enumerate(recipe.steps, 1):
        report(f"  {number} of {len(recipe.steps)}: pip install {shlex.join(step.packages)}")
        _pip_install(step, recipe, folder, log, report)
    for module in recipe.modules:
        _logged([str(_python(folder)), "-c", f"import {module}"], recipe, log)


def _pip_install(
    step: Step, recipe: Recipe, folder: Path, log: IO[str], report: Callable[[str], object]
) -> None:
    pip = [str(_python(folder)), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    try:
        _logged([*pip, "install", *step.packages], recipe, log)
    except PeerError:
        if not step.fallback:
            raise
        report(f"    not to be had; instead {shlex.join(step.fallback)}")
        _logged([*pip, "install", *step.fallback], recipe, log)
    if step.without:
        _logged([*pip, "uninstall", "--yes", *step.without], recipe, log)


def _logged(command: Sequence[str], recipe: Recipe, log: IO[str]) -> None:
    log.write(f"$ {shlex.join(command)}\n")
    log.flush()
    start = log.tell()
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=variables(recipe),
        cwd=root(),  # modules in the caller's current folder must not be imported
        check=False,
    )
    if done.returncode:
        lines = Path(log.name).read_bytes()[start:].decode(errors="replace").strip().splitlines()
        last = "\n".join(lines[-_SHOWN_LINES:]) or f"exit code {done.returncode}"
        raise PeerError(f"{shlex.join(command[1:])} failed:\n{last}")


def _packages(folder: Path) -> dict[str, str]:
    listed = subprocess.run(
        [_python(folder), "-m", "pip", "list", "--format", "json", "--disable-pip-version-check"],
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        raise PeerError(f"pip list failed: {listed.stderr.strip()}")
    return {entry["name"].lower(): entry["version"] for entry in json.loads(listed.stdout)}


def variables(recipe: Recipe) -> dict[str, str]:
    """A peer's environment: ours, less what would let our packages in or tune its threads."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "KVPAGER_", "OMP_")) and name != "VIRTUAL_ENV"
    }
    kept |= {"PYTHONNOUSERSITE": "1", "PYTHONUNBUFFERED": "1"}
    kept.setdefault("HF_HUB_OFFLINE", "1")
    kept.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", str(len(os.sched_getaffinity(0))))
    return kept | dict(recipe.variables)


@contextlib.contextmanager
def _lock(recipe: Recipe, report: Callable[[str], object]) -> Iterator[None]:
    """One installation of a peer at a time; the second one waits and finds it done."""
    with _beside(recipe, "lock").open("w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"{recipe.title}: another process is installing it; waiting")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _recipe(name: str) -> Recipe:
    try:
        return PEERS[name]
    except KeyError:
        raise ValueError(f"peer is {name!r}; expected one of {', '.join(PEERS)}") from None


def _python(folder: Path) -> Path:
    return folder / "bin" / "python"


def _beside(recipe: Recipe, ending: str) -> Path:
    """A file beside a peer's folder: of its log, its lock or its failure."""
    return root() / f"{recipe.folder}.{ending}"


def _said(log: IO[str]) -> str:
    """The last lines of what a process wrote for people, to be put behind an error."""
    lines = Path(log.name).read_bytes().decode(errors="replace").strip().splitlines()
    return "".join(f"\n  {line}" for line in lines[-_SHOWN_LINES:])
