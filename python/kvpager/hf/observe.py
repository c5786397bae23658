"""Runs a model once without a pager: what its modules and its attention are given."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from kvpager.errors import InvalidArgumentError, UnsupportedModelError
from kvpager.held import held_by_one
from kvpager.hf.attention import running
from kvpager.hf.bits import same_bits
from kvpager.hf.cancelling import line_bytes
from kvpager.hf.decoder import decoder_of
from kvpager.hf.head import HEAD_ROWS, Head
from kvpager.hf.hooks import Watch
from kvpager.hf.placement import only_aligns
from kvpager.hf.weights import has_expert_weights

LayerTensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def packed_inputs(
    tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None = None
) -> dict[str, Any]:
    """The arguments of a forward over M packed rows; tokens and positions are [M] int64.

    The mask is a dummy of four dimensions: transformers then builds none and looks for no packing.
    Who runs many forwards makes it once (`dummy_mask`).
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
        """Of v [M, Hkv, Dv]: its rows, one per head of q; written to `out` where it is given."""
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
    generator = torch.Generator("cpu").manual_seed(0)  # the same tokens on every device
    vocab = model.get_input_embeddings().weight.shape[0]
    tokens = torch.randint(vocab, (rows,), generator=generator, device="cpu").to(model.device)
    longest = getattr(model.config, "max_position_embeddings", None) or rows
    positions = torch.randint(min(4 * rows, longest), (rows,), generator=generator, device="cpu")
    positions = positions.to(model.device)
    recorder = Recorder()
    keep = torch.arange(HEAD_ROWS, device=model.device) % rows
    with torch.inference_mode(), _watched(model) as seen, running(recorder):
        try:
            output = model(**packed_inputs(tokens, positions), logits_to_keep=keep)
        except (InvalidArgumentError, UnsupportedModelError):
            raise
        except Exception as error:
            raise UnsupportedModelError(
                f"{type(model).__name__} does not run on packed rows, as a decoder does that takes "
                f"position_ids and logits_to_keep ({type(error).__name__}: {error})"
            ) from error
        logits = Head(model)(seen.hidden, keep.tolist())
        if not same_bits(output.logits[0], logits):
            raise UnsupportedModelError(
                f"{type(model).__name__} does more between its decoder and its logits than a head "
                "that is plain, soft-capped or scaled"
            )
    calls = [*seen.calls.values()]
    return Observation(
        tokens, positions, recorder.calls, seen.hidden, calls, recorder.windows, recorder.sinks
    )


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


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of an argument list or a result: plain, or in tuples, lists and mappings."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(tuple(value.values()))


def _signature(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    """Equal for modules that library kernels cannot tell apart but by content."""
    held = held_by_one(module)
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
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _kept(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return (list if isinstance(value, list) else tuple)(map(_kept, value))
    return value
