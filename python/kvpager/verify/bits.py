"""Comparison of raw bits: what differs, by how much, and where first.

Not of numbers: +0 differs from -0, and a NaN equals only a NaN of the same payload. Torch tensors
and numpy arrays of any real dtype, one kind against the other too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kvpager._model.seam.rows import as_bits

Array: TypeAlias = "torch.Tensor | npt.NDArray[Any]"
PlaceName: TypeAlias = "str | Callable[[tuple[int, ...]], str]"

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_ONES = np.array([bin(byte).count("1") for byte in range(256)], dtype=np.uint8)


@dataclass(frozen=True)
class Difference:
    """The first element, in logical order, whose bits differ; or why nothing could be compared.

    Attributes:
        place: where, in the caller's words.
        index: of the element; empty where shapes or dtypes differ.
        actual: its value here.
        expected: the value it should have.
        ulps: representable numbers between the two; 0 for two zeros of other sign; None where one
            is NaN, or they are no floating-point numbers.
        reason: what else is wrong, such as another shape.
    """

    place: str
    index: tuple[int, ...] = ()
    actual: float | None = None
    expected: float | None = None
    ulps: int | None = None
    reason: str = ""

    def __str__(self) -> str:
        if self.reason:
            return f"{self.place}: {self.reason}"
        apart = f", {self.ulps:,} ulp apart" if self.ulps is not None else ""
        return f"{self.place}: {self.actual!r}, expected {self.expected!r}{apart}"

    def to_json(self) -> dict[str, Any]:
        """JSON-able; numbers that JSON has no word for are text."""
        return {
            "place": self.place,
            "index": list(self.index),
            "actual": _json_number(self.actual),
            "expected": _json_number(self.expected),
            "ulps": self.ulps,
            "reason": self.reason,
        }


@dataclass(frozen=True)
class Comparison:
    """How much was compared and how much of it differs; `a + b` is both together.

    Attributes:
        elements: numbers compared.
        bits: bits compared.
        differing_elements: numbers with at least one other bit.
        differing_bits: bits that differ.
        first: the first difference, of `a` before that of `b`.
    """

    elements: int = 0
    bits: int = 0
    differing_elements: int = 0
    differing_bits: int = 0
    first: Difference | None = None

    @property
    def same(self) -> bool:
        """Whether nothing differs. Of an empty comparison too: see `elements`."""
        return self.first is None

    def __add__(self, other: Comparison) -> Comparison:
        return Comparison(
            self.elements + other.elements,
            self.bits + other.bits,
            self.differing_elements + other.differing_elements,
            self.differing_bits + other.differing_bits,
            self.first or other.first,
        )

    def to_json(self) -> dict[str, Any]:
        """JSON-able."""
        return {**vars(self), "first": None if self.first is None else self.first.to_json()}


def compare_bits(actual: Array, expected: Array, place: PlaceName = "") -> Comparison:
    """Compares every bit of two arrays of the same shape and dtype.

    Args:
        actual: what came out.
        expected: what it should be.
        place: what is compared, such as "keys of layer 3"; or a function from an element's index to
            such words, such as "keys of layer 3, position 17, head 1". A text gets the index added.

    A different shape or dtype is a difference of its own, with no elements compared.
    """
    name = place if isinstance(place, str) else place(())
    for what, here, there in (
        ("shape", str(list(actual.shape)), str(list(expected.shape))),
        ("dtype", _dtype_name(actual), _dtype_name(expected)),
    ):
        if here != there:
            return Comparison(first=Difference(name, reason=f"{what} {here}, expected {there}"))
    ours, theirs = _raw(actual), _raw(expected)
    elements, bits = ours.size, ours.size * ours.itemsize * 8
    changed = np.flatnonzero(ours != theirs)
    if not changed.size:
        return Comparison(elements, bits)
    flipped = ours[changed] ^ theirs[changed]
    at = int(changed[0])
    index = tuple(int(i) for i in np.unravel_index(at, tuple(actual.shape)))
    return Comparison(
        elements,
        bits,
        int(changed.size),
        int(_ONES[flipped.view(np.uint8)].sum(dtype=np.int64)),
        Difference(
            _place_of(place, index),
            index,
            _value(actual, index),
            _value(expected, index),
            _ulps(
                actual,
                int(ours[at]),
                int(theirs[at]),
                _value(actual, index),
                _value(expected, index),
            ),
        ),
    )


def _raw(array: Array) -> npt.NDArray[Any]:
    """The bytes as unsigned integers [elements], in logical order."""
    if isinstance(array, torch.Tensor):
        raw: npt.NDArray[Any] = as_bits(array.detach().cpu().reshape(-1)).numpy()
    else:
        raw = np.ascontiguousarray(array).reshape(-1)
    return raw.view(_UNSIGNED[raw.itemsize])


def _dtype_name(array: Array) -> str:
    return str(array.dtype).removeprefix("torch.")


def _place_of(place: PlaceName, index: tuple[int, ...]) -> str:
    if not isinstance(place, str):
        return place(index)
    where = f"[{', '.join(map(str, index))}]"
    return f"{place} {where}" if place else where


def _value(array: Array, index: tuple[int, ...]) -> float:
    number: float = array[index].item()
    return number


def _ulps(array: Array, ours: int, theirs: int, actual: float, expected: float) -> int | None:
    """Steps between two floating-point numbers along the line of representable ones."""
    if not isinstance(actual, float) or math.isnan(actual) or math.isnan(expected):
        return None
    sign = 1 << (
        8 * (array.element_size() if isinstance(array, torch.Tensor) else array.itemsize) - 1
    )

    def along(raw: int) -> int:
        return -(raw - sign) if raw & sign else raw

    return abs(along(ours) - along(theirs))


def _json_number(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)
