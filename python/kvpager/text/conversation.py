"""The messages of a conversation, and the tokens each stretch of its text has had so far.

A chat template makes one text of all messages, and makes it anew in every turn. Encoding that text
again could give other tokens than the model produced, so that their K/V were lost. So the text is
kept in stretches, with the tokens that each has: prompts as they were encoded, answers as they were
produced. A turn keeps the tokens of all stretches with which the new text begins, and encodes only
the rest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from kvpager.errors import CorruptSnapshotError, InvalidArgumentError
from kvpager.text.tokenizer import Message, Tokenizer, text_of
from kvpager.tokens import TokenIds

ASSISTANT = "assistant"


class Stretch(NamedTuple):
    """A stretch of a conversation's text, and its tokens."""

    text: str
    ids: TokenIds


@dataclass(frozen=True)
class OpenAnswer:
    """An answer that may still grow: the session's tokens from `start` on.

    stops: strings that end it; what a message gets ends before them.
    """

    start: int
    stops: tuple[str, ...]


@dataclass(frozen=True)
class Turn:
    """What the next turn of a conversation would be; see `Conversation.turn`.

    Attributes:
        messages: all of them, without the answer.
        ids: the tokens of the whole prompt.
        stretches: of the prompt.
    """

    messages: tuple[Message, ...]
    ids: TokenIds
    stretches: tuple[Stretch, ...]


@dataclass(frozen=True)
class Conversation:
    """Messages and stretches of one text; immutable. A new session has none of either.

    Attributes:
        messages: so far; the answer that is open is not among them.
        stretches: of the text's beginning, as the last turn left it. The session may hold other
            tokens by now.
        answer: the answer of the last turn, until it is settled.
    """

    messages: tuple[Message, ...] = ()
    stretches: tuple[Stretch, ...] = ()
    answer: OpenAnswer | None = None

    def turn(
        self,
        messages: Sequence[Message],
        tokenizer: Tokenizer,
        options: Mapping[str, Any],
    ) -> Turn:
        """The prompt for an answer to `messages`.

        Args:
            messages: the whole conversation.
            tokenizer: renders the messages and encodes what is new.
            options: further arguments of the chat template.
        """
        text = tokenizer.render(messages, options)
        kept: list[Stretch] = []
        at = 0
        for stretch in self.stretches:
            if not text.startswith(stretch.text, at):
                break
            kept.append(stretch)
            at += len(stretch.text)
        if at < len(text):
            new = tokenizer.encode(text[at:], "messages", special_tokens=False)
            kept.append(Stretch(text[at:], new))
        if not kept:
            raise InvalidArgumentError("messages: the chat template makes no text of them")
        ids = np.concatenate([stretch.ids for stretch in kept])
        return Turn(tuple(messages), ids, tuple(kept))

    def settled(self, tokens: TokenIds, tokenizer: Tokenizer | None) -> Conversation:
        """The conversation with its open answer as a message. REQUIRES: there is one.

        tokens: the session's, of which the answer is the end. Without a tokenizer, if nothing was
        produced, or if the prompt was cut since and goes on otherwise, the answer is left out.
        """
        assert self.answer is not None
        start = self.answer.start
        prompt = np.concatenate([stretch.ids for stretch in self.stretches])
        if tokenizer is None or len(tokens) <= start or not np.array_equal(tokens[:start], prompt):
            return replace(self, answer=None)
        ids, before = tokens[start:], tokens[:start]
        content = text_of(ids, before, tokenizer)
        for stop in self.answer.stops:
            content = content.partition(stop)[0]
        whole = Stretch(text_of(ids, before, tokenizer, special_tokens=True), ids)
        return Conversation(
            messages=(*self.messages, {"role": ASSISTANT, "content": content}),
            stretches=(*self.stretches, whole),
        )

    def to_json(self, tokens: TokenIds) -> dict[str, Any]:
        """JSON values for a snapshot of `tokens`. REQUIRES: settled."""
        stretches, held = [], 0
        for stretch in self.stretches:
            end = held + len(stretch.ids)
            if not np.array_equal(tokens[held:end], stretch.ids):
                break
            stretches.append([stretch.text, len(stretch.ids)])
            held = end
        return {"messages": [dict(message) for message in self.messages], "stretches": stretches}

    @classmethod
    def from_json(cls, values: Any, tokens: TokenIds, path: str) -> Conversation:
        """The inverse of `to_json`.

        Raises:
            CorruptSnapshotError: the values are not what `to_json` returns for `tokens`.
        """
        try:
            messages = tuple(checked_messages(values["messages"]))
            parts = [(text, count) for text, count in values["stretches"]]
        except (KeyError, TypeError, ValueError, InvalidArgumentError) as error:
            raise CorruptSnapshotError(f"{path}: session.conversation: {error!r}") from error
        stretches, held = [], 0
        for text, count in parts:
            fits = type(count) is int and 0 <= count <= len(tokens) - held
            if type(text) is not str or not fits:
                raise CorruptSnapshotError(
                    f"{path}: session.conversation.stretches has {[text, count]!r}; expected text "
                    f"and its number of tokens, of the {len(tokens)} that the snapshot has"
                )
            stretches.append(Stretch(text, tokens[held : held + count].copy()))
            held += count
        return cls(messages, tuple(stretches))


def checked_messages(messages: Any) -> list[Message]:
    """Copies of a caller's messages.

    Raises:
        InvalidArgumentError: no list of mappings with a role, or not JSON.
    """
    expected = 'a list of messages such as {"role": "user", "content": "..."}'
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidArgumentError(f"messages is {messages!r}; expected {expected}")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidArgumentError(f"messages[{i}] is {message!r}; expected {expected}")
    try:
        copies: list[Message] = json.loads(
            json.dumps([dict(message) for message in messages], allow_nan=False)
        )
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"messages cannot be written as JSON, and so not be saved: {error}"
        ) from error
    return copies
