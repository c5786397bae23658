"""The row counts of an engine's forwards: M, as configured or the best one possible, and less."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from kvpager.errors import UnsupportedModelError
from kvpager.hf.observe import Observation, observe
from kvpager.hf.prove import RowProof, prove
from kvpager.hf.rows import RowCounts

_log = logging.getLogger(__name__)

# The largest useful M if no smaller count is proven: a decode step pays for all rows. A GPU reads
# the weights once for any number of rows.
_ALONE = {"cpu": 64, "cuda": 256}
_SMALL = 16  # a count that makes up for many rows


def settle_rows(
    model: Any,
    choices: Sequence[int],
    *,
    small_rows: str | tuple[int, ...] = "proven",
    exact: bool = True,
) -> tuple[Observation, RowCounts, RowProof | None]:
    """Runs the model on made-up tokens; returns that forward and the row counts to use.

    Args:
        model: a causal LM that `check_supported` accepted and `attach` knows.
        choices: what M may be, best first; the last is taken for want of a better.
        small_rows: as in `PagerConfig`.
        exact: False: nothing is proven, M is the first choice.

    Raises:
        UnsupportedModelError: this model cannot keep the promise with any of the choices.
    """
    if not exact:
        return observe(model, choices[0]), RowCounts(choices[0]), None
    alone = _ALONE[model.device.type]
    most = alone if small_rows == "fixed" else choices[0]
    choices = [rows for rows in choices if rows <= most] or choices[-1:]
    for rows in choices[:-1]:
        try:
            seen = observe(model, rows)
            proof = prove(model, seen, small_rows)
        except UnsupportedModelError as error:
            _log.info("not %d rows per forward: %s", rows, error)
            continue
        if rows <= alone or proof.counts.ladder[0] <= _SMALL:
            return seen, proof.counts, proof
        _log.info("not %d rows per forward: no count of %d or less is as exact", rows, _SMALL)
    seen = observe(model, choices[-1])
    proof = prove(model, seen, small_rows)
    return seen, proof.counts, proof
