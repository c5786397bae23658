"""The table of architectures says what the code does, for the installed transformers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import transformers

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))

from architecture_table import classify as classifying  # noqa: E402
from architecture_table.build import build  # noqa: E402
from architecture_table.page import page, text_architectures  # noqa: E402

TOLD = json.loads((ROOT / "docs" / "architectures.json").read_text(encoding="utf-8"))
ROWS = {row["architecture"]: row for row in TOLD["architectures"]}
# One of each verdict, and those that were accepted and wrong, or ended with a raw exception.
SAMPLE = ["llama", "phimoe", "doge", "jetmoe", "gemma4_text", "modernbert-decoder", "bloom"]
SAMPLE += ["zamba", "minimax_m3_vl_text"]

OTHER_DTYPES = classifying.DTYPES[1:]

ANOTHER = transformers.__version__ != TOLD["transformers"]
of_this_release = pytest.mark.skipif(ANOTHER, reason="this release of transformers has no table")


def agrees(name):
    """Asserts that an architecture is now what the table says, which is of one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        row = classifying.classify(name).to_json()
    finally:
        torch.set_num_threads(threads)
    told = ROWS[name]
    fixed = ("model", "verdict", "options")
    assert {key: row[key] for key in fixed} == {key: told[key] for key in fixed}, json.dumps(row)
    # Numbers within a reason are of a machine.
    assert row["reason"].split(":")[0] == told["reason"].split(":")[0]


@of_this_release
def test_every_architecture_that_transformers_can_load_is_in_the_table():
    assert list(ROWS) == text_architectures()


def test_the_page_is_made_of_the_table():
    assert (ROOT / "docs" / "architectures.md").read_text(encoding="utf-8") == page(TOLD)


def test_nothing_in_the_table_is_wrong_or_a_raw_exception():
    verdicts = {row["verdict"] for row in ROWS.values()}
    assert verdicts <= {"equal", "equal with options", "refused", "not built"}
    assert all(row["reason"] for row in ROWS.values() if row["verdict"] in ("refused", "not built"))
    assert all(row["figures"] for row in ROWS.values() if row["verdict"].startswith("equal"))
    others = [row[dtype] for row in ROWS.values() for dtype in OTHER_DTYPES if dtype in row]
    assert {each["verdict"] for each in others} <= verdicts | {"not compared"}
    assert all(each["reason"] for each in others if each["verdict"] in ("refused", "not built"))


@of_this_release
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_of_architectures_is_what_the_table_says(name):
    agrees(name)


@of_this_release
@pytest.mark.deep
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(ROWS))
def test_every_architecture_is_what_the_table_says(name):
    agrees(name)


@of_this_release
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", OTHER_DTYPES)
@pytest.mark.parametrize("name", ["llama", "beam"])  # one of each verdict
def test_a_sample_of_other_dtypes_is_what_the_table_says(name, dtype):
    row = classifying.classify(name, dtype).to_json()
    told = ROWS[name][dtype]
    assert {key: row[key] for key in ("verdict", "options")} == {
        key: told[key] for key in ("verdict", "options")
    }, json.dumps(row)


@pytest.mark.filterwarnings("ignore")
def test_a_model_of_the_table_is_the_same_each_time():
    first, again = (build("mistral").state_dict() for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.filterwarnings("ignore")
def test_the_table_calls_a_model_wrong_that_is_accepted_and_is_not_equal(monkeypatch):
    monkeypatch.setattr("kvpager._model.proof.own_attention.note_mask_window", lambda *_: None)
    monkeypatch.setattr("kvpager._model.proof.own_attention._require_same_model", lambda *_: None)
    row = classifying.classify("phimoe")
    assert row.verdict == classifying.WRONG
    assert "equal to transformers" in row.reason
