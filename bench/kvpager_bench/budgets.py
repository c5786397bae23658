"""A budget of chunks that a policy may read for a row, and needles asked for under it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from kvpager import Dense, Engine, PagerConfig, TopK
from kvpager.config import Window
from kvpager_bench import harness, subjects
from kvpager_bench.hard_keys import RETRIEVING_LAYER, load_with_keys
from kvpager_bench.harness import NOT_APPLICABLE

CHUNK_TOKENS = 64
ANSWER_TOKENS = 4
ROWS = 64
SINK_CHUNKS, RECENT_CHUNKS = 1, 2
FULL, OURS, ORACLE, WINDOW, MEAN = (
    "full attention",
    "kvpager",
    "oracle",
    "sliding window",
    "mean keys",
)
SCORERS = {OURS: "bits2", ORACLE: "exact", MEAN: "mean"}


@dataclass(frozen=True)
class Budget:
    """How many chunks of a context may be read for a row."""

    context: int
    percent: float

    @property
    def chunks(self) -> int:
        least = SINK_CHUNKS + RECENT_CHUNKS + 1
        return max(least, int(self.context * self.percent / 100) // CHUNK_TOKENS)

    @property
    def tokens(self) -> int:
        return self.chunks * CHUNK_TOKENS

    def selection(self, policy: str) -> Dense | TopK | Window:
        """What `policy` may read: as many tokens as any other one."""
        sinks = SINK_CHUNKS * CHUNK_TOKENS
        if policy == FULL:
            return Dense()
        if policy == WINDOW:
            # A window of W tokens touches one chunk more than W / CHUNK_TOKENS.
            return Window(recent=self.tokens - sinks - CHUNK_TOKENS, sinks=sinks)
        return TopK(
            chunks=self.chunks - SINK_CHUNKS - RECENT_CHUNKS,
            sinks=sinks,
            recent=(RECENT_CHUNKS - 1) * CHUNK_TOKENS,
            scorer=SCORERS[policy],
        )

    @property
    def compression_ratio(self) -> float:
        """The share of the document that a press drops, to keep as many tokens."""
        return 1 - self.tokens / self.context


def found_of(answers: list[list[int]], expected: list[list[int]]) -> int:
    """Exact matches: every token of an answer is right."""
    if len(answers) != len(expected):
        raise harness.MissingNumberError(f"{len(answers)} answers to {len(expected)} questions")
    return sum(answer == right for answer, right in zip(answers, expected))


def mass_recall(
    q: np.ndarray[Any, Any], k: np.ndarray[Any, Any], chunks: list[list[int]], scaling: float
) -> float:
    """Share of softmax(q k) that lies in the selected chunks, averaged over query heads.

    Args:
        q: [q_heads, dim] of one row.
        k: [tokens, kv_heads, dim] of everything before it.
        chunks: the selected chunks per kv head.
        scaling: of the dot products.
    """
    group = q.shape[0] // k.shape[1]
    shares = []
    for head in range(q.shape[0]):
        scores = (k[:, head // group].astype(np.float64) @ q[head].astype(np.float64)) * scaling
        weights = np.exp(scores - scores.max())
        selected = np.zeros(len(weights), dtype=bool)
        for chunk in chunks[head // group]:
            selected[chunk * CHUNK_TOKENS : (chunk + 1) * CHUNK_TOKENS] = True
        shares.append(weights[selected].sum() / weights.sum())
    return float(np.mean(shares))


class Retriever:
    """A model with its stock twin, which says what a question's queries are."""

    def __init__(self, keys: str) -> None:
        self.keys = keys
        self.model = load_with_keys(keys)
        self.stock = subjects.beside(self.model)
        config = self.model.config
        self.shape = (config.num_attention_heads, config.head_dim)

    def queries(self, asked: subjects.Questions) -> list[np.ndarray[Any, Any]]:
        """[q_heads, dim] of each prompt's last row at the retrieving layer, by full attention."""
        cache, _ = subjects.stock_prefill(self.stock, asked.document.ids, subjects.PREFILL_TOKENS)
        seen: list[torch.Tensor] = []
        projection = self.stock.model.layers[RETRIEVING_LAYER].self_attn.q_proj
        hook = projection.register_forward_hook(lambda _m, _i, output: seen.append(output))
        try:
            for prompt in asked.prompts:
                subjects.stock_step(self.stock, copy.deepcopy(cache), prompt)
        finally:
            hook.remove()
        return [rows[0, -1].reshape(self.shape).numpy() for rows in seen]


def ask(
    retriever: Retriever,
    asked: subjects.Questions,
    queries: list[np.ndarray[Any, Any]],
    budget: Budget,
    policy: str,
    kept: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[list[list[int]], float | str]:
    """The answers under a policy, and its mass recall where chunks are selected by score.

    kept: further fields of the PagerConfig, which say what K/V are kept in.
    """
    config = PagerConfig(
        pool_tokens=budget.context + 2048,
        chunk_tokens=CHUNK_TOKENS,
        rows=ROWS,
        selection=budget.selection(policy),
        **kept,
    )
    answers = []
    recalls = []
    with ExitStack() as stack:
        engine = stack.enter_context(Engine(retriever.model, config))
        session = stack.enter_context(engine.session())
        session.prefill(asked.document.ids)
        sequence = session.sequence
        keys = sequence.read_kv(RETRIEVING_LAYER, 0, sequence.length)[0].float().numpy()
        for prompt, q in zip(asked.prompts, queries):
            with session.fork() as fork:
                fork.append(prompt)
                answers.append(
                    [int(token) for token in fork.generate(ANSWER_TOKENS, stream="tokens")]
                )
            if policy in SCORERS:
                chosen = sequence.select(RETRIEVING_LAYER, torch.from_numpy(q))
                recalls.append(mass_recall(q, keys, chosen, q.shape[1] ** -0.5))
    return answers, float(np.mean(recalls)) if recalls else NOT_APPLICABLE
