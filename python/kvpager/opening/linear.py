"""Whose products the linear layers of an engine are: kvpager's, or torch's."""

from __future__ import annotations

import torch

from kvpager.errors import InvalidArgumentError
from kvpager.execution.core import EngineCore, Products
from kvpager.hf.expert_products import expert_configurations, takes_experts
from kvpager.hf.functions import exchange_callers
from kvpager.hf.linear import (
    LinearLayers,
    LinearLayersOnDevice,
    exchange,
    has_fast_products,
)
from kvpager.pager.device import Place


def whose_products(asked: str, place: Place, dtype: torch.dtype) -> Products:
    """Who computes an engine's linear layers.

    "auto" follows a rule about the processor and the dtype, and no measurement: which products they
    are decides bits, and two machines of one kind, or one machine on two days, have to agree. The
    rule is what `kvpager bench linear` shows (adr/0068), and knows nothing of KVPAGER_ISA, which
    changes no bit. For a model on a GPU it is torch (adr/0072).

    Args:
        asked: `PagerConfig.linear`.
        place: of the engine.
        dtype: of its model.

    Raises:
        InvalidArgumentError: kvpager's were asked for, and somebody else computes all layers.
    """
    if asked == "kvpager":
        _require_exchanged()
        return "processor" if place.kind == "cpu" else "device"
    on_cpu = place.tensors.type == "cpu"
    own = asked == "auto" and on_cpu and has_fast_products(dtype) and not exchange()
    return "processor" if own else "torch"


def linear_layers(core: EngineCore) -> LinearLayers | None:
    """The layers of an engine that are kvpager's own products; None: torch computes all.

    Raises InvalidArgumentError: they were, and somebody else computes all layers now.
    """
    if core.products != "torch":
        _require_exchanged()
    callers = exchange_callers(core.model)  # also where torch computes: engines watch classes
    if core.products == "device":
        return LinearLayersOnDevice(core.model, core.workers, core.place, callers=callers)
    if core.products == "torch":
        return None
    return LinearLayers(
        core.model, core.workers, experts=expert_configurations(core.model), callers=callers
    )


def multiplies_experts(products: Products, model: torch.nn.Module) -> bool:
    """Whether the experts of a model are kvpager's products in an engine with these."""
    return products == "processor" and takes_experts(model)


def _require_exchanged() -> None:
    if whose := exchange():
        raise InvalidArgumentError(
            f"torch.nn.Linear.forward was replaced by {whose}, so that linear layers cannot be "
            'kvpager\'s products; put it back, or choose linear="torch"'
        )
