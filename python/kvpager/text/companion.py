"""The interface of a companion: another model's cache of a conversation's text."""

from __future__ import annotations

from typing import Protocol

from kvpager.companions import Cache
from kvpager.stores.companion import CompanionSnapshot


class Companion(Cache, Protocol):
    """A cache that is cut, forked, saved and closed with the transcript it belongs to."""

    kind: str  # of companion, as a store records it

    def fork(self) -> Companion:
        """A companion for a fork of the transcript; an empty one if there is no room."""
        ...

    def freeze(self, upto: int) -> CompanionSnapshot | None:
        """Its cache of the first `upto` tokens, for a save; None if it holds none of them."""
        ...

    def close(self) -> None:
        """Releases its chunks. May be called twice."""
        ...
