"""Questions about documents that refer to one another, asked of stitched text and of whole text.

Documents are cached alone, and put together in another order for every prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvpager import Engine, PagerConfig
from kvpager.segments import Assembly, RepairPolicy
from kvpager_bench import harness, repairs
from kvpager_bench.repairs import Outcome, Way
from kvpager_bench.two_hop import TwoHopTask, TwoHopText

DOCUMENTS = 6
FACTS, LOCAL_FACTS = 8, 4
SYSTEM_TOKENS = 32
CHUNK_TOKENS = 64


@dataclass(frozen=True)
class Prompt:
    """order: of the documents; question, answer: token ids."""

    order: tuple[int, ...]
    question: list[int]
    answer: list[int]


def prompts_of(text: TwoHopText, count: int, generator: np.random.Generator) -> list[Prompt]:
    """Each with a fact of its own and an order of its own, with definitions before references."""
    facts = [fact for fact in text.facts if not fact.is_local]
    half = (len(text.documents) + 1) // 2
    return [
        Prompt(
            (
                *map(int, generator.permutation(half)),
                *map(int, half + generator.permutation(len(text.documents) - half)),
            ),
            fact.query.tolist(),
            fact.answer.tolist(),
        )
        for fact in facts[:count]
    ]


def draw(task: TwoHopTask, context: int, generator: np.random.Generator) -> TwoHopText:
    """A text of `context` tokens, the question on top."""
    shares = generator.uniform(0.6, 1.4, DOCUMENTS)
    sizes = np.floor(shares / shares.sum() * (context - SYSTEM_TOKENS)).astype(int)
    sizes[-1] += context - SYSTEM_TOKENS - int(sizes.sum())
    return task.text([int(size) for size in sizes], FACTS, local=LOCAL_FACTS, system=SYSTEM_TOKENS)


class Asked:
    """A set of prompts over the same documents, which are cached in an engine."""

    def __init__(self, engine: Engine, text: TwoHopText, number: int) -> None:
        self.engine = engine
        self.text = text
        self.lengths = [len(ids) for ids in text.documents]
        self._names = [
            engine.cache_segment(ids, name=f"document-{i}").name
            for i, ids in enumerate(text.documents)
        ]
        # Of its own, so that no repair finds what the full prefill has left.
        self._salt = f"full prefill of set {number}"

    def full(self, prompt: Prompt) -> tuple[torch.Tensor, bool]:
        """Logits after the question, and whether the answer is right, without any segment."""
        ids = np.concatenate(
            [self.text.system, *(self.text.documents[i] for i in prompt.order), prompt.question]
        )
        with self.engine.adopt(self.engine.pager.sequence(salt=self._salt)) as session:
            session.prefill(ids)
            return session.logits, session.generate(
                len(prompt.answer), eos=None
            ).tokens.tolist() == (prompt.answer)

    def stitched(self, prompt: Prompt, repair: RepairPolicy) -> tuple[torch.Tensor, bool, Assembly]:
        """The same from segments."""
        names = [self._names[i] for i in prompt.order]
        parts: list[Any] = [self.text.system, *names, prompt.question]
        with self.engine.assemble(parts, repair=repair) as session:
            assert session.assembly is not None
            logits = session.logits
            answer = session.generate(len(prompt.answer), eos=None).tokens.tolist()
            return logits, answer == prompt.answer, session.assembly

    def ask(self, prompt: Prompt, ways: Sequence[Way]) -> tuple[bool, dict[Way, Outcome]]:
        """Whether a full prefill answers it, and what each way comes to."""
        expected, right = self.full(prompt)
        told: dict[Way, Outcome] = {}
        for way in ways:
            repair = way.repair(self.lengths, told.get(Way(repairs.DEFAULT)))
            logits, answered, assembly = self.stitched(prompt, repair)
            told[way] = repairs.outcome(expected, logits, answered, assembly, sum(self.lengths))
        return right, told

    def require_deterministic(self, prompt: Prompt) -> None:
        """Raises NondeterministicSubjectError unless the default repair gives its bits again."""
        repair = repairs.FIXED[repairs.DEFAULT]
        harness.require_deterministic(
            lambda: harness.digest(self.stitched(prompt, repair)[0]), "the default repair"
        )

    def close(self) -> None:
        """Removes the segments."""
        for name in self._names:
            self.engine.segments.remove(name)


@dataclass(frozen=True)
class Answers:
    """Prompt by prompt, those of a set beside each other.

    full: whether a full prefill answers. told: the result of each way.
    """

    full: list[bool]
    told: dict[Way, list[Outcome]]


def measure(
    model: Any,
    context: int,
    sets: int,
    per_set: int,
    ways: Sequence[Way],
    seed: int,
    progress: Callable[[int], object] = lambda prompts: None,
) -> Answers:
    """Every way on the same prompts, of which each set of documents has `per_set`."""
    generator = np.random.default_rng(seed)
    task = TwoHopTask(model.config.vocab_size, seed)
    answers = Answers([], {way: [] for way in ways})
    room = -(-8 * context // CHUNK_TOKENS) * CHUNK_TOKENS
    config = PagerConfig(pool_tokens=room, chunk_tokens=CHUNK_TOKENS)
    with Engine(model, config) as engine:
        for number in range(sets):
            text = draw(task, context, generator)
            with closing(Asked(engine, text, number)) as asked:
                for prompt in prompts_of(text, per_set, generator):
                    if not answers.full:
                        asked.require_deterministic(prompt)
                    right, outcomes = asked.ask(prompt, ways)
                    answers.full.append(right)
                    for way, outcome in outcomes.items():
                        answers.told[way].append(outcome)
            progress(len(answers.full))
    return answers
