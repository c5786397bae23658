"""Places up to which a prompt is saved: `prompt_cache_breakpoint` and `cache_control`.

A place is the end of a part of a message. The text up to it is what the chat template makes of the
messages, up to where a word put there comes out. It is saved to the token: what ends within a chunk
is saved up to there.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvpager.server.conversations import Conversations, Kept
from kvpager.session import Session
from kvpager.text.tokenizer import Tokenizer
from kvpager.tokens import TokenIds

if TYPE_CHECKING:
    from kvpager.server.plan import Plan

MOST = 4  # breakpoints of one request that are written, as in both APIs
DEFAULT_TTL = "30m"
_WORD = "\u2063kvpager:breakpoint\u2063"


class Mark(NamedTuple):
    """One place: behind `length` characters of the content of message `message`."""

    message: int
    length: int
    ttl: str


@dataclass(frozen=True)
class Marks:
    """The places of one request, in their order; the last few of them count."""

    places: tuple[Mark, ...] = ()

    def behind(self, messages: int) -> Marks:
        """The same places, with so many messages before them."""
        return Marks(tuple(mark._replace(message=mark.message + messages) for mark in self.places))

    def fork(
        self, source: Conversations, tokenizer: Tokenizer | None, plan: Plan
    ) -> tuple[Session, Kept] | None:
        """A fork of the longest of these beginnings that is saved."""
        if not self.places or tokenizer is None:
            return None
        ids = self._encoded(tokenizer, plan)
        for _, position in reversed(self._positions(tokenizer, plan, ids)):
            found = source.fork_if_usable(_name(ids[:position], plan.salt), plan.salt)
            if found is not None:
                return found
        return None

    def save(
        self, source: Conversations, tokenizer: Tokenizer | None, plan: Plan, session: Session
    ) -> int:
        """Saves the beginnings up to these places of a session that holds the prompt.

        Returns the number of tokens of the longest.
        """
        if not self.places or tokenizer is None or source.store is None:
            return 0
        tokens = session.tokens
        ids = self._encoded(tokenizer, plan)
        if not np.array_equal(ids, tokens[: len(ids)]):
            return 0  # a conversation that kept other tokens for the same text has no place here
        found = self._positions(tokenizer, plan, ids)
        for mark, position in found:
            name = _name(ids[:position], plan.salt)
            if not source.has(name):
                session.save(name, store=source.store, upto=position)
            source.store.set_ttl(name, mark.ttl)
        return max((position for _, position in found), default=0)

    def longest(self, tokenizer: Tokenizer, plan: Plan) -> int:
        """Tokens up to the last place that the template's text has."""
        found = self._positions(tokenizer, plan, self._encoded(tokenizer, plan))
        return max((position for _, position in found), default=0)

    def _encoded(self, tokenizer: Tokenizer, plan: Plan) -> TokenIds:
        return tokenizer.prompt_ids(plan.prompt.messages, plan.prompt.rendering)

    def _positions(self, tokenizer: Tokenizer, plan: Plan, ids: TokenIds) -> list[tuple[Mark, int]]:
        """Each place with its number of tokens; those the template leaves out are not there."""
        found = []
        for mark in self.places[-MOST:]:
            messages = [dict(message) for message in plan.prompt.messages]
            content = messages[mark.message]["content"] or ""
            messages[mark.message]["content"] = (
                content[: mark.length] + _WORD + content[mark.length :]
            )
            text, word, _ = tokenizer.render(messages, plan.prompt.rendering).partition(_WORD)
            if word and text:
                position = _common(tokenizer.encode_prompt(text), ids)
                if position:
                    found.append((mark, position))
        return found


def _common(first: TokenIds, second: TokenIds) -> int:
    count = min(len(first), len(second))
    different = np.flatnonzero(first[:count] != second[:count])
    return int(different[0]) if different.size else count


def _name(ids: TokenIds, salt: str | None) -> str:
    digest = blake2b(ids.astype("<i4").tobytes(), digest_size=16, person=b"kvp-breakpoint")
    digest.update((salt or "").encode())
    return "prompt-" + digest.hexdigest()
