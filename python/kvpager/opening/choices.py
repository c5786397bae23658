"""Decisions of an engine before it has a pager."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from kvpager.config import PagerConfig, free_memory, known_options
from kvpager.errors import InvalidArgumentError, UnsupportedModelError
from kvpager.hf import Observation
from kvpager.hf.recurrent import is_recurrent
from kvpager.hf.support import has_experts
from kvpager.layout import Layout
from kvpager.pager import attention_version
from kvpager.pager.device import Place
from kvpager.plan import PoolChoice, choose_pool, shape_of
from kvpager.plan.memory import suits_experts

_log = logging.getLogger(__name__)


def configuration(config: PagerConfig | None, options: Mapping[str, Any]) -> PagerConfig:
    """A checked configuration, from a `PagerConfig` or from keyword options."""
    options = known_options(options)
    if config is None:
        return PagerConfig(**options)
    if not isinstance(config, PagerConfig):
        raise InvalidArgumentError(f"config is {config!r}; expected a PagerConfig")
    return config.replace(**options) if options else config


def row_choices(config: PagerConfig, model: Any, *, gathers_experts: bool) -> tuple[int, ...]:
    """Candidates for M, best first: those a plan would choose, as far as the pool allows.

    gathers_experts: whether a forward copies the matrices that its rows choose, where a model has
        experts.
    """
    device = model.device.type
    if is_recurrent(model):
        if config.rows not in (None, config.chunk_tokens):
            raise InvalidArgumentError(
                f"rows is {config.rows}; a model with recurrent layers is run a chunk at a time: "
                f"expected None or chunk_tokens, {config.chunk_tokens}"
            )
        return (config.chunk_tokens,)
    if not gathers_experts or not has_experts(model):
        return config.row_choices(device)
    shape = replace(shape_of(model), gathers_experts=True)
    return config.row_choices(device, partial(suits_experts, shape))


def sized(
    config: PagerConfig, model: Any, layout: Layout, rows: int, place: Place
) -> tuple[PagerConfig, PoolChoice | None]:
    """The configuration with a number as `pool_tokens`; if that was "auto", how it was chosen."""
    if not config.pool_is_auto:
        return config, None
    free = torch.cuda.mem_get_info(place.tensors)[0] if place.kind == "cuda" else free_memory()
    choice = choose_pool(
        config,
        layout.native(),
        rows=rows,
        max_positions=int(getattr(model.config, "max_position_embeddings", None) or 0),
        free_bytes=free,
        device=place.kind,
    )
    _log.info("%s", choice)
    return config.replace(pool_tokens=choice.pool_tokens), choice


def attention(
    seen: Observation, layout: Layout, config: PagerConfig, place: Place
) -> tuple[int, int | str]:
    """Query heads of a model, and the kernel version of its attention."""
    if not seen.layers:  # the zeros of a model without attention
        return 1, attention_version(layout, config, place, 1, torch.float16)
    queries = [q for q, _, _ in seen.layers.values()]
    heads = {q.shape[1] for q in queries}
    if place.kind != "cpu" and len(heads) != 1:
        raise UnsupportedModelError(
            f"its layers have {', '.join(map(str, sorted(heads)))} query heads, and on "
            f"{place.name} all have to have as many; use the CPU"
        )
    versions = {
        attention_version(layout, config, place, max(heads), dtype)
        for dtype in {q.dtype for q in queries}
    }
    known = sorted(versions, key=str)
    return max(heads), known[0] if len(known) == 1 else ", ".join(map(str, known))


def common_window(seen: Observation) -> int:
    """The largest window of any layer, in tokens; 0 if one has no window."""
    windows = list(seen.windows.values())
    return 0 if None in windows else max(filter(None, windows), default=0)


def vocab_size(model: Any) -> int:
    """Number of token ids the model accepts."""
    return int(model.get_input_embeddings().weight.shape[0])
