"""`python -m deep PART ...`: one part of the deep tests; see docs/testing.md."""

from __future__ import annotations

import argparse

from deep.interposer import run_under, workplace
from deep.report import RECORDS

UNDER_THE_INTERPOSER = {"calls": "deep.system_calls", "power": "deep.power_loss"}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m deep", description=__doc__)
    parser.add_argument("part", choices=sorted(UNDER_THE_INTERPOSER))
    options, more = parser.parse_known_args()
    if "--json" not in more:
        RECORDS.mkdir(exist_ok=True)
        more += ["--json", str(RECORDS / f"{options.part}.json")]
    with workplace() as folder:
        return run_under(UNDER_THE_INTERPOSER[options.part], more, folder)


if __name__ == "__main__":
    raise SystemExit(main())
