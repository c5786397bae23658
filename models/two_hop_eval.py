"""How well a two-hop model answers: with a text read whole, and with documents read alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from retriever_eval import ask, prefill
from transformers import DynamicCache, SmolLM3ForCausalLM
from two_hop_task import TwoHopTask, TwoHopText


@dataclass(frozen=True)
class Evaluation:
    """Exact match: the share of questions whose answer greedy decoding gives exactly.

    whole: after one prefill of the text. alone: after system prompt and documents were encoded
    without one another. alone_local: the same for local facts, which need no other document.
    """

    whole: float
    alone: float
    alone_local: float


def document_sizes(tokens: int, count: int) -> list[int]:
    """`count` documents of about `tokens` tokens together, the longest thrice the shortest."""
    share = np.linspace(0.5, 1.5, count)
    share = np.concatenate([share[::2], share[1::2]])
    return [int(tokens * part) for part in share / share.sum()]


@torch.no_grad()
def measure(
    model: SmolLM3ForCausalLM, task: TwoHopTask, tokens: int, documents: int, facts: int, texts: int
) -> Evaluation:
    """Asks all facts of `texts` texts of about `tokens` tokens; half as many more are local."""
    whole: list[bool] = []
    alone: list[bool] = []
    alone_local: list[bool] = []
    for _ in range(texts):
        text = task.text(document_sizes(tokens, documents), facts, local=facts // 2)
        read, stitched = prefill(model, text.ids), encode_alone(model, text)
        for fact in text.facts:
            whole.append(ask(model, read, fact.query, fact.answer)[0])
            kind = alone_local if fact.is_local else alone
            kind.append(ask(model, stitched, fact.query, fact.answer)[0])
    return Evaluation(float(np.mean(whole)), float(np.mean(alone)), float(np.mean(alone_local)))


@torch.no_grad()
def encode_alone(model: SmolLM3ForCausalLM, text: TwoHopText) -> DynamicCache:
    """The cache of the text with no part having seen another.

    A part is encoded at its place in the text: attention with RoPE sees differences of positions
    alone, so this equals encoding at 0 and rotating the keys.
    """
    parts = [prefill(model, text.system)]
    parts += [
        prefill(model, ids, start) for ids, start in zip(text.documents, text.starts, strict=True)
    ]
    cache = DynamicCache(config=model.config)
    for number, layers in enumerate(zip(*(part.layers for part in parts), strict=True)):
        keys = torch.cat([layer.keys for layer in layers], dim=2)
        values = torch.cat([layer.values for layer in layers], dim=2)
        cache.update(keys, values, number)
    return cache
