"""The report of a verification: data, JSON, and a verdict in one line."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvpager.verify.bits import Comparison
from kvpager.verify.check import DIFFERS, FAILED, NOT_RUN, Outcome

if TYPE_CHECKING:
    from kvpager._model.proof.shapes import ShapeReport


@dataclass
class Report:
    """The report on one model under one configuration on one machine.

    Attributes:
        about: what was verified: model, dtype, threads, row counts and the like.
        outcomes: of every relation, under every selection.
        shapes: findings on each shape of layer, from `kvpager._model.proof.shapes.probe_shapes`.
        advice: suggestions, in sentences.
        refusal: why an engine refuses the model, so that nothing was checked; else empty.
        seconds: duration.
        lengths: of the texts that were compared with a cold run, in tokens, ascending.
    """

    about: dict[str, Any]
    outcomes: list[Outcome] = field(default_factory=list)
    shapes: list[ShapeReport] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    refusal: str = ""
    seconds: float = 0.0
    lengths: list[int] = field(default_factory=list)

    @property
    def kept(self) -> bool:
        """Whether every relation was checked and gave the same bits, or does not apply."""
        return bool(self.compared.elements) and all(outcome.kept for outcome in self.outcomes)

    @property
    def broken(self) -> bool:
        """Whether a relation was checked and does not hold."""
        return any(outcome.status in (DIFFERS, FAILED) for outcome in self.outcomes)

    @property
    def compared(self) -> Comparison:
        """All comparisons together; its first difference is that of the first relation."""
        total = Comparison()
        for outcome in self.outcomes:
            total += outcome.comparison
        return total

    def outcome(self, relation: str, selection: str | None = None) -> Outcome:
        """A relation's outcome, under a selection or the first. Raises KeyError without one."""
        for outcome in self.outcomes:
            if outcome.relation == relation and selection in (None, outcome.selection):
                return outcome
        raise KeyError(relation)

    def verdict(self) -> str:
        """One line."""
        if self.refusal:
            return f"REFUSED: {self.refusal}"
        total = self.compared
        bits = f"{total.bits:,} bits compared"
        for status, words in ((DIFFERS, "NOT KEPT"), (FAILED, "NOT KEPT"), (NOT_RUN, "NOT PROVEN")):
            found = [outcome for outcome in self.outcomes if outcome.status == status]
            if found and status == DIFFERS:
                return (
                    f"{words}: {total.differing_bits:,} bits in {total.differing_elements:,} "
                    f"numbers differ, {bits}; {found[0].relation}: {found[0].comparison.first}"
                )
            if found:
                how = "failed" if status == FAILED else "was not run"
                return f"{words}: {found[0].relation} {how}: {found[0].reason}; {bits}"
        if not total.elements:
            return "NOT PROVEN: nothing was compared"
        return f"kept: {bits}, 0 differ"

    def __str__(self) -> str:
        return self.verdict()

    def to_json(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            **self.about,
            "kept": self.kept,
            "refusal": self.refusal or None,
            "verdict": self.verdict(),
            "compared": self.compared.to_json(),
            "relations": [outcome.to_json() for outcome in self.outcomes],
            "shapes": [shape.to_json() for shape in self.shapes],
            "advice": self.advice,
            "lengths": self.lengths,
            "seconds": self.seconds,
        }
