"""Encodes prompts so that a part of one has the tokens that it has in the whole.

A tokenizer may treat a text's beginning in its own way (a blank is put before it), and what stands
at a place may change how its neighbours are encoded. Two texts are encoded apart from each other
for certain only where an added token stands that nothing before it can be part of: the `tokenizers`
library takes added tokens out of a text before anything else. Elsewhere the whole is encoded.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from typing import Any

from kvpager.errors import InvalidArgumentError
from kvpager.text.template_input import BEGIN_TEXT, END_TEXT, ControlTokens


class PromptEncoder:
    """The token ids of a rendered conversation, and of its end behind any place.

    Attributes:
        can_mark: whether control tokens can be encoded as text; only with tokenizers of the
            `tokenizers` library.
    """

    def __init__(self, wrapped: Any) -> None:
        """wrapped: a tokenizer of transformers. Raises InvalidArgumentError if it uses chance."""
        self._wrapped = wrapped
        self._backend = _backend_of(wrapped)
        self.can_mark = self._backend is not None
        self._lock = threading.Lock()
        self._apart: _Apart | None = None
        self._control = (-1, "", ControlTokens((), ()))  # for how many tokens, and which template
        self._known: tuple[int, re.Pattern[str] | None] = (-1, None)  # for how many tokens
        dropout = getattr(getattr(self._backend, "model", None), "dropout", None)
        if dropout:
            raise InvalidArgumentError(
                f"tokenizer encodes by chance: its BPE has a dropout of {dropout}; expected none: "
                "set tokenizer.backend_tokenizer.model.dropout = None"
            )

    def encode(self, text: str) -> list[int]:
        """The ids of a whole text, in which marked control tokens are text."""
        if self._backend is None or (BEGIN_TEXT not in text and END_TEXT not in text):
            return [int(one) for one in self._wrapped.encode(text, add_special_tokens=False)]
        with self._lock:
            if self._apart is None or self._apart.outdated(self._backend):
                self._apart = _Apart(self._backend)
            apart = self._apart
        return apart.encode(text)

    def encode_behind(self, text: str, start: int) -> list[int] | None:
        """The ids that `text[start:]` has in the whole text.

        None: the whole has no border between tokens there.
        """
        if start >= len(text):
            return []
        border = self._border(text, start)
        whole = self.encode(text[border:])
        head = self.encode(text[border:start]) if border < start else []
        return whole[len(head) :] if whole[: len(head)] == head else None

    def control_tokens(self, template: str) -> ControlTokens:
        """What marks control tokens in texts for this template."""
        added = [] if self._backend is None else _added(self._backend)
        if self._control[:2] == (len(added), template):
            return self._control[2]
        special, of_template = [], []
        for token in added:
            content = token.content
            if token.special:
                special.append(content)
            elif content in template and not content.isalnum() and not content.isspace():
                of_template.append(content)
        control = ControlTokens(special, of_template)
        self._control = (len(added), template, control)
        return control

    def _border(self, text: str, start: int) -> int:
        """The last place up to `start` where the encoding of the whole begins anew; at least 0."""
        borders = None if BEGIN_TEXT in text or END_TEXT in text else self._borders()
        last = 0
        for match in () if borders is None else borders.finditer(text):
            if match.start() > start:
                break
            last = match.start()
        return last

    def _borders(self) -> re.Pattern[str] | None:
        """Matches added tokens that are taken out of any text wherever they stand."""
        if self._backend is None or getattr(self._wrapped, "split_special_tokens", False):
            return None
        added = [token for token in _added(self._backend) if not token.normalized]
        if self._known[0] != len(added):
            certain = _certain(added)
            pattern = re.compile("|".join(map(re.escape, certain))) if certain else None
            self._known = (len(added), pattern)
        return self._known[1]


class _Apart:
    """A copy of a tokenizer in which added tokens have names that no text has.

    So the template's control tokens, which get these names, are tokens, and equal text is text.
    """

    def __init__(self, backend: Any) -> None:
        from tokenizers import AddedToken, Tokenizer

        values = json.loads(backend.to_str())
        values |= {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
        added = _added(backend)
        _rename(values["model"], {token.content for token in added if token.special})
        self._tokens = Tokenizer.from_str(json.dumps(values))
        self._count = len(added)
        self._names = {
            token.content: f"{BEGIN_TEXT}{number}{END_TEXT}" for number, token in enumerate(added)
        }
        self._tokens.add_tokens(
            [
                AddedToken(
                    self._names[token.content],
                    single_word=False,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=False,
                    special=False,
                )
                for token in added
            ]
        )
        ids = self._tokens.get_added_tokens_decoder()
        originals = {name: backend.token_to_id(content) for content, name in self._names.items()}
        self._ids = {one: originals[token.content] for one, token in ids.items()}
        longest_first = sorted(self._names, key=len, reverse=True)
        either = "|".join(map(re.escape, longest_first)) or "(?!)"
        begin, end = BEGIN_TEXT, END_TEXT
        self._pieces = re.compile(
            f"{begin}(?P<text>{either}){end}|[{begin}{end}]|(?P<token>{either})"
        )

    def outdated(self, backend: Any) -> bool:
        """Whether tokens were added since."""
        return len(backend.get_added_tokens_decoder()) != self._count

    def encode(self, text: str) -> list[int]:
        """The ids of a text with marks."""

        def named(match: re.Match[str]) -> str:
            token = match["token"]
            return match["text"] or "" if token is None else self._names[token]

        ids = self._tokens.encode(self._pieces.sub(named, text), add_special_tokens=False).ids
        return [self._ids.get(one, one) for one in ids]


def _rename(model: dict[str, Any], tokens: set[str]) -> None:
    """Gives entries of a model's vocabulary names that no text has, so that no text becomes one."""
    tokens = tokens - {model.get("unk_token")}
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {_hidden(one, tokens): number for one, number in vocab.items()}
    else:
        model["vocab"] = [[_hidden(one, tokens), score] for one, score in vocab]


def _hidden(entry: str, tokens: set[str]) -> str:
    return f"{BEGIN_TEXT}{entry}" if entry in tokens else entry


def _backend_of(wrapped: Any) -> Any:
    """The tokenizer of the `tokenizers` library that encodes for `wrapped`; None: another does."""
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind = type(wrapped)
    plain: tuple[tuple[str, Callable[..., Any]], ...] = (
        ("encode", PreTrainedTokenizerBase.encode),
        ("_encode_plus", PreTrainedTokenizerFast._encode_plus),  # noqa: SLF001  # is it overridden?
    )
    if any(getattr(kind, name, None) is not method for name, method in plain):
        return None
    return wrapped.backend_tokenizer


def _added(backend: Any) -> list[Any]:
    return list(backend.get_added_tokens_decoder().values())


def _certain(added: list[Any]) -> list[str]:
    """Which tokens are found wherever their text stands, no matter what stands before it.

    added: those that are looked for in a text as it is. The longest that begins first is found.
    """
    rests = [token.content[1:] for token in added]
    inside = "\0".join(rests)
    ends = {rest[at:] for rest in rests for at in range(len(rest))}
    careful = [token.content for token in added if token.lstrip or token.single_word]
    return [
        content
        for content in (token.content for token in added)
        if content
        and not content[0].isspace()
        and content not in inside  # of another token, or of itself
        and not any(content[:end] in ends for end in range(1, len(content)))
        and not any(other.startswith(content) for other in careful)
    ]
