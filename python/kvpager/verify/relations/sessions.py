"""Prompts computed again or with a reused beginning; sessions that are forked, trimmed, paged."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvpager.config import TopK
from kvpager.verify.check import Check, NotRunError
from kvpager.verify.recording import cold_run, record
from kvpager.verify.subject import new_salt

if TYPE_CHECKING:
    import torch

    from kvpager._support.tokens import TokenIds
    from kvpager.session import Session
    from kvpager.verify.recording import Recording
    from kvpager.verify.subject import Subject


def cold_again(subject: Subject, check: Check) -> None:
    """Another cold run of the same tokens, and of their beginning alone, in this engine."""
    cold = subject.cold(subject.prompt)
    selection = subject.config.selection
    if isinstance(selection, TopK):
        check.note(f"rows choose {selection.chunks} of at most {subject.sweep.candidates} chunks")
    check.case("a second cold run")
    check.recording(cold_run(subject.engine(), subject.prompt, new_salt()), cold)
    for length in (subject.sweep.cuts[0], len(subject.prompt) - 1):
        check.case(f"a cold run of the first {length} tokens")
        check.recording(cold_run(subject.engine(), subject.prompt[:length], new_salt()), cold)
    if subject.effort != "start":
        check.case("a cold run of another engine")
        with subject.fresh_engine() as engine:
            check.recording(cold_run(engine, subject.prompt, new_salt()), cold)


def warm(subject: Subject, check: Check) -> None:
    """Prefill of a prefix, then of the whole: in the session itself, and in one that shares it."""
    cold = subject.cold(subject.prompt)
    chunk = subject.sweep.chunk
    engine = subject.engine()
    for length in subject.sweep.prefixes:
        salt = new_salt()
        check.case(f"prefilled up to {length}")
        first = subject.session(salt=salt)
        first.prefill(subject.prompt[:length])
        check.session(first, cold)
        check.case(f"reused up to {length}")
        reused = engine.stats()["prefix_tokens_reused"]
        second = subject.session(salt=salt)
        second.prefill(subject.prompt)
        reused = engine.stats()["prefix_tokens_reused"] - reused
        check.session(second, cold)
        check.require(
            reused == length // chunk * chunk,
            f"{reused} tokens reused, expected {length // chunk * chunk}",
        )
        second.close()
        check.case(f"continued at {length}")
        first.prefill(subject.prompt)
        check.session(first, cold)
        first.close()


def forked(subject: Subject, check: Check) -> None:
    """A fork and the session it is of, continued differently, and a fork of the fork."""
    cold = subject.cold(subject.prompt)
    for cut in subject.sweep.cuts:
        with subject.session() as session:
            session.prefill(subject.prompt[:cut])
            with session.fork() as fork:
                other = subject.ids(min(subject.sweep.chunk + 2, 40), seed=300 + cut)
                fork.append(other)
                with fork.fork() as second:
                    check.case(f"forked at {cut}, and the session it is of continued")
                    session.prefill(subject.prompt)
                    check.session(session, cold)
                    text = np.concatenate([subject.prompt[:cut], other])
                    check.case(f"forked at {cut}, and the fork continued")
                    check.session(fork, subject.cold(text))
                    more = np.concatenate([text, other[:3]])
                    check.case(f"forked at {cut}, and a fork of the fork continued")
                    second.append(other[:3])
                    check.session(second, subject.cold(more))
        subject.forget()


def trimmed(subject: Subject, check: Check) -> None:
    """A session cut back, then continued with the same tokens and with others."""
    cold = subject.cold(subject.prompt)
    for cut in subject.sweep.cuts:
        with subject.session() as session:
            session.prefill(subject.prompt)
            check.case(f"trimmed to {cut}")
            session.trim(cut)
            check.session(session, cold)
            check.case(f"trimmed to {cut} and continued with other tokens")
            other = subject.ids(min(subject.sweep.chunk + 2, 40), seed=400 + cut)
            session.append(other)
            check.session(session, subject.cold(session.tokens))
            check.case(f"trimmed to {cut} twice and continued with the same tokens")
            session.trim(cut)
            session.prefill(subject.prompt)
            check.session(session, cold)
        subject.forget()


def paged(subject: Subject, check: Check) -> None:
    """Two sessions through the smallest pool, with blocks in random order and poisoned when free.

    Between forwards everything that may leave is sent away, or pinned back in.
    """
    sweep = subject.sweep
    engine = subject.engine(
        pool_tokens=sweep.least_pool, debug_shuffle_seed=subject.seed + 1, debug_poison=True
    )
    cold = subject.cold(subject.prompt)
    other = np.concatenate([subject.ids(7, seed=500), subject.prompt[:-7]])
    other_cold = subject.cold(other)
    random = np.random.default_rng(subject.seed)
    step = max(1, sweep.chunk // 3)
    with subject.session(engine) as one, subject.session(engine) as two:
        runs: tuple[tuple[Session, TokenIds, Recording, dict[int, torch.Tensor]], ...] = (
            (one, subject.prompt, cold, {}),
            (two, other, other_cold, {}),
        )
        while any(session.length < len(ids) for session, ids, _, _ in runs):
            for session, ids, _, logits in runs:
                length = min(len(ids), session.length + int(random.integers(1, 2 * step)))
                if length > session.length:
                    session.prefill(ids[:length])
                    logits[length - 1] = session.logits
                    engine.pager.evict_all()
        for number, (session, _, reference, logits) in enumerate(runs):
            check.case(f"paged out and in, session {number}")
            check.recording(record(session, logits), reference)
            with session.pin(0, sweep.chunk):
                check.case(f"paged out and in, session {number}, pinned")
                check.recording(record(session), reference)
            check.case(f"paged out and in, session {number}, computed again")
            engine.pager.evict_all()
            session.trim(session.length - 1)
            check.session(session, reference)
    if not engine.stats()["chunks_evicted"]:
        raise NotRunError("no chunk was evicted, so nothing was tried; give a longer prompt")
    check.note(f"{engine.stats()['chunks_evicted']:,} evictions")
    subject.forget()
