"""Prompts into K/V, of one session or of several packed together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from kvpager.errors import (
    CapacityError,
    InvalidArgumentError,
    PrefixMismatchError,
    RestoreNotConsumedError,
)
from kvpager.runtime.feed import Feed
from kvpager.runtime.packing import advance
from kvpager.runtime.progress import Progress, reporting
from kvpager.runtime.tokens import TokenIds

if TYPE_CHECKING:
    from kvpager.runtime.engine import Engine
    from kvpager.runtime.session import Session


def prefill_all(
    engine: Engine, prompts: Iterable[tuple[Session, TokenIds]], progress: Progress
) -> None:
    """Feeds every session the rest of its prompt. See `Engine.prefill_many`."""
    feeds = [Feed(session, ids) for session, ids in prompts]
    if len({id(feed.session) for feed in feeds}) != len(feeds):
        raise InvalidArgumentError("a session is named twice; expected one prompt per session")
    for feed in feeds:
        engine.check_session(feed.session)
        engine.positions.check(len(feed.ids), "ids")
        check_extends(feed.session, feed.ids)
    total = sum(len(feed.ids) for feed in feeds)
    with reporting(progress, "prefill", total) as report:
        try:
            for feed in feeds:
                feed.admit(engine)
            report(sum(feed.done for feed in feeds))
            while pending := [feed for feed in feeds if feed.left]:
                try:
                    advance(engine, feeds=pending)
                except CapacityError:
                    if not _advance_one(engine, pending):
                        raise
                report(sum(feed.done for feed in feeds))
        finally:
            for feed in feeds:
                feed.leave()
    for feed in feeds:
        feed.session.note_used()  # also where the prompt was held already and nothing ran


def _advance_one(engine: Engine, feeds: list[Feed]) -> bool:
    """Feeds the first one whose unsealed chunks the pool can hold, if only one chunk at a time."""
    for feed in feeds:
        for room in (engine.rows, engine.layout.chunk_tokens):
            try:
                advance(engine, feeds=[feed], room=room)
            except CapacityError:
                continue
            return True
    return False


def check_extends(session: Session, ids: TokenIds) -> None:
    """Raises unless `ids` begins with all the tokens the session holds.

    The error is PrefixMismatchError; for a restored session RestoreNotConsumedError, which is one,
    so that a restore that cannot be used is never taken for a cold start.
    """
    held = session.tokens
    refusal: type[PrefixMismatchError] = PrefixMismatchError
    whose = "held"
    if session.restored_tokens and not session.restored_tokens_consumed:
        refusal, whose = RestoreNotConsumedError, "restored"
    common = min(len(held), len(ids))
    different = np.flatnonzero(held[:common] != ids[:common])
    if different.size:
        at = int(different[0])
        raise refusal(
            f"ids[{at}] is {ids[at]}, but the session's {whose} token {at} is {held[at]}; "
            f"call session.trim({at}) to drop what follows the common part, or use another session",
            position=at,
        )
    if len(ids) < len(held):
        raise refusal(
            f"ids has {len(ids)} tokens, but the session has {len(held)} {whose} ones; prefill "
            f"takes the whole prompt: pass all of it, or call session.trim({len(ids)}) first",
            position=len(ids),
        )
