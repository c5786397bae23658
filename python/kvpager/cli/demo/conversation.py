"""Holding one turn of the conversation: asking, answering, noting what happened."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpager.cli.demo.compare import Bytes, raw
from kvpager.cli.demo.plan import ANSWER_TOKENS, Question
from kvpager.pager import TIER_RESIDENT
from kvpager.report import Trace
from kvpager.runtime.progress import reporting

if TYPE_CHECKING:
    from kvpager import Session

_PREFILL_MOMENTS = 256  # of the picture: more than it has columns


@dataclass
class Answers:
    """What a turn's questions brought."""

    tokens: list[int] = field(default_factory=list)
    logits: list[Bytes] = field(default_factory=list)  # [vocab x itemsize] behind each token
    out_at_start: list[bool] = field(default_factory=list)  # per needle, its chunk not resident
    found: list[bool] = field(default_factory=list)  # per needle
    paged_out: list[bool] = field(default_factory=list)  # likewise, when it was asked for
    first_token_at: float = 0.0  # time.perf_counter
    decode_s: float = 0.0
    decoded_tokens: int = 0

    def all_logits(self) -> Bytes:
        """[tokens, vocab x itemsize]."""
        return np.stack(self.logits) if self.logits else np.zeros((0, 0), np.uint8)

    def to_json(self) -> dict[str, Any]:
        """What a report needs; logits apart."""
        return {
            "answers": self.tokens,
            "needles_asked": len(self.found),
            "needles_found": sum(self.found),
            "needles_paged_out_at_start": sum(self.out_at_start),
            "needles_paged_out_when_asked": sum(self.paged_out),
            "decode_tokens_per_s": self.decoded_tokens / self.decode_s if self.decode_s else None,
        }


def prefill(session: Session, ids: list[int], label: str, quiet: bool) -> Trace:
    """Prefills with a bar on stderr, noting residency as often as a picture can show."""
    trace = Trace(label, session.sequence)
    stride = max(1, len(ids) // (session.engine.rows * _PREFILL_MOMENTS))
    with _steps(label, len(ids), quiet) as update:
        calls = 0

        def progress(done: int, total: int) -> None:
            nonlocal calls
            update(done)
            if calls and (calls % stride == 0 or done == total):
                trace.note()
            calls += 1

        session.prefill(ids, progress=progress)
    return trace


def ask(session: Session, questions: list[Question], label: str) -> tuple[Answers, Trace]:
    """Asks every question in turn; answers are greedy and of fixed length."""
    answers, trace = Answers(), Trace(label, session.sequence)
    answers.out_at_start = [_paged_out(session, question) for question in questions]
    for question in questions:
        if question.needle is not None:
            answers.paged_out.append(_paged_out(session, question))
            trace.ask(question.needle[0] // session.engine.layout.chunk_tokens)
        given = _answer(session, question, answers, trace)
        if question.answer is not None:
            answers.found.append(given == question.answer)
    return answers, trace


def _paged_out(session: Session, question: Question) -> bool:
    """Whether none of the needle's chunks is in the pool now, by the ledger."""
    if question.needle is None:
        return False
    start, stop = question.needle
    size = session.engine.layout.chunk_tokens
    tiers = session.sequence.residency()["tiers"][start // size : -(-stop // size)]
    return not (tiers & TIER_RESIDENT).any()


def _answer(session: Session, question: Question, answers: Answers, trace: Trace) -> list[int]:
    session.append(question.ids)
    given: list[int] = []
    before = time.perf_counter()
    for token in session.generate(ANSWER_TOKENS, eos=None):
        now = time.perf_counter()
        answers.first_token_at = answers.first_token_at or now
        if given:  # the first one came with the question's own forward
            answers.decode_s += now - before
            answers.decoded_tokens += 1
        given.append(token)
        answers.logits.append(raw(session.logits))
        trace.note()
        before = time.perf_counter()
    answers.tokens += given
    return given


@contextmanager
def _steps(label: str, total: int, quiet: bool) -> Iterator[Callable[[int], object]]:
    with reporting(not quiet, label, total) as update:
        yield update
