"""Checks a model before an engine opens it, and chooses row counts, pool and linear layers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from kvpager import _core
from kvpager._model.facts.compression import check_compression
from kvpager._model.layout import Layout
from kvpager._model.model_facts import Products
from kvpager._model.seam.causal_lm import vocab_size
from kvpager._model.seam.expert_products import expert_configurations, takes_experts
from kvpager._model.seam.functions import exchange_callers
from kvpager._model.seam.linear import (
    LinearLayers,
    LinearLayersOnDevice,
    exchange,
    has_fast_products,
    has_products,
)
from kvpager._model.seam.observe import Observation
from kvpager._model.seam.recurrent import is_recurrent
from kvpager._model.seam.support import check_supported, has_experts, require_exact_experts
from kvpager._model.watch.looks import refuse_modes
from kvpager.config import PagerConfig, free_memory, known_options
from kvpager.errors import InvalidArgumentError, UnsupportedModelError
from kvpager.pager import attention_version
from kvpager.pager.device import PoolDevice, resolve
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
    config: PagerConfig, model: Any, layout: Layout, rows: int, place: PoolDevice
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
    seen: Observation, layout: Layout, config: PagerConfig, place: PoolDevice
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


def whose_products(asked: str, place: PoolDevice, dtype: torch.dtype) -> Products:
    """Who computes an engine's linear layers.

    "auto" follows a rule about the processor and the dtype, and no measurement: which products they
    are decides bits, and two machines of one kind, or one machine on two days, have to agree. The
    rule is what `kvpager bench linear` shows (docs/design/04). It ignores KVPAGER_ISA, which
    changes no bit. For a model on a GPU it is torch (docs/design/15).

    Args:
        asked: `PagerConfig.linear`.
        place: of the engine.
        dtype: of its model.

    Raises:
        InvalidArgumentError: kvpager's were asked for, and the processor lacks what they need, or
            somebody else computes all layers.
    """
    if asked == "kvpager":
        _require_exchanged()
        if place.kind == "cpu" and not has_products():
            raise InvalidArgumentError(
                'linear is "kvpager", but this processor lacks AVX2 (x86-64-v3), which kvpager\'s '
                'products need; expected "torch", or "auto", which chooses it here'
            )
        return "processor" if place.kind == "cpu" else "device"
    on_cpu = place.tensors.type == "cpu"
    own = asked == "auto" and on_cpu and has_fast_products(dtype) and not exchange()
    return "processor" if own else "torch"


def linear_layers(
    model: torch.nn.Module, products: Products, workers: _core.Workers, place: PoolDevice
) -> LinearLayers | None:
    """The layers of a model that are kvpager's own products; None: torch computes all.

    Raises InvalidArgumentError: they were, and somebody else computes all layers now.
    """
    if products != "torch":
        _require_exchanged()
    callers = exchange_callers(model)  # also where torch computes: engines watch classes
    if products == "device":
        return LinearLayersOnDevice(model, workers, place, callers=callers)
    if products == "torch":
        return None
    return LinearLayers(model, workers, experts=expert_configurations(model), callers=callers)


def multiplies_experts(products: Products, model: torch.nn.Module) -> bool:
    """Whether the experts of a model are kvpager's products in an engine with these."""
    return products == "processor" and takes_experts(model)


def _require_exchanged() -> None:
    if whose := exchange():
        raise InvalidArgumentError(
            f"torch.nn.Linear.forward was replaced by {whose}, so that linear layers cannot be "
            'kvpager\'s products; put it back, or choose linear="torch"'
        )


@dataclass(frozen=True)
class CheckedModel:
    """A model, and how it is to be run.

    Attributes:
        model: a transformers causal LM.
        config: the engine's configuration; `pool_tokens` may be "auto".
        place: the device of pool and model.
        workers: threads of the pager and of linear layers.
        products: what computes linear layers.
        linear: the layers that kvpager computes; None: torch computes all.
        row_choices: candidates for M, best first.
        vocab_size: number of token ids the model accepts.
    """

    model: Any
    config: PagerConfig
    place: PoolDevice
    workers: _core.Workers
    products: Products
    linear: LinearLayers | None
    row_choices: tuple[int, ...]
    vocab_size: int


def check_model(
    model: object, config: PagerConfig, workers: _core.Workers, place: PoolDevice | None = None
) -> CheckedModel:
    """Checks whether an engine can run a model so.

    Args:
        model: of any kind.
        config: the engine's configuration.
        workers: the engine's.
        place: where the engine has its pool; None: it has none yet.

    Raises:
        UnsupportedModelError, InvalidArgumentError, DeviceError: as `kvpager.Engine`.
    """
    exact = config.exact is not False
    refuse_modes()
    sound = check_supported(model, one_at_a_time=config.exact != "all")
    place = resolve(config.device, sound.device) if place is None else place
    products = whose_products(config.linear, place, sound.dtype)
    check_compression(config, products, place)
    own_experts = multiplies_experts(products, sound)
    if exact and not own_experts:
        require_exact_experts(sound)
    choices = row_choices(config, sound, gathers_experts=exact and not own_experts)
    linear = linear_layers(sound, products, workers, place)
    return CheckedModel(sound, config, place, workers, products, linear, choices, vocab_size(sound))
