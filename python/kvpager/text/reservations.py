"""Room below the pool for tokens that a text may still get, reserved before they are written."""

from __future__ import annotations

from contextlib import suppress
from types import TracebackType

from kvpager.errors import PagerError
from kvpager.pager import Sequence


class Reservation:
    """Room for a number of tokens of a text. Made by `Reservations.reserve`."""

    def __init__(self, reservations: Reservations, total_tokens: int) -> None:
        self.total_tokens = total_tokens
        self._reservations = reservations

    def release(self) -> None:
        """Releases the room that no other reservation of the text needs. May be called twice."""
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
    """The reservations of one transcript. The pager holds room for the largest.

    sequence: the transcript's sequence; whoever replaces that one has to replace it here too.
    """

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self._held: list[Reservation] = []

    def reserve(self, total_tokens: int) -> Reservation:
        """Holds room for the text to grow to `total_tokens`.

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
            # A sequence that replaced the first one keeps what it could reserve; one that another
            # thread closed, or that a forked child inherited, has nothing to release.
            with suppress(PagerError):
                self.sequence.reserve(self._most())

    def _most(self) -> int:
        """The largest reservation, at least the sequence's length (accepted guesses count)."""
        return max([self.sequence.length, *(one.total_tokens for one in self._held)])
