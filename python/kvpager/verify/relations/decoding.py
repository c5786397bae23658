"""Tokens one by one against the same tokens as a prompt: given, generated, proposed, re-sealed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpager._support.tokens import TokenIds
from kvpager.verify.check import Check, NotRunError
from kvpager.verify.recording import record, record_sequence
from kvpager.verify.runners import listening
from kvpager.verify.sweep import PLAIN

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
    stream = engine.generate_many(sessions, new_tokens, temperature=temperature, seed=11, **PLAIN)
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


def resealed(subject: Subject, check: Check) -> None:
    """Text generated with provisional rows: its sealed chunks, and prompts that go on from it."""
    sweep = subject.sweep
    engine = subject.engine(exact="reuse")
    chunk = sweep.chunk
    salt_of = {}
    texts = {}
    for start in (chunk - 3, 2 * chunk):
        salt_of[start] = f"resealed {start}"
        with subject.session(engine, salt=salt_of[start]) as session:
            session.prefill(subject.prompt[:start])
            for _ in session.generate(chunk + 6, **PLAIN, stream="tokens"):
                pass
            check.case(f"generated from {start} on")
            texts[start] = session.tokens
            worth = {info.provenance for info in session.ledger() if info.sealed}
            sealed = sum(info.sealed for info in session.ledger()) * chunk
            check.require(worth == {"exact"}, f"sealed chunks are {', '.join(sorted(worth))}")
            check.require(sealed > start // chunk * chunk, "no generated chunk was sealed")
            cold = subject.cold(texts[start])
            check.recording(record_sequence(engine.layout, session.sequence, sealed), cold)
    for start, text in texts.items():
        check.case(f"a prompt that goes on from what was generated from {start} on")
        more = np.concatenate([text, subject.ids(5, seed=700)])
        with subject.session(engine, salt=salt_of[start]) as session:
            session.prefill(more)
            check.session(session, subject.cold(more))
    subject.forget()


class Recalling:
    """Proposes the known continuation of a text; every `wrong`-th token is replaced."""

    def __init__(self, text: TokenIds, vocab_size: int, wrong: int = 0) -> None:
        self._text = text
        self._vocab = vocab_size
        self._wrong = wrong

    def propose(self, tokens: TokenIds, count: int) -> Sequence[int]:
        """See `kvpager.speculation.Proposer`."""
        proposed: list[int] = self._text[len(tokens) : len(tokens) + count].tolist()
        if not self._wrong:
            return proposed
        return [
            (token + 1) % self._vocab if (len(tokens) + i) % self._wrong == 0 else token
            for i, token in enumerate(proposed)
        ]


def speculated(subject: Subject, check: Check) -> None:
    """Good, bad and mixed proposals and a look-up in the prompt, greedy and sampled."""
    sweep = subject.sweep
    new_tokens = max(sweep.new_tokens, 12)
    # A prompt that repeats itself, so that looking up in it proposes something.
    part = subject.prompt[: max(4, sweep.chunk // 2)]
    prompt = np.tile(part, 3)[: sweep.length - 1]
    for temperature in (0.0,) if subject.effort == "start" else (0.0, 1.0):
        how: dict[str, Any] = {"temperature": temperature, "seed": 3, **PLAIN}
        with subject.session() as plain:
            plain.prefill(prompt)
            plain.generate(new_tokens, **how).tokens.tolist()
            text = plain.tokens
        cold = subject.cold(text)
        proposers = _proposers(text, subject.engine().vocab_size)
        for name, speculate in proposers.items():
            check.case(f"{name} proposals, temperature {temperature}")
            _speculate(subject, check, prompt, name, {**how, "speculate": speculate}, text, cold)
    subject.forget()


def _proposers(text: TokenIds, vocab_size: int) -> dict[str, str | Callable[[], Recalling]]:
    """Values for `speculate=`, by their description."""
    return {
        "good": lambda: Recalling(text, vocab_size),
        "bad": lambda: Recalling(text, vocab_size, wrong=1),
        "mixed": lambda: Recalling(text, vocab_size, wrong=3),
        "prompt-lookup": "prompt-lookup",
    }


def _speculate(
    subject: Subject,
    check: Check,
    prompt: TokenIds,
    name: str,
    how: dict[str, Any],
    text: TokenIds,
    cold: Any,
) -> None:
    with subject.session() as session, listening(subject.engine()) as listener:
        session.prefill(prompt)
        tokens = [
            int(token)
            for token in session.generate(len(text) - len(prompt), **how, stream="tokens")
        ]
        check.tokens(np.array(tokens, dtype=np.int32), text[len(prompt) :])
        if tokens != text[len(prompt) :].tolist():
            return  # another text: its K/V and logits have nothing to be compared with
        stats = session.speculation
        logits = dict(listener.heard(session.sequence.uid, text))
        check.recording(record(session, logits), cold)
    if name in ("good", "mixed") and not stats.accepted:
        raise NotRunError(f"no {name} proposal was accepted, so accepting was not tried")
    if name in ("bad", "mixed") and stats.proposed == stats.accepted:
        raise NotRunError(f"no {name} proposal was refused, so refusing was not tried")
    kind = "sampled" if how["temperature"] else "greedy"
    check.note(f"{name}, {kind}: {stats.accepted} of {stats.proposed} accepted")
