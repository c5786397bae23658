"""Which keys a mask lets a row see, asked of the function that makes it.

transformers describes a mask as a function of two positions and builds a tensor from it. Asking the
function costs the same for a window of 64 and of 64 thousand positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from transformers import AttentionMaskInterface

MaskFunction: TypeAlias = Callable[..., Any]  # of batch, head, query and key

_EAGER: MaskFunction = AttentionMaskInterface()["eager"]  # type: ignore[no-untyped-call]
_LEAST, _MOST = 1 << 12, 1 << 17  # positions that are asked for


class NotCausalWindowError(Exception):
    """A mask that is neither causal nor a causal window; says what it lets a row see."""


@dataclass
class MaskMaker:
    """Makes the masks of a forward as eager attention takes them, and remembers how.

    Attributes:
        made: each mask with its function and a copy of what it was.
    """

    made: list[tuple[torch.Tensor, MaskFunction, torch.Tensor]] = field(default_factory=list)

    def make(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """A mask [1, 1, rows, keys], of 0 and its dtype's least number; as transformers asks."""
        mask: torch.Tensor | None = _EAGER(*args, **kwargs)
        if mask is not None and "mask_function" in kwargs:
            self.made.append((mask, kwargs["mask_function"], mask.clone()))
        return mask

    def function_of(self, mask: torch.Tensor) -> MaskFunction | None:
        """What made a mask, or what it is a view of; None where its values are others."""
        for made, function, before in self.made:
            kept = mask.data_ptr() == made.data_ptr() and mask.stride() == made.stride()
            if kept and mask.shape == made.shape and torch.equal(mask, before):
                return function
        return None


def window_of(function: MaskFunction, longest: int) -> int | None:
    """How many positions a row sees, itself among them; None: all up to its own.

    Args:
        function: of batch, head, query's and key's position, as transformers composes masks.
        longest: positions that the model has.

    Raises:
        NotCausalWindowError: at some position it is neither.
    """
    last = min(max(longest, _LEAST), _MOST) - 1
    seen = _visible(function, last)
    width = len(seen)
    window = None if width == last + 1 else width
    for position in _probes(last, width):
        seen = _visible(function, position)
        expected = position + 1 if window is None else min(window, position + 1)
        first = position + 1 - expected
        if len(seen) != expected or int(seen[0]) != first or int(seen[-1]) != position:
            raise NotCausalWindowError(
                f"position {position} sees {_described(seen)} where a causal "
                + ("mask" if window is None else f"window of {window} positions")
                + f" has {first} to {position}"
            )
    return window


def _visible(function: MaskFunction, position: int) -> torch.Tensor:
    """The positions that one position sees, of those up to a few after it."""
    keys = torch.arange(position + 9, device="cpu")
    first, row = torch.tensor(0, device="cpu"), torch.tensor(position, device="cpu")
    try:
        answer = torch.as_tensor(function(first, first, row, keys), device="cpu")
        return keys[answer.to(torch.bool).expand_as(keys)]
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        raise NotCausalWindowError(
            f"its mask cannot be asked for position {position} ({type(error).__name__}: {error})"
        ) from error


def _probes(last: int, width: int) -> Iterator[int]:
    near = {0, 1, 2, last, last - 1, *range(width - 2, width + 3), 2 * width, 3 * width + 1}
    power = 4
    while power <= last:
        near |= {power - 1, power, power + power // 3}
        power *= 2
    yield from sorted(position for position in near if 0 <= position <= last)


def _described(seen: torch.Tensor) -> str:
    if not len(seen):
        return "nothing"
    first, last = int(seen[0]), int(seen[-1])
    gaps = "" if len(seen) == last - first + 1 else f" with gaps ({len(seen)} of them)"
    return f"{first} to {last}{gaps}"
