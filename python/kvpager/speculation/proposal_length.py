"""How many tokens to propose: many where text repeats, none where proposals never pay."""

from __future__ import annotations

from collections.abc import Callable

# Costs relative to reading all weights (1), in the middle of those measured for small and large
# models, short and long texts. They affect speed only.
_ROW_COST = 1 / 32  # a further row of a forward, as padding
_TOKEN_COST = 1 / 16  # a proposed token: its attention, its logits, its removal when refused

_MEMORY = 0.7  # weight of earlier observations after another proposal
_MOST = 128  # tokens of one proposal
_TRIAL = 4  # tokens of a trial, which finds out whether proposals pay again
_FIRST_WAIT, _LONGEST_WAIT = 4, 64  # forwards between trials; doubles while they fail


class ProposalLength:
    """Chooses the number of tokens that maximises a forward's tokens per cost.

    Assumes that a proposed token is accepted with probability a if all before it were, so that k of
    them give a + a^2 + ... + a^k tokens; a follows recent acceptance. If no number pays, it only
    proposes a trial from time to time. A pure function of the observations; reads no clock.
    """

    def __init__(self, guess_cost: float = 0.0) -> None:
        """`guess_cost`: cost of one guess relative to a forward that reads all weights."""
        self._guess_cost = guess_cost
        self._accepted = self._refused = 1.0  # before any observation a is 1/2
        self._waited, self._wait = 0, _FIRST_WAIT

    @property
    def acceptance(self) -> float:
        """The probability a."""
        return self._accepted / (self._accepted + self._refused)

    def choose(self, *, room: int, used: int, fit: Callable[[int], int], paid: int = 0) -> int:
        """The number of tokens to propose now.

        Args:
            room: the most there may be.
            used: rows of the forward without them.
            fit: maps used rows to the rows that the forward runs with.
            paid: how many of them cost no draft forward, because other sessions guess as many.
        """
        if room <= 0:
            return 0
        best = self._best(min(room, _MOST), used, fit, paid)
        if best or self._waited >= self._wait:
            return best or min(room, _TRIAL, max(1, fit(used) - used))
        self._waited += 1
        return 0

    def _best(self, most: int, used: int, fit: Callable[[int], int], paid: int) -> int:
        best, best_rate = 0, used / (1 + _ROW_COST * fit(used))
        expected, chance, spent = float(used), 1.0, 0.0
        for count in range(1, most + 1):
            chance *= self.acceptance
            expected += chance
            cost = _TOKEN_COST + (self._guess_cost if count > paid else 0.0)
            spent += cost
            rate = expected / (1 + _ROW_COST * fit(used + count) + spent)
            if rate > best_rate:
                best, best_rate = count, rate
            if chance <= cost * rate:  # further tokens cost more than they gain
                break
        return best

    def observe(self, proposed: int, accepted: int) -> None:
        """Records a proposal's outcome; if `accepted` < `proposed`, the next token was refused."""
        if not proposed:
            return
        self._accepted = _MEMORY * self._accepted + accepted
        self._refused = _MEMORY * self._refused + (accepted < proposed)
        failed_trial = self._waited >= self._wait and not accepted
        self._wait = min(_LONGEST_WAIT, 2 * self._wait) if failed_trial else _FIRST_WAIT
        self._waited = 0
