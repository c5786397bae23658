"""Renders conversations by a chat template without reading every message again in each turn.

transformers copies all messages for each rendering, and control tokens in them have to be marked.
What a message becomes depends on the message alone, so it is kept from turn to turn, and the
compiled template is called with it. The template itself always renders the whole conversation: it
is a program, and may look at any message.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple

from kvpager._runtime.text.json_values import exact
from kvpager._runtime.text.template_input import CallIds, ControlTokens, template_messages

Compile = Callable[[str], Any]

_AS_JSON = "{{ messages | tojson }}"
_MOST_PROVEN = 64
# Variables that `apply_chat_template` reads itself.
_NOT_PASSED = frozenset(
    {"documents", "chat_template", "sanitize_control_tokens", "padding", "truncation"}
    | {"max_length", "return_tensors", "return_assistant_tokens_mask", "tokenizer_kwargs"}
)


class Shown(NamedTuple):
    """The messages of a conversation, and what a chat template gets of each.

    Attributes:
        given: the messages. Nobody changes them, so that an identical object is the same message.
        marked: their copies for `apply_chat_template`.
        read: what that makes of each of these.
        control: what marked control tokens in them; None: nothing did.
        reused: number of messages taken from the turn before.
    """

    given: tuple[Mapping[str, Any], ...] = ()
    marked: tuple[dict[str, Any], ...] = ()
    read: tuple[dict[str, Any], ...] = ()
    control: ControlTokens | None = None
    reused: int = 0


class TemplateRenderer:
    """Renders by the chat template of a transformers tokenizer. Any thread may use it."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped
        self._compile = _compiler_for(wrapped)
        # Templates and names of variables for which both ways have given the same text.
        self._proven: set[tuple[str, ...]] = set()

    def shown(
        self,
        messages: Sequence[Mapping[str, Any]],
        control: ControlTokens | None,
        id_of: CallIds | None,
        known: Shown,
    ) -> Shown:
        """The messages as the template gets them.

        Args:
            messages: of the whole conversation.
            control: marks control tokens; None: they are tokens.
            id_of: see `template_messages`. With it a message depends on those before it.
            known: of an earlier turn, whose messages are read once.
        """
        keeps = id_of is None and self._compile is not None
        if known.control is not control or not keeps:
            known = Shown()
        same = [*map(is_, known.given, messages), False].index(False)  # mostly all of `known`
        places = {id(message): place for place, message in enumerate(known.given[same:], same)}
        rest = messages[same:]
        new = [message for message in rest if id(message) not in places]
        marked = template_messages(new, id_of)
        if control is not None:
            marked = control.marked(marked)
        marked = list(map(_same, new, marked))
        if not keeps:
            return Shown(tuple(messages), tuple(marked), control=control)
        read = list(map(_same, marked, self._read(marked)))
        if len(new) == len(messages):
            return Shown(tuple(messages), tuple(marked), tuple(read), control)
        pairs = iter(zip(marked, read, strict=True))
        both = [
            next(pairs) if place is None else (known.marked[place], known.read[place])
            for place in map(places.get, map(id, rest))
        ]
        return Shown(
            tuple(messages),
            (*known.marked[:same], *(one for one, _ in both)),
            (*known.read[:same], *(one for _, one in both)),
            control,
            len(messages) - len(new),
        )

    def render(
        self, shown: Shown, variables: Mapping[str, Any], *, prompted: bool, continues: bool
    ) -> str:
        """The text of messages. Raises whatever the template does.

        Args:
            shown: the messages.
            variables: of the template, and what else `apply_chat_template` takes.
            prompted: whether the template begins an answer.
            continues: whether the answer goes on with the last message.
        """
        key: tuple[str, ...] = ()
        direct: str | None = None
        if self._compile is not None and shown.read and not continues and self._passes(variables):
            template = self._wrapped.get_chat_template(None, variables.get("tools"))
            key = (template, *sorted(variables))
            direct = self._compile(template).render(
                **{
                    "messages": list(shown.read),
                    "tools": None,
                    "documents": None,
                    "add_generation_prompt": prompted,
                    **self._wrapped.special_tokens_map,
                    **variables,
                }
            )
            if shown.reused and key in self._proven:
                return direct
        text: str = self._wrapped.apply_chat_template(
            list(shown.marked),
            tokenize=False,
            add_generation_prompt=prompted,
            continue_final_message=continues,
            **variables,
        )
        if direct == text:
            if len(self._proven) >= _MOST_PROVEN:
                self._proven.clear()
            self._proven.add(key)
        else:
            self._proven.discard(key)
        return text

    def _read(self, marked: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """What transformers makes of messages before a template gets them."""
        if not marked:
            return []
        text = self._wrapped.apply_chat_template(marked, chat_template=_AS_JSON, tokenize=False)
        read: list[dict[str, Any]] = json.loads(text)
        return read

    def _passes(self, variables: Mapping[str, Any]) -> bool:
        """Whether a template gets these variables as they are."""
        return (
            _NOT_PASSED.isdisjoint(variables)
            and all(isinstance(tool, dict) for tool in variables.get("tools") or ())
            and _is_json([dict(variables), self._wrapped.special_tokens_map])
        )


def _compiler_for(wrapped: Any) -> Compile | None:
    """What compiles templates for a tokenizer; None: it renders in a way of its own."""
    from transformers import PreTrainedTokenizerBase
    from transformers.utils import chat_template_utils

    for name in ("apply_chat_template", "get_chat_template"):
        if getattr(type(wrapped), name, None) is not getattr(PreTrainedTokenizerBase, name):
            return None
    return getattr(chat_template_utils, "_compile_jinja_template", None)


def _same(before: Mapping[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """`before` if `after` is an exact copy of it: one object then serves for both."""
    if type(before) is dict and _is_json(before) and exact(before) == exact(after):
        return before
    return after


def _is_json(value: object) -> bool:
    """Whether a value has JSON's own types alone."""
    if type(value) is dict:
        return all(type(key) is str and _is_json(one) for key, one in value.items())
    if type(value) is list:
        return all(map(_is_json, value))
    return value is None or type(value) in (str, int, float, bool)
