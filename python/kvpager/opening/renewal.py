"""Renews an engine after its model has changed: it drops everything computed before."""

from __future__ import annotations

from typing import Any

from kvpager.errors import InvalidArgumentError
from kvpager.execution.core import EngineCore
from kvpager.hf import check_supported
from kvpager.hf.modes import refuse_modes
from kvpager.hf.support import require_exact_experts
from kvpager.opening.choices import vocab_size
from kvpager.opening.identity import identify
from kvpager.opening.linear import multiplies_experts
from kvpager.progress import Progress
from kvpager.text.transcript import Transcript

# Attributes of `EngineCore` that describe the model.
_KNOWN = (
    "watch",
    "numerics",
    "fingerprint",
    "linear",
    "layout",
    "plan",
    "config",
    "recurrence",
    "row_counts",
    "row_proof",
    "vocab_size",
)


def identify_again(core: EngineCore, progress: Progress) -> None:
    """Identifies a core's model again; if that fails, the core keeps what it knew."""
    before = {name: getattr(core, name) for name in _KNOWN}
    try:
        exact = core.config.exact
        refuse_modes()
        check_supported(core.model, one_at_a_time=exact != "all")
        if exact is not False and not multiplies_experts(core.products, core.model):
            require_exact_experts(core.model)
        core.vocab_size = vocab_size(core.model)
        _check_draft(core)
        _check_texts(core)
        identify(core, progress, proven=before["watch"].same_places())
    except BaseException:
        for name, value in before.items():
            setattr(core, name, value)
        raise


def begin_anew(core: EngineCore) -> None:
    """Opens a new pager; all transcripts keep their texts, now uncomputed."""
    transcripts = [transcript for transcript in core.transcripts if not transcript.closed]
    texts = [_text(transcript) for transcript in transcripts]
    for transcript in transcripts:
        transcript.sequence.close()
    core.checkpoints.clear()
    core.open_pager()
    for transcript, (text, pending) in zip(transcripts, texts):
        transcript.restart(core.pager.sequence(salt=transcript.sequence.salt), text, pending)


def _check_draft(core: EngineCore) -> None:
    draft = None if core.drafter is None else core.drafter.core
    if draft is not None and draft.vocab_size != core.vocab_size:
        raise InvalidArgumentError(
            f"weights_changed: the model has {core.vocab_size} token ids now, and its draft "
            f"{draft.vocab_size}; open an engine with a draft of the same vocabulary"
        )


def _check_texts(core: EngineCore) -> None:
    for transcript in core.transcripts:
        largest = 0 if transcript.closed else int(max(transcript.tokens, default=0))
        if largest >= core.vocab_size:
            raise InvalidArgumentError(
                f"weights_changed: the model has {core.vocab_size} token ids now, and an open "
                f"session has a token {largest}; close or trim that session first"
            )


def _text(transcript: Transcript) -> tuple[Any, int | None]:
    """A text without its pending token, and the pending token."""
    transcript.drop_accepted()
    tokens, pending = transcript.tokens, transcript.pending
    return (tokens if pending is None else tokens[:-1]), pending
