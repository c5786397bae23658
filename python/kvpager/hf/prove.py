"""Finds the row counts that give the bits of M rows, when an engine starts.

It assumes nothing about a library or an architecture. It tests every part of the model alone, on
numbers that reveal another order of summation, and then the whole model, with its own weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kvpager.errors import UnsupportedModelError
from kvpager.hf.between import Between, decoder_run, finishing_run
from kvpager.hf.linear import computes_products
from kvpager.hf.observe import Observation
from kvpager.hf.part import Part
from kvpager.hf.rows import HEAD_COUNTS, RowCounts, counts_below, spread
from kvpager.hf.support import require_known_experts
from kvpager.hf.units import head_unit, units_of
from kvpager.hf.whole import WholeModel


@dataclass(frozen=True)
class Dropped:
    """A row count that was tried and gives other bits, and what gives them."""

    rows: int
    where: str


@dataclass(frozen=True)
class RowProof:
    """What was found out about a model's row counts: those it may have, and those it may not."""

    counts: RowCounts
    dropped: tuple[Dropped, ...] = ()


class _Subject(Protocol):
    """Something that rows pass through."""

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
        subjects: list[_Subject] = [*parts, between, WholeModel(model, seen)]
        smaller, dropped = _settle(subjects, candidates, choose)
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
    subjects: Sequence[_Subject], candidates: Iterable[int], choose: _Choice
) -> tuple[tuple[int, ...], list[Dropped]]:
    """What `choose` picks of the candidates that every subject gives the same bits with.

    Only what it would pick is tried. Every subject is asked at least once.
    """
    alive = list(candidates)
    dropped: list[Dropped] = []
    tried: list[set[int]] = [set() for _ in subjects]
    before = -1
    while len(dropped) != before:  # what takes a dropped count's place is new to earlier subjects
        before = len(dropped)
        for subject, done in zip(subjects, tried):
            differing: dict[int, str] | None = None
            while differing is None or differing:
                picked = [count for count in choose(alive) if count not in done]
                differing = subject.differing(picked)
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
