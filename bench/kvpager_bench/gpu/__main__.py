"""Measures what kvpager does on one GPU, beside what the machine and torch do.

    python -m kvpager_bench.gpu attention selection --out FILE
    python -m kvpager_bench.gpu rows --rehearse --out FILE    # on the shim, without a GPU

`scripts/gpu.py` runs the sections in their order. Every rate stands beside a ceiling that was
measured in the same run, every figure beside what was predicted. A section that raises is recorded
with its error and the others go on, but for a result that is wrong: it ends the run. The file is
written after every row. Of a rehearsal nothing but that it works is to be believed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from kvpager.errors import DeviceError
from kvpager_bench import harness
from kvpager_bench.gpu import gates, model_sections, sections
from kvpager_bench.gpu.facts import facts
from kvpager_bench.gpu.machine import CudaMachine, RehearsalMachine
from kvpager_bench.gpu.products import linear
from kvpager_bench.gpu.profiles import profiles
from kvpager_bench.gpu.run import Run
from kvpager_bench.gpu.sizes import FULL, REHEARSAL
from kvpager_bench.gpu.subjects import WrongResultError
from kvpager_bench.places import write_text
from kvpager_bench.report import SCHEMA

SECTIONS = {
    "facts": facts,
    **sections.SECTIONS,
    "linear": linear,
    **model_sections.SECTIONS,
    "profiles": profiles,
}
# Seconds after which a section measures no further cell. Each is for itself.
BUDGETS = {
    "facts": 90,
    "ceilings": 20,
    "paging": 60,
    "attention": 140,
    "selection": 60,
    "linear": 60,
    "rows": 120,
    "decode": 300,
    "profiles": 200,
    "restore": 150,
}
JUDGED_BY_CEILINGS = ("paging", "attention", "selection", "linear")
NOT_FOR_RESULTS = "a rehearsal on the shim: these numbers mean nothing"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="+", metavar="SECTION", choices=list(SECTIONS))
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="of JSON")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on the shim")
    parser.add_argument("--device", default="cuda", help='"cuda" or "cuda:N"')
    parser.add_argument("--threads", type=int, default=harness.DEFAULT_THREADS, help="of torch")
    return parser.parse_args(arguments)


def carry_out(run: Run, wanted: list[str]) -> None:
    """Runs the sections in order."""
    for name in wanted:
        print(f"== {name}", flush=True)
        run.carry_out(name, SECTIONS[name], BUDGETS[name])
        report = run.reports.get(name)
        if report is not None and report.rows:
            print(f"\n{report.question}\n\n{report.markdown()}\n", flush=True)


def with_ceilings(wanted: list[str]) -> list[str]:
    """In the order of SECTIONS, with the ceilings that others are measured against."""
    judged = any(name in JUDGED_BY_CEILINGS for name in wanted)
    return [name for name in SECTIONS if name in wanted or (name == "ceilings" and judged)]


def result(run: Run, wanted: list[str]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "rehearsal": run.machine.rehearsal,
        **({"warning": NOT_FOR_RESULTS} if run.machine.rehearsal else {}),
        **run.to_json(),
        "gates": [judged.to_json() for judged in gates.judge(run, wanted)],
    }


def write(run: Run, wanted: list[str], path: Path) -> None:
    text = json.dumps(result(run, wanted), indent=1, allow_nan=False)
    write_text(path, text + "\n")


def main(arguments: list[str] | None = None) -> int:
    """0 if every section ran; gates that do not hold are said and are no failure of the run."""
    options = parse(arguments)
    start = time.monotonic()
    environment = harness.start(options.threads)
    try:
        machine = RehearsalMachine() if options.rehearse else CudaMachine(options.device)
    except DeviceError as error:
        print(f"cannot measure: {error}", file=sys.stderr)
        return 2
    sizes = REHEARSAL if options.rehearse else FULL
    run = Run(machine, sizes, {**environment, **machine.describe()})
    wanted = with_ceilings(options.sections)
    run.keep = partial(write, run, wanted, options.out)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    try:
        carry_out(run, wanted)
    except WrongResultError as error:
        print(f"WRONG: {error}", file=sys.stderr)
    finally:
        run.keep()
        tell(run, wanted)
    print(f"{time.monotonic() - start:.0f} s")
    return 1 if run.errors else 0


def tell(run: Run, wanted: list[str]) -> None:
    """What came of the gates, and what is missing."""
    if run.machine.rehearsal:
        print(NOT_FOR_RESULTS)
    for judged in gates.judge(run, wanted):
        print(judged)
    for name, why in run.errors.items():
        print(f"section {name} stopped: {why}")
    for what in run.skipped:
        print(f"not measured: {what}")


if __name__ == "__main__":
    sys.exit(main())
