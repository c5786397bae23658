"""Carries a step out and writes what came of it, again after every part."""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpu_steps.part import Outcome, Part, StepFailedError, run
from gpu_steps.place import ROOT, Place
from gpu_steps.steps import Step

TAIL_LINES = 40


@dataclass
class Record:
    """The JSON of a step."""

    step: Step
    place: Place
    start: float = field(default_factory=time.monotonic)
    outcomes: list[Outcome] = field(default_factory=list)
    measured: dict[str, Any] = field(default_factory=dict)
    stopped: str = "it is running"  # why it is not done; nothing if it is

    @property
    def seconds(self) -> float:
        """Since the step began."""
        return time.monotonic() - self.start

    def take(self, part: Part) -> None:
        """Keeps what a part has measured, also one that failed."""
        if part.measured is not None and part.measured.is_file():
            text = part.measured.read_text(encoding="utf-8", errors="replace")
            try:
                self.measured[part.name] = json.loads(text)
            except ValueError:  # its writer was stopped
                self.measured[part.name] = text

    def write(self) -> None:
        """Replaces the file as a whole."""
        path = self.place.out / f"{self.step.name}.json"
        data = {
            "step": self.step.name,
            "does": self.step.does,
            "device": self.place.device,
            "rehearsal": self.place.rehearse,
            "commit": _commit(),
            "ok": not self.stopped,
            "stopped": self.stopped,
            "seconds": round(self.seconds, 1),
            "limit": self.step.limit,
            "parts": [asdict(outcome) for outcome in self.outcomes],
            "measured": self.measured,
        }
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        part.replace(path)


def carry_out(step: Step, place: Place) -> None:
    """Runs a step's parts. Raises StepFailedError at the first that failed."""
    record = Record(step, place)
    log = place.out / f"{step.name}.log"
    log.write_text("", encoding="utf-8")
    record.write()
    print(f"== {step.name}: {step.does}", flush=True)
    try:
        for part in step.parts(place):
            _carry_out(part, record, log)
        record.stopped = ""
    except StepFailedError as error:
        record.stopped = str(error)
        raise
    except KeyboardInterrupt:
        record.stopped = "interrupted"
        raise
    finally:
        record.write()
    print(f"   {step.name} is done after {record.seconds:.0f} s", flush=True)


def _carry_out(part: Part, record: Record, log: Path) -> None:
    limit = min(
        part.limit * record.place.patience,
        record.step.limit * record.place.patience - record.seconds,
    )
    where = f"{record.step.name}: {part.name}"
    if limit <= 0:
        raise StepFailedError(f"{where}: no time was left of {record.step.limit:.0f} s")
    if part.measured is not None:
        part.measured.parent.mkdir(parents=True, exist_ok=True)
        part.measured.unlink(missing_ok=True)
    try:
        outcome = run(part, limit, log)
    finally:
        record.take(part)
    record.outcomes.append(outcome)
    record.write()
    mark = "FAILED" if outcome.wrong else "ok"
    print(f"   {outcome.seconds:6.1f} s  {mark:6}  {part.name}", flush=True)
    for line in outcome.said.splitlines():
        print(f"                     {line}", flush=True)
    if outcome.wrong:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        print("\n".join(lines[-TAIL_LINES:]), flush=True)
        raise StepFailedError(f"{where}: {outcome.wrong}")


def _commit() -> str:
    """Nothing outside of a checkout."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip()
