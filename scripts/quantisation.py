"""Makes docs/quantisation.json: what kvpager does with models that libraries have quantised.

    python scripts/quantisation.py             # every case whose library is installed
    python scripts/quantisation.py bitsandbytes

Cases of libraries that are not installed keep what was found before. Each case runs in processes of
its own; the second of them goes on from the file that the first has written.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent))

from quantisation_table.cases import CASES
from quantisation_table.page import FILE, write_page
from quantisation_table.trial import save_plain


def main() -> None:
    """Tries the cases whose names hold one of the words given, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="parts of names of cases (default: all cases)")
    words = parser.parse_args().words
    known = json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {"cases": {}}
    rows: dict[str, Any] = {}
    for number, case in enumerate(CASES):
        before = known["cases"].get(case.name)
        if words and not any(word in case.name for word in words):
            found = before
        else:
            found = _tried(number)
            found = before if found["verdict"] == "not installed" and before else found
            print(f"{case.name}: {found['verdict']} {found['reason']}", flush=True)
        if found is not None:
            rows[case.name] = found
    told = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cases": rows,
    }
    FILE.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    write_page(told)


def _tried(number: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_plain(folder / "plain")
        for step in ("first", "second"):
            trial = ["-m", "quantisation_table.trial", step, str(number), str(folder)]
            paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
            done = subprocess.run(
                [sys.executable, *trial],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"},
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                lines = done.stderr.strip().splitlines() or ["it ended without a word"]
                return {"version": "", "verdict": "failed", "reason": lines[-1][:400]}
            told: dict[str, Any] = json.loads((folder / "told.json").read_text())
            if told["verdict"] != "taken":
                break
        told.pop("then", None)
        return told


if __name__ == "__main__":
    main()
