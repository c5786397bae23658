"""What `exact="reuse"` promises: sealed chunks of generated text are those of a cold run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvpager.verify.check import Check
from kvpager.verify.recording import record_sequence

if TYPE_CHECKING:
    from kvpager.verify.subject import Subject


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
            for _ in session.generate(chunk + 6, eos=None, stream="tokens"):
                pass
            check.case(f"generated from {start} on")
            texts[start] = session.tokens
            worth = {info.provenance for info in session.ledger() if info.sealed}
            sealed = sum(info.sealed for info in session.ledger()) * chunk
            check.require(worth == {"exact"}, f"sealed chunks are {', '.join(sorted(worth))}")
            check.require(sealed > start // chunk * chunk, "no generated chunk was sealed")
            cold = subject.cold(texts[start])
            check.recording(record_sequence(engine, session.sequence, sealed), cold)
    for start, text in texts.items():
        check.case(f"a prompt that goes on from what was generated from {start} on")
        more = np.concatenate([text, subject.ids(5, seed=700)])
        with subject.session(engine, salt=salt_of[start]) as session:
            session.prefill(more)
            check.session(session, subject.cold(more))
    subject.forget()
