"""What kvpager does on one GPU, beside what the machine and torch do; one table per section.

    python -m kvpager_bench.gpu              # 10 minutes at most; bench/results/gpu.json
    python -m kvpager_bench.gpu --only ceilings,attention
    python -m kvpager_bench.gpu --quick       # small sizes: gpu-quick.json
    python -m kvpager_bench.gpu --rehearse    # on the shim, without a GPU: does it run?

Every rate stands beside a ceiling that was measured in the same run. A section that raises is
recorded with its error and the others go on; what is not measured fails the gates that need it. A
rehearsal measures nothing: it is never written to bench/results.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from kvpager.errors import DeviceError
from kvpager_bench import harness
from kvpager_bench.gpu import gates as gpu_gates
from kvpager_bench.gpu import model_sections as gpu_model_sections
from kvpager_bench.gpu import sections as gpu_sections
from kvpager_bench.gpu.machine import CudaMachine, RehearsalMachine
from kvpager_bench.gpu.run import Run
from kvpager_bench.gpu.sizes import FULL, QUICK, REHEARSAL

SECTIONS = {**gpu_sections.SECTIONS, **gpu_model_sections.SECTIONS}
# Seconds after which a section measures no further cell, and after which none is begun.
BUDGETS = {
    "ceilings": 20,
    "paging": 40,
    "attention": 100,
    "selection": 40,
    "dense_pool": 20,
    "decode": 160,
    "restore": 90,
    "rows": 70,
}
TOTAL_SECONDS = 560
NOT_FOR_RESULTS = "a rehearsal on the shim: these numbers mean nothing"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = harness.cli(__doc__)
    parser.add_argument("--only", type=harness.parse_list, default=list(SECTIONS))
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on the shim")
    parser.add_argument("--device", default="cuda", help='"cuda" or "cuda:N"')
    parser.add_argument("--out", type=Path, help="folder; by default bench/results")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.only if name not in SECTIONS]
    if unknown:
        parser.error(f"--only {','.join(unknown)}: expected some of {', '.join(SECTIONS)}")
    if options.rehearse and options.out is not None and _is_results(options.out):
        parser.error(f"--out {options.out}: {NOT_FOR_RESULTS}")
    return options


def _is_results(folder: Path) -> bool:
    return folder.resolve() == harness.RESULTS_DIR.resolve()


def carry_out(options: argparse.Namespace) -> Run:
    """Runs the sections in order; writes what there is after each, so that nothing is lost."""
    environment = harness.start(options)
    machine = RehearsalMachine() if options.rehearse else CudaMachine(options.device)
    sizes = REHEARSAL if options.rehearse else QUICK if options.quick else FULL
    run = Run(machine, sizes, {**environment, **machine.describe()})
    # Others are judged by the ceilings, so these are measured whatever is asked for.
    wanted = [name for name in SECTIONS if name == "ceilings" or name in options.only]
    start = time.monotonic()
    for name in wanted:
        left = TOTAL_SECONDS - (time.monotonic() - start)
        if left <= 0:
            run.errors[name] = "no time was left for it"
            continue
        print(f"== {name}", flush=True)
        run.carry_out(name, SECTIONS[name], min(BUDGETS[name], left))
        report = run.reports.get(name)
        if report is not None and report.rows:
            print(f"\n{report.question}\n\n{report.markdown()}\n", flush=True)
        write(run, options)
    return run


def result(run: Run, options: argparse.Namespace) -> dict[str, Any]:
    verdicts = gpu_gates.judge(run)
    return {
        "schema": harness.SCHEMA,
        "name": "gpu",
        "rehearsal": run.machine.rehearsal,
        **({"warning": NOT_FOR_RESULTS} if run.machine.rehearsal else {}),
        **run.to_json(),
        "gates": [vars(verdict) for verdict in verdicts],
    }


def write(run: Run, options: argparse.Namespace) -> Path | None:
    """Replaces the file of this kind of run; a rehearsal is written only to a given path."""
    folder = options.out or (None if run.machine.rehearsal else harness.RESULTS_DIR)
    if folder is None:
        return None
    name = "gpu-rehearsal" if run.machine.rehearsal else harness.report_name("gpu", options)
    if set(options.only) != set(SECTIONS) and not run.machine.rehearsal:
        name = f"{name}-part-quick"  # never in the place of a whole run; not kept in git
    folder.mkdir(parents=True, exist_ok=True)
    path: Path = folder / f"{name}.json"
    harness.write_text(path, json.dumps(result(run, options), indent=1, allow_nan=False) + "\n")
    return path


def main(arguments: list[str] | None = None) -> int:
    """0 if every section ran; gates that do not hold are said and are no failure of the run."""
    options = parse(arguments)
    start = time.monotonic()
    try:
        run = carry_out(options)
    except DeviceError as error:
        print(f"cannot measure: {error}", file=sys.stderr)
        return 2
    if run.machine.rehearsal:
        print(NOT_FOR_RESULTS)
    for verdict in [] if run.machine.rehearsal else gpu_gates.judge(run):
        print(f"{'holds' if verdict.holds else 'FAILS'}: {verdict.claim} ({verdict.evidence})")
    for name, why in run.errors.items():
        print(f"section {name} stopped: {why}")
    for what in run.skipped:
        print(f"not measured: {what}")
    path = write(run, options)
    print(f"{time.monotonic() - start:.0f} s" + (f", wrote {path}" if path else ""))
    return 1 if run.errors else 0


if __name__ == "__main__":
    sys.exit(main())
