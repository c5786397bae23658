"""Comparison of bits, and the report of a verification."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console
from rich.table import Table

from kvpager import PagerConfig
from kvpager._model.proof.shapes import ShapeReport
from kvpager._model.seam.rows import RowCounts
from kvpager.verify.advice import advice_for, advice_on_refusal
from kvpager.verify.bits import Comparison, Difference, compare_bits
from kvpager.verify.check import Outcome
from kvpager.verify.report import Report
from kvpager.verify.table import parts

TORCH = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
NUMPY = [np.float32, np.float16, np.float64]
WIDTH = {torch.float32: 32, torch.bfloat16: 16, torch.float16: 16, torch.float64: 64}


@pytest.mark.parametrize("dtype", TORCH)
def test_equal_tensors_are_the_same_and_every_bit_of_them_is_counted(dtype):
    values = torch.randn(3, 4, 5).to(dtype)
    result = compare_bits(values, values.clone())
    assert result == Comparison(60, 60 * WIDTH[dtype])
    assert result.same


@pytest.mark.parametrize("dtype", TORCH)
def test_plus_zero_differs_from_minus_zero(dtype):
    result = compare_bits(torch.tensor([0.0], dtype=dtype), torch.tensor([-0.0], dtype=dtype))
    assert not result.same
    assert (result.differing_elements, result.differing_bits) == (1, 1)
    assert result.first.ulps == 0
    assert "0.0, expected -0.0" in str(result.first)


@pytest.mark.parametrize("dtype", NUMPY)
def test_plus_zero_differs_from_minus_zero_in_numpy(dtype):
    assert not compare_bits(np.zeros(2, dtype), np.array([0.0, -0.0], dtype)).same


def test_a_nan_equals_itself_and_no_nan_of_another_payload():
    quiet = np.array([0x7FC00000, 0x7FC00001], dtype=np.uint32).view(np.float32)
    assert compare_bits(quiet, quiet.copy()).same
    result = compare_bits(quiet, quiet[::-1].copy())
    assert (result.differing_elements, result.differing_bits) == (2, 2)
    assert result.first.ulps is None


@pytest.mark.parametrize("dtype", TORCH)
def test_neighbouring_numbers_are_one_ulp_apart(dtype):
    one = torch.tensor([1.0, -1.0, 0.5], dtype=dtype)
    above = torch.nextafter(one, torch.full_like(one, torch.inf))
    for i in range(3):
        assert compare_bits(above[i : i + 1], one[i : i + 1]).first.ulps == 1


def test_the_distance_across_zero_counts_both_sides():
    tiny = torch.tensor([5e-324], dtype=torch.float64)
    assert compare_bits(tiny, -tiny).first.ulps == 2
    ours, theirs = np.array([1.0], np.float32), np.array([-1.0], np.float32)
    assert compare_bits(ours, theirs).first.ulps == 2 * 0x3F800000


def test_the_first_difference_has_its_index_and_both_values():
    expected = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)
    actual = expected.clone()
    actual[1, 0, 2] += 1
    actual[1, 2, 3] += 1
    result = compare_bits(actual, expected, "keys of layer 3")
    assert result.differing_elements == 2
    assert result.first == Difference("keys of layer 3 [1, 0, 2]", (1, 0, 2), 15.0, 14.0, 1 << 20)


def test_a_place_may_be_words_for_an_index():
    expected = torch.zeros(4, 2, 8, dtype=torch.bfloat16)
    actual = expected.clone()
    actual[3, 1, 5] = 1.0
    result = compare_bits(
        actual,
        expected,
        lambda at: f"keys of layer 3, position {14 + at[0]}, head {at[1]}" if at else "keys",
    )
    assert str(result.first).startswith("keys of layer 3, position 17, head 1: 1.0, expected 0.0, ")


def test_every_flipped_bit_is_counted():
    ours = np.array([0, 0xFF, 3], dtype=np.uint64).view(np.float64)
    theirs = np.array([0, 0, 1], dtype=np.uint64).view(np.float64)
    result = compare_bits(ours, theirs)
    assert (result.differing_elements, result.differing_bits) == (2, 9)


def test_views_that_are_not_contiguous_are_compared_in_logical_order():
    values = torch.randn(6, 4)
    assert compare_bits(values.t(), values.t().contiguous()).same
    assert compare_bits(values.numpy().T, values.t().contiguous()).same
    other = values.clone()
    other[5, 1] = 0.0
    assert compare_bits(other.t(), values.t()).first.index == (1, 5)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (torch.zeros(3, 3), "shape [2, 3], expected [3, 3]"),
        (torch.zeros(2, 3, dtype=torch.bfloat16), "dtype float32, expected bfloat16"),
        (torch.zeros(2, 3, dtype=torch.int32), "dtype float32, expected int32"),
    ],
)
def test_another_shape_or_dtype_is_a_difference(other, words):
    result = compare_bits(torch.zeros(2, 3), other, "values of layer 0")
    assert not result.same
    assert result.elements == 0
    assert str(result.first) == f"values of layer 0: {words}"


def test_integers_are_compared_like_anything_else():
    result = compare_bits(np.array([1, 2, 3], np.int32), np.array([1, 2, 4], np.int32), "tokens")
    assert (result.differing_elements, result.differing_bits) == (1, 3)
    assert str(result.first) == "tokens [2]: 3, expected 4"


def test_a_sum_counts_both_and_keeps_the_first_difference():
    one, two = torch.ones(4), torch.zeros(4)
    total = compare_bits(one, one) + compare_bits(one, two, "b") + compare_bits(two, one, "c")
    assert (total.elements, total.bits, total.differing_elements) == (12, 384, 8)
    assert total.first.place == "b [0]"
    assert (Comparison() + total) == total


def test_what_json_has_no_word_for_is_text():
    result = compare_bits(np.array([np.nan]), np.array([np.inf]))
    told = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert (told["first"]["actual"], told["first"]["expected"]) == ("nan", "inf")
    assert told["differing_elements"] == 1


def test_no_elements_are_the_same_but_say_that_nothing_was_compared():
    assert compare_bits(torch.zeros(0, 4), torch.zeros(0, 4)) == Comparison()


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
