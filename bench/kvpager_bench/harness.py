"""How every benchmark here measures, and what it has to say with its numbers.

A subject is shown to be deterministic before it is timed. Calls are warmed, run several times and
given as a median with the fastest and the slowest run beside it. A report names its columns once;
a row that lacks one, or holds a number that is not finite, is an error and never a zero. Reports
carry the machine, the versions and the commit, and are read back under the same rules.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeAlias

# Before torch loads its OpenMP runtime: on a busy machine spinning threads slow each other down.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
import transformers
import xxhash

import kvpager
from kvpager import _core

gc.freeze()  # what is imported stays, so that collections between runs need not look at it

SCHEMA = 1
PACKAGE_DIR = Path(__file__).resolve().parent


def _checkout() -> Path | None:
    """The source tree this package lies in; None for an installed wheel."""
    root = PACKAGE_DIR.parents[1]
    return root if (root / "pyproject.toml").is_file() and (root / "bench").is_dir() else None


CHECKOUT = _checkout()
RESULTS_DIR = CHECKOUT / "bench" / "results" if CHECKOUT else Path("kvpager-bench")
DOCS_DIR = CHECKOUT / "docs" / "results" if CHECKOUT else RESULTS_DIR
SCRATCH_DIR = CHECKOUT / "build" / "bench" if CHECKOUT else RESULTS_DIR / "scratch"
NOT_APPLICABLE = "n/a"  # the one thing an optional column may hold instead of a number
DEFAULT_THREADS = 2

Cell: TypeAlias = "str | int | float | bool"

_ENVIRONMENT = (
    "cpu",
    "cores",
    "memory_bytes",
    "threads",
    "isa",
    "python",
    "torch",
    "transformers",
    "kvpager",
    "kernel_version",
    "commit",
    "dirty",
    "date",
    "load_average",
)


class MissingNumberError(Exception):
    """A report lacks a number it promised, or holds one that is not finite."""


class NondeterministicSubjectError(Exception):
    """What was to be measured gives other bits when it is run again."""


@dataclass(frozen=True)
class Timing:
    """Seconds of several runs of one call."""

    runs: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.runs or any(not math.isfinite(run) or run <= 0 for run in self.runs):
            raise MissingNumberError(f"timings are {self.runs}; expected positive seconds")

    @property
    def median(self) -> float:
        return statistics.median(self.runs)

    @property
    def fastest(self) -> float:
        return min(self.runs)

    @property
    def slowest(self) -> float:
        return max(self.runs)

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median."""
        return (self.slowest - self.fastest) / self.median


def measure(
    call: Callable[[], object],
    *,
    runs: int = 5,
    warm_up: int = 1,
    before: Callable[[], object] | None = None,
) -> Timing:
    """Times a synchronous call. `before` runs ahead of every call and is not timed."""
    seconds = []
    for run in range(warm_up + runs):
        if before is not None:
            before()
        gc.collect()
        start = time.perf_counter()
        call()
        elapsed = time.perf_counter() - start
        if run >= warm_up:
            seconds.append(elapsed)
    return Timing(tuple(seconds))


@dataclass(frozen=True)
class Subject:
    """A synchronous call to be timed, and what has to be so before each run; that is not timed."""

    call: Callable[[], object]
    before: Callable[[], object] = lambda: None


def interleave(
    subjects: Mapping[str, Subject], *, runs: int = 5, warm_up: int = 1
) -> dict[str, Timing]:
    """Times several subjects side by side, for ratios between them.

    Every round runs each of them once, and begins with another one than the round before: what
    slows the machine for a while slows all of them, and nobody always runs first.
    """
    names = list(subjects)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for run in range(warm_up + runs):
        gc.collect()
        first = run % len(names)
        for name in names[first:] + names[:first]:
            subjects[name].before()
            start = time.perf_counter()
            subjects[name].call()
            elapsed = time.perf_counter() - start
            if run >= warm_up:
                seconds[name].append(elapsed)
    return {name: Timing(tuple(runs)) for name, runs in seconds.items()}


def bytes_read() -> int:
    """Bytes this process has had from read calls, whether a disk or the page cache gave them."""
    for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(": ")
        if name == "rchar":
            return int(value)
    raise MissingNumberError("/proc/self/io has no rchar; bytes read cannot be counted here")


def peak_growth(call: Callable[[], object]) -> int:
    """Bytes by which the process's memory grew at most while the call ran."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak is now what is held
    before = _memory("VmRSS")
    call()
    return max(0, _memory("VmHWM") - before)


def _memory(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(name):
            return int(line.split()[1]) << 10
    raise MissingNumberError(f"/proc/self/status has no {name}; memory cannot be measured here")


def digest(*tensors: torch.Tensor) -> str:
    """Of shapes, dtypes and raw bits."""
    state = xxhash.xxh3_128()
    for tensor in tensors:
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        state.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
        state.update(raw.data)
    return state.hexdigest()


def require_deterministic(subject: Callable[[], object], name: str, times: int = 2) -> None:
    """Runs `subject` several times; it returns a value that equals itself when bits are the same.

    Raises NondeterministicSubjectError, with the first result that differs.
    """
    first = subject()
    for attempt in range(1, times):
        again = subject()
        if again != first:
            raise NondeterministicSubjectError(
                f"{name}: run {attempt + 1} gave {again!r}, the first {first!r}; a time or a count "
                "of something that changes means nothing"
            )


@dataclass(frozen=True)
class Column:
    """One column of a report.

    unit: empty for plain numbers and for text. digits: significant ones when printed. optional:
    whether NOT_APPLICABLE may stand in for a number.
    """

    name: str
    unit: str = ""
    digits: int = 3
    text: bool = False
    optional: bool = False

    @property
    def heading(self) -> str:
        return f"{self.name} [{self.unit}]" if self.unit else self.name

    def check(self, value: object, where: str) -> None:
        if self.text:
            if not isinstance(value, str) or not value:
                raise MissingNumberError(f"{where}: {self.name} is {value!r}; expected text")
        elif isinstance(value, bool) or not isinstance(value, (int, float)):
            if not (self.optional and value == NOT_APPLICABLE):
                raise MissingNumberError(f"{where}: {self.name} is {value!r}; expected a number")
        elif not math.isfinite(value):
            raise MissingNumberError(f"{where}: {self.name} is {value}; expected a finite number")


@dataclass(frozen=True)
class Verdict:
    """A claim the numbers were gathered to judge, and whether they bear it out."""

    claim: str
    holds: bool
    evidence: str


@dataclass
class Report:
    """The table of one question. `name` is also that of its file."""

    name: str
    question: str
    columns: tuple[Column, ...]
    settings: Mapping[str, Any]
    environment: Mapping[str, Any]
    rows: list[dict[str, Cell]] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)

    def add(self, **values: Cell) -> dict[str, Cell]:
        """Adds a row: exactly one value per column. Raises MissingNumberError otherwise."""
        where = f"{self.name}, row {len(self.rows)}"
        names = [column.name for column in self.columns]
        lacking = [name for name in names if name not in values]
        unknown = [name for name in values if name not in names]
        if lacking or unknown:
            raise MissingNumberError(f"{where}: lacks {lacking}, has unknown {unknown}")
        for column in self.columns:
            column.check(values[column.name], where)
        row = {name: values[name] for name in names}
        self.rows.append(row)
        return row

    def judge(self, claim: str, holds: bool, evidence: str) -> None:
        self.verdicts.append(Verdict(claim, bool(holds), evidence))

    def number(self, row: Mapping[str, Cell], name: str) -> float:
        """The number in a row; text, NOT_APPLICABLE and unknown names raise MissingNumberError."""
        value = row.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise MissingNumberError(f"{self.name}: {name} is {value!r}; expected a number")
        return float(value)

    def to_json(self) -> dict[str, Any]:
        if not self.rows:
            raise MissingNumberError(f"{self.name}: no rows were measured")
        return {
            "schema": SCHEMA,
            "name": self.name,
            "question": self.question,
            "environment": dict(self.environment),
            "settings": dict(self.settings),
            "columns": [vars(column) for column in self.columns],
            "rows": self.rows,
            "verdicts": [vars(verdict) for verdict in self.verdicts],
        }

    def write(self, folder: Path | None = None) -> Path:
        """Replaces name.json in `folder`, by default RESULTS_DIR.

        An interrupted run leaves the older file whole.
        """
        folder = folder or RESULTS_DIR
        text = json.dumps(self.to_json(), indent=1, allow_nan=False)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        write_text(path, text + "\n")
        return path

    def markdown(self) -> str:
        cells = [[column.heading for column in self.columns]]
        cells += [[_printed(row[c.name], c) for c in self.columns] for row in self.rows]
        widths = [max(len(line[i]) for line in cells) for i in range(len(self.columns))]
        lines = [
            "| "
            + " | ".join(
                text.ljust(width) if column.text else text.rjust(width)
                for text, width, column in zip(line, widths, self.columns)
            )
            + " |"
            for line in cells
        ]
        rules = ["-" * w if c.text else "-" * (w - 1) + ":" for w, c in zip(widths, self.columns)]
        lines.insert(1, "| " + " | ".join(rules) + " |")
        return "\n".join(lines)

    def print(self) -> None:
        print(f"\n{self.question}\n\n{self.markdown()}\n")
        for verdict in self.verdicts:
            print(f"{'holds' if verdict.holds else 'FAILS'}: {verdict.claim} ({verdict.evidence})")

    def finish(self) -> None:
        """Prints the table and writes the file."""
        self.print()
        print(f"wrote results/{self.write().name}")


def load_report(path: Path) -> Report:
    """Reads a report back, checking all that `Report.add` checks.

    Raises MissingNumberError for another schema, an incomplete environment or row, or no rows.
    """
    data = json.loads(path.read_text(encoding="utf-8"))
    if data.get("schema") != SCHEMA:
        raise MissingNumberError(f"{path.name}: schema {data.get('schema')!r}, expected {SCHEMA}")
    lacking = [name for name in _ENVIRONMENT if data["environment"].get(name) in (None, "")]
    if lacking:
        raise MissingNumberError(f"{path.name}: environment lacks {lacking}")
    if not data["rows"]:
        raise MissingNumberError(f"{path.name}: no rows")
    report = Report(
        name=data["name"],
        question=data["question"],
        columns=tuple(Column(**column) for column in data["columns"]),
        settings=data["settings"],
        environment=data["environment"],
    )
    for row in data["rows"]:
        report.add(**row)
    for verdict in data["verdicts"]:
        report.judge(**verdict)
    return report


def environment() -> dict[str, Any]:
    """What a figure depends on beside the code: machine, versions, commit, date, load."""
    record = {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "threads": torch.get_num_threads(),
        "isa": _core.isa_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "kvpager": kvpager.__version__,
        "kernel_version": _core.KERNEL_VERSION,
        "commit": _git("rev-parse", "HEAD") or "no git checkout",
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "load_average": round(os.getloadavg()[0], 2),
    }
    assert tuple(record) == _ENVIRONMENT
    return record


def native_digest() -> str:
    """Of the extension's bytes and its package's sources: what cached cells are good for."""
    state = xxhash.xxh3_128()
    package = Path(kvpager.__file__).parent
    for path in [Path(str(_core.__file__)), *sorted(package.rglob("*.py"))]:
        state.update(path.name.encode())
        state.update(path.read_bytes())
    return state.hexdigest()


def cli(description: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small sizes: does it work?")
    parser.add_argument("--threads", type=int, default=DEFAULT_THREADS, help="of torch and kvpager")
    return parser


def start(arguments: argparse.Namespace) -> dict[str, Any]:
    """Sets the thread count and records the environment."""
    torch.set_num_threads(arguments.threads)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    return environment()


def report_name(name: str, arguments: argparse.Namespace) -> str:
    """A quick run never overwrites a full one's figures."""
    return f"{name}-quick" if arguments.quick else name


def run_worker(module: str, task: Mapping[str, Any]) -> dict[str, Any]:
    """Runs `python -m module --worker TASK` in a new process; returns its last line's JSON."""
    done = subprocess.run(
        [sys.executable, "-m", module, "--worker", json.dumps(dict(task))],
        check=False,
        stdout=subprocess.PIPE,
        text=True,
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise MissingNumberError(f"the worker for {dict(task)} failed (exit {done.returncode})")
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


def write_text(path: Path, text: str) -> None:
    """Replaces a file as a whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def parse_list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def parse_ints(text: str) -> list[int]:
    return [int(part) for part in parse_list(text)]


def tokens_name(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


def _printed(value: Cell, column: Column) -> str:
    """`column.digits` significant digits, without an exponent unless the number is tiny."""
    if not isinstance(value, float):
        return str(value)
    if value == 0:
        return "0"
    magnitude = math.floor(math.log10(abs(value)))
    if magnitude < -4:
        return f"{value:.{column.digits - 1}e}"
    return f"{value:.{max(0, column.digits - 1 - magnitude)}f}"


def _cpu_name() -> str:
    try:
        lines: Iterable[str] = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = ()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=PACKAGE_DIR, capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip()
