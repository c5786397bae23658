"""What another model holds of a conversation's text, for as long as the conversation lives."""

from __future__ import annotations

from typing import Protocol

from kvpager.caches import Cache
from kvpager.stores.companion import CompanionSnapshot


class Companion(Cache, Protocol):
    """A cache that is cut, forked, saved and closed with the transcript it belongs to."""

    kind: str  # of companion, in a store

    def fork(self) -> Companion:
        """The same for a transcript with the same text; empty where there is no room for it."""
        ...

    def freeze(self, upto: int) -> CompanionSnapshot | None:
        """What it holds of the first `upto` tokens, for a save; None if that is nothing."""
        ...

    def close(self) -> None:
        """Gives its chunks up. Twice is harmless."""
        ...
