"""What putting a session together from segments came to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Assembly:
    """How `Engine.assemble` has filled a session, and what it cost.

    Every token of the text is of one of four kinds, whose numbers add up to `tokens`.

    Attributes:
        tokens: of the text.
        exact: at its beginning, with the K/V a full prefill gives: a true prefix, whatever was
            computed right after it, and with everything recomputed the whole text.
        moved: K/V of a segment, with keys rotated to their new positions; approximate.
        recomputed: likewise of a segment, but computed again in place; approximate.
        fresh: ids that were in no segment, after something that is approximate.
        shared: of the exact tokens, those that were there already and nobody had to compute.
        rows: rows of forwards of the whole model, padding apart: for each of the other exact
            tokens, each recomputed and each fresh one, one.
        probe_rows: rows that a policy has spent on its choice, in forwards of the whole model; a
            forward that stops after some layers counts as their share of all.
        forwards: forwards run for all of it, probes included.
        policy: what chose the tokens to recompute.
        seconds: from the call of `assemble` to its return.
    """

    tokens: int
    exact: int
    moved: int
    recomputed: int
    fresh: int
    shared: int
    rows: int
    probe_rows: float
    forwards: int
    policy: str
    seconds: float

    @property
    def recomputed_share(self) -> float:
        """Recomputed tokens by those that segments were to bring; 0 without any."""
        segments = self.moved + self.recomputed
        return self.recomputed / segments if segments else 0.0
