"""What was found out about each part of a model, as a table that can be printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvpager._model.proof.rowwise import RowwiseProbe, Sample
from kvpager._model.proof.units import Unit, head_unit, units_of
from kvpager._model.seam.attach import attach
from kvpager._model.seam.observe import observe
from kvpager._model.seam.rows import HEAD_COUNTS

ROW_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class ShapeReport:
    """How the bits of one part's rows depend on the forward they are in.

    Attributes:
        kind: class name of the module.
        modules: names of the modules of this kind and shape.
        in_features, out_features: elements of a row that go in and come out.
        dtype: of its weights, or of what goes in where it has none.
        row_dependent: a row's bits change with its index.
        neighbour_dependent: a row's bits change with what other rows hold.
        classes: row counts, grouped by equal bits.
        thread_dependent: the number of threads changes bits; None: not asked.
    """

    kind: str
    modules: tuple[str, ...]
    in_features: int
    out_features: int
    dtype: str
    row_dependent: bool
    neighbour_dependent: bool
    classes: tuple[tuple[int, ...], ...]
    thread_dependent: bool | None = None

    def to_json(self) -> dict[str, Any]:
        """Its fields, of types that JSON has."""
        return asdict(self)


def probe_shapes(model: Any, rows: int, *, thread_counts: Sequence[int] = ()) -> list[ShapeReport]:
    """One report per distinct part of a model: products, norms, activations, experts, the head.

    Products are tried on made-up weights and inputs whose exact result is zero, so that another
    order of summation shows in almost every element.

    Args:
        model: a causal LM that `check_supported` accepted.
        rows: M; parts are tried with it and with the counts of ROW_COUNTS, experts only with those
            below M.
        thread_counts: numbers of torch threads whose bits are compared with those of the present
            number; it is set back afterwards.

    Raises:
        UnsupportedModelError: the model does not run on packed rows at all.
    """
    attach(model)
    seen = observe(model, rows)
    with torch.inference_mode():
        reports = [_report(unit, _counts(unit, rows), thread_counts) for unit in units_of(seen)]
        head = head_unit(model, seen)
        reports.append(_report(head, HEAD_COUNTS, thread_counts))
    return reports


def _counts(unit: Unit, rows: int) -> list[int]:
    most = unit.base if unit.gathers else max(rows, ROW_COUNTS[-1])
    return sorted({count for count in (*ROW_COUNTS, unit.base) if count <= most})


def _report(unit: Unit, counts: Sequence[int], thread_counts: Sequence[int]) -> ShapeReport:
    samples = unit.samples(counts[-1])
    probe = RowwiseProbe(samples, unit.base)
    return ShapeReport(
        kind=unit.kind,
        modules=unit.modules,
        in_features=unit.in_features,
        out_features=unit.out_features,
        dtype=str(unit.dtype).removeprefix("torch."),
        row_dependent=probe.row_dependent(),
        neighbour_dependent=probe.neighbour_dependent(),
        classes=probe.classes(counts),
        thread_dependent=_thread_dependent(probe, samples, unit.base, thread_counts),
    )


def _thread_dependent(
    probe: RowwiseProbe, samples: Sequence[Sample], base: int, thread_counts: Sequence[int]
) -> bool | None:
    if not thread_counts:
        return None
    before = torch.get_num_threads()
    try:
        for count in thread_counts:
            torch.set_num_threads(count)
            if not probe.same_reference(RowwiseProbe(samples, base)):
                return True
    finally:
        torch.set_num_threads(before)
    return False
