"""Tokens one by one against the same tokens as a prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpager.tokens import TokenIds
from kvpager.verify.check import Check
from kvpager.verify.recording import record

if TYPE_CHECKING:
    import torch

    from kvpager.engine import Engine
    from kvpager.verify.subject import Subject


def decoded(subject: Subject, check: Check) -> None:
    """Tokens given one at a time, and tokens generated, over every kind of boundary; then several.

    Each stretch is decoded twice: with the prompt's own tokens, and with those the model chooses.
    """
    engine = subject.engine()
    for start, stop in subject.sweep.windows:
        check.case(f"given token by token from {start} to {stop}")
        _given(subject, check, start, stop)
        words = f"generated from {start} to {stop}"
        _generated(subject, check, engine, [subject.prompt[:start]], stop - start, words)
    for count in subject.sweep.batches:
        prompts = [
            subject.ids(length, seed=100 + i)
            for i, length in enumerate(subject.sweep.lengths(count))
        ]
        engine = subject.engine(pool_tokens=_pool_for(subject, count))
        for temperature in (0.0, 1.0) if count == 3 else (0.0,):
            how = "sampled" if temperature else "greedy"
            words = f"{how}, {count} at once"
            new_tokens = subject.sweep.new_tokens
            _generated(subject, check, engine, prompts, new_tokens, words, temperature)


def _given(subject: Subject, check: Check, start: int, stop: int) -> None:
    logits = {}
    with subject.session() as session:
        session.prefill(subject.prompt[:start])
        for position in range(start, stop):
            session.append(subject.prompt[position : position + 1])
            logits[position] = session.logits
        check.recording(record(session, logits), subject.cold(subject.prompt))


def _generated(
    subject: Subject,
    check: Check,
    engine: Engine,
    prompts: list[TokenIds],
    new_tokens: int,
    words: str,
    temperature: float = 0.0,
) -> None:
    """Sessions that decode together, each token of each against a cold run of its text."""
    sessions = [subject.session(engine) for _ in prompts]
    engine.prefill_many(zip(sessions, prompts))
    logits: dict[int, dict[int, torch.Tensor]] = {id(session): {} for session in sessions}
    before = engine.stats()["model_forwards"]
    stream = engine.generate_many(sessions, new_tokens, temperature=temperature, seed=11, eos=None)
    for session, _ in stream:
        logits[id(session)][session.committed - 1] = session.logits
    forwards = engine.stats()["model_forwards"] - before
    for i, session in enumerate(sessions):
        check.case(f"{words}, session {i} of {len(prompts[i])} tokens")
        check.recording(record(session, logits[id(session)]), subject.cold(session.tokens))
        came = len(logits[id(session)])
        check.require(came == new_tokens, f"{came} tokens came, expected {new_tokens}")
        session.close()
    # The first token of each comes with its prompt; every further one takes a row of its own.
    check.require(
        forwards >= new_tokens - 1,
        f"{new_tokens} tokens took {forwards} forwards: they were not decoded one by one",
    )
    subject.forget()


def _pool_for(subject: Subject, count: int) -> int:
    """A pool that holds the unsealed chunks of so many sessions; at least the configured one."""
    configured = subject.config.pool_size
    if subject.effort == "start":  # in the engine at hand, whatever it takes
        return configured
    return max(configured, subject.sweep.least_pool + 2 * count * subject.sweep.chunk)
