"""Room below the pool that a text may still need, owned by whoever asked for it."""

from __future__ import annotations

from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING

from kvpager.errors import PagerError

if TYPE_CHECKING:
    from kvpager.pager import Sequence


class Room:
    """A claim on room for so many tokens of a text, until it is released. Made by `Rooms.claim`."""

    def __init__(self, rooms: Rooms, total_tokens: int) -> None:
        self.total_tokens = total_tokens
        self._rooms = rooms

    def release(self) -> None:
        """Gives the claim up, and the room that no other claim needs. Twice is harmless."""
        self._rooms.release(self)

    def __enter__(self) -> Room:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class Rooms:
    """The claims of one session. The pager holds room for the largest of them.

    sequence: what the session holds now; whoever exchanges it says so here.
    """

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self._claims: list[Room] = []

    def claim(self, total_tokens: int) -> Room:
        """Holds room for the text to grow to so many tokens.

        Raises:
            CapacityError: nothing more is held than before.
        """
        room = Room(self, total_tokens)
        self._claims.append(room)
        try:
            self.sequence.reserve(self._wanted())
        except BaseException:
            self._claims.remove(room)
            raise
        return room

    def release(self, room: Room) -> None:
        """See `Room.release`."""
        if room not in self._claims:
            return
        self._claims.remove(room)
        if not self.sequence.closed:
            # Of another sequence than the claims were made for, it has what it could have; closed
            # by another thread meanwhile or inherited by a forked child, it has nothing to give.
            with suppress(PagerError):
                self.sequence.reserve(self._wanted())

    def _wanted(self) -> int:
        """What is ahead of the text may be more already."""
        return max([self.sequence.length, *(claim.total_tokens for claim in self._claims)])
