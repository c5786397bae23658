"""A digest of what a model does with a few made-up tokens.

Parameters and settings do not determine a forward completely: a hook, a patched method, a number
that somebody has set in a module or an inactive adapter may change it. The digest covers their
effect, and how each layer attends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from blake3 import blake3

from kvpager._model.seam.attention import running
from kvpager._model.seam.causal_lm import Head, decoder_of, made_up_tokens
from kvpager._model.seam.observe import LayerTensors, Observation, Recorder, packed_inputs
from kvpager._model.seam.recurrent import Recurrence
from kvpager._model.seam.rows import RowCounts, same_bits
from kvpager._model.seam.state import EMPTY, RecurrentState

KEYS = 16  # rows that attend to one another; later ones attend to themselves
_BITS = 20  # of a number in a score: products of two, and sums of these, are exact in float64


@dataclass
class Mixing(Recorder):
    """Stands in for forwards of one text: each row attends to all rows that its call lets it see.

    Its arithmetic is one that every library rounds alike. Scaling, window, soft cap and sinks of a
    call show in the result, and so does every key a row may see. It is no softmax, since
    exponentials differ between processors: scores are sums of integers, exact in any order, and all
    else is additions, products and quotients one after the other, as IEEE 754 defines them. So the
    result is the same for every number of rows, threads and kind of device.

    Attributes:
        positions: [rows] of the forward that is next or running.
        arguments: of each attention call, in order, its keyword arguments.
    """

    positions: torch.Tensor = field(default_factory=lambda: torch.empty(0, device="cpu"))
    arguments: list[dict[str, Any]] = field(default_factory=list)
    _seen: dict[int, LayerTensors] = field(default_factory=dict)

    def begin(self, positions: torch.Tensor) -> None:
        """Goes on with further rows of the text, whose calls take the place of those before."""
        self.calls, self.arguments = {}, []
        self.positions = positions

    def note_call(self, arguments: dict[str, Any]) -> None:
        """Keeps the keyword arguments of an attention call that follows."""
        self.arguments.append(arguments)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **call: Any
    ) -> torch.Tensor:
        """As a forward does, but by the arithmetic of this module."""
        made = super().attend(layer, q, k, v, **call)
        before = self._seen.get(layer, (k[:0], v[:0], self.positions[:0]))
        count = min(len(q), KEYS - len(before[0]))
        if count > 0:
            new = (k[:count], v[:count], self.positions[:count])
            seen = torch.cat([before[0], new[0]]), torch.cat([before[1], new[1]])
            positions = torch.cat([before[2], new[2]])
            self._seen[layer] = (*seen, positions)
            made = torch.cat([_mixed(q[:count], *seen, positions, call).to(q.dtype), made[count:]])
        return made


def _mixed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    call: dict[str, Any],
) -> torch.Tensor:
    """[n, q_heads, v_dim] float64 for the last n rows of those whose keys and values are given."""
    n, total, heads = len(q), len(k), k.shape[1]
    own = torch.arange(total - n, total, device=q.device)
    queries, query_exponents = _integers(q.reshape(n, heads, -1, q.shape[-1]))
    keys, key_exponents = _integers(k)
    scores = torch.einsum("ihgd,jhd->ihgj", queries, keys)
    exponents = query_exponents + key_exponents.squeeze(-1).t()[:, None]
    scores = scores * _power(exponents) * float(call["scaling"])
    if (cap := call.get("softcap")) is not None:
        scores = scores / (1 + scores.abs() / float(cap))
    seen = own[:, None] >= torch.arange(total, device=q.device)
    if (window := call.get("window")) is not None:
        seen = seen & (positions[own, None] - positions < window)
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    highest = scores.amax(-1, keepdim=True)
    if (sinks := call.get("sinks")) is not None:
        sink = sinks.double().reshape(1, heads, -1, 1)
        highest = torch.maximum(highest, sink)
    weights = _weight(scores, highest)
    whole = weights.new_zeros(()) if sinks is None else _weight(sink, highest)
    out = weights.new_zeros((n, *scores.shape[1:3], v.shape[-1]))
    whole = whole.expand(n, *scores.shape[1:3], 1).clone()
    values = v.double()
    for place in range(total):
        first = max(0, place - (total - n))  # of the rows that may see it
        weight = weights[first:, ..., place : place + 1]
        whole[first:] += weight
        out[first:] += weight * values[place][None, :, None]
    return (out / whole).reshape(n, -1, v.shape[-1])


def _weight(scores: torch.Tensor, highest: torch.Tensor) -> torch.Tensor:
    """1 for the highest score, 0 for minus infinity, and the less the lower."""
    return 1 / (1 + (highest - scores) * (highest - scores))


def _integers(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors [..., dim] as integers, and the exponent of each [..., 1] to scale them back by."""
    wide = x.double()
    _, exponent = torch.frexp(wide.abs().amax(-1, keepdim=True))
    exponent = exponent - _BITS
    return (wide * _power(-exponent)).round(), exponent


def _power(exponents: torch.Tensor) -> torch.Tensor:
    """2 to the power of integers, float64; torch's own may be off by a bit."""
    return (exponents.long().clamp(-1022, 1023) + 1023 << 52).view(torch.float64)


TOKENS = KEYS
# Positions of the first tokens. Those of the others are up to the model's last, at distances that
# are beyond most windows.
_NEAR = (0, 1, 2, 3, 7, 20, 55, 150)
_MASKS = ("attention_mask",)  # of rows by rows


@dataclass(frozen=True)
class Behaviour:
    """Result of a forward of made-up tokens.

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
    tokens = made_up_tokens(model, TOKENS, torch.Generator("cpu").manual_seed(3))
    last = (getattr(model.config, "max_position_embeddings", None) or 5 * TOKENS) - 1
    chosen = {min(near, last) for near in _NEAR}
    chosen.update(last >> halved for halved in range(TOKENS - len(_NEAR)))
    more = (position for position in range(last + 1) if position not in chosen)
    while len(chosen) < min(TOKENS, last + 1):
        chosen.add(next(more))
    positions = torch.tensor([*sorted(chosen), *[last] * (TOKENS - len(chosen))], device="cpu")
    return tokens, positions.to(model.device)


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
    tokens = made_up_tokens(model, max(TOKENS, rows), torch.Generator("cpu").manual_seed(3))
    positions = torch.arange(len(tokens), device=model.device)
    mixing, head = Mixing(), Head(model, counts.head)
    state: RecurrentState = EMPTY
    for start in range(0, len(tokens) - rows + 1, rows):
        given = [x[start : start + rows] for x in (tokens, positions)]
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
        for part in _encoded(_joined([call.get(name) for call in calls], rows)):
            summary.update(part)


def _joined(values: Sequence[Any], rows: Sequence[int]) -> Any:
    """Joins an argument of several forwards to what one forward of all their rows would have."""
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


def _encoded(value: Any) -> Iterator[bytes]:
    """An argument as bytes, the same in every process; of other objects the class."""
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        yield _raw(value)
    elif isinstance(value, (tuple, list)):
        yield b"["
        for item in value:
            yield from _encoded(item)
        yield b"]"
    elif isinstance(value, dict):
        for key, item in sorted(value.items(), key=lambda pair: str(pair[0])):
            yield f"{key}:".encode()
            yield from _encoded(item)
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
