"""Sessions packed into common forwards, in any row, beside any padding."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvpager._support.tokens import TokenIds
from kvpager.verify.check import Check, NotRunError
from kvpager.verify.recording import record
from kvpager.verify.runners import DisturbedRunner, disturbed
from kvpager.verify.sweep import PLAIN

if TYPE_CHECKING:
    import torch

    from kvpager.verify.subject import Subject


@dataclass
class _Disturbance:
    """Counts of moved, padded and shared rows, over all forwards."""

    moved: int = 0
    padded: int = 0
    shared: int = 0
    counts: set[int] = field(default_factory=set)

    def add(self, by: DisturbedRunner) -> None:
        self.moved += by.moved
        self.padded += by.padded
        self.shared += by.shared
        self.counts |= by.counts


def packed(subject: Subject, check: Check) -> None:
    """Prompts and generation of several sessions, with every forward's rows shuffled and padded."""
    sweep = subject.sweep
    done = _Disturbance()
    lengths = [sweep.length, 5, sweep.chunk, min(sweep.rows + 1, sweep.length)]
    if subject.effort == "start":
        lengths = [sweep.chunk + 3, 5, sweep.chunk]
    for turn in range({"start": 1, "short": 2, "full": 8}[subject.effort]):
        prompts = [subject.prompt[: lengths[0]]] + [
            subject.ids(length, seed=200 + i) for i, length in enumerate(lengths[1:])
        ]
        _in_step(subject, check, prompts, turn, done)
        if subject.effort != "start":
            # Of another beginning: nothing may be shared with what the engine has seen.
            seeds = range(1000 * (turn + 1), 1000 * (turn + 1) + len(lengths))
            fresh = [subject.ids(length, seed) for length, seed in zip(lengths, seeds)]
            _as_they_come(subject, check, fresh, turn, done)
        subject.forget()
    if not done.moved or not done.padded or not done.shared:
        raise NotRunError(
            f"of all rows {done.moved} were moved and {done.padded} were garbage, and "
            f"{done.shared} forwards held several sessions: not all of it was tried"
        )
    check.note(
        f"{done.moved:,} rows moved, {done.padded:,} rows of garbage, {done.shared:,} forwards of "
        f"several sessions, of {', '.join(map(str, sorted(done.counts)))} rows"
    )


def _in_step(
    subject: Subject, check: Check, prompts: list[TokenIds], turn: int, done: _Disturbance
) -> None:
    """All prompts, then a token of each session in turn."""
    engine = subject.engine()
    sessions = [subject.session() for _ in prompts]
    logits: dict[int, dict[int, torch.Tensor]] = {id(session): {} for session in sessions}
    with disturbed(engine, seed=subject.seed + turn) as disturber:
        engine.prefill_many(zip(sessions, prompts))
        for session in sessions:
            logits[id(session)][session.committed - 1] = session.logits
        for session, _ in engine.generate_many(sessions, subject.sweep.new_tokens, **PLAIN):
            logits[id(session)][session.committed - 1] = session.logits
    done.add(disturber)
    for i, session in enumerate(sessions):
        check.case(f"packed, round {turn}, session {i} of {len(prompts[i])} tokens")
        check.recording(record(session, logits[id(session)]), subject.cold(session.tokens))
        session.close()


def _as_they_come(
    subject: Subject, check: Check, prompts: list[TokenIds], turn: int, done: _Disturbance
) -> None:
    """The scheduler's own mixture: tokens, pieces of prompts and guesses in one forward."""
    engine = subject.engine()
    with disturbed(engine, seed=subject.seed + 50 + turn) as disturber:
        completions = engine.run(
            prompts,
            subject.sweep.new_tokens,
            temperature=0.7,
            seed=[turn * 10 + i for i in range(len(prompts))],
            **PLAIN,
            speculate="prompt-lookup" if subject.all_exact else None,
            keep_sessions=True,
        )
    done.add(disturber)
    for i, completion in enumerate(completions):
        check.case(f"run, round {turn}, session {i} of {len(prompts[i])} tokens")
        if completion.session is None:
            raise NotRunError(
                f"session {i} ended with {completion.finish_reason}: {completion.error}"
            )
        with completion.session as session:
            check.tokens(completion.tokens, session.tokens[len(prompts[i]) :])
            check.session(session, subject.cold(session.tokens))
