"""One part of a model, asked which row counts give the bits of its base."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvpager.errors import UnsupportedModelError
from kvpager.hf.rowwise import RowwiseProbe
from kvpager.hf.units import Unit


class Part:
    """A unit of a model. What it is tried on is made anew for each question, and not kept."""

    def __init__(self, model: Any, unit: Unit, rows: int) -> None:
        """`rows`: how many are tried in all, at least the unit's base."""
        self._model = model
        self._unit = unit
        self._rows = rows
        self._checked = False

    def differing(self, counts: Sequence[int]) -> dict[int, str]:
        """Of some row counts those that give other bits than the base, each with what differs.

        Raises:
            UnsupportedModelError: rows of the base depend on their index or on one another.
        """
        tried = [count for count in counts if count <= self._rows]
        if self._checked and not tried:
            return {}
        samples = self._unit.samples(self._rows)
        if not samples:  # nothing of it is torch's
            self._checked = True
            return {}
        probe = RowwiseProbe(samples, self._unit.base)
        if not self._checked:
            self._require_independent_rows(probe)
            self._checked = True
        return {count: what for count in tried if (what := self._difference(probe, count))}

    def _difference(self, probe: RowwiseProbe, count: int) -> str | None:
        try:
            if probe.differs(count):
                return str(self._unit)
        except (RuntimeError, ValueError, IndexError) as error:
            return f"{self._unit}, which fails with it ({error})"
        return None

    def _require_independent_rows(self, probe: RowwiseProbe) -> None:
        if probe.independent():
            return
        base = self._unit.base
        if probe.neighbour_dependent():
            what = "what other rows of the forward hold"
            remedy = "use an architecture or implementation that computes each row alone"
            if self._unit.quantised:
                what += " (a scale of activations over several rows, or columns chosen by them)"
                remedy = "quantise weights alone, or activations by a scale of each token"
        else:
            what = "its index in the forward"
            remedy = "set rows to a multiple of 64, or use one torch thread or another dtype"
        raise UnsupportedModelError(
            f"{type(self._model).__name__}: the bits of a row depend on {what} in {self._unit}, "
            f"with {base} rows and {torch.get_num_threads()} threads, so no saved K/V could be "
            f"trusted; {remedy}"
        )
