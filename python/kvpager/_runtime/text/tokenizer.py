"""A transformers tokenizer as the runtime uses it: text to token ids and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from kvpager._runtime.text.encoder import PromptEncoder
from kvpager._runtime.text.template_input import (
    ControlTokensAs,
    template_messages,
    unparsed_arguments,
)
from kvpager._runtime.text.template_rendering import Shown, TemplateRenderer
from kvpager._runtime.text.token_bytes import BROKEN, TokenBytes
from kvpager._runtime.text.tool_calls import call_ids_of
from kvpager._support.arguments import require_unicode
from kvpager._support.tokens import TextOrIds, TokenIds, as_token_ids
from kvpager.errors import InvalidArgumentError

Message: TypeAlias = Mapping[str, Any]

NOTHING_SHOWN = Shown()
_CONTEXT = 8  # tokens before a text that its first characters may depend on

# Arguments of `apply_chat_template` that are not the template's.
_GIVEN_TO_TEMPLATES = frozenset(
    {"tokenize", "add_generation_prompt", "continue_final_message", "conversation", "return_dict"}
)


@dataclass(frozen=True)
class Rendering:
    """Options of rendering a prompt by the chat template.

    Attributes:
        variables: further arguments of the template, such as `tools` or `enable_thinking`.
        control_tokens: what a control token in a caller's text is: "text", where the tokenizer can
            encode it so, or one of the template's "tokens".
        continues: whether the answer goes on with the last message, an assistant's.
        generation_prompt: whether the template begins an answer; not with `continues`.
    """

    variables: Mapping[str, Any] = field(default_factory=dict)
    control_tokens: ControlTokensAs = "text"
    continues: bool = False
    generation_prompt: bool = True


class Tokenizer:
    """Wraps a transformers tokenizer.

    Args:
        tokenizer: with `encode`, `decode` and, for chats, `apply_chat_template`.
        vocab_size: the model's; a text with a token id beyond it is refused.

    Attributes:
        wrapped: the tokenizer of transformers.
        bytes: of its single tokens.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        for method in ("encode", "decode"):
            if not callable(getattr(tokenizer, method, None)):
                raise InvalidArgumentError(
                    f"tokenizer is {tokenizer!r}; expected one of transformers, such as "
                    "AutoTokenizer.from_pretrained(name)"
                )
        self.wrapped = tokenizer
        self.bytes = TokenBytes(tokenizer)
        self._vocab_size = vocab_size
        self._prompts = PromptEncoder(tokenizer)
        self._templates = TemplateRenderer(tokenizer)

    def encode(self, text: str, name: str, *, special_tokens: bool) -> TokenIds:
        """The ids of `text`; with those that begin a text, such as BOS, if `special_tokens`.

        Raises:
            InvalidArgumentError: no tokens, or an id that the model does not have.
        """
        ids = self.wrapped.encode(require_unicode(text, name), add_special_tokens=special_tokens)
        return as_token_ids(list(ids), self._vocab_size, f"{name} (as token ids)")

    def decode(self, ids: Sequence[int] | TokenIds, *, special_tokens: bool = False) -> str:
        """The text of ids; that of special tokens only if `special_tokens`."""
        text: str = self.wrapped.decode(
            [int(token) for token in ids],
            skip_special_tokens=not special_tokens,
            clean_up_tokenization_spaces=False,
        )
        return text

    def shown(
        self, messages: Sequence[Message], rendering: Rendering, known: Shown = NOTHING_SHOWN
    ) -> Shown:
        """The messages as the chat template gets them. Raises InvalidArgumentError as `render`.

        known: of an earlier turn, whose messages are not read again. An identical object has to be
            the same message.
        """
        template, control = self._template, None
        if rendering.control_tokens == "text" and self._prompts.can_mark:
            texts = template.values() if isinstance(template, Mapping) else [template]
            control = self._prompts.control_tokens("\n".join(map(str, texts)))
        with _refusals(template, messages):
            return self._templates.shown(messages, control, call_ids_of(template), known)

    def render(
        self, messages: Sequence[Message], rendering: Rendering, shown: Shown | None = None
    ) -> str:
        """The text of a conversation up to where the model answers, by the chat template.

        It may have marks, see `kvpager._runtime.text.template_input`: `encode_prompt` reads them.

        Args:
            messages: as `apply_chat_template` takes them.
            rendering: options of the template.
            shown: of these messages, where the caller keeps it.

        Raises:
            InvalidArgumentError: there is no template, or it refuses the messages.
        """
        template = self._template  # before other errors
        for name in rendering.variables:
            if name in _GIVEN_TO_TEMPLATES:
                raise InvalidArgumentError(
                    f"chat_template_kwargs has {name!r}, which kvpager sets itself; leave it out"
                )
        if shown is None:
            shown = self.shown(messages, rendering)
        variables = dict(rendering.variables)
        if shown.control is not None:
            variables = shown.control.marked_values(variables)
        with _refusals(template, messages):
            return self._templates.render(
                shown,
                variables,
                prompted=rendering.generation_prompt and not rendering.continues,
                continues=rendering.continues,
            )

    @property
    def _template(self) -> Any:
        """The chat template, or templates by name. Raises InvalidArgumentError: there is none."""
        template = getattr(self.wrapped, "chat_template", None)
        if not template:
            raise InvalidArgumentError(
                "the tokenizer has no chat template; set tokenizer.chat_template, or use prefill "
                "and generate"
            )
        return template

    def encode_prompt(self, text: str) -> TokenIds:
        """The ids of what `render` returned. Raises InvalidArgumentError: as `encode`."""
        return self._checked(self._prompts.encode(require_unicode(text, "messages")))

    def encode_behind(self, text: str, start: int) -> TokenIds | None:
        """The ids that the end of what `render` returned, from `start` on, has in the whole.

        None: the whole has no border between tokens there. Raises InvalidArgumentError: as
        `encode`.
        """
        ids = self._prompts.encode_behind(require_unicode(text, "messages"), start)
        if ids is None:
            return None
        return self._checked(ids) if ids else np.zeros(0, dtype=np.int32)

    def prompt_ids(self, messages: Sequence[Message], rendering: Rendering) -> TokenIds:
        """The ids of a whole conversation up to where the model answers."""
        return self.encode_prompt(self.render(messages, rendering))

    def _checked(self, ids: list[int]) -> TokenIds:
        return as_token_ids(ids, self._vocab_size, "messages (as token ids)")


@contextmanager
def _refusals(template: object, messages: Sequence[Message]) -> Iterator[None]:
    """Raises the errors of a template, which is a program, as InvalidArgumentError."""
    try:
        yield
    except Exception as error:
        hint = unparsed_arguments(template_messages(messages, call_ids_of(template)))
        why = f"; {hint} is no JSON object" if hint is not None else ""
        raise InvalidArgumentError(
            f"the chat template refuses the messages: {type(error).__name__}: {error}{why}"
        ) from error


def read_ids(
    given: TextOrIds,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    name: str = "ids",
    *,
    special_tokens: bool = True,
) -> TokenIds:
    """The ids of a text, or the ids given; arguments and errors as for `as_token_ids`."""
    if isinstance(given, str) and tokenizer is not None:
        return tokenizer.encode(given, name, special_tokens=special_tokens)
    return as_token_ids(given, vocab_size, name)  # type: ignore[arg-type]  # text is refused


class Detokenizer:
    """Turns tokens into text as they come, no character before it is complete.

    The text of a token depends on the tokens before it (spaces, bytes of one character), so the
    last few are decoded again with each new one: the time per token does not grow. A character that
    the tokens before the first one have begun comes with the token that completes it; one that is
    incomplete at the end is left to whoever goes on from there.
    """

    def __init__(
        self, tokenizer: Tokenizer, before: TokenIds | None = None, *, special_tokens: bool = False
    ) -> None:
        """before: the tokens before the first one; the last few are enough."""
        self._tokenizer = tokenizer
        self._special = special_tokens
        self._tokens = [] if before is None else [int(token) for token in before[-_CONTEXT:]]
        while self._tokens and tokenizer.bytes.continues(self._tokens[0]):
            del self._tokens[0]  # else a decoder of single bytes takes what follows for broken
        self._returned, self._complete = self._complete_text()

    def push(self, token: int) -> str:
        """The text that is complete with this token, after what was returned before."""
        self._tokens.append(int(token))
        text, complete = self._complete_text()
        piece = text[len(self._returned) :]
        if piece:  # the tokens since the last return are the context of the next ones
            del self._tokens[: min(self._complete, complete - 1)]
            self._returned, self._complete = self._complete_text()
        return piece

    def _complete_text(self) -> tuple[str, int]:
        """The text up to the last complete character, and the number of its tokens."""
        text, count = self._decode(self._tokens), len(self._tokens)
        while text.endswith(BROKEN):
            begun = self._tokenizer.bytes.begun(self._tokens[:count])
            if not begun:
                break
            count -= begun
            text = self._decode(self._tokens[:count])
        return text, count

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, special_tokens=self._special)


def text_of(
    ids: Sequence[int] | TokenIds,
    before: TokenIds | None,
    tokenizer: Tokenizer,
    *,
    special_tokens: bool = False,
) -> str:
    """The text of `ids` after `before`: what a `Detokenizer` returns for them in all."""
    pieces = Detokenizer(tokenizer, before, special_tokens=special_tokens)
    return "".join(map(pieces.push, np.asarray(ids).tolist()))
