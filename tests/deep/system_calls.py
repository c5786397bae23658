"""Each system call of an operation fails once, with each error.

    python -m deep.system_calls [--only PART ...] [--stride N] [--offset N] --json FILE

Runs under the interposer; `python -m deep calls` starts it so. After each failure: the error is a
typed one that names a file of the operation, what was there is there to the bit, no descriptor is
left open, a sweep leaves nothing, and the same operation then goes through.
"""

from __future__ import annotations

import argparse
import errno
import faulthandler
import gc
import logging
import os
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

from small_store import Author

from deep.aftermath import check_goes_through, check_holds
from deep.interposer import Interposer, Seen, root
from deep.operations import OPERATIONS, Operation
from deep.record import chosen, write
from deep.worlds import Templates, held
from kvpager.errors import PagerError

ERRORS = ("EIO", "ENOSPC", "EDQUOT", "EACCES", "EMFILE", "ESTALE")
PATIENCE_S = 60.0


@dataclass
class Outcome:
    """Of one operation.

    Attributes:
        calls: system calls it makes.
        cases: failures tried.
        refused: of these, those after which it raised; the others it got over.
        by_call: how often each call was made to fail.
        wrong: what was not as it has to be.
    """

    calls: int = 0
    cases: int = 0
    refused: int = 0
    seconds: float = 0.0
    by_call: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


class Trial:
    """One operation, on a fresh copy of its world each time."""

    def __init__(self, name: str, templates: Templates, library: Interposer) -> None:
        self.operation: Operation = OPERATIONS[name]
        self._templates = templates
        self._library = library
        self._folder = root() / "case"
        self._author = Author()
        self._failed = Seen(0, "", "")

    def _attempt(self, after: int, error: int) -> Exception | None:
        self._library.arm(after, error)
        try:
            self.operation.run(self._author, self._folder)
        except Exception as raised:
            raised.__traceback__ = None  # which would keep what the operation had open
            return raised
        finally:
            self._failed = self._library.disarm()
        return None

    def count(self) -> int:
        """How many calls the operation makes when nothing fails."""
        self._templates.copy(self.operation.world, self._folder)
        self._run_once()
        assert held(self._author, self._folder) == self.operation.done
        return self._failed.calls

    def _run_once(self) -> None:
        error = self._attempt(-1, 0)
        assert error is None, error

    def fail_at(self, after: int, error: int) -> tuple[Seen, bool, list[str]]:
        """One case: what was made to fail, whether the operation raised, and what is wrong."""
        self._templates.copy(self.operation.world, self._folder)
        before = descriptors()
        raised = self._attempt(after, error)
        seen = self._failed
        wrong = []
        if raised is not None:
            wrong += self._check_error(raised)
        refused = raised is not None
        del raised
        gc.collect()
        if (now := descriptors()) != before:
            wrong.append(f"{now - before} descriptors left open")
        operation, folder = self.operation, self._folder
        try:
            check_holds(operation, self._author, folder, done=not refused, failed=refused)
            check_goes_through(operation, self._author, folder)
        except Exception as broken:
            wrong.append(_in_a_line(broken))
        return seen, refused, wrong

    def _check_error(self, raised: Exception) -> list[str]:
        if not isinstance(raised, PagerError):
            return [f"untyped: {_in_a_line(raised)}"]
        if not any(path in str(raised) for path in (os.fspath(self._folder), self._failed.path)):
            return [f"names no file: {_in_a_line(raised)}"]
        return []


def _in_a_line(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)
    place = f" at {Path(where[-1].filename).name}:{where[-1].lineno}" if where else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{place}"


def try_operation(
    name: str, templates: Templates, library: Interposer, stride: int, offset: int
) -> Outcome:
    """All failures of one operation, or every `stride`-th from `offset` on."""
    started = time.monotonic()
    trial = Trial(name, templates, library)
    outcome = Outcome(calls=trial.count())
    cases = [(n, code) for code in ERRORS for n in range(outcome.calls)][offset::stride]
    for n, code in cases:
        faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
        seen, refused, wrong = trial.fail_at(n, getattr(errno, code))
        faulthandler.cancel_dump_traceback_later()
        if not seen.failed:  # the number of calls is not the same each time
            continue
        outcome.cases += 1
        outcome.refused += refused
        outcome.by_call[seen.failed] = outcome.by_call.get(seen.failed, 0) + 1
        place = f"call {n}, {seen.failed}({Path(seen.path).relative_to(root())}) {code}"
        outcome.wrong += [f"{place}: {what}" for what in wrong]
    outcome.seconds = round(time.monotonic() - started, 1)
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", default=[""], metavar="PART")
    parser.add_argument("--stride", type=int, default=1)
    parser.add_argument("--offset", type=int, default=0)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # that a companion is left out is said thousands of times
    library = Interposer()
    templates = Templates(root() / "templates")
    outcomes: dict[str, Outcome] = {}
    for name in chosen(OPERATIONS, options.only):
        gc.freeze()
        outcome = try_operation(name, templates, library, options.stride, options.offset)
        outcomes[name] = outcome
        print(
            f"{name:32} {outcome.calls:4} calls {outcome.cases:5} cases "
            f"{outcome.refused:5} refused {len(outcome.wrong):4} wrong {outcome.seconds:7.1f} s",
            flush=True,
        )
        for kind in _kinds(outcome.wrong):
            print(f"    {kind}", flush=True)
        write(options.json, "operation", outcomes, errors=ERRORS, stride=options.stride)
    return int(any(outcome.wrong for outcome in outcomes.values()))


def _kinds(wrong: list[str], most: int = 12) -> list[str]:
    """One example of each kind of trouble."""
    kinds: dict[str, list[str]] = {}
    for line in wrong:
        where, _, what = line.partition(": ")
        kinds.setdefault(where.partition(", ")[2].split("(")[0] + what[:60], []).append(line)
    return [f"{lines[0]} ({len(lines)} times)" for lines in list(kinds.values())[:most]]


if __name__ == "__main__":
    raise SystemExit(main())
