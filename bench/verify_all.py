"""Does every relation hold for every model, dtype, shape and thread count, to the bit?

The whole matrix of tests/model/matrix.py, and the shipped model at 32K tokens. Each group of cases
runs in a process of its own, with its own number of threads. Relations that need fresh processes
are checked for few cases that hold every pair of values, and with --effort full for all.

    python bench/verify_all.py [--effort start | short | full] [--only PART,...] [--quick]
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

from kvpager_bench import harness
from kvpager_bench.harness import Column, MissingNumberError, Report
from kvpager_bench.study import Asked, Option, Study, Table

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


def measure(asked: Asked) -> None:
    o = asked.options
    cases = matrix.pairwise() if asked.quick else matrix.full()
    apart = cases if o.effort == "full" else matrix.cover(cases)
    jobs = list(groups(cases, set(apart), o))
    asked.settings |= {
        "cases": sum(len(job["cases"]) for job in jobs),
        "long_context": long_subject.LENGTH,
    }
    totals: dict[tuple[str, str], dict[str, Any]] = {}
    for outcome in side_by_side(asked, jobs):
        count(outcome, totals)
    for total in totals.values():
        asked.report().add(**total)
    judge(asked.report())


def groups(
    cases: Iterable[matrix.Case], apart: Collection[matrix.Case], o: Any
) -> Iterator[dict[str, Any]]:
    """What each process does: cases of one architecture and one number of threads.

    apart: cases of which relations between processes are checked too.
    """

    def key(case: matrix.Case) -> tuple[str, int]:
        return case.architecture, case.threads

    def wanted(name: str) -> bool:
        return any(part in name for part in o.only)

    chosen = sorted((case for case in cases if wanted(str(case))), key=key)
    for (_, threads), group in groupby(chosen, key):
        yield {
            "threads": threads,
            "effort": o.effort,
            "cases": [{"values": vars(case), "apart": case in apart} for case in group],
        }
    for name in long_subject.SELECTIONS:
        case = f"{long_subject.NAME}-{name}"
        if wanted(case):
            length = 4096 if o.quick else long_subject.LENGTH
            yield {"threads": o.threads, "long": name, "length": length, "cases": [case]}


def side_by_side(asked: Asked, jobs: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The outcomes of all jobs; as many run at once as there are cores for their threads."""
    cores = len(os.sched_getaffinity(0))

    def run(job: Mapping[str, Any]) -> list[dict[str, Any]]:
        try:
            outcomes: list[dict[str, Any]] = asked.work("cases", **job)["rows"]
        except MissingNumberError as error:  # an hour of others is not lost by it
            return [not_made(job, str(error))]
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
        "relation": "all",
        "outcome": "not run",
        "kept": False,
        "situations": 0,
        "compared": 0,
        "differing": 0,
        "time": 0.0,
        "first_difference": why,
    }


def work(job: Mapping[str, Any]) -> dict[str, Any]:
    """In a process of its own: verifies every case of a job; a row per case and relation."""
    if "long" in job:
        with long_subject.subject(job["long"], job["length"]) as subject:
            name = f"{long_subject.NAME}-{job['long']}"
            model = f"{name}-{harness.tokens_name(job['length'])}"
            return {"rows": rows_of(model, name, subject, long_subject.RELATIONS)}
    rows = []
    for one in job["cases"]:
        case = matrix.Case(**one["values"])
        relations = [each for each in RELATIONS if one["apart"] or not each.processes]
        with Subject(case.model(), case.config, effort=job["effort"]) as subject:
            rows += rows_of(case.architecture, str(case), subject, relations)
    return {"rows": rows}


def rows_of(
    model: str, case: str, subject: Subject, relations: Sequence[Any]
) -> list[dict[str, Any]]:
    rows = []
    for outcome in verify(subject, relations).outcomes:
        first, compared = outcome.comparison.first, outcome.comparison
        rows.append(
            {
                "model": model,
                "relation": outcome.relation,
                "outcome": outcome.status,
                "kept": outcome.kept,
                "situations": outcome.cases,
                "compared": compared.bits,
                "differing": compared.differing_bits,
                "time": outcome.seconds,
                "first_difference": str(first) if first else outcome.reason or NONE,
            }
        )
        print(f"{case}: {outcome.relation}: {outcome.status}", file=sys.stderr, flush=True)
    return rows


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


def judge(report: Report) -> None:
    def total(name: str) -> int:
        return sum(int(report.number(row, name)) for row in report.rows)

    report.judge(
        "every relation gives the same bits for every case",
        not total("not_kept") and not total("differing"),
        f"{total('differing'):,} of {total('compared'):,} bits differ, {total('not_kept')} of "
        f"{total('cases')} checks differ or could not be made",
    )


EFFORTS = ("start", "short", "full")
STUDY = Study(
    measure,
    (
        Table(
            "verify_all",
            "Does every way to the same tokens give the same bits, for every model?",
            COLUMNS,
        ),
    ),
    (
        Option("effort", "short", among=EFFORTS),
        Option("only", [""], help="parts of names of cases"),
    ),
    workers={"cases": work},
)

if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        STUDY.main()
    else:
        told = STUDY.ask(sys.argv[1:]).report().verdicts[-1]
        sys.exit(0 if told.holds else 1)
