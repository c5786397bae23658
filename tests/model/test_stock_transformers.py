"""What an engine computes is what transformers computes, for prompts several times the pool."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from bits import assert_same_bits
from reference_models import (
    ARCHITECTURES,
    PROMISED,
    SHIPPED,
    build,
    make_engine,
    prompt,
    stock_logits,
)

from kvpager._model.seam.attention import running
from kvpager._model.seam.causal_lm import HEAD_ROWS, Head
from kvpager._model.seam.observe import Recorder, packed_inputs

# The shipped model attends so sharply that bfloat16 runs of transformers differ by whole units
# from one another; how far from the truth ours are has its own test.
CASES = [
    (architecture, dtype)
    for architecture in PROMISED
    for dtype in ("float32", "bfloat16")
    if (architecture, dtype) != (SHIPPED, "bfloat16")
]
TOLERANCE = {"float32": {"atol": 2e-4, "rtol": 1e-4}, "bfloat16": {"atol": 5e-2, "rtol": 2e-2}}


@pytest.mark.parametrize(("architecture", "dtype"), CASES)
def test_logits_of_a_prompt_larger_than_the_pool_are_those_of_transformers(
    architecture, dtype, closing
):
    model = build(architecture, dtype)
    ids = prompt(301)
    expected = stock_logits(model, ids).float()
    engine = closing(make_engine(model))
    session = engine.session()
    session.prefill(ids[:150])
    torch.testing.assert_close(session.logits.float(), expected[149], **TOLERANCE[dtype])
    session.prefill(ids)
    torch.testing.assert_close(session.logits.float(), expected[300], **TOLERANCE[dtype])


@pytest.mark.parametrize("architecture", ["gemma2", "granite", "cohere", "gpt_oss"])
def test_soft_caps_scaled_heads_and_sinks_are_those_of_transformers(architecture, closing):
    model = build(architecture)
    ids = prompt(120)
    expected = stock_logits(model, ids)
    session = closing(make_engine(model)).session()
    session.prefill(ids)
    torch.testing.assert_close(session.logits, expected[-1], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(("architecture", "dtype"), CASES)
def test_score_is_the_log_softmax_of_transformers(architecture, dtype, closing):
    model = build(architecture, dtype)
    ids = prompt(200)
    expected = stock_logprobs(model, ids)
    score = closing(make_engine(model)).score(ids)
    assert score.logprobs.dtype == np.float32
    atol = 2e-4 if dtype == "float32" else 6e-2
    np.testing.assert_allclose(score.logprobs, expected.numpy(), atol=atol, rtol=0)
    assert score.mean == pytest.approx(expected.mean().item(), abs=atol)
    assert score.perplexity == pytest.approx(np.exp(-score.mean))


def stock_logprobs(model, ids):
    """Log-probabilities [n - 1] float64 of every token but the first, by transformers."""
    logprobs = torch.log_softmax(stock_logits(model, ids).double(), dim=-1)
    return logprobs[:-1].gather(1, torch.as_tensor(ids[1:, None]))[:, 0]


def test_the_shipped_model_in_bfloat16_is_as_close_to_float32_as_transformers_is(closing):
    model = build(SHIPPED, "bfloat16")
    ids = prompt(300)
    truth = stock_logprobs(copy.deepcopy(model).float(), ids)  # the same weights
    theirs = (stock_logprobs(model, ids) - truth).abs()
    ours = (torch.from_numpy(closing(make_engine(model)).score(ids).logprobs) - truth).abs()
    assert ours.mean() < 1.1 * theirs.mean()
    assert ours.mean() < 0.1


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_the_head_gives_the_bits_of_the_models_own(architecture, closing):
    model = build(architecture, "bfloat16")
    engine = closing(make_engine(model))
    tokens, positions = torch.as_tensor(prompt(engine.rows)), torch.arange(engine.rows)
    rows = [7, 3, 30, 3]
    keep = torch.tensor(rows + [rows[0]] * (HEAD_ROWS - len(rows)))
    with torch.inference_mode():
        with running(Recorder()):
            expected = model(**packed_inputs(tokens, positions), logits_to_keep=keep).logits[0]
        with running(Recorder()):
            hidden = model.get_decoder()(**packed_inputs(tokens, positions))[0][0]
        actual = Head(model)(hidden, rows)
    assert_same_bits(actual, expected[: len(rows)], "logits")


def test_more_rows_than_the_head_takes_give_each_row_the_same_bits(closing):
    model = build("llama")
    engine = closing(make_engine(model))
    hidden = torch.randn(engine.rows, model.config.hidden_size)
    with torch.inference_mode():
        every = Head(model)(hidden, range(engine.rows))
        alone = torch.cat([Head(model)(hidden, [row]) for row in range(engine.rows)])
    assert_same_bits(every, alone, "logits")
