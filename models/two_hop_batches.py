"""Training sequences for the two-hop model: definitions, references, then questions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import two_hop_task as two_hop
from two_hop_task import DEFINITION_TOKENS, REFERENCE_TOKENS, TwoHopTask

from kvpager.cli.needles import BOS, Ids

FACT_TOKENS = DEFINITION_TOKENS + REFERENCE_TOKENS
QUESTION_TOKENS = 6  # with its answer
NO_LOSS, VALUE, ANSWER_END = range(3)


@dataclass(frozen=True)
class TwoHopBatch:
    """B sequences of T tokens, all arrays [B, T] int64.

    parts: what the token after this one is to the loss (NO_LOSS, VALUE or ANSWER_END).
    questions: number of the question that a token belongs to, from 1; 0 in the document.
    """

    ids: Ids
    parts: Ids
    questions: Ids


class TwoHopSampler:
    """Draws training batches of one task; the task's generator supplies all randomness."""

    def __init__(self, task: TwoHopTask) -> None:
        self.task = task

    def batch(self, sequences: int, tokens: int) -> TwoHopBatch:
        """`sequences` sequences of exactly `tokens` tokens, one fact per 22 to 64 tokens."""
        ids, parts, questions = np.zeros((3, sequences, tokens), np.int64)
        rng = self.task.needles.rng
        for row in range(sequences):
            density = math.exp(rng.uniform(math.log(1 / 64), math.log(1 / 22)))
            facts = max(1, int(tokens * density))
            asked = facts if rng.random() < 0.7 else int(rng.integers(1, facts + 1))
            while 2 + FACT_TOKENS * facts + QUESTION_TOKENS * asked > tokens:
                facts -= 1
                asked = min(asked, facts)
            self._fill(ids[row], parts[row], questions[row], facts, asked)
        return TwoHopBatch(ids, parts, questions)

    def _fill(self, ids: Ids, parts: Ids, questions: Ids, facts: int, asked: int) -> None:
        needles, rng = self.task.needles, self.task.needles.rng
        names = rng.permutation(needles.keys(2 * facts))
        values = [int(value[0]) for value in needles.values([1] * facts)]
        ids[0] = BOS
        ids[1:] = needles.filler(len(ids) - 1)

        at, document = 1, len(ids) - QUESTION_TOKENS * asked
        share = rng.gamma(0.6, 1.0, size=2 * facts + 1)  # uneven gaps
        gaps = np.floor(share / share.sum() * (document - 1 - FACT_TOKENS * facts)).astype(int)
        for (fact, is_reference), gap in zip(self._schedule(facts), gaps[:-1], strict=True):
            if gap > 8 and rng.random() < 0.3:
                # A decoy: a name's tokens in the filler, without marks.
                decoy = at + int(rng.integers(0, gap - 4))
                ids[decoy : decoy + 2] = names[int(rng.integers(len(names)))]
            key, alias = names[fact], names[facts + fact]
            event = two_hop.reference(key, alias)
            if not is_reference:
                event = two_hop.definition(alias, values[fact])
            at += int(gap)
            ids[at : at + len(event)] = event
            at += len(event)

        at = document
        for number, fact in enumerate(rng.permutation(facts)[:asked], 1):
            query = two_hop.query(names[fact])
            end = at + QUESTION_TOKENS
            ids[at:end] = np.concatenate([query, two_hop.answer(values[fact])])
            # A position is marked for the token after it, so marks begin at the separator.
            parts[at + len(query) - 1 : end - 1] = VALUE, ANSWER_END
            questions[at:end] = number
            at = end

    def _schedule(self, facts: int) -> list[tuple[int, bool]]:
        """(fact, is it the reference?) of all events, each definition before its reference."""
        rng = self.task.needles.rng
        told, draw = rng.random(facts), rng.random(facts)
        referred = told + (1 - told) * draw
        if rng.random() < 0.4:  # all definitions first
            told, referred = 0.4 * told, 0.4 + 0.6 * draw
        events = [(float(time), fact, False) for fact, time in enumerate(told)]
        events += [(float(time), fact, True) for fact, time in enumerate(referred)]
        return [(fact, is_reference) for _, fact, is_reference in sorted(events)]
