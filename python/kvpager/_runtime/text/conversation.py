"""The messages of a conversation, and the tokens each stretch of its text has had so far.

A chat template makes one text of all messages, and makes it again in every turn. Encoding that text
again could give other tokens than the model produced, so that their K/V were lost. So the text is
kept in stretches, with the tokens that each has: prompts as they were encoded, answers as they were
produced. A turn keeps all tokens up to the last answer that the new text has, and gives the rest
the tokens that it has in the whole text: a conversation's prompt depends on its answers, and on
nothing else that is in memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from kvpager._runtime.text.template_rendering import Shown
from kvpager._runtime.text.tokenizer import (
    NOTHING_SHOWN,
    Message,
    Rendering,
    Tokenizer,
    text_of,
)
from kvpager._support.tokens import TokenIds
from kvpager.errors import CorruptSnapshotError, InvalidArgumentError

ASSISTANT = "assistant"


class Stretch(NamedTuple):
    """A stretch of a conversation's text, and its tokens.

    Attributes:
        text: as `Tokenizer.render` returns it, marks included.
        ids: its tokens.
        produced: whether they are an answer's; others are what the tokenizer makes of the text.
    """

    text: str
    ids: TokenIds
    produced: bool = False


@dataclass(frozen=True)
class LastAnswer:
    """The answer of the last turn: the session's tokens [start, end).

    Attributes:
        start: where the prompt ends.
        stops: strings that end it; what a message gets ends before them.
        end: None while it is open, and every token of the session from `start` on belongs to it; a
            closed one is the last message and stretch of its conversation.
        continues: characters of its message that the prompt has already; 0: it is a message of its
            own.
    """

    start: int
    stops: tuple[str, ...]
    end: int | None = None
    continues: int = 0


@dataclass(frozen=True)
class Turn:
    """What the next turn of a conversation would be; see `Conversation.turn`.

    Attributes:
        messages: all of them, without the answer.
        ids: the tokens of the whole prompt.
        stretches: of the prompt.
        shown: the messages as the chat template got them.
    """

    messages: tuple[Message, ...]
    ids: TokenIds
    stretches: tuple[Stretch, ...]
    shown: Shown


@dataclass(frozen=True)
class Conversation:
    """Messages and stretches of one text; immutable. A new session has none of either.

    Attributes:
        messages: so far; an answer that is open is not among them.
        stretches: of the text's beginning, as the last turn left it. The session may hold other
            tokens by now.
        answer: of the last turn; None if it was cut away.
        shown: the messages of the last turn as its chat template got them, so that the next turn
            need not read them again. It changes no prompt.
        untaken: the text behind the stretches is of a turn that was not taken, so that the next
            turn may drop it.
    """

    messages: tuple[Message, ...] = ()
    stretches: tuple[Stretch, ...] = ()
    answer: LastAnswer | None = None
    shown: Shown = field(default=NOTHING_SHOWN, compare=False, repr=False)
    untaken: bool = field(default=False, compare=False)

    def turn(self, messages: Sequence[Message], tokenizer: Tokenizer, rendering: Rendering) -> Turn:
        """The prompt for an answer to `messages`.

        Args:
            messages: the whole conversation.
            tokenizer: renders the messages and encodes what is new.
            rendering: options of the chat template.
        """
        shown = tokenizer.shown(messages, rendering, self.shown)
        text = tokenizer.render(messages, rendering, shown)
        if not text:
            raise InvalidArgumentError("messages: the chat template makes no text of them")
        kept: list[Stretch] = []
        at = 0
        for stretch in self.stretches:
            if not text.startswith(stretch.text, at):
                break
            kept.append(stretch)
            at += len(stretch.text)
        rest = None
        while kept and rest is None:
            if kept[-1].produced:
                rest = tokenizer.encode_behind(text, at)
            if rest is None:
                at -= len(kept.pop().text)
        if rest is None:
            rest = tokenizer.encode_prompt(text)
        if at < len(text):
            kept.append(Stretch(text[at:], rest))
        ids = np.concatenate([stretch.ids for stretch in kept])
        return Turn(tuple(messages), ids, tuple(kept), shown)

    @property
    def is_open(self) -> bool:
        """Whether the last answer may still grow."""
        return self.answer is not None and self.answer.end is None

    def settled(self, tokens: TokenIds, tokenizer: Tokenizer | None) -> Conversation:
        """The conversation with its open answer as a message. REQUIRES: there is one.

        tokens: the session's, of which the answer is the end. Without a tokenizer, or if nothing
        was produced, the answer is left out.
        """
        assert self.answer is not None
        start = self.answer.start
        if tokenizer is None or len(tokens) <= start:
            return replace(self, answer=None)
        ids, before = tokens[start:], tokens[:start]
        content = text_of(ids, before, tokenizer)
        for stop in self.answer.stops:
            content = content.partition(stop)[0]
        messages = [*self.messages, {"role": ASSISTANT, "content": content}]
        if self.answer.continues:
            begun = messages[-2]
            messages[-2:] = [{**begun, "content": begun["content"] + content}]
        whole = Stretch(text_of(ids, before, tokenizer, special_tokens=True), ids, produced=True)
        return replace(
            self,
            messages=tuple(messages),
            stretches=(*self.stretches, whole),
            answer=replace(self.answer, end=len(tokens)),
        )

    def reopened(self) -> Conversation:
        """The conversation before its last answer was closed. REQUIRES: it is."""
        assert self.answer is not None
        *messages, last = self.messages
        if begun := self.answer.continues:
            messages.append({**last, "content": last["content"][:begun]})
        return replace(
            self,
            messages=tuple(messages),
            stretches=self.stretches[:-1],
            answer=replace(self.answer, end=None),
        )

    def cut(self, position: int) -> Conversation:
        """The conversation of a text that was cut at `position`.

        The last answer is open again if a part of it is left, or nothing but its prompt, and what
        comes after the cut is of it. If its prompt was cut, there is none.
        """
        answer = self.answer
        if answer is None or (answer.end is not None and position >= answer.end):
            return self
        opened = self if answer.end is None else self.reopened()
        return opened if position >= answer.start else replace(opened, answer=None)

    def to_json(self, tokens: TokenIds, tokenizer: Tokenizer | None) -> dict[str, Any]:
        """JSON values for a snapshot of `tokens`, in which the last answer is a message."""
        whole = self.settled(tokens, tokenizer) if self.is_open else self
        held, kept = 0, 0
        for stretch in whole.stretches:
            end = held + len(stretch.ids)
            if not np.array_equal(tokens[held:end], stretch.ids):
                break
            held, kept = end, kept + 1
        values: dict[str, Any] = {
            "messages": [dict(message) for message in whole.messages],
            "stretches": [[one.text, len(one.ids)] for one in whole.stretches[:kept]],
            "encoded": [i for i, one in enumerate(whole.stretches) if not one.produced],
        }
        if kept < len(whole.stretches):  # the text was cut, and a next turn takes these up again
            values["dropped"] = [[one.text, one.ids.tolist()] for one in whole.stretches[kept:]]
        if self.answer is not None:
            values["answer"] = {
                "start": self.answer.start,
                "stops": list(self.answer.stops),
                "open": self.is_open,
                "continues": self.answer.continues,
            }
        return values

    @classmethod
    def from_json(
        cls, values: Any, tokens: TokenIds, path: str, vocab_size: int, *, has_text: bool = True
    ) -> Conversation:
        """The inverse of `to_json`.

        Args:
            values: JSON values.
            tokens: of the snapshot, the pending one included.
            path: of the snapshot, for messages.
            vocab_size: token ids are below it.
            has_text: whether there is a tokenizer; without one an answer cannot be open.

        Raises:
            CorruptSnapshotError: the values are not what `to_json` returns for `tokens`.
        """
        try:
            messages = tuple(checked_messages(values["messages"]))
            parts = [(text, count) for text, count in values["stretches"]]
            dropped = [(text, ids) for text, ids in values.get("dropped", ())]
            encoded = _numbers(values["encoded"])
        except (KeyError, TypeError, ValueError, InvalidArgumentError) as error:
            raise CorruptSnapshotError(f"{path}: session.conversation: {error!r}") from error
        stretches: list[Stretch] = []
        held = 0
        for number, (text, given) in enumerate([*parts, *dropped]):
            ids = None
            if number >= len(parts):
                if isinstance(given, list) and all(_is_below(vocab_size, one) for one in given):
                    ids = np.array(given, dtype=np.int32)
            elif _is_below(len(tokens) - held + 1, given):
                ids = tokens[held : held + given].copy()
                held += given
            if type(text) is not str or ids is None:
                raise CorruptSnapshotError(
                    f"{path}: session.conversation has a stretch {[text, given]!r}; expected text "
                    f"and its number of tokens, of the {len(tokens)} that the snapshot has, or if "
                    f"it was dropped its token ids, below {vocab_size}"
                )
            stretches.append(Stretch(text, ids, number not in encoded))
        whole = cls(messages, tuple(stretches))
        if values.get("answer") is None:
            return whole
        return whole._with_answer(values["answer"], tokens, path, has_text=has_text)

    def _with_answer(
        self, value: Any, tokens: TokenIds, path: str, *, has_text: bool
    ) -> Conversation:
        """The conversation with its last answer, as `to_json` describes it."""
        stretches = [len(stretch.ids) for stretch in self.stretches]
        end = sum(stretches)
        match value:
            case {
                "start": int(start),
                "stops": [*stops],
                "open": bool(is_open),
                "continues": begun,
            } if (
                type(start) is int
                and all(isinstance(stop, str) and stop for stop in stops)
                and self._may_continue(begun)
            ):
                answer = LastAnswer(start, tuple(stops), continues=begun)
            case _:
                raise CorruptSnapshotError(
                    f"{path}: session.conversation.answer is {value!r}; expected an object with "
                    "start (an integer), stops (texts), open (a bool) and continues (characters "
                    "of the last message)"
                )
        if start == end == len(tokens) and is_open:
            return replace(self, answer=answer)  # of which nothing was produced
        last = self.messages[-1]["role"] if self.messages else None
        fits = stretches and start == end - stretches[-1] and last == ASSISTANT
        if not fits or (is_open and end != len(tokens)):
            raise CorruptSnapshotError(
                f"{path}: session.conversation.answer begins at {start!r}; expected the last "
                f"stretch, and the last message, of {len(tokens)} tokens"
            )
        closed = replace(self, answer=replace(answer, end=end))
        return closed.reopened() if is_open and has_text else closed

    def _may_continue(self, begun: object) -> bool:
        """Whether the last message can have had so many characters before its answer."""
        if type(begun) is not int or begun < 0:
            return False
        content = self.messages[-1].get("content") if self.messages else None
        return begun == 0 or (isinstance(content, str) and begun <= len(content))


def _is_below(limit: int, value: object) -> bool:
    return type(value) is int and 0 <= value < limit


def _numbers(values: Any) -> frozenset[int]:
    if not isinstance(values, list) or not all(type(one) is int for one in values):
        raise ValueError(f"encoded is {values!r}; expected numbers of stretches")
    return frozenset(values)


def checked_messages(messages: Any, known: Sequence[Message] = ()) -> list[Message]:
    """Copies of a caller's messages.

    known: messages that were checked before; an identical object stands for itself.

    Raises:
        InvalidArgumentError: no list of mappings with a role, or not JSON.
    """
    expected = 'a list of messages such as {"role": "user", "content": "..."}'
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidArgumentError(f"messages is {messages!r}; expected {expected}")
    checked = set(map(id, known))
    new = [place for place, message in enumerate(messages) if id(message) not in checked]
    for i in new:
        message = messages[i]
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidArgumentError(f"messages[{i}] is {message!r}; expected {expected}")
    try:
        copies: list[Message] = json.loads(
            json.dumps([dict(messages[i]) for i in new], allow_nan=False)
        )
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"messages cannot be written as JSON, and so not be saved: {error}"
        ) from error
    whole = list(messages)
    for i, copy in zip(new, copies, strict=True):
        whole[i] = copy
    return whole
