"""Prompts into K/V, M rows at a time, of one session or of several packed together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvpager.errors import (
    CapacityError,
    InvalidArgumentError,
    PrefixMismatchError,
    RestoreNotConsumedError,
)
from kvpager.runtime.batch import Batch
from kvpager.runtime.prefix import adopt_stored_prefix
from kvpager.runtime.progress import Progress, reporting
from kvpager.runtime.repair import run
from kvpager.runtime.tokens import TokenIds

if TYPE_CHECKING:
    from kvpager.runtime.engine import Engine
    from kvpager.runtime.session import Session


@dataclass
class _Feed:
    """A whole prompt and the session it goes into."""

    session: Session
    ids: TokenIds

    @property
    def done(self) -> int:
        return self.session.committed

    def adopt(self) -> None:
        """Before a session's first row: shares what the pager already holds of its prompt."""
        if not self.done:
            self.session.sequence.adopt_prefix(self.ids)

    def admit(self, engine: Engine) -> None:
        """Holds lower-tier room for the whole prompt, less what is shared; or changes nothing."""
        empty = not self.done
        self.adopt()
        if empty:
            adopt_stored_prefix(engine, self.session, self.ids)
        try:
            self.session.sequence.reserve(len(self.ids))
        except BaseException:
            if empty:
                self.session.hold(engine.pager.sequence(salt=engine.salt))
            raise


def prefill_all(
    engine: Engine, prompts: Iterable[tuple[Session, TokenIds]], progress: Progress
) -> None:
    """Feeds every session the rest of its prompt. See `Engine.prefill_many`."""
    feeds = [_Feed(session, ids) for session, ids in prompts]
    if len({id(feed.session) for feed in feeds}) != len(feeds):
        raise InvalidArgumentError("a session is named twice; expected one prompt per session")
    for feed in feeds:
        engine.check_session(feed.session)
        check_extends(feed.session, feed.ids)
    total = sum(len(feed.ids) for feed in feeds)
    with reporting(progress, "prefill", total) as report:
        for feed in feeds:
            feed.admit(engine)
        report(sum(feed.done for feed in feeds))
        while pending := [feed for feed in feeds if feed.done < len(feed.ids)]:
            try:
                _run_one(engine, pending)
            except CapacityError:  # the pool may still hold the unsealed chunks of one
                if len(pending) == 1:
                    raise
                _run_one(engine, pending[:1])
            report(sum(feed.done for feed in feeds))
    for feed in feeds:
        feed.session.note_used()  # also where the prompt was held already and nothing ran


def _run_one(engine: Engine, feeds: list[_Feed]) -> None:
    """One forward: its rows go to the first prompt, what is left over to the next."""
    batch = Batch(engine.rows)
    finished = []
    for feed in feeds:
        if not batch.room:
            break
        feed.adopt()  # again: an earlier prompt of this call may have the same beginning
        start = feed.done
        tokens = feed.ids[start : start + batch.room]
        if not tokens.size:
            continue
        rows = batch.commit(feed.session.sequence, start, tokens)
        if start + len(tokens) == len(feed.ids):
            batch.wanted.append(rows[-1])
            finished.append(feed)
    if batch.used:
        logits = run(engine, batch)
        for feed, row in zip(finished, logits):
            feed.session.keep_logits(row)


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
