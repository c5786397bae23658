"""Rows whose products with a layer's own weights nearly cancel, without knowing the weights.

A quantised layer cannot be given weights whose products cancel (cancelling.py), so its rows are
chosen instead. Some places of a row are left free. The layer itself says what it makes of the rest,
and of each free place alone; the free places are set so that some outputs come near zero. That is
repeated with other free places, whose numbers are smaller each time, until those outputs are
nothing but the rounding errors of their sums.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_OUTPUTS = 32  # that are brought near zero, at most
_SPARE = 2  # free places per output, so that the equations are well conditioned
_ROUNDS = 3  # each leaves about a 200th in 16 bits


def cancelling_rows(
    layer: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Rows [R, ..., in] like `rows`, of which `layer` makes [R, ..., out] with some near zero.

    `layer` takes R rows at a time. What is no product of each row and a matrix, up to rounding,
    gets rows of no such kind, and keeps all other properties of being tried.
    """
    features = rows.shape[-1]
    if rows[0].numel() != features:
        return rows
    made = layer(rows)
    outputs = made.shape[-1]
    targets = min(features // (2 * _SPARE * _ROUNDS), outputs, _OUTPUTS)
    if not targets or made[0].numel() != outputs:
        return rows
    chosen = torch.randperm(outputs, generator=generator, device="cpu")[:targets].to(rows.device)
    places = torch.randperm(features, generator=generator, device="cpu").to(rows.device)
    free = places[: targets * _SPARE * _ROUNDS].view(_ROUNDS, -1)
    changed = rows.clone()
    changed[..., free.flatten()] = 0
    effect = _effect(layer, rows, free.flatten(), chosen).view(_ROUNDS, -1, targets)
    for at, solution in zip(free, torch.linalg.pinv(effect)):
        left = layer(changed)[..., chosen].double()
        changed[..., at] = (-left @ solution).to(rows.dtype)
    return changed if bool(changed.isfinite().all()) else rows


def _effect(
    layer: Callable[[torch.Tensor], torch.Tensor],
    rows: torch.Tensor,
    places: torch.Tensor,
    chosen: torch.Tensor,
) -> torch.Tensor:
    """[places, chosen] float64: what one at each place alone adds to the chosen outputs."""
    nothing = torch.zeros_like(rows)
    before = layer(nothing)[:1, ..., chosen].double()
    found = []
    for start in range(0, len(places), len(rows)):
        block = places[start : start + len(rows)]
        ones = nothing.clone()
        ones[torch.arange(len(block), device=rows.device), ..., block] = 1
        found.append((layer(ones)[..., chosen].double() - before)[: len(block)])
    effects = torch.cat(found).flatten(1)
    return effects.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
