"""Does every relation hold for every model, dtype, shape and thread count, to the bit?

The whole matrix of tests/model/matrix.py, and the shipped model at 32K tokens. Each group of cases
runs in a process of its own, with its own number of threads. Relations that need fresh processes
are checked for few cases that hold every pair of values, and with --effort full for all.

    python bench/verify_all.py [--effort start | short | full] [--only PART ...] [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

from kvpager_bench import harness
from kvpager_bench.harness import Column, MissingNumberError, Report

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "model"))

import matrix

import long_subject
from kvpager.verify import RELATIONS, Subject, verify

# One row per model and relation, over all cases: dtypes, hidden sizes, heads, selections, threads.
COLUMNS = (
    Column("model", text=True),
    Column("relation", text=True),
    Column("cases"),
    Column("not_applicable"),
    Column("not_kept"),
    Column("situations"),
    Column("compared", "bits"),
    Column("differing", "bits"),
    Column("time", "s"),
    Column("first_difference", text=True),
)
NONE = "none"
_NO_PROMISE = "does not apply"


def main() -> int:
    parser = harness.cli(__doc__)
    parser.add_argument("--effort", choices=("start", "short", "full"), default="short")
    parser.add_argument("--only", nargs="+", default=[""], help="parts of names of cases")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(json.loads(arguments.worker))
        return 0
    environment = harness.start(arguments)
    cases = matrix.pairwise() if arguments.quick else matrix.full()
    apart = cases if arguments.effort == "full" else matrix.cover(cases)
    jobs = list(groups(cases, set(apart), arguments))
    report = Report(
        name=harness.report_name("verify_all", arguments),
        question="Does every way to the same tokens give the same bits, for every model?",
        columns=COLUMNS,
        settings={
            "effort": arguments.effort,
            "only": arguments.only,
            "cases": sum(len(job["cases"]) for job in jobs),
            "long_context": long_subject.LENGTH,
        },
        environment=environment,
    )
    totals: dict[tuple[str, str], dict[str, Any]] = {}
    for outcome in side_by_side(jobs):
        count(outcome, totals)
    for total in totals.values():
        report.add(**total)
    return conclude(report)


def groups(
    cases: Iterable[matrix.Case], apart: Collection[matrix.Case], arguments: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """What each process does: cases of one architecture and one number of threads.

    apart: cases of which relations between processes are checked too.
    """

    def key(case: matrix.Case) -> tuple[str, int]:
        return case.architecture, case.threads

    def wanted(name: str) -> bool:
        return any(part in name for part in arguments.only)

    chosen = sorted((case for case in cases if wanted(str(case))), key=key)
    for (_, threads), group in groupby(chosen, key):
        yield {
            "threads": threads,
            "effort": arguments.effort,
            "cases": [{"values": vars(case), "apart": case in apart} for case in group],
        }
    for name in long_subject.SELECTIONS:
        case = f"{long_subject.NAME}-{name}"
        if wanted(case):
            length = 4096 if arguments.quick else long_subject.LENGTH
            yield {"threads": arguments.threads, "long": name, "length": length, "cases": [case]}


def side_by_side(jobs: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The outcomes of all jobs; as many run at once as there are cores for their threads."""
    cores = len(os.sched_getaffinity(0))

    def run(job: Mapping[str, Any]) -> list[dict[str, Any]]:
        outcomes = []
        try:
            for outcome in in_a_process(job):
                tell(outcome)
                outcomes.append(outcome)
        except MissingNumberError as error:  # an hour of others is not lost by it
            outcomes.append(not_made(job, str(error)))
            tell(outcomes[-1])
        return outcomes

    def threads(job: Mapping[str, Any]) -> int:
        number: int = job["threads"]
        return number

    for number, same in groupby(sorted(jobs, key=threads), threads):
        with ThreadPoolExecutor(max(1, cores // number)) as pool:
            for outcomes in pool.map(run, same):
                yield from outcomes


def not_made(job: Mapping[str, Any], why: str) -> dict[str, Any]:
    """The row of a process that ended before its end."""
    return {
        "model": long_subject.NAME if "long" in job else job["cases"][0]["values"]["architecture"],
        "case": f"{len(job['cases'])} cases",
        "relation": "all",
        "outcome": "not run",
        "kept": False,
        "situations": 0,
        "compared": 0,
        "differing": 0,
        "time": 0.0,
        "first_difference": why,
    }


def in_a_process(job: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of a report that a worker prints, as they come."""
    with subprocess.Popen(
        [sys.executable, __file__, "--worker", json.dumps(job)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": str(job["threads"]), "OMP_WAIT_POLICY": "passive"},
    ) as child:
        try:
            assert child.stdout is not None
            for line in child.stdout:
                if line.startswith("{"):
                    yield json.loads(line)
        except BaseException:
            child.kill()
            raise
    if child.returncode:
        raise MissingNumberError(
            f"a worker for {len(job['cases'])} cases ended with {child.returncode}"
        )


def work(job: Mapping[str, Any]) -> None:
    """In a process of its own: verifies every case of a job, prints a line per relation."""
    harness.prepare(job["threads"])
    if "long" in job:
        with long_subject.subject(job["long"], job["length"]) as subject:
            name = f"{long_subject.NAME}-{job['long']}"
            model = f"{name}-{harness.tokens_name(job['length'])}"
            show(model, name, subject, long_subject.RELATIONS)
        return
    for one in job["cases"]:
        case = matrix.Case(**one["values"])
        relations = [each for each in RELATIONS if one["apart"] or not each.processes]
        with Subject(case.model(), case.config, effort=job["effort"]) as subject:
            show(case.architecture, str(case), subject, relations)


def show(model: str, case: str, subject: Subject, relations: Sequence[Any]) -> None:
    for outcome in verify(subject, relations).outcomes:
        first = outcome.comparison.first
        row = {
            "model": model,
            "case": case,
            "relation": outcome.relation,
            "outcome": outcome.status,
            "kept": outcome.kept,
            "situations": outcome.cases,
            "compared": outcome.comparison.bits,
            "differing": outcome.comparison.differing_bits,
            "time": outcome.seconds,
            "first_difference": str(first) if first else outcome.reason or NONE,
        }
        print(json.dumps(row), flush=True)


def tell(row: Mapping[str, Any]) -> None:
    words = f"{row['case']}: {row['relation']}: {row['outcome']}, {row['compared']:,} bits compared"
    why = "" if row["first_difference"] == NONE else f"; {row['first_difference']}"
    print(f"{words}, {row['differing']:,} differ{why} ({row['time']:.1f} s)", flush=True)


def count(row: Mapping[str, Any], totals: dict[tuple[str, str], dict[str, Any]]) -> None:
    """Adds one case's outcome to its model's and relation's."""
    columns = [column.name for column in COLUMNS]
    key = row["model"], row["relation"]
    fresh = dict(zip(columns, (*key, *[0] * (len(columns) - 3), NONE)))
    total = totals.setdefault(key, fresh)
    total["cases"] += 1
    total["not_applicable"] += row["outcome"] == _NO_PROMISE
    total["not_kept"] += not row["kept"]
    for name in ("situations", "compared", "differing", "time"):
        total[name] += row[name]
    if total["first_difference"] == NONE and row["outcome"] != _NO_PROMISE:
        total["first_difference"] = row["first_difference"]


def conclude(report: Report) -> int:
    """Writes the report; 1 if anything differs or was not run."""

    def total(name: str) -> int:
        return sum(int(report.number(row, name)) for row in report.rows)

    report.judge(
        "every relation gives the same bits for every case",
        not total("not_kept") and not total("differing"),
        f"{total('differing'):,} of {total('compared'):,} bits differ, {total('not_kept')} of "
        f"{total('cases')} checks differ or could not be made",
    )
    path = report.write()
    verdict = report.verdicts[-1]
    print(f"\n{'holds' if verdict.holds else 'FAILS'}: {verdict.claim} ({verdict.evidence})")
    print(f"wrote results/{path.name}")
    return 0 if verdict.holds else 1


if __name__ == "__main__":
    sys.exit(main())
