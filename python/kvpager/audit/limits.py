"""How far apart log-probabilities may be before rounding does not explain it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvpager.audit.compare import Comparison

# Measured: docs/how_to/audit_a_server.md, "Rounding or corruption".
FACTOR = 4.0  # times the largest difference among cold runs
LEAST = 0.001
UNSEEN = 0.15  # where cold runs are the same; a step of a bfloat16 logit in [16, 32) is 0.125
UNMEASURED = 0.5  # where none can be repeated
MOST = 1.0


@dataclass(frozen=True)
class Limit:
    """The largest difference of log-probabilities that counts as rounding, in nats.

    Attributes:
        value: it.
        floor: the largest difference among cold runs of one text; None where none could be made.
        positions: compared for `floor`.
    """

    value: float
    floor: float | None
    positions: int

    def to_json(self) -> dict[str, Any]:
        """JSON-able."""
        return dict(vars(self))


def limit_of(cold: Iterable[Comparison]) -> Limit:
    """The limit that follows from comparisons of cold runs with one another."""
    made = [comparison for comparison in cold if comparison.tokens]
    if not made:
        return Limit(UNMEASURED, None, 0)
    floor = max(comparison.largest for comparison in made)
    value = max(LEAST, FACTOR * floor) if floor else UNSEEN
    return Limit(min(value, MOST), floor, sum(comparison.tokens for comparison in made))
