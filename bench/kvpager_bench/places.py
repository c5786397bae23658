"""Where figures are kept: in a checkout its own folders, otherwise one below where one stands."""

from __future__ import annotations

import os
from pathlib import Path

PACKAGE_DIR = Path(__file__).resolve().parent
RESULTS_VARIABLE = "KVPAGER_BENCH_RESULTS"


def _checkout() -> Path | None:
    """The source tree this package lies in; None for an installed wheel."""
    root = PACKAGE_DIR.parents[1]
    return root if (root / "pyproject.toml").is_file() and (root / "bench").is_dir() else None


CHECKOUT = _checkout()
RESULTS_DIR = CHECKOUT / "bench" / "results" if CHECKOUT else Path("kvpager-bench")
DOCS_DIR = CHECKOUT / "docs" / "results" if CHECKOUT else RESULTS_DIR
SCRATCH_DIR = CHECKOUT / "build" / "bench" if CHECKOUT else RESULTS_DIR / "scratch"


def results_dir() -> Path:
    """RESULTS_DIR, unless $KVPAGER_BENCH_RESULTS names another folder; workers inherit it."""
    given = os.environ.get(RESULTS_VARIABLE)
    return Path(given) if given else RESULTS_DIR


def write_text(path: Path, text: str) -> None:
    """Replaces a file as a whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
