"""Room below the pool that a text may still need, reserved by whoever will write it."""

from __future__ import annotations

from contextlib import suppress
from types import TracebackType

from kvpager.errors import PagerError
from kvpager.pager import Sequence


class Reservation:
    """Room for so many tokens of a text, until it is released. Made by `Reservations.reserve`."""

    def __init__(self, reservations: Reservations, total_tokens: int) -> None:
        self.total_tokens = total_tokens
        self._reservations = reservations

    def release(self) -> None:
        """Gives back the room that no other reservation of the text needs. Twice is harmless."""
        self._reservations.release(self)

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class Reservations:
    """Those of one transcript. The pager holds room for the largest of them.

    sequence: what the transcript holds now; whoever exchanges it says so here.
    """

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self._held: list[Reservation] = []

    def reserve(self, total_tokens: int) -> Reservation:
        """Holds room for the text to grow to so many tokens.

        Raises:
            CapacityError: nothing more is held than before.
        """
        reservation = Reservation(self, total_tokens)
        self._held.append(reservation)
        try:
            self.sequence.reserve(self._most())
        except BaseException:
            self._held.remove(reservation)
            raise
        return reservation

    def release(self, reservation: Reservation) -> None:
        """See `Reservation.release`."""
        if reservation not in self._held:
            return
        self._held.remove(reservation)
        if not self.sequence.closed:
            # Of another sequence than was reserved for, it has what it could have; closed by
            # another thread meanwhile or inherited by a forked child, it has nothing to give.
            with suppress(PagerError):
                self.sequence.reserve(self._most())

    def _most(self) -> int:
        """Accepted guesses may have brought the sequence further already."""
        return max([self.sequence.length, *(one.total_tokens for one in self._held)])
