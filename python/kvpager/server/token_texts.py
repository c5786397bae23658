"""Tokens and their log-probabilities, as chat completions and completions show them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from kvpager.scheduling.stream import GeneratedToken
from kvpager.server.schema.chat import LogprobEntry, TokenLogprob


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
        return LogprobEntry(token=text, logprob=logprob, bytes=list(text.encode()))

    def chosen(self, token: GeneratedToken) -> TokenLogprob:
        """A generated token with its alternatives."""
        entry = self.entry(token.id, token.logprob)
        return TokenLogprob(
            token=entry.token,
            logprob=entry.logprob,
            bytes=entry.bytes,
            top_logprobs=[self.entry(one, logprob) for one, logprob in token.top],
        )

    def _decoded(self, token: int) -> str:
        text: str = self._tokenizer.decode(
            [token], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text
