"""Prefills prompts, of one session or of several packed together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from kvpager._runtime.execution.core import EngineCore
from kvpager._runtime.scheduling.chat import settled
from kvpager._runtime.scheduling.feed import Feed
from kvpager._runtime.scheduling.packing import advance
from kvpager._runtime.text.transcript import Transcript
from kvpager._support.tokens import TokenIds
from kvpager.errors import (
    CapacityError,
    InvalidArgumentError,
    PrefixMismatchError,
    RestoreNotConsumedError,
)
from kvpager.progress import Progress, reporting


def prefill_all(
    core: EngineCore, prompts: Iterable[tuple[Transcript, TokenIds]], progress: Progress
) -> None:
    """Prefills the rest of every session's prompt. See `Engine.prefill_many`."""
    feeds = [Feed(transcript, ids) for transcript, ids in prompts]
    if len({id(feed.transcript) for feed in feeds}) != len(feeds):
        raise InvalidArgumentError("a session is named twice; expected one prompt per session")
    for feed in feeds:
        core.check_open(feed.transcript)
        core.positions.check(len(feed.ids), "ids")
        check_extends(feed.transcript, feed.ids)
    for feed in feeds:  # what is added is no part of an answer
        feed.transcript.conversation = replace(settled(core, feed.transcript), untaken=False)
    total = sum(len(feed.ids) for feed in feeds)
    with reporting(progress, "prefill", total) as report:
        try:
            for feed in feeds:
                feed.admit(core)
            report(sum(feed.done for feed in feeds))
            while pending := [feed for feed in feeds if feed.left]:
                try:
                    advance(core, feeds=pending)
                except CapacityError:
                    if not _advance_one(core, pending):
                        raise
                report(sum(feed.done for feed in feeds))
        finally:
            for feed in feeds:
                feed.leave()
    for feed in feeds:
        feed.transcript.mark_used()  # also if the K/V were there already and nothing ran


def _advance_one(core: EngineCore, feeds: list[Feed]) -> bool:
    """Computes one chunk of the first prompt whose unsealed chunks fit into the pool."""
    for feed in feeds:
        for room in (core.rows, core.facts.layout.chunk_tokens):
            try:
                advance(core, feeds=[feed], room=room)
            except CapacityError:
                continue
            return True
    return False


def check_extends(transcript: Transcript, ids: TokenIds) -> None:
    """Raises unless `ids` begins with all tokens the session holds.

    Raises PrefixMismatchError; for a restored session its subclass RestoreNotConsumedError, so that
    callers never mistake a restore that cannot be used for a cold start.
    """
    held = transcript.tokens
    refusal: type[PrefixMismatchError] = PrefixMismatchError
    whose = "held"
    if transcript.restored_tokens and not transcript.restored_tokens_consumed:
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
