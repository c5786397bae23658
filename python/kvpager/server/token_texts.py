"""Texts and log-probabilities of tokens in chat completions and completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache

from kvpager._runtime.scheduling.stream import GeneratedToken
from kvpager._runtime.text.token_bytes import BROKEN
from kvpager._runtime.text.tokenizer import Detokenizer, Tokenizer
from kvpager._support.tokens import TokenIds
from kvpager.sampling import Alternatives
from kvpager.server.schema.chat import LogprobEntry, TokenLogprob


class TokenTexts:
    """The text and the bytes of single tokens of one tokenizer, special ones included.

    A token's text is what it adds to a text: with decoders that strip a text's first space, or put
    one between words, that is not what they make of the token alone.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.text = lru_cache(maxsize=1 << 16)(self._text)

    def first(self, token: int) -> str:
        """Returns the text of a token at the beginning of a text."""
        return self._decode([token])

    def name(self, token: int) -> str:
        r"""Returns the token's text, or `bytes:\xe2\x82` if it is not whole characters."""
        text = self.text(token)
        data = self.tokenizer.bytes.of(token) if BROKEN in text else None
        return text if data is None or _is_text(data) else _spelled(data)

    def beginning(self, tokens: Sequence[int]) -> int | None:
        """Returns the index of the first token that is not special."""
        return next((i for i, one in enumerate(tokens) if one not in self._special), None)

    def named(
        self, own: str, chosen: int, logprob: float, alternatives: Alternatives
    ) -> dict[str, float]:
        """Returns log-probabilities by name: of alternatives and, as OpenAI, of the chosen token.

        Names are unique, so that no token is lost. own: the chosen token's name.
        """
        named: dict[str, float] = {}
        for one, value in alternatives:
            data = self.tokenizer.bytes.of(one) or b""
            names = (self.name(one), _spelled(data), f"token_id:{one}")
            if one == chosen:
                named[own] = value
            else:
                named[next(name for name in names if name != own and name not in named)] = value
        named.setdefault(own, logprob)
        return named

    def entry(self, token: int, logprob: float) -> LogprobEntry:
        """Returns a token and its log-probability."""
        text = self.text(token)
        data = self.tokenizer.bytes.of(token) if BROKEN in text else None
        return LogprobEntry(
            token=text, logprob=logprob, bytes=list(text.encode() if data is None else data)
        )

    def chosen(self, token: GeneratedToken) -> TokenLogprob:
        """Returns a generated token with its alternatives."""
        entry = self.entry(token.id, token.logprob)
        top = [self.entry(one, logprob) for one, logprob in token.top]
        return TokenLogprob(**entry.model_dump(), top_logprobs=top)

    def _text(self, token: int) -> str:
        alone, before = self._decode([token]), self._context
        if before is None or token in self._special:
            return alone
        text, context = self._decode([before, token]), self._decode([before])
        return text.removeprefix(context) if text.startswith(context) else alone

    @cached_property
    def _context(self) -> int | None:
        """A plain word that tokens are decoded after."""
        for token in range(len(self.tokenizer.wrapped)):
            text = self._decode([token])
            if text.isascii() and text.isalpha() and token not in self._special:
                return token
        return None

    @cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(self.tokenizer.wrapped.all_special_ids)

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, special_tokens=True)


class TextOffsets:
    """Where the text of each token begins in the text of all of them, in characters.

    Of several tokens that make one character, all begin where it does.
    """

    def __init__(self, texts: TokenTexts, before: TokenIds | None = None, start: int = 0) -> None:
        """before: the tokens before the first one. start: offset of the first one."""
        self._texts = texts
        self._pieces = Detokenizer(texts.tokenizer, before)
        self._next = start

    def push(self, token: int) -> int:
        """Returns the offset of the next token."""
        offset, piece = self._next, self._pieces.push(token)
        self._next += len(piece)
        own = self._texts.text(token)
        # After broken characters that no token has completed.
        behind = BROKEN not in own and piece.startswith(BROKEN) and piece.endswith(own)
        return self._next - len(own) if behind else offset

    def all(self, tokens: Iterable[int]) -> list[int]:
        """Returns the offsets of the next tokens."""
        return [self.push(token) for token in tokens]


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _spelled(data: bytes) -> str:
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
