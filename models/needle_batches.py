"""Training sequences for the tiny retrieval model: needles and their questions, interleaved."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kvpager.cli import needles
from kvpager.cli.needles import Ids, NeedleTask

# Which part of an answer the next token is; 0 where the next token carries no loss.
NO_LOSS, FIRST_VALUE, SECOND_VALUE, LATER_VALUE, ANSWER_END = range(5)
# What a token itself is.
FILLER, MARKER, VALUE = range(3)

FRAME_TOKENS = needles.VALUE_OFFSET + 1  # a needle, or a question and answer, without its value


@dataclass(frozen=True)
class TrainingBatch:
    """B sequences of T tokens, all arrays [B, T] int64.

    parts: what the token after this one is to the loss (NO_LOSS .. ANSWER_END).
    roles: FILLER, MARKER (marks and keys) or VALUE (values and their `<E>`).
    """

    ids: Ids
    parts: Ids
    roles: Ids


@dataclass(frozen=True)
class _Event:
    """A needle, or a question with its answer, at a time in [0, 1] of its sequence."""

    time: float
    is_question: bool
    needle: int


class BatchSampler:
    """Draws training batches of one task; the task's generator supplies all randomness."""

    def __init__(self, task: NeedleTask, value_tokens: tuple[int, int]) -> None:
        """value_tokens: shortest and longest value, both inclusive."""
        self.task = task
        self.value_tokens = value_tokens

    def batch(self, sequences: int, tokens: int) -> TrainingBatch:
        """`sequences` sequences of exactly `tokens` tokens, one event per 12 to 64 tokens."""
        ids, parts, roles = np.zeros((3, sequences, tokens), np.int64)
        rng = self.task.rng
        for row in range(sequences):
            density = math.exp(rng.uniform(math.log(1 / 64), math.log(1 / 12)))
            total = max(2, int(tokens * density))
            needle_count = (total + 1) // 2
            questions = max(1, total // 2)
            if rng.random() < 0.3:  # now and then few questions among many needles
                questions = int(rng.integers(1, questions + 1))
            self._fill(ids[row], parts[row], roles[row], needle_count, questions)
        return TrainingBatch(ids, parts, roles)

    def _fill(self, ids: Ids, parts: Ids, roles: Ids, needle_count: int, questions: int) -> None:
        task, rng = self.task, self.task.rng
        keys = task.keys(needle_count)
        low, high = self.value_tokens
        values = task.values([int(n) for n in rng.integers(low, high + 1, size=needle_count)])
        asked_at_end = bool(rng.random() < 0.5)
        events = self._schedule(needle_count, questions, asked_at_end)
        lengths = self._drop_until_fits(events, values, len(ids) - 1 - 4)
        gaps = self._gaps(events, len(ids) - 1 - sum(lengths), asked_at_end)

        ids[0] = needles.BOS
        ids[1:] = task.filler(len(ids) - 1)
        at = 1
        for event, gap, length in zip(events, gaps, lengths, strict=True):
            at += gap
            key, value = keys[event.needle], values[event.needle]
            ids[at : at + length] = task.needle(key, value)
            roles[at : at + length] = MARKER
            roles[at + needles.VALUE_OFFSET : at + length] = VALUE
            if event.is_question:
                ids[at] = needles.QUESTION
                # A position is marked for the token after it, so marks begin at the separator.
                answer = parts[at + needles.VALUE_OFFSET - 1 : at + length - 1]
                answer[:-1] = np.minimum(np.arange(len(value)) + FIRST_VALUE, LATER_VALUE)
                answer[-1] = ANSWER_END
            elif gap > 8 and rng.random() < 0.3:
                # A decoy: a key's tokens in the filler before this needle, without marks.
                decoy = at - int(rng.integers(3, gap - 3))
                ids[decoy : decoy + needles.KEY_TOKENS] = keys[int(rng.integers(needle_count))]
            at += length

    def _schedule(self, needle_count: int, questions: int, at_end: bool) -> list[_Event]:
        """All needles and `questions` questions, each later than its needle, in order of time."""
        rng = self.task.rng
        told = rng.random(needle_count) * 0.9
        asked = rng.permutation(needle_count)[:questions]
        draw = rng.random(questions)
        times = 0.95 + 0.05 * draw if at_end else told[asked] + (1 - told[asked]) * draw
        events = [_Event(float(time), False, needle) for needle, time in enumerate(told)]
        events += [
            _Event(float(time), True, int(needle))
            for time, needle in zip(times, asked, strict=True)
        ]
        return sorted(events, key=lambda event: (event.time, event.is_question))

    def _drop_until_fits(self, events: list[_Event], values: list[Ids], room: int) -> list[int]:
        """Removes random questions, then needles nobody asks for; the lengths of what is left."""

        def lengths() -> list[int]:
            return [FRAME_TOKENS + len(values[event.needle]) for event in events]

        while sum(lengths()) > room:
            questions = [event for event in events if event.is_question]
            if len(questions) > 1:
                events.remove(questions[int(self.task.rng.integers(len(questions)))])
                continue
            spare = [e for e in events if not e.is_question and e.needle != questions[0].needle]
            if not spare:
                raise ValueError(f"{room} tokens have no room for a needle and its question")
            events.remove(spare[0])
        return lengths()

    def _gaps(self, events: list[_Event], filler: int, asked_at_end: bool) -> list[int]:
        """Filler tokens before each event: uneven, and short between questions at the end."""
        share = self.task.rng.gamma(0.6, 1.0, size=len(events) + 1)
        if asked_at_end:
            told = sum(not event.is_question for event in events)
            share[told + 1 :] *= 0.05
        gaps = np.floor(share / share.sum() * filler).astype(int)
        if asked_at_end:
            gaps[0] += filler - int(gaps.sum())  # rounding goes before the first event
        return [int(gap) for gap in gaps[:-1]]
