"""Finds the row counts that give the bits of M rows, when an engine starts.

It assumes nothing about a library or an architecture. It tests every part of the model alone, on
numbers that reveal another order of summation, and then the whole model, with its own weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kvpager._model.proof.between import Between, decoder_run, finishing_run
from kvpager._model.proof.units import Part, head_unit, units_of
from kvpager._model.proof.whole import WholeModel
from kvpager._model.seam.linear import computes_products
from kvpager._model.seam.observe import Observation, observe
from kvpager._model.seam.rows import HEAD_COUNTS, RowCounts, counts_below, spread
from kvpager._model.seam.support import require_known_experts
from kvpager.errors import UnsupportedModelError


@dataclass(frozen=True)
class Dropped:
    """A row count that was tried and gives other bits, and what gives them."""

    rows: int
    where: str


@dataclass(frozen=True)
class RowProof:
    """Row counts that a model may have, and those that it may not."""

    counts: RowCounts
    dropped: tuple[Dropped, ...] = ()


class _Trial(Protocol):
    """Tries what rows pass through: a part of a model, or all of it."""

    def differing(self, counts: Sequence[int]) -> dict[int, str]:
        """Of some row counts those that give other bits than M, each with what gives them.

        The first call raises UnsupportedModelError if rows of a forward of M depend on one another.
        """


def prove(model: Any, seen: Observation, small_rows: str | tuple[int, ...] = "proven") -> RowProof:
    """The row counts that forwards may have beside that of the one that was observed, M.

    Args:
        model: a causal LM that `attach` knows.
        seen: a forward of M rows of it.
        small_rows: "proven" for a few counts of those that can be proven, "fixed" for none, or
            the counts to prove.

    Raises:
        UnsupportedModelError: a row's bits in a forward of M depend on its index or on other rows,
            or a count of `small_rows` gives other bits. Says what was seen where.
    """
    require_known_experts(model, [call.module for call in seen.calls])
    candidates, choose = _candidates(small_rows, seen.rows)
    with torch.inference_mode():
        parts = [Part(model, unit, unit.base) for unit in units_of(seen)]
        between = Between(model, decoder_run(model, seen), seen.rows, seen)
        trials: list[_Trial] = [*parts, between, WholeModel(model, seen)]
        smaller, dropped = _settle(trials, candidates, choose)
        if dropped and not isinstance(small_rows, str):
            raise _refused(model, seen.rows, small_rows, dropped[0])
        head = head_unit(model, seen)
        others = [count for count in HEAD_COUNTS if count != head.base]
        after = Between(model, finishing_run(model, seen), head.base, seen)
        of_head, dropped_of_head = _settle(
            [Part(model, head, HEAD_COUNTS[-1]), after],
            [] if small_rows == "fixed" else others,
            tuple,
        )
    counts = RowCounts(seen.rows, smaller, tuple(sorted((head.base, *of_head))))
    return RowProof(counts, (*dropped, *dropped_of_head))


_Choice = Callable[[Sequence[int]], tuple[int, ...]]


def _candidates(small_rows: str | tuple[int, ...], rows: int) -> tuple[tuple[int, ...], _Choice]:
    """The counts to try, ascending, and which of them to use if some can be proven."""
    if not isinstance(small_rows, str):
        return small_rows, tuple
    apart = 2 if computes_products() else 4  # where a further count is soon tried
    return (
        counts_below(rows) if small_rows == "proven" else (),
        lambda counts: spread(counts, rows, apart),
    )


def _settle(
    trials: Sequence[_Trial], candidates: Iterable[int], choose: _Choice
) -> tuple[tuple[int, ...], list[Dropped]]:
    """Picks, with `choose`, among the candidates that give the same bits in every trial.

    Only what it would pick is tried. Each trial is asked at least once.
    """
    alive = list(candidates)
    dropped: list[Dropped] = []
    tried: list[set[int]] = [set() for _ in trials]
    before = -1
    while len(dropped) != before:  # what takes a dropped count's place is new to earlier trials
        before = len(dropped)
        for trial, done in zip(trials, tried):
            differing: dict[int, str] | None = None
            while differing is None or differing:
                picked = [count for count in choose(alive) if count not in done]
                differing = trial.differing(picked)
                done.update(picked)
                alive = [count for count in alive if count not in differing]
                dropped += [Dropped(count, what) for count, what in differing.items()]
    return choose(alive), dropped


def _refused(
    model: Any, rows: int, small_rows: tuple[int, ...], dropped: Dropped
) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"PagerConfig.small_rows is {small_rows}, but a forward of {dropped.rows} rows gives "
        f"{type(model).__name__} other bits than one of {rows}, in {dropped.where}; leave "
        f'{dropped.rows} out, or set small_rows to "proven"'
    )


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
