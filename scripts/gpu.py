"""The first hour on a GPU: steps of at most eight minutes that stop at the first wrong kernel.

    python scripts/gpu.py                    # every step, in order
    python scripts/gpu.py build kernels      # some of them; all but `build` need what it built
    python scripts/gpu.py --list             # what the steps do, their limits, what they leave
    python scripts/gpu.py --rehearse         # the same on a machine without a GPU, small

Uses the Python it is started with and what is installed beside it: torch, pybind11, cmake, ninja,
pytest. Nothing is fetched. A step leaves one JSON and one log in one folder; both grow while it
runs, and an interrupted step leaves what it has. A part of a step that passes its limit, or in
which nothing was tested, has failed, and what failed ends the step and the run.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).parent))

from gpu_steps.part import StepFailedError
from gpu_steps.place import BUILD, PLUGIN, Place, PlaceError
from gpu_steps.record import carry_out
from gpu_steps.steps import STEPS, Step


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options; ends the process where they are wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [step.name for step in STEPS]
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"some of {', '.join(names)}")
    parser.add_argument("--list", action="store_true", help="print the steps and run none")
    parser.add_argument("--rehearse", action="store_true", help="on the shim, without a GPU")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(os.environ.get("OUT") or BUILD),
        metavar="FOLDER",
        help="for JSON and logs; default: $OUT, else build/gpu",
    )
    parser.add_argument(
        "--prebuilt",
        type=Path,
        metavar="FOLDER",
        help=f"of build: has a {PLUGIN} to be taken instead of compiling one",
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 2, help="of the build")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.steps if name not in names]
    if unknown:
        parser.error(f"STEP {' '.join(unknown)}: expected some of {', '.join(names)}")
    return options


def print_list(out: Path) -> None:
    """The steps, and what each leaves."""
    for step in STEPS:
        print(f"{step.name:11} at most {step.limit:3.0f} s   {step.does}")
    print(f"\nEach leaves NAME.json and NAME.log in {out} (--out).")


def end_as_interrupted(number: int, frame: FrameType | None) -> None:
    """For SIGTERM, which is how a time limit ends a command."""
    raise KeyboardInterrupt


def run(steps: list[Step], place: Place) -> int:
    """0 if every step went well, 1 if one failed, 2 if it cannot run here, 130 if interrupted."""
    if place.rehearse:
        print("a rehearsal on the shim: its figures mean nothing", flush=True)
    try:
        place.out.mkdir(parents=True, exist_ok=True)
        for step in steps:
            place.check(step.name)
            carry_out(step, place)
    except PlaceError as error:
        print(error, file=sys.stderr)
        return 2
    except StepFailedError as error:
        print(f"\n{error}", flush=True)
        return 1
    except KeyboardInterrupt:
        print(f"\ninterrupted; what was measured is in {place.out}", flush=True)
        return 130
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Exit status, as `run` gives it."""
    options = parse(arguments)
    if options.list:
        print_list(options.out)
        return 0
    signal.signal(signal.SIGTERM, end_as_interrupted)
    place = Place(options.out.resolve(), options.rehearse, options.jobs, options.prebuilt)
    wanted = [step for step in STEPS if not options.steps or step.name in options.steps]
    return run(wanted, place)


if __name__ == "__main__":
    sys.exit(main())
