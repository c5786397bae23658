"""How far from the truth: bits that agree with one another must also be right.

The truth is float64, of the same weights. Beside each bound stands the error of transformers' own
run in the same dtype, which ours may exceed by a tenth at most. Of a single prompt of 200 tokens in
bfloat16 the ratio of the two is anywhere from 0.8 to 1.2, whoever is the better: the errors of its
tokens are not independent. So the means are over several prompts.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from exact_reference import logprobs_of, true_attention, true_logprobs
from reference_models import (
    DTYPES,
    PROMISED,
    SHIPPED,
    build,
    make_engine,
    prompt,
    stock_logits,
)

from kvpager import Dense, Layout, Pager, PagerConfig
from kvpager.pager import ROW_COMMIT, ROW_PADDING
from kvpager.sampling import log_probability

# Largest and mean error of a log-probability.
BOUNDS = {"bfloat16": (6e-2, 8e-3), "float16": (1e-2, 1e-3), "float32": (5e-6, 1e-6)}
ARCHITECTURES = [name for name in PROMISED if name != SHIPPED] + ["qwen3_moe"]


PROMPTS = 8


def errors(model, closing):
    """Absolute errors of float32 log-probabilities of all prompts: ours, and stock eager's."""
    engine = closing(make_engine(model))
    ours, theirs = [], []
    for seed in range(PROMPTS):
        ids = prompt(200, seed)
        truth = true_logprobs(model, ids)
        ours.append((torch.from_numpy(engine.score(ids).logprobs) - truth).abs())
        theirs.append((logprobs_of(stock_logits(model, ids), ids).float() - truth).abs())
    return torch.cat(ours), torch.cat(theirs)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_log_probabilities_are_as_close_to_float64_as_those_of_transformers(
    architecture, dtype, closing
):
    model = build(architecture, dtype, group=4)
    ours, theirs = errors(model, closing)
    largest, mean = BOUNDS[dtype]
    assert ours.max() <= largest
    assert ours.mean() <= mean
    assert ours.mean() <= 1.1 * theirs.mean()


@pytest.mark.parametrize(
    ("dtype", "mean"), [("bfloat16", 0.1), ("float16", 2e-2), ("float32", 2e-5)]
)
def test_the_shipped_model_is_as_close_to_float64_as_transformers_is(dtype, mean, closing):
    """Its attention is so sharp that rounding of keys alone moves single tokens by whole units."""
    ours, theirs = errors(build(SHIPPED, dtype), closing)
    assert ours.mean() <= mean
    assert ours.mean() <= 1.1 * theirs.mean()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("group", [1, 4])
def test_attention_is_as_close_to_float64_as_that_of_torch(dtype, group, closing):
    rows, length, kv_heads, dim = 32, 640, 2, 64
    layout = Layout(1, kv_heads, dim, dim, chunk_tokens=16, k_dtype=dtype, v_dtype=dtype)
    config = PagerConfig(pool_tokens=96, chunk_tokens=16, selection=Dense(), host_bytes="16MiB")
    pager = closing(Pager(layout, config, rows=rows, fingerprint={}, threads=1))
    random = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(length, heads, dim, generator=random).to(DTYPES[dtype])
        for heads in (group * kv_heads, kv_heads, kv_heads)
    )
    sequence = pager.sequence()
    parts = []
    for start in range(0, length, rows):
        at = slice(start, start + rows)
        with pager.begin(
            [sequence] * rows, np.arange(start, start + rows), [1] * rows, [ROW_COMMIT] * rows
        ) as forward:
            parts.append(forward.attend(0, q[at], k[at], v[at], scaling=dim**-0.5))
            forward.commit()
    ours = torch.cat(parts)
    theirs = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, enable_gqa=True
    )[0].transpose(0, 1)
    truth = true_attention(q, k, v, dim**-0.5)
    torch.testing.assert_close(ours.double(), truth, atol=5e-2, rtol=2e-2)
    assert (ours - truth).abs().mean() <= 1.1 * (theirs - truth).abs().mean()


def test_a_padding_row_gives_zeros(closing):
    layout = Layout(1, 2, 32, 32, chunk_tokens=16)
    pager = closing(Pager(layout, PagerConfig(64, chunk_tokens=16), rows=16, fingerprint={}))
    rows = [torch.full((16, 2, 32), torch.nan) for _ in range(3)]
    for tensor in rows:
        tensor[0] = 1.0
    kinds = [ROW_COMMIT] + [ROW_PADDING] * 15
    with pager.begin([pager.sequence()] + [None] * 15, [0] * 16, [1] * 16, kinds) as forward:
        out = forward.attend(0, *rows, scaling=1.0)
    assert (out[0] == 1.0).all()
    assert (out[1:].view(torch.int32) == 0).all()


def test_a_reduction_to_a_log_probability_adds_no_error_of_its_own():
    """`sampling.log_probability` against a sum of exactly rounded terms, at the edges of range."""
    for scale in (1e-3, 1.0, 30.0, 1e4):
        logits = torch.randn(50_000, generator=torch.Generator().manual_seed(1)) * scale
        values = [float(x) for x in logits]
        top = max(values)
        total = math.log(math.fsum(math.exp(x - top) for x in values))
        for token in (0, 17, int(logits.argmax())):
            exact = values[token] - top - total
            assert log_probability(logits, token) == pytest.approx(exact, rel=1e-12, abs=1e-12)
