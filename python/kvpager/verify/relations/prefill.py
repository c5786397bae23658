"""A prompt computed again, in pieces, or with its beginning reused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpager.config import TopK
from kvpager.verify.check import Check
from kvpager.verify.cold import cold_run
from kvpager.verify.subject import new_salt

if TYPE_CHECKING:
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
