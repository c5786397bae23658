"""The comparisons of one relation, and its outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from kvpager.verify.bits import Array, Comparison, PlaceName, compare_bits

if TYPE_CHECKING:
    from kvpager._support.tokens import TokenIds
    from kvpager.session import Session
    from kvpager.verify.recording import Recording

Status: TypeAlias = Literal["same", "within", "differs", "failed", "not run", "does not apply"]

SAME: Status = "same"
WITHIN: Status = "within"
DIFFERS: Status = "differs"
FAILED: Status = "failed"
NOT_RUN: Status = "not run"
NOT_APPLICABLE: Status = "does not apply"


class NotRunError(Exception):
    """A relation could not be checked; says why. It counts as not kept."""


class DoesNotApplyError(Exception):
    """A relation has no meaning under this configuration; says why."""


@dataclass(frozen=True)
class Measure:
    """The distance between two ways whose bits need not be equal.

    Attributes:
        what: "logits", "keys".
        apart: the largest difference.
        bound: what is allowed.
        unit: of both, such as "of their standard deviation".
        place: of the largest difference.
    """

    what: str
    apart: float
    bound: float
    unit: str
    place: str

    @property
    def within(self) -> bool:
        """Whether it is allowed; a NaN is not."""
        return self.apart <= self.bound

    def __str__(self) -> str:
        return (
            f"{self.what} at most {self.apart:.2g} {self.unit} apart ({self.place}), "
            f"allowed {self.bound:.2g}"
        )


@dataclass(frozen=True)
class Outcome:
    """The result of one relation under one selection.

    Attributes:
        relation: its name.
        statement: what it says, in one line.
        selection: what rows attended to, in one line.
        status: "same"; "within" a bound, where bits are not promised; "differs" in some bit;
            "failed" with an error, beyond a bound, or with other work than promised; "not run"; or
            "does not apply".
        reason: a further explanation, in a line; `comparison.first` is the first difference.
        comparison: of all bits compared.
        cases: number of situations compared.
        notes: figures beside the bits.
        seconds: duration.
        measures: distances with a bound.
    """

    relation: str
    statement: str
    selection: str
    status: Status
    reason: str
    comparison: Comparison
    cases: int
    notes: tuple[str, ...]
    seconds: float
    measures: tuple[Measure, ...] = ()

    @property
    def kept(self) -> bool:
        """Whether the promise holds: same, within, or does not apply."""
        return self.status in (SAME, WITHIN, NOT_APPLICABLE)

    def to_json(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            **vars(self),
            "comparison": self.comparison.to_json(),
            "notes": list(self.notes),
            "measures": [vars(measure) for measure in self.measures],
        }


class Check:
    """Collects the comparisons of one relation; every one is made, whatever differed before."""

    def __init__(self, cold_run: Callable[[TokenIds], Recording] | None = None) -> None:
        """`cold_run`: of any text, where a longer text's is none of its beginning (subject.py)."""
        self._cold_run = cold_run
        self.comparison = Comparison()
        self.cases = 0
        self.notes: list[str] = []
        self.measures: list[Measure] = []
        self.broken = ""  # the first thing that is not as required
        self._case = ""

    def case(self, words: str) -> None:
        """Begins another situation; differences in it are reported with `words` in front."""
        self._case = words
        self.cases += 1

    def bits(self, actual: Array, expected: Array, place: PlaceName) -> None:
        """Compares two arrays; `place` as for `compare_bits`."""
        self.comparison += compare_bits(actual, expected, self._placed(place))

    def close(self, what: str, apart: float, bound: float, unit: str, place: str) -> None:
        """Adds a value that need not be equal to the bit: the largest difference, and its bound."""
        measure = Measure(what, apart, bound, unit, place)
        self.measures.append(measure)
        self.require(measure.within, str(measure))

    def require(self, condition: bool, otherwise: str) -> None:
        """Adds a condition beside the bits, such as how much was computed."""
        if not condition and not self.broken:
            self.broken = f"{self._case}: {otherwise}" if self._case else otherwise

    def note(self, words: str) -> None:
        """Adds a figure to report beside the bits."""
        self.notes.append(words)

    def logits(self, actual: Array, cold: Recording, position: int) -> None:
        """Logits [vocab] after the token at `position`."""
        if position not in cold.logits:
            raise NotRunError(f"the cold run left no logits at position {position}")
        self.bits(
            actual,
            cold.logits[position],
            lambda at: f"logits after position {position}" + (f", token {at[0]}" if at else ""),
        )

    def tokens(self, actual: Array, expected: Array) -> None:
        """Token ids [n] int32."""
        self.bits(actual, expected, lambda at: f"token {at[0]}" if at else "tokens")

    def recording(self, actual: Recording, cold: Recording) -> None:
        """Tokens, K/V of every layer, then whatever logits `actual` has.

        K/V come first, layer by layer, so that the first difference is reported where it arose.
        """
        length = len(actual.tokens)
        cold = self._of_length(cold, length)
        self.tokens(actual.tokens, np.asarray(cold.tokens[:length]))
        for layer, (keys, values) in enumerate(zip(actual.keys, actual.values)):
            for name, ours, theirs in (
                ("keys", keys, cold.keys[layer]),
                ("values", values, cold.values[layer]),
            ):
                self.bits(ours, theirs[:length], _kv_place(name, layer))
        whole = len(actual.logits) == length  # all of one run, rather than of some prompts' ends
        for position, logits in sorted(actual.logits.items()):
            of = cold if whole else self._of_length(cold, position + 1)
            self.logits(logits, of, position)

    def session(self, session: Session, cold: Recording) -> None:
        """Tokens, K/V of every layer, and the logits after the last committed token."""
        from kvpager.verify.recording import record

        logits = session.logits  # computes first what is uncomputed
        self.recording(record(session, {session.committed - 1: logits}), cold)

    def _of_length(self, cold: Recording, length: int) -> Recording:
        if self._cold_run is None or length == len(cold.tokens):
            return cold
        return self._cold_run(cold.tokens[:length])

    def _placed(self, place: PlaceName) -> PlaceName:
        if not self._case:
            return place
        case = self._case
        if isinstance(place, str):
            return f"{case}: {place}"
        words: Callable[[tuple[int, ...]], str] = place
        return lambda at: f"{case}: {words(at)}"


def _kv_place(name: str, layer: int) -> Callable[[tuple[int, ...]], str]:
    def words(at: tuple[int, ...]) -> str:
        where = f"{name} of layer {layer}"
        return f"{where}, position {at[0]}, head {at[1]}, element {at[2]}" if at else where

    return words
