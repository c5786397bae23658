"""Compares an engine with transformers running the model's own attention.

Equal bits are not promised here, because the two sum in different orders. The allowed distance is
measured: transformers runs the prompt again with every module's result moved by one rounding, and
the engine may be a few times as far from transformers as that run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import DynamicCache

from kvpager._model.seam.attention import mask_windows
from kvpager._model.seam.causal_lm import handed
from kvpager._model.seam.support import has_experts
from kvpager._support.tokens import TokenIds
from kvpager.config import TopK
from kvpager.verify.check import Check, DoesNotApplyError, NotRunError

if TYPE_CHECKING:
    from kvpager.verify.recording import Recording
    from kvpager.verify.subject import Subject


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


_TIMES = 4.0  # what one rounding of every module does; measured is up to 1
_MOST = 0.5  # standard deviations of a logit; a bound beyond tells nothing
_LONGEST = 8192  # tokens, so that windows up to about 5,000 are crossed
_SEEDS = (11, 12)
_CODES = {"q8": 2 / 127, "q4": 2 / 7}  # distance of two levels, of a row whose largest number is 2


def equal_to_transformers(subject: Subject, check: Check) -> None:
    """Logits at every position and K/V of every layer, beyond chunks and short windows."""
    if isinstance(subject.config.selection, TopK):
        raise DoesNotApplyError("rows attend to chosen chunks alone, and in transformers to all")
    ids = _prompt(subject, check)
    cold = subject.cold(ids)
    recurrent = subject.engine().core.facts.recurrence is not None
    stock = stock_run(subject.model, ids, cached=not recurrent)
    rounding = _rounding(subject)
    moved = [
        stock_run(subject.model, ids, rounding=rounding, seed=seed, cached=not recurrent)
        for seed in _SEEDS
    ]
    if not recurrent:
        _compare_kv(subject, check, cold, stock, moved)
    _compare_logits(subject, check, cold, stock, moved)
    subject.forget()


def _prompt(subject: Subject, check: Check) -> TokenIds:
    """The long prompt, made longer than every window there is room for."""
    windows = [window for window in mask_windows(subject.model).values() if window]
    longest = getattr(subject.model.config, "max_position_embeddings", None) or _LONGEST
    wanted = [window + max(window // 2, subject.sweep.chunk + 5) for window in windows]
    crossed = max((tokens for tokens in wanted if tokens <= min(longest, _LONGEST)), default=0)
    ids = subject.prompt
    if crossed > len(ids):
        ids = np.concatenate([ids, subject.ids(crossed - len(ids), seed=900)])
    too_long = sorted({window for window in windows if window >= len(ids)})
    check.note(f"{len(ids)} tokens")
    if too_long:
        check.note(
            f"windows of {', '.join(map(str, too_long))} are longer, and were compared as masks "
            "when the engine started"
        )
    return ids


def _rounding(subject: Subject) -> float:
    """Half a unit in the last place of the model's dtype, or of the one that K/V are kept in."""
    layout = subject.engine().layout
    stored = (layout.k_dtype, layout.v_dtype)
    steps = [_CODES[d] if d in _CODES else torch.finfo(getattr(torch, d)).eps for d in stored]
    return max(torch.finfo(subject.model.dtype).eps, *steps) / 2


def _compare_logits(
    subject: Subject, check: Check, cold: Recording, stock: StockRun, moved: list[StockRun]
) -> None:
    ours = torch.stack([cold.logits[i].float().cpu() for i in range(len(cold.tokens))])
    spread = stock.logits.std(dim=-1).clamp_min(1e-30)
    found = _rms(ours - stock.logits) / spread
    allowed = max(_worst(subject, _rms(run.logits - stock.logits) / spread) for run in moved)
    if not _TIMES * allowed <= _MOST:
        said = (
            f"one rounding of each module moves this model's logits by {allowed:.2g} of their "
            "standard deviation, so that they tell nothing in this dtype"
        )
        if check.measures:
            check.note(said)
            return
        layout = subject.engine().layout
        if layout.is_coded:
            raise DoesNotApplyError(
                f"{said} with K/V in {layout.format}; in kv_dtype='auto' they are compared"
            )
        raise NotRunError(f"{said}; use float32 (--dtype)")
    where = f"position {int(found.argmax())}"
    unit = "of their standard deviation"
    check.close("logits", _worst(subject, found), _TIMES * allowed, unit, where)


def _compare_kv(
    subject: Subject, check: Check, cold: Recording, stock: StockRun, moved: list[StockRun]
) -> None:
    for what in ("keys", "values"):
        kept, theirs = getattr(cold, what), getattr(stock, what)
        if [tuple(x.shape) for x in kept] != [tuple(x.shape) for x in theirs]:
            check.note(f"{what} of transformers' cache are of other layers or shapes: not compared")
            continue
        layers = []
        for layer, (ours, own) in enumerate(zip(kept, theirs)):
            size = _rms(own.float().flatten()).clamp_min(1e-30)
            found = _rms((ours.cpu().float() - own.float()).flatten(1)) / size
            others = [getattr(run, what)[layer].float() - own.float() for run in moved]
            allowed = max(_worst(subject, _rms(x.flatten(1)) / size) for x in others)
            where = f"layer {layer}, position {int(found.argmax())}"
            if _TIMES * allowed <= _MOST:
                layers.append((_worst(subject, found), _TIMES * allowed, where))
        if not layers:
            continue
        apart, bound, where = max(layers, key=lambda layer: layer[0] / max(layer[1], 1e-30))
        check.close(what, apart, bound, "of their root mean square", where)


def _rms(x: torch.Tensor) -> torch.Tensor:
    return x.square().mean(dim=-1).sqrt()


def _worst(subject: Subject, apart: torch.Tensor) -> float:
    """The largest of a value per position; with experts in 16 bits the upper quartile.

    There a near tie of a router sends a row to another expert, which changes the whole row.
    """
    if has_experts(subject.model) and subject.model.dtype != torch.float32:
        return float(apart.quantile(0.75))
    return float(apart.amax())
