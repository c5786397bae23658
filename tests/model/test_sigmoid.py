"""Sigmoids of modules in float32 have the bits of torch's vectors, whatever their number."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from bits import assert_same_bits
from reference_models import build, make_engine, prompt
from test_operations_between_modules import mixture, needs_two_paths

from kvpager import _core
from kvpager._model.seam.linear import Callers, LinearLayers
from kvpager._model.seam.sigmoid import sigmoid


def numbers():
    """4096 of many sizes and both signs, and what has no size."""
    drawn = torch.randn(4096, generator=torch.Generator().manual_seed(1)) * 8
    drawn[::512] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1e30, -1e30, 1e-30, 89])
    return drawn


def telling_numbers():
    """Those whose bits are others where torch computes one alone."""
    x = numbers()
    return x[torch.cat([torch.sigmoid(each) for each in x.split(1)]) != torch.sigmoid(x)]


@pytest.mark.parametrize("width", [1, 7, 16, 64])
def test_a_number_has_the_same_sigmoid_among_any_number_of_others(width):
    x = numbers()
    whole = torch.sigmoid(x)  # whole vectors, in one thread
    for rows in range(1, 41):
        given = x[: 4096 // (rows * width) * rows * width].view(-1, rows, width)
        parts = [sigmoid(each) for each in given]
        assert parts[0].shape == (rows, width)
        assert_same_bits(torch.cat(parts).reshape(-1), whole[: given.numel()], f"{rows} rows")


@needs_two_paths
def test_threads_change_no_bit_of_it():
    x = telling_numbers().repeat(131_080)[:131_080]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = torch.cat([torch.sigmoid(x[:131_072]), sigmoid(x[131_072:])])
        for threads in (2, 3, 7):
            torch.set_num_threads(threads)
            assert_same_bits(sigmoid(x), expected, f"{threads} threads")
    finally:
        torch.set_num_threads(before)


def test_its_shape_is_that_of_what_it_was_given():
    for x in (torch.zeros(()), torch.zeros(0, 3), torch.randn(5, 3).T, torch.randn(9)[::2]):
        made = sigmoid(x)
        assert made.shape == x.shape
        assert torch.allclose(made, torch.sigmoid(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_stay_torchs(dtype):
    assert sigmoid(torch.zeros(3, dtype=dtype)) is None


def test_a_gate_of_one_number_for_a_row_takes_a_row_alone(closing):
    engine = closing(make_engine(mixture(), linear="kvpager"))
    assert engine.row_counts.ladder[0] == 1
    ids = prompt(40)
    rollout = engine.run([ids], 50, temperature=1.0, seed=[0], logprobs=True, eos=None)[0]
    score = engine.score(np.concatenate([ids, rollout.tokens]))
    assert score.against(rollout.logprobs).differing == 0


@needs_two_paths
def test_rows_that_fill_no_vector_are_taken(closing):
    assert closing(make_engine(mixture(), linear="kvpager", rows=40)).row_counts.ladder[-1] == 40


def test_sigmoids_without_products_leave_the_fingerprint_as_it_is():
    model, workers = build("llama"), _core.Workers(1)
    (plain, other) = (
        LinearLayers(model, workers, callers=Callers(frozenset({1}), multiply=multiply)).version
        for multiply in (False, True)
    )
    assert plain == LinearLayers.version
    assert other == f"{plain}, functional"
