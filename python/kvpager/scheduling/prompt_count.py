"""How many tokens of a request's prompt were computed for it."""

from __future__ import annotations

import numpy as np


class PromptCount:
    """Counts positions of a prompt whose K/V were computed, each once.

    A position may be computed more than once: after a suspension, because its chunk is damaged, or
    because a recurrent state is missing.
    """

    def __init__(self, prompt_tokens: int) -> None:
        self._computed = np.zeros(prompt_tokens, dtype=bool)
        self._ready = 0

    def mark(self, start: int, count: int) -> None:
        """Notes that positions [start, start + count) were computed; ignores those behind it."""
        self._computed[start : start + count] = True

    def reached(self, length: int) -> None:
        """Notes that K/V of the first `length` positions exist."""
        self._ready = max(self._ready, min(length, len(self._computed)))

    @property
    def computed(self) -> int:
        """Number of positions computed."""
        return int(np.count_nonzero(self._computed))

    @property
    def cached(self) -> int:
        """Number of positions whose K/V existed already."""
        return self._ready - int(np.count_nonzero(self._computed[: self._ready]))
