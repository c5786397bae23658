from __future__ import annotations

import math

import numpy as np
import pytest

from kvpager import Agreement, InvalidArgumentError


def floats(*values):
    return np.array(values, dtype=np.float32)


def test_the_same_bits_agree_in_every_aggregate():
    values = floats(-0.1, -2.5, -30.0, -math.inf)
    agreement = Agreement.between(values, values.copy())
    assert agreement == Agreement(4, 0, 0.0, 0.0, 0.0)
    assert "0 of 4 log-probabilities differ" in str(agreement)


def test_one_bit_counts_even_where_it_is_no_distance():
    agreement = Agreement.between(floats(0.0, -1.0), floats(-0.0, -1.0))
    assert agreement.differing == 1
    assert agreement.max_abs_delta == 0


def test_aggregates_are_those_that_training_watches():
    generated, again = floats(-1.0, -2.0, -3.0, -4.0), floats(-1.25, -2.0, -2.5, -4.125)
    delta = [-0.25, 0.0, 0.5, -0.125]
    agreement = Agreement.between(generated, again)
    assert agreement.tokens == 4
    assert agreement.differing == 3
    assert agreement.max_abs_delta == 0.5
    kl = sum(math.exp(d) - 1 - d for d in delta) / 4
    assert agreement.approx_kl == pytest.approx(kl, rel=1e-12)
    assert agreement.clip_fraction == 0.5  # exp(-0.25) = 0.78 and exp(0.5) = 1.65


def test_which_side_was_generated_matters():
    a, b = floats(-1.0), floats(-1.2)
    assert Agreement.between(a, b).clip_fraction == 0  # exp(-0.2) = 0.82
    assert Agreement.between(b, a).clip_fraction == 1  # exp(0.2) = 1.22


def test_a_tiny_change_is_not_lost_in_rounding():
    generated = floats(-1.0)
    again = np.nextafter(generated, floats(0.0))
    agreement = Agreement.between(generated, again)
    step = float(again[0]) - float(generated[0])
    assert agreement.max_abs_delta == step
    assert agreement.approx_kl == pytest.approx(step**2 / 2, rel=1e-2)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_on_one_side_is_never_taken_for_agreement(wrong):
    agreement = Agreement.between(floats(-1.0, -1.0), floats(-1.0, wrong))
    assert agreement.differing == 1
    assert not agreement.max_abs_delta < 1e30


@pytest.mark.parametrize(
    ("generated", "again", "said"),
    [
        (floats(-1.0), floats(-1.0, -2.0), "again 2"),
        (floats(), floats(), "generated is float32 of shape"),
        (floats(-1.0), np.array([-1.0]), "again is float64"),
        (floats(-1.0)[None], floats(-1.0), "generated is float32 of shape"),
    ],
)
def test_what_cannot_be_of_the_same_tokens_is_refused(generated, again, said):
    with pytest.raises(InvalidArgumentError, match=said):
        Agreement.between(generated, again)
