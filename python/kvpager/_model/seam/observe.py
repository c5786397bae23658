"""Runs a model once without a pager: what its modules and its attention are given."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from kvpager._model.seam.attention import running
from kvpager._model.seam.causal_lm import (
    HEAD_ROWS,
    Head,
    decoder_of,
    made_up_tokens,
    requiring,
)
from kvpager._model.seam.hooks import Watch
from kvpager._model.seam.rows import line_bytes, same_bits
from kvpager._model.weights.held import held_by
from kvpager._model.weights.supported import has_expert_weights, only_aligns
from kvpager.errors import UnsupportedModelError

LayerTensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def packed_inputs(
    tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None = None
) -> dict[str, Any]:
    """The arguments of a forward over M packed rows; tokens and positions are [M] int64.

    The mask is a dummy of four dimensions: transformers then builds none and looks for no packing.
    A caller that runs many forwards makes it once (`dummy_mask`).
    """
    return {
        "input_ids": tokens.unsqueeze(0),
        "position_ids": positions.unsqueeze(0),
        "attention_mask": dummy_mask(tokens.device) if mask is None else mask,
        "use_cache": False,
    }


def dummy_mask(device: torch.device) -> torch.Tensor:
    """[1, 1, 1, 1], which nothing reads."""
    return torch.zeros(1, 1, 1, 1, device=device)


@dataclass
class Recorder:
    """Stands in for a forward: notes q, k and v of each layer; rows attend to themselves."""

    calls: dict[int, LayerTensors] = field(default_factory=dict)
    windows: dict[int, int | None] = field(default_factory=dict)
    sinks: set[int] = field(default_factory=set)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the rows of v [M, Hkv, Dv], one per head of q; writes them to `out` if given."""
        del scaling, softcap
        if layer in self.calls:
            raise UnsupportedModelError(
                f"layer {layer} attends more than once; use a model with one attention per layer"
            )
        self.calls[layer] = (q, k, v)
        self.windows[layer] = window
        if sinks is not None:
            self.sinks.add(layer)
        made = v.repeat_interleave(q.shape[1] // k.shape[1], dim=1).to(q.dtype)
        return made if out is None else out.copy_(made)


@dataclass
class Call:
    """The first call of a module, standing for all modules of its kind and shape."""

    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: list[str] = field(default_factory=list)


@dataclass
class Observation:
    """One forward of M rows.

    Attributes:
        tokens, positions: [M] int64, what was fed.
        layers: q, k and v of each attention call, by layer.
        hidden: [M, hidden_size], the decoder's output.
        calls: of every distinct module without children, or with expert weights; none of a forward
            that only attention was watched in.
        windows: how many positions back each attention call let a row see; None: all of them.
        sinks: layers whose softmax has attention sinks, logits of no key.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    layers: dict[int, LayerTensors]
    hidden: torch.Tensor
    calls: list[Call]
    windows: dict[int, int | None] = field(default_factory=dict)
    sinks: set[int] = field(default_factory=set)

    @property
    def rows(self) -> int:
        """M."""
        return len(self.tokens)


def observe(model: Any, rows: int) -> Observation:
    """One forward of made-up tokens through the model's own head, which is compared with ours.

    REQUIRES: `attach(model)`. Other threads may run the model meanwhile.

    Args:
        model: a causal LM.
        rows: M.

    Raises:
        UnsupportedModelError: the model does not run on packed rows, or does something between its
            layers and its logits that is not known here.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    tokens = made_up_tokens(model, rows, generator)
    longest = getattr(model.config, "max_position_embeddings", None) or rows
    positions = torch.randint(min(4 * rows, longest), (rows,), generator=generator, device="cpu")
    positions = positions.to(model.device)
    recorder = Recorder()
    keep = torch.arange(HEAD_ROWS, device=model.device) % rows
    with torch.inference_mode(), _watched(model) as seen, running(recorder):
        with requiring(
            f"{type(model).__name__} does not run on packed rows, as a decoder does that takes "
            "position_ids and logits_to_keep"
        ):
            output = model(**packed_inputs(tokens, positions), logits_to_keep=keep)
        require_plain_head(model, output.logits[0], Head(model)(seen.hidden, keep.tolist()))
    calls = [*seen.calls.values()]
    return Observation(
        tokens, positions, recorder.calls, seen.hidden, calls, recorder.windows, recorder.sinks
    )


def require_plain_head(model: Any, logits: torch.Tensor, ours: torch.Tensor) -> None:
    """Raises UnsupportedModelError if a model's logits are not those that `Head` gives."""
    if not same_bits(logits, ours):
        raise UnsupportedModelError(
            f"{type(model).__name__} does more between its decoder and its logits than a head that "
            "is plain, soft-capped or scaled"
        )


RowTensors = tuple[dict[int, LayerTensors], torch.Tensor]  # by layer, and the hidden states


def difference(
    before: RowTensors,
    after: RowTensors,
    rows: torch.Tensor | slice = slice(None),
    places: torch.Tensor | slice = slice(None),
) -> str | None:
    """Names what differs in bits between `rows` of one forward and `places` of another, or None."""
    for layer, tensors in sorted(before[0].items()):
        for label, one, other in zip(("queries", "keys", "values"), tensors, after[0][layer]):
            if not same_bits(one[rows], other[places]):
                return f"the {label} of layer {layer}"
    return None if same_bits(before[1][rows], after[1][places]) else "the final hidden states"


@dataclass
class _Seen:
    hidden: torch.Tensor = field(default_factory=lambda: torch.empty(0, device="cpu"))
    calls: dict[Any, Call] = field(default_factory=dict)


@contextmanager
def _watched(model: Any) -> Iterator[_Seen]:
    """While open, notes the decoder's hidden states, and the calls of its modules."""
    seen = _Seen()
    decoder = decoder_of(model)
    names = {id(module): name for name, module in model.named_modules()}

    def note_hidden(module: torch.nn.Module, arguments: Any, output: Any) -> None:
        seen.hidden = output[0][0]

    def note_call(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        key = _signature(module, args, kwargs)
        if key not in seen.calls:
            seen.calls[key] = Call(module, _kept(args), _kept(kwargs))
        seen.calls[key].names.append(names[id(module)])

    modules = [
        module
        for module in decoder.modules()
        if not any(module.children()) or has_expert_weights(module)
    ]
    with Watch(decoder, note_hidden, modules, note_call):
        yield seen


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of an argument list or a result, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _signature(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    """Equal for modules that library kernels cannot tell apart but by content."""
    held = held_by(module, alone=True)
    return (
        type(module),
        json.dumps(held.settings),
        # One of its kind, if it is patched.
        id(module) if "forward" in vars(module) and not only_aligns(module) else None,
        tuple(
            (name, x.shape, x.stride(), x.dtype, x.data_ptr() % line_bytes(x))
            for name, x in held.tensors
        ),
        tuple((x.shape, x.stride(), x.dtype) for x in tensors_in((args, kwargs))),
    )


def _kept(value: Any) -> Any:
    """A copy of an argument list whose tensors nothing later writes to."""
    return tree_map_only(torch.Tensor, torch.clone, value)
