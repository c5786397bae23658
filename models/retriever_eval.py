"""How well a tiny retriever answers, and how well its keys can be selected by."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, SmolLM3ForCausalLM

from kvpager._model.seam.causal_lm import handed
from kvpager.cli import needles
from kvpager.cli.needles import NeedleTask

PREFILL_TOKENS = 512  # per forward
CHUNK_TOKENS = 64
BEST_CHUNKS = 8


@dataclass(frozen=True)
class Evaluation:
    """Means over all needles of all documents.

    exact_match: share of needles answered exactly with full attention.
    chunk_recall: per scorer, share of (answer token, K/V head) whose source lies in one of the
    BEST_CHUNKS chunks that the scorer ranks highest. Exact match alone does not show whether
    summaries of chunks tell where a needle is.
    """

    exact_match: float
    chunk_recall: dict[str, float]


@torch.no_grad()
def measure(
    model: SmolLM3ForCausalLM, task: NeedleTask, tokens: int, needle_count: int, documents: int
) -> Evaluation:
    """Evaluates on `documents` documents of `tokens` tokens with `needle_count` needles each."""
    found, recalls = [], []
    for _ in range(documents):
        document = task.document(tokens, needle_count)
        cache = prefill(model, document.ids)
        keys = cache.layers[-1].keys[0]  # type: ignore[union-attr, index]
        for needle in range(needle_count):
            query = task.query(document.keys[needle])
            answer = task.answer(document.values[needle])
            exact, queries = ask(model, cache, query, answer)
            found.append(exact)
            value_start = document.span(needle)[0] + needles.VALUE_OFFSET
            sources = value_start + torch.arange(len(answer))
            recalls.append(chunk_recall(queries, keys, sources))
    mean = {name: float(np.mean([recall[name] for recall in recalls])) for name in recalls[0]}
    return Evaluation(float(np.mean(found)), mean)


@torch.no_grad()
def prefill(model: SmolLM3ForCausalLM, ids: needles.Ids, start: int = 0) -> DynamicCache:
    """The full-attention cache of `ids`, computed in forwards of PREFILL_TOKENS tokens.

    start: position of the first token.
    """
    cache = DynamicCache(config=model.config)
    chunks = torch.split(torch.from_numpy(ids), PREFILL_TOKENS)
    positions = torch.split(torch.arange(start, start + len(ids)), PREFILL_TOKENS)
    for chunk, at in zip(chunks, positions, strict=True):
        model.model(input_ids=chunk[None], position_ids=at[None], **handed(model, cache))
    return cache


@torch.no_grad()
def ask(
    model: SmolLM3ForCausalLM, cache: DynamicCache, query: needles.Ids, answer: needles.Ids
) -> tuple[bool, Tensor]:
    """Whether greedy decoding after `query` gives exactly `answer`; leaves the cache as it was.

    One forward decides: it does if and only if every answer token is the most likely one after
    the query and the answer tokens before it. Also returns the last layer's queries at the
    positions that predict the answer, [len(answer), heads * head_dim].
    """
    projected: list[Tensor] = []
    hook = model.model.layers[-1].self_attn.q_proj.register_forward_hook(
        lambda _module, _inputs, output: projected.append(output)
    )
    asked = torch.from_numpy(np.concatenate([query, answer[:-1]]))
    logits = model(input_ids=asked[None], **handed(model, cache)).logits[0]
    hook.remove()
    cache.crop(-len(asked))
    predicting = slice(len(query) - 1, None)
    exact = torch.equal(logits[predicting].argmax(-1), torch.from_numpy(answer))
    return exact, projected[0][0, predicting]


def chunk_recall(queries: Tensor, keys: Tensor, sources: Tensor) -> dict[str, float]:
    """Share of (query, K/V head) for which each scorer ranks the source's chunk among the best.

    queries: [A, heads * head_dim], without RoPE. keys: [kv_heads, T, head_dim]. sources: [A], the
    position each query should attend to. A chunk's score is the maximum over a K/V head's queries.
    Positions after the last whole chunk are not sources.
    """
    kv_heads, tokens, dim = keys.shape
    grouped = queries.view(len(queries), kv_heads, -1, dim)
    chunks = keys[:, : tokens - tokens % CHUNK_TOKENS].view(kv_heads, -1, CHUNK_TOKENS, dim)
    product = "akgd,kcd->akgc"
    high = torch.einsum(product, grouped.clamp(min=0), chunks.amax(2))
    low = torch.einsum(product, grouped.clamp(max=0), chunks.amin(2))
    scores = {
        "mean": torch.einsum(product, grouped, chunks.mean(2)),
        "minmax": high + low,
        "exact token maximum": torch.einsum("akgd,kctd->akgct", grouped, chunks).amax(-1),
    }
    wanted = (sources // CHUNK_TOKENS)[:, None, None]
    best = min(BEST_CHUNKS, chunks.shape[1])
    return {
        name: float((score.amax(2).topk(best).indices == wanted).any(-1).float().mean())
        for name, score in scores.items()
    }
