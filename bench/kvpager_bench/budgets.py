"""A budget of chunks that a policy may read for a row, and needles asked for under it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvpager import Dense, Engine, PagerConfig, TopK
from kvpager.config import Window
from kvpager_bench import harness, subjects

CHUNK_TOKENS = 64
ANSWER_TOKENS = 4
ROWS = 64
SINK_CHUNKS, RECENT_CHUNKS = 1, 2
FULL, OURS, WINDOW = "full attention", "kvpager", "sliding window"
# Keys of the shipped model, and of its sibling whose keys were not made easy to select by.
TRAINED, PLAIN = "trained", subjects.PLAIN


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


def ask(model: Any, asked: subjects.Questions, budget: Budget, policy: str) -> list[list[int]]:
    """The answers under a policy."""
    config = PagerConfig(
        pool_tokens=budget.context + 2048,
        chunk_tokens=CHUNK_TOKENS,
        rows=ROWS,
        selection=budget.selection(policy),
    )
    answers = []
    with Engine(model, config) as engine, engine.session() as session:
        session.prefill(asked.document.ids)
        for prompt in asked.prompts:
            with session.fork() as fork:
                fork.append(prompt)
                answers.append(fork.generate(ANSWER_TOKENS).tokens.tolist())
    return answers
