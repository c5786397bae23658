"""What a model computes in float64: the truth that other precisions are measured against."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import torch
from reference_models import stock_logits


def logprobs_of(logits, ids):
    """Log-probabilities [n - 1] float64 of every token but the first, under logits [n, vocab]."""
    every = torch.log_softmax(logits.double(), dim=-1)
    return every[:-1].gather(1, torch.as_tensor(np.asarray(ids)[1:, None]))[:, 0]


def true_logprobs(model, ids):
    """Of the model's own weights, by transformers' eager attention with everything in float64."""
    exact = copy.deepcopy(model).double()
    if hasattr(model.config, "num_experts"):
        exact.set_experts_implementation("eager")  # one copy of the weights, not one per row
    with _nothing_narrower_than_float64(exact):
        return logprobs_of(stock_logits(exact, ids), ids)


@contextmanager
def _nothing_narrower_than_float64(model: torch.nn.Module) -> Iterator[None]:
    """Norms and softmax of transformers go through float32 whatever the model's dtype is."""
    softmax = torch.nn.functional.softmax

    def wide_softmax(x, dim=None, dtype=None, **options):
        return softmax(x, dim=dim, dtype=x.dtype if x.dtype == torch.float64 else dtype, **options)

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = _norm(module)
    with mock.patch.object(torch.nn.functional, "softmax", wide_softmax):
        yield


def _norm(module):
    epsilon = module.variance_epsilon

    def forward(x):
        assert x.dtype == torch.float64
        return module.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)

    return forward


def true_attention(q, k, v, scaling):
    """Causal attention of q [n, Hq, D] over k, v [n, Hkv, D], in float64."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = (q @ k.transpose(1, 2)) * scaling
    later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    return (scores.masked_fill(later, -torch.inf).softmax(-1) @ v).transpose(0, 1)
