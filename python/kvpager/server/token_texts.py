"""Tokens and their log-probabilities, as chat completions and completions show them."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from kvpager.scheduling.stream import GeneratedToken
from kvpager.server.schema.chat import LogprobEntry, TokenLogprob
from kvpager.text.tokenizer import Detokenizer, Tokenizer
from kvpager.tokens import TokenIds

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTES = {
    character: byte
    for byte, character in bytes_to_unicode().items()  # type: ignore[no-untyped-call]
}
_ONE_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTexts:
    """The text and the bytes of single tokens of one tokenizer, special ones included."""

    def __init__(self, tokenizer: Any) -> None:
        """tokenizer: of transformers."""
        self._tokenizer = tokenizer
        self._decode = lru_cache(maxsize=1 << 16)(self._decoded)

    def text(self, token: int) -> str:
        """The token's text alone; of an incomplete character a replacement character."""
        return self._decode(token)

    def entry(self, token: int, logprob: float) -> LogprobEntry:
        """A token and its log-probability."""
        text = self.text(token)
        return LogprobEntry(token=text, logprob=logprob, bytes=list(self._bytes(token)))

    def chosen(self, token: GeneratedToken) -> TokenLogprob:
        """A generated token with its alternatives."""
        entry = self.entry(token.id, token.logprob)
        return TokenLogprob(
            token=entry.token,
            logprob=entry.logprob,
            bytes=entry.bytes,
            top_logprobs=[self.entry(one, logprob) for one, logprob in token.top],
        )

    def _bytes(self, token: int) -> bytes:
        """Its bytes in the text, also where they are no whole characters."""
        text = self.text(token)
        if _REPLACEMENT not in text:
            return text.encode()
        name: str = self._tokenizer.convert_ids_to_tokens(token)
        one = _ONE_BYTE.fullmatch(name)  # as SentencePiece spells it
        if one is not None:
            return bytes.fromhex(one.group(1))
        if all(character in _BYTES for character in name):  # as GPT-2's tokenizer does
            return bytes(_BYTES[character] for character in name)
        return text.encode()

    def _decoded(self, token: int) -> str:
        text: str = self._tokenizer.decode(
            [token], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text


class TextOffsets:
    """Where the text of each token begins in the text of all of them, in characters.

    Of several tokens that make one character, all begin where it does.
    """

    def __init__(
        self, tokenizer: Tokenizer, before: TokenIds | None = None, start: int = 0
    ) -> None:
        """before: the tokens before the first one. start: where the first one begins."""
        self._pieces = Detokenizer(tokenizer, before)
        self._next = start

    def push(self, token: int) -> int:
        """Of the next token."""
        offset = self._next
        self._next += len(self._pieces.push(token))
        return offset
