"""The text of a generation, as it comes and up to where a string ends it."""

from __future__ import annotations

from kvpager._runtime.text.call_parsing import overlap
from kvpager._runtime.text.tokenizer import Detokenizer


class AnswerText:
    """The text of the tokens of one generation, up to the first of the stop strings.

    Text that may be the beginning of a stop string is held back until the next token decides.

    Attributes:
        stops: the stop strings.
        stopped_by: the stop string that was found, the first in the text and among several there
            the first given; nothing follows then. None: none was.
    """

    def __init__(
        self, pieces: Detokenizer, stops: tuple[str, ...] = (), *, include_stop: bool = False
    ) -> None:
        """include_stop: whether the text has the string that ends it."""
        self._pieces = pieces
        self.stops = stops
        self._include_stop = include_stop
        self._returned: list[str] = []
        self._held = ""
        self.stopped_by: str | None = None

    @property
    def text(self) -> str:
        """The text returned so far."""
        return "".join(self._returned)

    def push(self, token: int, *, may_stop: bool = True) -> str:
        """The text that is certain with this token, after what was returned before.

        may_stop: whether a string may end the text here; only the first tokens may not.
        """
        piece = self._pieces.push(token)
        return self._take(piece) if may_stop else self._return(piece)

    def finish(self) -> str:
        """The rest of the text, when no token follows."""
        held, self._held = self._held, ""
        return self._return(held)

    def _take(self, piece: str) -> str:
        if self.stopped_by is not None:
            return ""
        held = self._held + piece
        found = [stop for stop in self.stops if stop in held]
        if found:
            self.stopped_by, self._held = min(found, key=held.find), ""
            included = len(self.stopped_by) if self._include_stop else 0
            return self._return(held[: held.find(self.stopped_by) + included])
        kept = max((overlap(held, stop) for stop in self.stops), default=0)
        certain, self._held = held[: len(held) - kept], held[len(held) - kept :]
        return self._return(certain)

    def _return(self, piece: str) -> str:
        if piece:
            self._returned.append(piece)
        return piece
