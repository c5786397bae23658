"""What the sections of the GPU benchmark measure: models, pagers, contexts, torch's attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.nn.attention.bias import causal_lower_right
from transformers import Cache, DynamicCache, Qwen3ForCausalLM, StaticCache

from kvpager import Dense, Layout, Pager, PagerConfig
from kvpager._model.seam.causal_lm import handed
from kvpager.config import Selection
from kvpager.pager import ROW_READ, Forward, Sequence
from kvpager.verify.bits import compare_bits
from kvpager_bench import harness, subjects
from kvpager_bench.gpu.machine import Machine
from kvpager_bench.gpu.sizes import CHUNK_TOKENS, Sizes

BFLOAT16 = torch.bfloat16
RELATIVE_ERROR = 1e-2  # of bfloat16 attention against another order of operations


class WrongResultError(Exception):
    """What was to be timed does not compute what it should."""


def build_model(machine: Machine, sizes: Sizes, layers: int | None = None) -> Any:
    """A model of random weights in bfloat16, made where it will run."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(BFLOAT16)
    torch.manual_seed(0)
    try:
        with torch.device(machine.tensors):
            model: Any = Qwen3ForCausalLM(sizes.model_config(layers))
    finally:
        torch.set_default_dtype(before)
    return model.eval()


def config(machine: Machine, pool_tokens: int, **options: Any) -> PagerConfig:
    """Budgets of what is measured; nothing of the machine's memory is taken for granted."""
    return PagerConfig(pool_tokens=pool_tokens, device=machine.pager_device, **options)


@contextmanager
def pager_of(
    machine: Machine,
    layout: Layout,
    q_heads: int,
    pool_tokens: int,
    *,
    rows: int,
    selection: Selection | None = None,
    host_tokens: int = 0,
) -> Iterator[Pager]:
    """A pager without a model. host_tokens: what the pinned arena holds; 0: blocks are homes.

    Dense attention scans no summaries: "lru" needs no scores.
    """
    frontier = 2 * (rows + 2 * CHUNK_TOKENS)
    pool = -(-(pool_tokens + frontier) // CHUNK_TOKENS) * CHUNK_TOKENS
    host_bytes = -(-host_tokens // CHUNK_TOKENS) * layout.chunk_bytes
    options = config(
        machine,
        pool,
        selection=selection or Dense(),
        host_bytes=host_bytes,
        rows=rows,
        policy="qk" if selection else "lru",
    )
    pager = Pager(layout, options, rows=rows, q_heads=q_heads)
    try:
        yield pager
    finally:
        pager.close()
        machine.free()


def append(machine: Machine, sequence: Sequence, layout: Layout, tokens: int, seed: int) -> None:
    """Grows a sequence to `tokens` positions of random ids and random K/V made on the device."""
    step = 4096
    ids = np.random.default_rng(seed)
    dtype = BFLOAT16
    while sequence.length < tokens:
        count = min(step, tokens - sequence.length)
        shape = (layout.layers, count, layout.kv_heads)
        k = machine.random(*shape, layout.k_dim, dtype=dtype, seed=seed + sequence.length)
        v = machine.random(*shape, layout.v_dim, dtype=dtype, seed=seed + sequence.length + 1)
        sequence.append(ids.integers(8, 100, count, dtype=np.int32), k, v)


class Reading:
    """Rows that read at the end of sequences, to attend with as often as one likes.

    Rows of a sequence hold its last positions, so that row i sees all but the last n - 1 - i.
    """

    def __init__(
        self, machine: Machine, pager: Pager, sequences: list[Sequence], rows: int, q_heads: int
    ) -> None:
        layout = pager.layout
        of_rows = [sequence for sequence in sequences for _ in range(rows)]
        positions = [s.length - rows + i for s in sequences for i in range(rows)]
        total = len(of_rows)
        self._forward: Forward = pager.begin(of_rows, positions, [9] * total, [ROW_READ] * total)
        self.q = [
            machine.random(total, q_heads, layout.k_dim, dtype=BFLOAT16, seed=100 + layer)
            for layer in range(layout.layers)
        ]
        self._k = machine.random(total, layout.kv_heads, layout.k_dim, dtype=BFLOAT16)
        self._v = machine.random(total, layout.kv_heads, layout.v_dim, dtype=BFLOAT16)
        self._out = torch.empty(
            total, q_heads, layout.v_dim, dtype=BFLOAT16, device=machine.tensors
        )
        self._scaling = layout.k_dim**-0.5

    def attend(self, layer: int) -> torch.Tensor:
        out: torch.Tensor = self._forward.attend(
            layer, self.q[layer], self._k, self._v, scaling=self._scaling, out=self._out
        )
        return out

    def poison(self) -> None:
        self._out.fill_(float("nan"))

    def all_layers(self) -> None:
        for layer in range(len(self.q)):
            self.attend(layer)

    def __enter__(self) -> Reading:
        return self

    def __exit__(self, *_: object) -> None:
        self._forward.abort()


def contiguous_kv(
    machine: Machine, sequences: list[Sequence], layer: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [sequences, kv_heads, tokens, dim] of a layer, as torch's attention likes them."""
    pairs = [s.read_kv(layer, 0, s.length) for s in sequences]
    k, v = (torch.stack(list(part)).transpose(1, 2).contiguous() for part in zip(*pairs))
    return k.to(machine.tensors), v.to(machine.tensors)


def torch_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q [sequences, q_heads, rows, dim] at the end of k and v, causal; torch's own kernel."""
    rows = q.shape[2]
    mask = causal_lower_right(rows, k.shape[2]) if rows > 1 else None
    out: torch.Tensor = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out


def check_attention(
    machine: Machine, reading: Reading, sequences: list[Sequence], rows: int, layer: int = 0
) -> float:
    """Relative error of the pager's attention against torch's in float32; raises if it is wrong."""
    grouped: Any = reading.q[layer].float()
    q = grouped.unflatten(0, (len(sequences), rows)).transpose(1, 2)
    k, v = contiguous_kv(machine, sequences, layer)
    expected = torch_attention(q, k.float(), v.float()).transpose(1, 2).flatten(0, 1)
    reading.poison()
    got = reading.attend(layer).float()
    machine.synchronize()
    error = float((got - expected).norm() / expected.norm())
    if not error < RELATIVE_ERROR:
        raise WrongResultError(
            f"attention kernel: {rows} rows of {len(sequences)} sequences of {sequences[0].length} "
            f"tokens are off by {error:.3g}, allowed is {RELATIVE_ERROR}"
        )
    return error


def stock_cache(machine: Machine, model: Any, sizes: Sizes, tokens: int) -> DynamicCache:
    """A full DynamicCache of random K/V."""
    cache = DynamicCache(config=model.config)
    _fill(cache, machine, model, sizes, tokens)
    return cache


def _fill(cache: Cache, machine: Machine, model: Any, sizes: Sizes, tokens: int) -> None:
    shape = (1, sizes.kv_heads, tokens, sizes.head_dim)
    for layer in range(model.config.num_hidden_layers):
        k = machine.random(*shape, dtype=BFLOAT16, seed=layer)
        v = machine.random(*shape, dtype=BFLOAT16, seed=1000 + layer)
        cache.update(k, v, layer)


def stock_step(model: Any, cache: DynamicCache, ids: list[int]) -> int:
    """One greedy step of transformers alone, its token on the host."""
    return int(subjects.stock_step(model, cache, ids).argmax())


def graphed_step(
    machine: Machine, model: Any, sizes: Sizes, tokens: int, steps: int
) -> Callable[[], int]:
    """A greedy step of transformers alone as one graph of the device, its token on the host.

    A StaticCache holds random K/V of `tokens` positions and has room for `steps` more.
    """
    cache = StaticCache(config=model.config, max_cache_len=tokens + steps)
    _fill(cache, machine, model, sizes, tokens)
    token = torch.full((1, 1), 9, device=machine.tensors)

    @torch.inference_mode()
    def step() -> None:
        output = model(input_ids=token, logits_to_keep=1, **handed(model, cache))
        token.copy_(output.logits[:, -1:].argmax(-1))

    replay = machine.captured(step)

    def run() -> int:
        replay()
        return int(token)

    return run


def stock_prefill(model: Any, ids: Any) -> int:
    """One-shot prefill of transformers alone; the first token on the host."""
    return int(subjects.stock_prefill(model, ids)[1].argmax())


def differing_bits(a: torch.Tensor, b: torch.Tensor) -> int:
    """Bits in which two tensors of one shape and dtype differ."""
    found = compare_bits(a, b)
    if found.first is not None and found.first.reason:
        raise harness.MissingNumberError(found.first.reason)
    return found.differing_bits
