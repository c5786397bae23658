"""`python -m deep PART ...`: one part of the deep tests; see docs/testing.md."""

from __future__ import annotations

import argparse

from deep.interposer import run, workplace
from deep.report import RECORDS

UNDER_THE_LIBRARY = {"calls": "deep.system_calls", "power": "deep.power_loss"}
PLAIN = {
    "identity": "deep.identity",
    "interrupts": "deep.interrupts",
    "pairs": "deep.thread_pairs",
    "soak": "deep.soak",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m deep", description=__doc__)
    parser.add_argument("part", choices=sorted(UNDER_THE_LIBRARY | PLAIN))
    parser.add_argument("options", nargs=argparse.REMAINDER, help="its own: PART --help")
    options = parser.parse_args()
    more = options.options
    if "--json" not in more:
        RECORDS.mkdir(exist_ok=True)
        more += ["--json", str(RECORDS / f"{options.part}.json")]
    if options.part in PLAIN:
        return run(PLAIN[options.part], more)
    with workplace() as folder:
        return run(UNDER_THE_LIBRARY[options.part], more, folder)


if __name__ == "__main__":
    raise SystemExit(main())
