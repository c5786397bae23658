"""What a verification's report concludes, shows and advises, from outcomes that are made up."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console
from rich.table import Table

from kvpager import PagerConfig
from kvpager.hf import RowCounts
from kvpager.hf.shapes import ShapeReport
from kvpager.verify.advice import advice_for, advice_on_refusal
from kvpager.verify.bits import Comparison, compare_bits
from kvpager.verify.check import Outcome
from kvpager.verify.report import Report
from kvpager.verify.table import parts

SAME = compare_bits(np.arange(4.0), np.arange(4.0))
OTHER = compare_bits(np.arange(4.0) + 1, np.arange(4.0), "keys of layer 2")


def outcome(relation="warm", status="same", comparison=SAME, reason="", selection="dense()"):
    return Outcome(relation, "says so", selection, status, reason, comparison, 1, (), 0.5)


def report(*outcomes, **values):
    about = {"dtype": "float32", "architecture": "Model"}
    return Report(about=about, outcomes=list(outcomes), **values)


def engine(*smaller, exact="all", rows=64):
    return SimpleNamespace(
        row_counts=RowCounts(rows, smaller),
        config=PagerConfig(pool_tokens=2048, exact=exact),
        model=SimpleNamespace(device=torch.device("cpu")),
    )


def shape(**values):
    usual = {
        "kind": "Linear",
        "modules": ("model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"),
        "in_features": 128,
        "out_features": 256,
        "dtype": "float32",
        "row_dependent": False,
        "neighbour_dependent": False,
        "classes": ((1,), (2, 8), (4,), (16, 32, 64)),
        "thread_dependent": False,
    }
    return ShapeReport(**{**usual, **values})


def shown(found):
    console = Console(width=120, record=True, quiet=True, highlight=False, markup=False)
    with console.capture() as capture:
        console.quiet = False
        for part in parts(found, lambda title: Table(title=title)):
            console.print(part)
    return capture.get()


@pytest.mark.parametrize(
    ("outcomes", "kept", "broken", "words"),
    [
        ([outcome()], True, False, "kept: 256 bits compared, 0 differ"),
        ([outcome(), outcome("packed", "does not apply", Comparison())], True, False, "kept"),
        ([], False, False, "NOT PROVEN: nothing was compared"),
        ([outcome(status="does not apply", comparison=Comparison())], False, False, "NOT PROVEN"),
        (
            [outcome(), outcome("restored", "not run", Comparison(), "no room")],
            False,
            False,
            "NOT PROVEN: restored was not run: no room",
        ),
        (
            [outcome("re-scored", "failed", SAME, "it decoded"), outcome()],
            False,
            True,
            "NOT KEPT: re-scored failed: it decoded",
        ),
        (
            [outcome("a", "failed", SAME, "why"), outcome("decoded", "differs", OTHER)],
            False,
            True,
            "numbers differ, 512 bits compared; decoded: keys of layer 2 [0]: 1.0, expected 0.0",
        ),
    ],
)
def test_a_verdict_needs_every_relation_and_names_the_first_difference(
    outcomes, kept, broken, words
):
    found = report(*outcomes)
    assert (found.kept, found.broken) == (kept, broken)
    assert words in found.verdict() == str(found)
    assert found.to_json()["kept"] is kept


def test_a_refused_model_is_neither_kept_nor_broken():
    found = report(refusal="its experts run with 'eager'")
    assert (found.kept, found.broken) == (False, False)
    assert found.verdict() == "REFUSED: its experts run with 'eager'"


def test_an_outcome_is_found_by_relation_and_selection():
    found = report(outcome(), outcome(selection="topk()", status="failed", reason="x"))
    assert found.outcome("warm").selection == "dense()"
    assert found.outcome("warm", "topk()").status == "failed"
    with pytest.raises(KeyError):
        found.outcome("forked")


def test_tables_show_bits_layers_and_classes_of_row_counts():
    text = shown(
        report(outcome(), outcome("decoded", "differs", OTHER), shapes=[shape(row_dependent=True)])
    )
    assert "rows attend to dense()" in text
    assert "decoded (says so): differs" in text
    assert "first: keys of layer 2 [0]: 1.0, expected 0.0" in text
    assert "1 | 2 8 | 4 | 16-64" in text
    assert " mlp.up_proj and 1 more" in text
    assert "MATTERS" in text


def test_smaller_row_counts_and_modes_are_offered_where_decoding_differs():
    said = advice_for(report(outcome("decoded", "differs", OTHER)), engine(4, 16))
    assert any("--small-rows fixed" in sentence for sentence in said)
    assert any('exact="reuse"' in sentence for sentence in said)


def test_no_mode_is_offered_where_reuse_itself_differs():
    said = advice_for(
        report(outcome("warm", "differs", OTHER), outcome("decoded", "differs", OTHER)), engine(4)
    )
    assert not any('exact="reuse"' in sentence for sentence in said)


def test_a_model_that_disagrees_with_itself_is_told_of_threads_alone():
    (said,) = advice_for(report(outcome("self-consistent", "differs", OTHER)), engine(4))
    assert "--threads 1" in said


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"row_dependent": True}, "multiple of 64"),
        ({"neighbour_dependent": True}, "batched_mm"),
        ({"thread_dependent": True}, "1 of 1 shapes of layer have other bits"),
    ],
)
def test_what_a_layer_depends_on_is_said_with_a_remedy(values, words):
    said = advice_for(report(outcome(), shapes=[shape(**values)]), engine(4))
    assert words in " ".join(said)


def test_a_sound_model_with_small_row_counts_needs_no_advice():
    assert advice_for(report(outcome(), shapes=[shape()]), engine(4, 16)) == []


def test_float32_without_small_row_counts_is_told_of_strict_mkl(monkeypatch):
    monkeypatch.delenv("MKL_CBWR", raising=False)
    said = " ".join(advice_for(report(outcome()), engine()))
    assert "MKL_CBWR=AUTO,STRICT" in said
    assert "forwards of 64 rows" in said
    monkeypatch.setenv("MKL_CBWR", "AUTO,STRICT")
    assert "MKL_CBWR" not in " ".join(advice_for(report(outcome()), engine()))
    assert advice_for(report(outcome()), engine(exact="reuse")) == []


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("its experts run with 'eager'", "--experts batched_mm"),
        ("RoPE type 'dynamic' computes its frequencies", 'rope_type "default"'),
        ("the keys of layer 0 of a row depend on its index", "--threads 1"),
    ],
)
def test_a_refusal_comes_with_what_to_try(reason, words):
    model = SimpleNamespace(dtype=torch.bfloat16)
    assert words in " ".join(advice_on_refusal(model, reason))
