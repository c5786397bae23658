"""The shape of a model's K/V, read from its attention calls rather than from its configuration."""

from __future__ import annotations

import logging
from typing import Any

import torch

from kvpager._model.layout import Layout
from kvpager._model.seam.observe import Observation
from kvpager.config import PagerConfig
from kvpager.errors import UnsupportedModelError

_log = logging.getLogger(__name__)

NO_KV_DIM = 16  # head_dim of the zeros that stand for the K/V of a model without attention


def layout_of(
    model: Any, seen: Observation, config: PagerConfig, *, recurrent: bool = False
) -> Layout:
    """The layout of the model's K/V.

    A model without attention has none: its chunks are the least a pager can keep, and hold zeros.

    Args:
        model: the model that was observed.
        seen: a forward of it.
        config: how its keys and values are to be kept.
        recurrent: some of its layers carry a state, and need not attend.

    Raises:
        UnsupportedModelError: a layer has no K/V of its own, or layers differ in shape.
        InvalidArgumentError: they cannot be kept so, naming the option.
    """
    name = type(model).__name__
    if recurrent and not seen.layers:
        return Layout(
            layers=1,
            kv_heads=1,
            k_dim=NO_KV_DIM,
            v_dim=NO_KV_DIM,
            chunk_tokens=config.chunk_tokens,
            k_dtype="float16",
            v_dtype="float16",
        )
    layers = len(seen.layers) if recurrent else model.config.num_hidden_layers
    if sorted(seen.layers) != list(range(layers)):
        raise UnsupportedModelError(
            f"{name} has {layers} layers, but {len(seen.layers)} of them attended with K/V of "
            "their own; use a model in which every layer attends through AttentionInterface"
        )
    shapes = {
        (k.shape[1], k.shape[2], v.shape[2], k.dtype, v.dtype) for _, k, v in seen.layers.values()
    }
    if len(shapes) != 1:
        raise UnsupportedModelError(
            f"{name} has K/V of {len(shapes)} shapes (heads, head_dim or dtype differ between "
            "layers); use a model with one shape in all layers"
        )
    kv_heads, k_dim, v_dim, k_dtype, v_dtype = shapes.pop()
    own = Layout(
        layers=layers,
        kv_heads=kv_heads,
        k_dim=k_dim,
        v_dim=v_dim,
        chunk_tokens=config.chunk_tokens,
        k_dtype=_dtype_name(k_dtype),
        v_dtype=_dtype_name(v_dtype),
    )
    kept = own.kept_as(config.kv_dtype, config.kv_rotation, config.float_layers)
    if seen.sinks and "q4" in (kept.k_dtype, kept.v_dtype):
        _log.warning(
            "%s has attention sinks in %d of its %d layers, which take weight from what 4 bits "
            'leave of a key; no such model was measured in 4 bits: kv_dtype="q8" is safer',
            name,
            len(seen.sinks),
            layers,
        )
    return kept


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
