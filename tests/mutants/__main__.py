"""Applies one mutant at a time to a copy of the tree and expects its named tests to fail.

    cd tests && python -m mutants [--only PART ...] [--keep FOLDER] [--installed] [--fast]
                                  [--output FILE]

Exit code 0: every mutant was killed by every test it names. 1: one survived, does not apply or does
not compile, or a named test fails without it. 2: a wrong command line.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from mutants.catalogue import CATALOGUE
from mutants.mutant import Mutant
from mutants.workshop import BuildError, Workshop

KILLED = "killed"


@dataclass(frozen=True)
class Finding:
    """What became of one mutant; `detail` says which tests did not do what they are for."""

    mutant: Mutant
    outcome: str
    detail: str
    seconds: float


def judge(
    workshop: Workshop,
    mutant: Mutant,
    sound: dict[str, str],
    timeout_s: float | None = None,
    *,
    fast: bool = False,
) -> Finding:
    """Tries one mutant; `sound` is what its tests do without it.

    fast: long tests do not run, and one test that fails is enough.
    """
    start = time.monotonic()
    problems = mutant.problems()
    fine = ("passed", "not found") if fast else ("passed",)
    broken = [test for test in mutant.killers if sound.get(test) not in fine]
    if problems:
        outcome, detail = "does not apply", "; ".join(problems)
    elif broken:
        outcome, detail = "no verdict", "; ".join(f"{t} {sound.get(t)} without it" for t in broken)
    else:
        try:
            with workshop.changed(mutant):
                results = workshop.run(mutant.killers, timeout_s)
        except BuildError as error:
            outcome, detail = "does not build", str(error)
        else:
            # What waits for ever in its mutant's place has failed too: it passed without.
            killing = ("failed", "timed out")
            alive = [
                f"{test} {result}" for test, result in results.items() if result not in killing
            ]
            killed = len(alive) < len(results) if fast else not alive
            outcome, detail = (KILLED, "") if killed else ("SURVIVED", "; ".join(alive))
    return Finding(mutant, outcome, detail, time.monotonic() - start)


def table(findings: Sequence[Finding]) -> str:
    """One line per mutant, then what went wrong."""
    width = max(len(finding.mutant.name) for finding in findings)
    lines = [
        f"{finding.mutant.name:<{width}}  {finding.outcome:<14} {finding.seconds:6.1f} s  "
        f"{finding.mutant.breaks}"
        for finding in findings
    ]
    wrong = [finding for finding in findings if finding.outcome != KILLED]
    lines += [f"\n{finding.mutant.name}: {finding.detail}" for finding in wrong]
    lines.append(f"\n{len(findings) - len(wrong)} of {len(findings)} mutants killed")
    return "\n".join(lines)


def record(findings: Sequence[Finding]) -> str:
    """What became of each, as JSON."""
    rows = {
        finding.mutant.name: {
            "outcome": finding.outcome,
            "seconds": round(finding.seconds, 1),
            **({"detail": finding.detail} if finding.detail else {}),
        }
        for finding in findings
    }
    killed = sum(finding.outcome == KILLED for finding in findings)
    return json.dumps({"mutants": len(findings), "killed": killed, "rows": rows}, indent=1) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[""], help="parts of names or files")
    parser.add_argument("--keep", type=Path, help="folder to build in and keep for the next run")
    parser.add_argument(
        "--installed", action="store_true", help="Python alone, with the extension as installed"
    )
    parser.add_argument(
        "--fast",
        action="store_true",
        help="with the tests of `make test` alone, of which one is enough",
    )
    parser.add_argument("--jobs", type=int, default=2, help="compile jobs")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one mutant's tests")
    parser.add_argument("--output", type=Path, help="a JSON file for what became of each mutant")
    parser.add_argument("--list", action="store_true", help="print the catalogue and stop")
    options = parser.parse_args(arguments)
    chosen = [m for m in CATALOGUE if any(p in m.name or p in m.file for p in options.only)]
    if options.installed:
        chosen = [mutant for mutant in chosen if not mutant.native]
    if not chosen:
        parser.error(f"no mutant has any of {options.only} in its name or file")
    if options.list:
        print("\n".join(f"{mutant.name}: {mutant.breaks} ({mutant.file})" for mutant in chosen))
        return 0
    with ExitStack() as stack:
        temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpager-mutants-"))
        folder = (options.keep or Path(temporary)).resolve()
        workshop = Workshop(
            folder, jobs=options.jobs, installed=options.installed, fast=options.fast
        )
        stack.callback(workshop.close)
        print("making a copy ..." if options.installed else "building a copy ...", flush=True)
        workshop.prepare()
        print("running the named tests without a mutant ...", flush=True)
        sound = workshop.run(test for mutant in chosen for test in mutant.killers)
        findings = []
        # Neighbours in one file: giving back the last and applying the next is one compilation.
        for mutant in sorted(chosen, key=lambda mutant: (not mutant.native, mutant.file)):
            findings.append(judge(workshop, mutant, sound, options.timeout, fast=options.fast))
            print(f"{findings[-1].outcome:<14} {mutant.name}", flush=True)
            if options.output:
                options.output.write_text(record(findings), encoding="utf-8")
    print("\n" + table(findings))
    return any(finding.outcome != KILLED for finding in findings)


if __name__ == "__main__":
    sys.exit(main())
