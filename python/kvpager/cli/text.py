"""Text from a growing list of token ids, a piece at a time."""

from __future__ import annotations

from typing import Any

_UNFINISHED = "\ufffd"  # what a tokenizer shows for the first bytes of a character


class TextPieces:
    """Turns tokens into printable pieces; without a tokenizer, into numbers."""

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []  # since the last line end: context that spacing depends on
        self._shown = 0
        self._first = True

    def push(self, token: int) -> str:
        """The text that this token completes; may be empty."""
        if self._tokenizer is None:
            piece = f"{'' if self._first else ' '}{token}"
            self._first = False
            return piece
        self._tokens.append(token)
        text = self._text()
        if text.endswith(_UNFINISHED):
            return ""
        piece = text[self._shown :]
        self._shown = len(text)
        if text.endswith("\n"):
            self._tokens, self._shown = [], 0
        return piece

    def finish(self) -> str:
        """What was held back."""
        return "" if self._tokenizer is None else self._text()[self._shown :]

    def _text(self) -> str:
        assert self._tokenizer is not None
        text: str = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        return text
