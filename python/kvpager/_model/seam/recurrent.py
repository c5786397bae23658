"""Layers that carry a state from token to token: forwards that begin at a state and leave one.

transformers keeps such states in the layers of a cache, beside the keys and values of attention
layers. Here a forward works on a copy of a state, in a cache made for it. Keys and values stay
where the running forward has put them: that cache hands them through.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.utils._pytree import TreeSpec, tree_flatten_with_path, tree_map, tree_unflatten
from transformers import DynamicCache, cache_utils

from kvpager._model.seam.attention import RowAttention
from kvpager._model.seam.causal_lm import CACHE_ARGUMENTS, cache_argument, decoder_of
from kvpager._model.seam.state import (
    AttentionAndStateLayer,
    AttentionLayer,
    DirectedAttention,
    Place,
    RecurrentState,
    Slot,
    StateShape,
    require_finite,
)
from kvpager.errors import UnsupportedModelError


class _At(NamedTuple):
    """Stands for a tensor of a state, by its number among all."""

    number: int


# The attributes of a cache layer, as leaves of a tree, with tensors replaced by `_At`.
Template: TypeAlias = tuple[list[Any], TreeSpec]
_PLAIN_ATTENTION = (cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer)


def is_recurrent(model: Any) -> bool:
    """Whether any layer carries a state from token to token."""
    return bool(_stateful(_cache_layers(model)))


class Recurrence:
    """How one model's recurrent layers are run, from a state to a state.

    Attributes:
        layers: pager's layer of each layer of the cache that attends; empty for a model that has
            none.
        shape: of a state; known once `observed` was called.
    """

    def __init__(self, model: Any) -> None:
        """Raises UnsupportedModelError where the decoder takes no cache."""
        argument = cache_argument(model)
        if argument is None:
            raise UnsupportedModelError(
                f"{type(model).__name__}: its decoder takes none of {', '.join(CACHE_ARGUMENTS)}, "
                "so that the state of its recurrent layers cannot be carried; use an architecture "
                "of transformers that keeps it in a Cache"
            )
        self._name = type(model).__name__
        self._argument = argument
        self._takes_positions = (
            "position_ids" in inspect.signature(decoder_of(model).forward).parameters
        )
        self._fresh = _cache_layers(model)
        for index, layer in enumerate(self._fresh):
            self._check_kept(index, layer)
        self._device = model.device
        self._templates: dict[int, Template] = {}
        self._shape: StateShape | None = None
        self.layers: dict[int, int] = {}

    def _check_kept(self, index: int, layer: Any) -> None:
        """Raises UnsupportedModelError for a cache layer with more than K/V and such states."""
        stateful = isinstance(layer, cache_utils.LinearAttentionCacheLayerMixin)
        attends = isinstance(layer, cache_utils.CacheLayerMixin)
        if attends and not stateful and type(layer) not in _PLAIN_ATTENTION:
            raise UnsupportedModelError(
                f"{self._name}: layer {index} keeps more than keys, values and a recurrent state "
                f"({type(layer).__name__}), which would be lost; use another architecture"
            )

    @property
    def shape(self) -> StateShape:
        """REQUIRES: observed."""
        assert self._shape is not None
        return self._shape

    def observed(self, cache: Any, hidden: torch.Tensor, attending: Sequence[int]) -> None:
        """Learns from a forward's cache what a state is, and from its layers which attend.

        hidden: [M, hidden_size] of that forward. attending: the layers of its attention calls.
        """
        slots: list[Slot] = []
        for layer in _stateful(cache.layers):
            self._templates[layer] = _template(cache.layers[layer], layer, slots, [])
        self._shape = StateShape(
            tuple(slots), Slot(-1, "hidden", (hidden.shape[-1],), hidden.dtype)
        )
        self.layers = {layer: i for i, layer in enumerate(sorted(attending))}

    def cache(self, state: RecurrentState) -> Any:
        """A transformers Cache that goes on from a copy of `state`, on the model's device."""
        layers = []
        place = Place(state.position)
        tensors = [tensor.to(self._device, copy=True) for tensor in state.tensors]
        for index, fresh in enumerate(self._fresh):
            stateful = isinstance(fresh, cache_utils.LinearAttentionCacheLayerMixin)
            attends = isinstance(fresh, cache_utils.CacheLayerMixin)
            if not stateful and not attends:
                layers.append(fresh)  # neither: it holds nothing
                continue
            layer: Any = _hollow(fresh, attends) if stateful else AttentionLayer()
            if stateful and state.position:
                vars(layer).update(_filled(self._templates[index], tensors))
            if attends:
                layer.place, layer.index = place, index
            layers.append(layer)
        cache: Any = cache_utils.Cache(layers=layers)
        cache.place = place
        return cache

    def attention(
        self, cache: Any, forward: RowAttention, *, by_cache_layer: bool = False
    ) -> RowAttention:
        """What attention calls of a model that is run with `cache` belong to.

        `forward` gets the pager's layer numbers, or with by_cache_layer those of the cache.
        """
        return DirectedAttention(forward, cache.place, {} if by_cache_layer else self.layers)

    def inputs(self, tokens: torch.Tensor, positions: torch.Tensor, cache: Any) -> dict[str, Any]:
        """Arguments of a forward of [M] consecutive positions of one sequence.

        There is no mask, not even a dummy: recurrent layers would take one for padding.
        """
        arguments: dict[str, Any] = {
            "input_ids": tokens.unsqueeze(0),
            "attention_mask": None,
            "use_cache": True,
            self._argument: cache,
        }
        if self._takes_positions:
            arguments["position_ids"] = positions.unsqueeze(0)
        return arguments

    def taken(self, cache: Any, position: int, hidden: torch.Tensor) -> RecurrentState:
        """The state a forward has left in the cache that was made for it, which is given up.

        position: tokens behind it. hidden: [hidden_size] of the last of them.

        Raises:
            NonFiniteError: it has a NaN or an infinity.
            UnsupportedModelError: it is not what it was at the start.
        """
        found: list[torch.Tensor] = []
        slots: list[Slot] = []
        for layer in _stateful(cache.layers):
            if self._templates[layer] != _template(cache.layers[layer], layer, slots, found):
                self._refuse_change(layer)
        if tuple(slots) != self.shape.slots:
            self._refuse_change(next(a.layer for a, b in zip(slots, self.shape.slots) if a != b))
        state = RecurrentState(position, tuple(found), hidden.clone())
        require_finite(state, self.shape)
        return state

    def _refuse_change(self, layer: int) -> None:
        raise UnsupportedModelError(
            f"{self._name}: what layer {layer} keeps changes its shape or more than tensors from "
            "forward to forward, so that it could not be put back; use another architecture"
        )


def _cache_layers(model: Any) -> list[Any]:
    """The layers of the cache that transformers would make for a model; none if it cannot."""
    try:
        return list(DynamicCache(config=model.config.get_text_config(decoder=True)).layers)
    except (AttributeError, KeyError, TypeError, ValueError):
        return []


def _stateful(layers: Sequence[Any]) -> list[int]:
    return [
        index
        for index, layer in enumerate(layers)
        if isinstance(layer, cache_utils.LinearAttentionCacheLayerMixin)
    ]


def _hollow(fresh: Any, attends: bool) -> Any:
    """A layer like a fresh one that keeps states, and no keys and values."""
    kind: Any = AttentionAndStateLayer if attends else type(fresh)
    layer = kind.__new__(kind)
    vars(layer).update(tree_map(lambda leaf: leaf, vars(fresh)))  # with dictionaries of its own
    return layer


def _template(
    cache_layer: Any, layer: int, slots: list[Slot], tensors: list[torch.Tensor]
) -> Template:
    """The template of a cache layer; adds its tensors, and what each is, to the lists."""
    own = {key: value for key, value in vars(cache_layer).items() if key not in ("place", "index")}
    found, spec = tree_flatten_with_path(own)
    leaves: list[Any] = []
    for path, leaf in found:
        if isinstance(leaf, torch.Tensor):
            name = ".".join(str(getattr(key, "key", key)) for key in path)
            leaves.append(_At(len(slots)))
            slots.append(Slot(layer, name, tuple(leaf.shape), leaf.dtype))
            tensors.append(leaf.contiguous())
        else:
            leaves.append(leaf)
    return leaves, spec


def _filled(template: Template, tensors: Sequence[torch.Tensor]) -> dict[Any, Any]:
    """The attributes that a template stands for, in dictionaries of their own."""
    leaves, spec = template
    filled: dict[Any, Any] = tree_unflatten(
        [tensors[leaf.number] if isinstance(leaf, _At) else leaf for leaf in leaves], spec
    )
    return filled
