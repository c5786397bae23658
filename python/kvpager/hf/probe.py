"""Runs a model without a pager, to learn its layout and to see that its rows are independent.

Nothing about an architecture is believed: shapes of keys and values are read from its attention
calls, the head is compared with the model's own logits, and every row's bits with those it has
among other neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from kvpager.errors import InvalidArgumentError, UnsupportedModelError
from kvpager.hf.attention import running
from kvpager.hf.head import HEAD_ROWS, Head
from kvpager.pager import Layout

_INTEGERS = {4: torch.int32, 2: torch.int16}
_ACTIVATION_TRIALS = 8


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether shape, dtype and raw bits are the same; NaN equals NaN, -0 differs from +0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    integers = _INTEGERS[a.element_size()]
    return torch.equal(a.contiguous().view(integers), b.contiguous().view(integers))


def packed_inputs(tokens: torch.Tensor, positions: torch.Tensor) -> dict[str, Any]:
    """The arguments of a forward over M packed rows; tokens and positions are [M] int64.

    The mask is a dummy of four dimensions: transformers then builds none and looks for no packing.
    """
    return {
        "input_ids": tokens.unsqueeze(0),
        "position_ids": positions.unsqueeze(0),
        "attention_mask": torch.zeros(1, 1, 1, 1, device=tokens.device),
        "use_cache": False,
    }


@dataclass
class _Recorder:
    """Stands in for a forward: notes q, k and v of each layer; rows attend to themselves."""

    calls: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=dict)

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
    ) -> torch.Tensor:
        del scaling, window, softcap, sinks
        if layer in self.calls:
            raise UnsupportedModelError(
                f"layer {layer} attends more than once; use a model with one attention per layer"
            )
        self.calls[layer] = (q, k, v)
        return v.repeat_interleave(q.shape[1] // k.shape[1], dim=1).to(q.dtype)


def probe_model(model: Any, *, rows: int, chunk_tokens: int, kv_dtype: str) -> Layout:
    """The layout of the model's K/V, once it is known to treat rows independently.

    The model's attention must be kvpager's (see attach.py).

    Args:
        model: a causal LM that `check_supported` accepted.
        rows: M; every check runs on forwards of exactly this many.
        chunk_tokens: tokens per chunk, for the layout.
        kv_dtype: "auto" for the dtype of the model's keys and values, or the dtype to keep them in.

    Raises:
        UnsupportedModelError: a row's bits depend on its index or on other rows, or the
            architecture does something between its layers and its logits that is not known here.
            Says what was seen.
    """
    generator = torch.Generator().manual_seed(0)
    vocab = model.get_input_embeddings().weight.shape[0]
    tokens = torch.randint(vocab, (rows,), generator=generator)
    longest = getattr(model.config, "max_position_embeddings", None) or rows
    positions = torch.randint(min(4 * rows, longest), (rows,), generator=generator)
    with torch.inference_mode():
        first, hidden, activations = _observed_forward(model, tokens, positions)
        layout = _layout(model, first, chunk_tokens, kv_dtype)
        _check_activations(activations, rows)
        _check_rows(model, tokens, positions, first, hidden, generator)
    return layout


def _observed_forward(
    model: Any, tokens: torch.Tensor, positions: torch.Tensor
) -> tuple[_Recorder, torch.Tensor, dict[Any, torch.nn.Module]]:
    """One forward through the model's own head, compared with ours; notes every activation."""
    recorder = _Recorder()
    rows = len(tokens)
    keep = torch.arange(HEAD_ROWS) % rows
    decoder = model.get_decoder()
    with _observed(decoder) as seen, running(recorder):
        try:
            output = model(**packed_inputs(tokens, positions), logits_to_keep=keep)
        except InvalidArgumentError:
            raise
        except Exception as error:
            raise UnsupportedModelError(
                f"{type(model).__name__} does not run on packed rows "
                f"({type(error).__name__}: {error}); use a decoder-only causal LM that takes "
                "position_ids and logits_to_keep"
            ) from error
    hidden: torch.Tensor = seen["hidden"]
    if not same_bits(output.logits[0], Head(model)(hidden, keep.tolist())):
        raise UnsupportedModelError(
            f"{type(model).__name__} does something to its logits after the output embeddings "
            "that is not known here; use an architecture with a plain, soft-capped or scaled head"
        )
    return recorder, hidden, seen["activations"]


@contextmanager
def _observed(decoder: torch.nn.Module) -> Iterator[dict[str, Any]]:
    """While open, notes the decoder's hidden states, and activations by kind and shape."""
    seen: dict[str, Any] = {"activations": {}}

    def note_hidden(module: torch.nn.Module, arguments: Any, output: Any) -> None:
        seen["hidden"] = output[0][0]

    def note_activation(module: torch.nn.Module, arguments: Any, output: Any) -> None:
        if len(arguments) == 1 and isinstance(arguments[0], torch.Tensor):
            x = arguments[0]
            seen["activations"][type(module), tuple(x.shape), x.dtype] = module

    handles = [decoder.register_forward_hook(note_hidden)]
    handles += [
        module.register_forward_hook(note_activation)
        for module in decoder.modules()
        if not any(module.children()) and not [*module.parameters(), *module.buffers()]
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _layout(model: Any, recorder: _Recorder, chunk_tokens: int, kv_dtype: str) -> Layout:
    name = type(model).__name__
    layers = model.config.num_hidden_layers
    if sorted(recorder.calls) != list(range(layers)):
        raise UnsupportedModelError(
            f"{name} has {layers} layers, but {len(recorder.calls)} of them attended with K/V of "
            "their own; use a model in which every layer attends through AttentionInterface"
        )
    shapes = {
        (k.shape[1], k.shape[2], v.shape[2], k.dtype, v.dtype)
        for _, k, v in recorder.calls.values()
    }
    if len(shapes) != 1:
        raise UnsupportedModelError(
            f"{name} has K/V of {len(shapes)} shapes (heads, head_dim or dtype differ between "
            "layers); use a model with one shape in all layers"
        )
    kv_heads, k_dim, v_dim, k_dtype, v_dtype = shapes.pop()
    return Layout(
        layers=layers,
        kv_heads=kv_heads,
        k_dim=k_dim,
        v_dim=v_dim,
        chunk_tokens=chunk_tokens,
        k_dtype=_dtype_name(k_dtype) if kv_dtype == "auto" else kv_dtype,
        v_dtype=_dtype_name(v_dtype) if kv_dtype == "auto" else kv_dtype,
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_activations(activations: dict[Any, torch.nn.Module], rows: int) -> None:
    """One row in all places: vectorised code treats the last elements of a thread's share apart."""
    generator = torch.Generator().manual_seed(0)
    for (kind, shape, dtype), module in activations.items():
        if len(shape) != 3 or shape[1] != rows or not dtype.is_floating_point:
            continue
        for _ in range(_ACTIVATION_TRIALS):
            row = (torch.randn(shape[-1], generator=generator) * 4).to(dtype)
            out = module(row.expand(shape).contiguous())
            if not same_bits(out, out[:, :1].expand_as(out)):
                raise UnsupportedModelError(
                    f"{kind.__name__} over {shape[-1]} elements gives a row other bits at another "
                    f"row index (rows={rows}, {torch.get_num_threads()} threads): the vector "
                    "length does not divide each thread's share; set rows to a multiple of 64, or "
                    "use one thread"
                )


def _check_rows(
    model: Any,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    first: _Recorder,
    hidden: torch.Tensor,
    generator: torch.Generator,
) -> None:
    """Half of the rows again, at other indices and among other neighbours at far positions."""
    rows = len(tokens)
    kept = max(1, rows // 2)
    place = torch.randperm(rows, generator=generator)[:kept]
    other_tokens = torch.zeros_like(tokens)
    other_positions = torch.full_like(
        positions, 2 * (getattr(model.config, "max_position_embeddings", None) or rows) - 1
    )
    if not getattr(model.config, "rope_parameters", None):
        other_positions.zero_()  # learned positions: an index past the table would be an error
    other_tokens[place], other_positions[place] = tokens[:kept], positions[:kept]
    second = _Recorder()
    with running(second):
        again = model.get_decoder()(**packed_inputs(other_tokens, other_positions))[0][0]
    for layer, tensors in sorted(first.calls.items()):
        for label, before, after in zip(
            ("queries", "keys", "values"), tensors, second.calls[layer]
        ):
            if not same_bits(before[:kept], after[place]):
                _refuse_rows(model, f"the {label} of layer {layer}")
    if not same_bits(hidden[:kept], again[place]):
        _refuse_rows(model, "the final hidden states")


def _refuse_rows(model: Any, what: str) -> None:
    raise UnsupportedModelError(
        f"{type(model).__name__}: {what} of a row depend on its index or on the other rows of the "
        "forward, so no saved K/V could be trusted; use another architecture, dtype or number of "
        "rows, or one torch thread"
    )
