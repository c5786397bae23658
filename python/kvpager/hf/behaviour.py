"""A digest of what a model does with a few made-up tokens.

Parameters and settings do not determine a forward completely: a hook, a patched method, a number
that somebody has set in a module or an inactive adapter may change it. The digest covers their
effect, and how each layer attends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from blake3 import blake3

from kvpager.hf.attention import running
from kvpager.hf.bits import same_bits
from kvpager.hf.decoder import decoder_of
from kvpager.hf.head import Head
from kvpager.hf.mixing import KEYS, Mixing
from kvpager.hf.observe import Observation, packed_inputs
from kvpager.hf.recurrent import Recurrence
from kvpager.hf.rows import RowCounts
from kvpager.hf.state import EMPTY, RecurrentState

TOKENS = KEYS
# Positions of the first tokens. Those of the others are up to the model's last, at distances that
# are beyond most windows.
_NEAR = (0, 1, 2, 3, 7, 20, 55, 150)
_MASKS = ("attention_mask",)  # of rows by rows


@dataclass(frozen=True)
class Behaviour:
    """What a model did.

    Attributes:
        digest: in hex, of queries, keys, values, hidden states, logits, and all arguments of every
            attention call. The same in every process under an equal fingerprint, and for every
            proven count of rows, whatever M is.
        seen: the rows of the tokens, or the first of them where they took several forwards.
    """

    digest: str
    seen: Observation


@dataclass(frozen=True)
class _Part:
    """One forward, without its padding."""

    seen: Observation
    logits: torch.Tensor
    arguments: list[dict[str, Any]]


def behave(model: Any, counts: RowCounts, recurrence: Recurrence | None = None) -> Behaviour:
    """Runs made-up tokens through a model, each of which attends to all before it.

    Args:
        model: whose attention is kvpager's (see attach.py).
        counts: that were proven for it.
        recurrence: of its recurrent layers, if it has any.
    """
    with torch.inference_mode():
        parts = [
            *(_packed(model, counts) if recurrence is None else _aligned(model, counts, recurrence))
        ]
    summary = blake3()
    for layer in sorted(parts[0].seen.layers):
        summary.update(layer.to_bytes(4, "little"))
        for tensors in zip(*(part.seen.layers[layer] for part in parts)):
            _add(summary, torch.cat(tensors))
    _add(summary, torch.cat([part.seen.hidden for part in parts]))
    _add(summary, torch.cat([part.logits for part in parts]))
    for calls in zip(*(part.arguments for part in parts)):
        _add_arguments(summary, calls, [part.seen.rows for part in parts])
    return Behaviour(str(summary.hexdigest()), parts[0].seen)


def behaviour_tokens(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens and positions of `behave`, [TOKENS] each, on the model's device."""
    generator = torch.Generator("cpu").manual_seed(3)  # the same tokens on every device
    vocab = model.get_input_embeddings().weight.shape[0]
    tokens = torch.randint(vocab, (TOKENS,), generator=generator, device="cpu")
    last = (getattr(model.config, "max_position_embeddings", None) or 5 * TOKENS) - 1
    chosen = {min(near, last) for near in _NEAR}
    chosen.update(last >> halved for halved in range(TOKENS - len(_NEAR)))
    more = (position for position in range(last + 1) if position not in chosen)
    while len(chosen) < min(TOKENS, last + 1):
        chosen.add(next(more))
    positions = torch.tensor([*sorted(chosen), *[last] * (TOKENS - len(chosen))], device="cpu")
    return tokens.to(model.device), positions.to(model.device)


def _packed(model: Any, counts: RowCounts) -> Iterator[_Part]:
    tokens, positions = behaviour_tokens(model)
    mixing, head = Mixing(), Head(model, counts.head)
    step = min(TOKENS, counts.rows)
    for start in range(0, TOKENS, step):
        used = min(step, TOKENS - start)
        rows = counts.fit(used)
        given = [
            torch.nn.functional.pad(x[start : start + used], (0, rows - used))
            for x in (tokens, positions)
        ]
        mixing.begin(given[1])
        with running(mixing):
            hidden = decoder_of(model)(**packed_inputs(*given))[0][0]
        yield _part(mixing, head, given, hidden, used)


def _aligned(model: Any, counts: RowCounts, recurrence: Recurrence) -> Iterator[_Part]:
    """The same of consecutive tokens, one after the other from nothing."""
    rows = counts.rows
    generator = torch.Generator("cpu").manual_seed(3)
    vocab = model.get_input_embeddings().weight.shape[0]
    tokens = torch.randint(vocab, (max(TOKENS, rows),), generator=generator, device="cpu")
    positions = torch.arange(len(tokens), device="cpu")
    mixing, head = Mixing(), Head(model, counts.head)
    state: RecurrentState = EMPTY
    for start in range(0, len(tokens) - rows + 1, rows):
        given = [x[start : start + rows].to(model.device) for x in (tokens, positions)]
        mixing.begin(given[1])
        cache = recurrence.cache(state)
        with running(recurrence.attention(cache, mixing)):
            hidden = decoder_of(model)(**recurrence.inputs(given[0], given[1], cache))[0][0]
        state = recurrence.taken(cache, start + rows, hidden[-1])
        yield _part(mixing, head, given, hidden, rows)


def _part(
    mixing: Mixing, head: Head, given: Sequence[torch.Tensor], hidden: torch.Tensor, used: int
) -> _Part:
    seen = Observation(
        tokens=given[0][:used],
        positions=given[1][:used],
        layers={layer: (q[:used], k[:used], v[:used]) for layer, (q, k, v) in mixing.calls.items()},
        hidden=hidden[:used],
        calls=[],
        windows=dict(mixing.windows),
        sinks=set(mixing.sinks),
    )
    rows = len(given[0])
    arguments = [
        {name: _without_padding(name, value, rows, used) for name, value in call.items()}
        for call in mixing.arguments
    ]
    return _Part(seen, head(hidden, range(min(used, TOKENS))), arguments)


def _without_padding(name: str, value: Any, rows: int, used: int) -> Any:
    """An argument without what belongs to padding: of the first dimension that counts rows."""
    if isinstance(value, (tuple, list)):
        return [_without_padding(name, item, rows, used) for item in value]
    if not isinstance(value, torch.Tensor):
        return value
    dims = [dim for dim in range(value.ndim) if value.shape[dim] == rows]
    for dim in dims if name in _MASKS else dims[:1]:
        value = value.narrow(dim, 0, used)
    return value


def _add_arguments(summary: Any, calls: Sequence[dict[str, Any]], rows: Sequence[int]) -> None:
    """Adds the arguments of a layer's call, in one forward or in several of so many rows."""
    for name in sorted({name for call in calls for name in call}):
        summary.update(f"{name}\0".encode())
        for part in _told(_joined([call.get(name) for call in calls], rows)):
            summary.update(part)


def _joined(values: Sequence[Any], rows: Sequence[int]) -> Any:
    """What an argument is in one forward of all rows, as far as that can be known."""
    first = values[0]
    if len(values) == 1:
        return first
    if all(isinstance(value, torch.Tensor) for value in values):
        dims = [
            dim
            for dim in range(first.ndim)
            if all(value.shape[dim] == count for value, count in zip(values, rows))
        ]
        if dims:
            return torch.cat(list(values), dim=dims[0])
        return first if all(same_bits(first, value) for value in values) else list(values)
    if isinstance(first, (tuple, list)):
        return [_joined(items, rows) for items in zip(*values)]
    return first if all(value == first for value in values) else list(values)


def _told(value: Any) -> Iterator[bytes]:
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        yield _raw(value)
    elif isinstance(value, (tuple, list)):
        yield b"["
        for item in value:
            yield from _told(item)
        yield b"]"
    elif isinstance(value, dict):
        for key, item in sorted(value.items(), key=lambda pair: str(pair[0])):
            yield f"{key}:".encode()
            yield from _told(item)
    elif value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        yield f"{type(value).__name__} {value!r};".encode()
    else:
        yield f"{type(value).__module__}.{type(value).__qualname__};".encode()


def _add(summary: Any, tensor: torch.Tensor) -> None:
    summary.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
    summary.update(_raw(tensor))


def _raw(tensor: torch.Tensor) -> bytes:
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return raw.numpy().tobytes()
