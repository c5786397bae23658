"""Attention for a model's digest: over many keys, in arithmetic that every library rounds alike.

It stands in for kvpager's attention where only the model matters. What a call asks for (scaling,
window, soft cap, sinks) shows in its result, and so does every key a row may see. It isn't a
softmax, whose exponentials differ between processors: scores are sums of integers, which are exact
in any order, and all else is additions, products and quotients one after the other, as IEEE 754
defines them. So the result is the same for every number of rows, threads and kind of device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from kvpager.hf.observe import LayerTensors, Recorder

KEYS = 16  # rows that attend to one another; later ones attend to themselves
_BITS = 20  # of a number in a score: products of two, and sums of these, are exact in float64


@dataclass
class Mixing(Recorder):
    """Stands in for forwards of one text: each row attends to all rows that its call lets it see.

    Attributes:
        positions: [rows] of the forward that is next or running.
        arguments: of each attention call, in order, its keyword arguments.
    """

    positions: torch.Tensor = field(default_factory=lambda: torch.empty(0, device="cpu"))
    arguments: list[dict[str, Any]] = field(default_factory=list)
    _seen: dict[int, LayerTensors] = field(default_factory=dict)

    def begin(self, positions: torch.Tensor) -> None:
        """Goes on with further rows of the text, whose calls take the place of those before."""
        self.calls, self.arguments = {}, []
        self.positions = positions

    def note_call(self, arguments: dict[str, Any]) -> None:
        """Keeps the keyword arguments of an attention call that follows."""
        self.arguments.append(arguments)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **call: Any
    ) -> torch.Tensor:
        """As a forward does, but by the arithmetic of this module."""
        made = super().attend(layer, q, k, v, **call)
        before = self._seen.get(layer, (k[:0], v[:0], self.positions[:0]))
        count = min(len(q), KEYS - len(before[0]))
        if count > 0:
            new = (k[:count], v[:count], self.positions[:count])
            seen = torch.cat([before[0], new[0]]), torch.cat([before[1], new[1]])
            positions = torch.cat([before[2], new[2]])
            self._seen[layer] = (*seen, positions)
            made = torch.cat([_mixed(q[:count], *seen, positions, call).to(q.dtype), made[count:]])
        return made


def _mixed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    call: dict[str, Any],
) -> torch.Tensor:
    """[n, q_heads, v_dim] float64 for the last n rows of those whose keys and values are given."""
    n, total, heads = len(q), len(k), k.shape[1]
    own = torch.arange(total - n, total, device=q.device)
    queries, query_exponents = _integers(q.reshape(n, heads, -1, q.shape[-1]))
    keys, key_exponents = _integers(k)
    scores = torch.einsum("ihgd,jhd->ihgj", queries, keys)
    exponents = query_exponents + key_exponents.squeeze(-1).t()[:, None]
    scores = scores * _power(exponents) * float(call["scaling"])
    if (cap := call.get("softcap")) is not None:
        scores = scores / (1 + scores.abs() / float(cap))
    seen = own[:, None] >= torch.arange(total, device=q.device)
    if (window := call.get("window")) is not None:
        seen = seen & (positions[own, None] - positions < window)
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    highest = scores.amax(-1, keepdim=True)
    if (sinks := call.get("sinks")) is not None:
        sink = sinks.double().reshape(1, heads, -1, 1)
        highest = torch.maximum(highest, sink)
    weights = _weight(scores, highest)
    whole = weights.new_zeros(()) if sinks is None else _weight(sink, highest)
    out = weights.new_zeros((n, *scores.shape[1:3], v.shape[-1]))
    for place in range(total):
        weight = weights[..., place : place + 1]
        whole = whole + weight
        out = out + weight * v[place].double()[None, :, None]
    return (out / whole).reshape(n, -1, v.shape[-1])


def _weight(scores: torch.Tensor, highest: torch.Tensor) -> torch.Tensor:
    """1 for the highest score, 0 for minus infinity, and the less the lower."""
    return 1 / (1 + (highest - scores) * (highest - scores))


def _integers(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors [..., dim] as integers, and the exponent of each [..., 1] to scale them back by."""
    wide = x.double()
    _, exponent = torch.frexp(wide.abs().amax(-1, keepdim=True))
    exponent = exponent - _BITS
    return (wide * _power(-exponent)).round(), exponent


def _power(exponents: torch.Tensor) -> torch.Tensor:
    """2 to the power of integers, float64; torch's own may be off by a bit."""
    return (exponents.long().clamp(-1022, 1023) + 1023 << 52).view(torch.float64)
