"""An engine goes on with its model as it is now, without what it computed before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpager.errors import InvalidArgumentError
from kvpager.hf import check_supported
from kvpager.runtime.opening import vocab_size
from kvpager.runtime.progress import Progress

if TYPE_CHECKING:
    from kvpager.runtime.engine import Engine
    from kvpager.runtime.session import Session

# What an engine knows of its model.
_KNOWN = (
    "_watch",
    "_numerics",
    "fingerprint",
    "layout",
    "plan",
    "config",
    "recurrence",
    "row_counts",
    "row_proof",
    "vocab_size",
)


def renew(engine: Engine, progress: Progress) -> None:
    """See `Engine.weights_changed`."""
    engine.check_open()
    engine.saves.wait()  # which write under the name that they began with
    found = False
    try:
        with engine.turns:  # between forwards
            _find_out(engine, progress)
            found = True
            _forget(engine)
    except BaseException:
        if found:  # what the sessions held is gone
            engine.close()
        raise


def _forget(engine: Engine) -> None:
    """Opens a new pager, over which all sessions go on with nothing but their text."""
    sessions = [session for session in engine.sessions() if not session.closed]
    texts = [_text(session) for session in sessions]
    for session in sessions:
        session.sequence.close()
    engine.checkpoints.clear()
    engine.open_pager()
    for session, (text, pending) in zip(sessions, texts):
        session.begin_anew(engine.pager.sequence(salt=session.sequence.salt), text, pending)


def _find_out(engine: Engine, progress: Progress) -> None:
    """Makes the engine know its model as it is; where that fails, as it was."""
    before = {name: getattr(engine, name) for name in _KNOWN}
    try:
        exact = engine.config.exact
        check_supported(engine.model, exact=exact is not False, one_at_a_time=exact != "all")
        engine.vocab_size = vocab_size(engine.model)
        _check_draft(engine)
        engine.identify(progress, proven=before["_watch"].same_places())
    except BaseException:
        for name, value in before.items():
            setattr(engine, name, value)
        raise


def _check_draft(engine: Engine) -> None:
    draft = engine.draft
    if draft is not None and draft.vocab_size != engine.vocab_size:
        raise InvalidArgumentError(
            f"weights_changed: the model has {engine.vocab_size} token ids now, and its draft "
            f"{draft.vocab_size}; open an engine with a draft of the same vocabulary"
        )


def _text(session: Session) -> tuple[Any, int | None]:
    """A session's tokens without the pending one, and that."""
    session.drop_ahead()
    tokens, pending = session.tokens, session.pending
    return (tokens if pending is None else tokens[:-1]), pending
