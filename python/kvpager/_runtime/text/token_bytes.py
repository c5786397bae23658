"""The bytes of single tokens, of which several may make one character."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

BROKEN = "\N{REPLACEMENT CHARACTER}"  # a tokenizer's text for a character without all its bytes
_LONGEST = 4  # bytes of a character
_BYTES = {
    character: byte
    for byte, character in bytes_to_unicode().items()  # type: ignore[no-untyped-call]
}
_ONE_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """The bytes of each token of a transformers tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.of = lru_cache(maxsize=1 << 16)(self._of)

    def begun(self, tokens: Sequence[int]) -> int:
        """How many of the last tokens have bytes of a character that they do not complete."""
        count, data = 0, b""
        while count < min(_LONGEST, len(tokens)):
            known = self.of(tokens[-1 - count])
            if known is None:
                break
            count, data = count + 1, known + data
        if not count:  # the bytes are unknown: wait for the next token
            return 1 if tokens else 0
        reader = codecs.getincrementaldecoder("utf-8")("replace")
        reader.decode(data)
        left, begun = len(reader.getstate()[0]), 0
        while left > 0:
            begun += 1
            left -= len(self.of(tokens[-begun]) or b"")
        return begun

    def continues(self, token: int) -> bool:
        """Whether it is one byte that begins no character."""
        data = self.of(token)
        return data is not None and len(data) == 1 and 0x80 <= data[0] < 0xC0

    def _of(self, token: int) -> bytes | None:
        """A token's bytes, special ones' included; None where only broken text is known of it."""
        text: str = self._tokenizer.decode(
            [token], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        if BROKEN not in text:
            return text.encode()
        name: Any = self._tokenizer.convert_ids_to_tokens(token)
        if isinstance(name, bytes):  # as tiktoken's tokenizers do
            return name
        one = _ONE_BYTE.fullmatch(name)  # as SentencePiece spells it
        if one is not None:
            return bytes.fromhex(one.group(1))
        if all(character in _BYTES for character in name):  # as GPT-2's tokenizer does
            return bytes(_BYTES[character] for character in name)
        return text.encode() if name == BROKEN else None
