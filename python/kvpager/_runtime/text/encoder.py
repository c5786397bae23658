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
from typing import Any, TypeAlias

from kvpager._runtime.text.template_input import BEGIN_TEXT, END_TEXT, ControlTokens
from kvpager.errors import InvalidArgumentError

_Borders: TypeAlias = tuple[re.Pattern[str], int]  # and characters of the longest
_REACH = 1024  # characters searched for a border at first


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
        # For texts without and with marks: for how many tokens, and their borders.
        self._known: dict[bool, tuple[int, _Borders | None]] = {}
        dropout = getattr(getattr(self._backend, "model", None), "dropout", None)
        if dropout:
            raise InvalidArgumentError(
                f"tokenizer encodes by chance: its BPE has a dropout of {dropout}; expected none: "
                "set tokenizer.backend_tokenizer.model.dropout = None"
            )

    def encode(self, text: str) -> list[int]:
        """The ids of a whole text, in which marked control tokens are text."""
        return self._encode(text, marked=self._is_marked(text))

    def _is_marked(self, text: str, end: int | None = None) -> bool:
        """Whether there are marks before `end`."""
        found = (text.find(mark, 0, end) >= 0 for mark in (BEGIN_TEXT, END_TEXT))
        return self._backend is not None and any(found)

    def _encode(self, text: str, *, marked: bool) -> list[int]:
        """The ids of a text; `marked`: of one, or of a part of one, that has marks."""
        if not marked:
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
        marked, begins_marked = self._is_marked(text), self._is_marked(text, start)
        # With the first mark, all that was encoded without marks is compared.
        border = self._border(text, start, marked=marked) if marked == begins_marked else 0
        whole = self._encode(text[border:], marked=marked)
        head = self._encode(text[border:start], marked=begins_marked) if border < start else []
        return whole[len(head) :] if whole[: len(head)] == head else None

    def control_tokens(self, template: str) -> ControlTokens:
        """The marks of control tokens in texts for this template."""
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

    def _border(self, text: str, start: int, *, marked: bool) -> int:
        """The last place up to `start` where the encoding of the whole starts again; at least 0."""
        borders = self._borders(marked=marked)
        if borders is None:
            return 0
        pattern, longest = borders
        reach = _REACH
        while True:  # backwards, as most have one close by; none overlaps another
            begin = max(0, start - reach)
            found = [one.start() for one in pattern.finditer(text, begin, start + longest)]
            last = max((at for at in found if at <= start), default=0)
            if last or not begin:
                return last
            reach *= 2

    def _borders(self, *, marked: bool) -> _Borders | None:
        """Matches added tokens that are taken out of any text wherever they stand.

        marked: of a text with marks, where normalized ones are too, and those behind a mark are
            text.
        """
        if self._backend is None or getattr(self._wrapped, "split_special_tokens", False):
            return None
        added = [token for token in _added(self._backend) if marked or not token.normalized]
        count, borders = self._known.get(marked, (-1, None))
        if count != len(added):
            certain = _certain(added)
            either = "|".join(map(re.escape, certain))
            pattern = re.compile(f"(?<!{BEGIN_TEXT})(?:{either})")
            borders = (pattern, max(map(len, certain))) if certain else None
            self._known[marked] = (len(added), borders)
        return borders


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
