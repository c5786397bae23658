"""The model as transformers runs it, with its own attention, and how much rounding moves it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from kvpager.hf.cache_argument import handed
from kvpager.tokens import TokenIds

ATTENTION = "eager"  # as architectures define it: sdpa leaves soft caps out


@dataclass(frozen=True)
class StockRun:
    """One forward of n tokens.

    Attributes:
        logits: [n, vocab], on the CPU.
        keys, values: one [n, kv_heads, dim] per layer of the cache, on the CPU; empty where the
            cache holds something else.
    """

    logits: torch.Tensor
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]


def stock_run(
    model: Any, ids: TokenIds, *, rounding: float = 0.0, seed: int = 0, cached: bool = True
) -> StockRun:
    """One forward of all tokens by transformers alone.

    Args:
        model: a transformers causal LM; its attention is eager meanwhile, then what it was.
        ids: token ids [n].
        rounding: what every module without children gives is moved by this part of itself, up or
            down at random: as far as another order of the same sums may.
        seed: of the directions.
        cached: whether to keep K/V.
    """
    tokens = torch.from_numpy(np.asarray(ids, dtype=np.int64)).to(model.device)[None]
    cache = DynamicCache() if cached else None  # of no configuration: layers of windows keep all
    with plain_attention(model), torch.inference_mode(), _rounded(model, rounding, seed):
        output = model(tokens, use_cache=cached, **handed(model, cache))
    keys, values = _kept(cache, len(ids))
    return StockRun(output.logits[0].float().cpu(), keys, values)


@contextmanager
def plain_attention(model: Any, implementation: str = ATTENTION) -> Iterator[None]:
    """While open, the model runs transformers' own attention."""
    before = model.config._attn_implementation  # noqa: SLF001  # no public name
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _kept(cache: Any, tokens: int) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """K/V of all layers, or nothing."""
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    for layer in getattr(cache, "layers", ()):
        for name, into in (("keys", keys), ("values", values)):
            kept = getattr(layer, name, None)
            if not isinstance(kept, torch.Tensor) or kept.ndim != 4 or kept.shape[2] != tokens:
                return (), ()
            into.append(kept[0].transpose(0, 1).cpu())
    return tuple(keys), tuple(values)


@contextmanager
def _rounded(model: Any, rounding: float, seed: int) -> Iterator[None]:
    if not rounding:
        yield
        return
    generator = torch.Generator("cpu").manual_seed(seed)

    def move(module: torch.nn.Module, arguments: Any, output: Any) -> Any:
        if not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return output
        up = torch.randint(2, output.shape, generator=generator, device="cpu").to(output.device)
        return (output.float() * (1 + rounding * (2.0 * up - 1))).to(output.dtype)

    handles = [
        module.register_forward_hook(move)
        for module in model.modules()
        if not any(module.children())
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
