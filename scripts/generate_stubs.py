"""Writes python/kvpager/_core.pyi from the built extension module, or checks that it is current.

Usage: python scripts/generate_stubs.py [--check]
"""

from __future__ import annotations

import argparse
import difflib
import subprocess
import sys
import tempfile
from pathlib import Path

MODULE = "kvpager._core"
# The generator sees values and takes their types for all there is to say.
MEANT = {
    ": tuple = (": ": tuple[int, int] = (",
    **{
        f"    {name} = None\n": f"    {name}: int | None\n"
        for name in ("chunk", "layer", "start", "stop")
    },
}
STUB = Path(__file__).resolve().parent.parent / "python" / "kvpager" / "_core.pyi"


def generate() -> str:
    """Returns the stub of the module that this interpreter imports, formatted."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pybind11_stubgen", MODULE, "--output-dir", folder]
        subprocess.run([*command, "--exit-code"], check=True, stdout=subprocess.DEVNULL)
        written = Path(folder) / "kvpager" / "_core.pyi"
        formatter = [sys.executable, "-m", "ruff", "format", "--isolated", "--line-length=100"]
        subprocess.run([*formatter, "--target-version=py310", "--quiet", written], check=True)
        text = written.read_text(encoding="utf-8")
        for generated, meant in MEANT.items():
            text = text.replace(generated, meant)
        return text


def main() -> int:
    """Runs the command line; returns 1 where --check found a difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    arguments = parser.parse_args()
    stub = generate()
    current = STUB.read_text(encoding="utf-8") if STUB.exists() else ""
    if stub == current:
        return 0
    if not arguments.check:
        STUB.write_text(stub, encoding="utf-8")
        print(f"wrote {STUB}")
        return 0
    sys.stdout.writelines(
        difflib.unified_diff(
            current.splitlines(keepends=True), stub.splitlines(keepends=True), str(STUB), MODULE
        )
    )
    print("the stub is out of date: run `make stubs`")
    return 1


if __name__ == "__main__":
    sys.exit(main())
