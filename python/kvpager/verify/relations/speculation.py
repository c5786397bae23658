"""Text with proposed tokens against the same text without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpager.tokens import TokenIds
from kvpager.verify.check import Check, NotRunError
from kvpager.verify.listen import listening
from kvpager.verify.recording import record

if TYPE_CHECKING:
    from kvpager.verify.subject import Subject


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
        how: dict[str, Any] = {"temperature": temperature, "seed": 3, "eos": None}
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
