"""The table of quantised weights is the one that its script has found."""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from quantisation_table.cases import CASES  # noqa: E402
from quantisation_table.page import DOCS, FILE, page  # noqa: E402


def test_the_page_has_the_table_that_was_found():
    told = json.loads(FILE.read_text(encoding="utf-8"))
    text = (DOCS / "quantisation.md").read_text(encoding="utf-8")
    assert page(text, told) == text


def test_nothing_that_was_tried_differs_or_failed():
    told = json.loads(FILE.read_text(encoding="utf-8"))["cases"]
    assert set(told) <= {case.name for case in CASES}
    verdicts = {found["verdict"] for found in told.values()}
    assert verdicts <= {"taken", "refused", "not loaded", "not installed"}
    refused = [found for found in told.values() if found["verdict"] == "refused"]
    assert refused
    assert all(found["reason"] for found in refused)
