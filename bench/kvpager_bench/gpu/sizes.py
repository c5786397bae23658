"""What a run of the GPU benchmark measures: the shape of the model and how much of everything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import Qwen3Config

from kvpager import Layout

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
CHUNK_TOKENS = 64


@dataclass(frozen=True)
class Sizes:
    """Lengths are tokens, sizes bytes, unless a name says otherwise."""

    # The model. 8B-shaped: 36 layers of 32 query and 8 kv heads of 128, 9 MiB of K/V per chunk.
    layers: int = 36
    kv_heads: int = 8
    q_heads: int = 32
    head_dim: int = 128
    hidden: int = 4096
    intermediate: int = 12288
    vocab: int = 151936
    runs: int = 20

    copy_bytes: int = 2 * GIB  # on the device
    link_bytes: int = GIB
    matmul: int = 8192

    pinned_bytes: tuple[int, ...] = (4 * GIB, 36 * GIB)  # arenas whose allocation is timed

    paged_chunks: tuple[int, ...] = (1, 32)
    duplex_chunks: int = 64
    wave_layers: int = 4

    rotated_bytes: int = 256 * MIB  # attention: K/V of the layers that take turns, at least
    short: int = 2048  # contexts of attention; those of selection are the last two
    middle: int = 32768
    long: int = 131072
    batch_contexts: tuple[int, ...] = (2048, 32768)
    batch: int = 8
    prefill_rows: tuple[int, ...] = (64, 256)

    product_rows: tuple[int, ...] = (1, 16, 64, 256)  # of linear layers

    most_scanned: int = 16384  # chunks
    scan_layers: int = 2
    scan_rows: int = 1024
    selected: int = 32

    pool: int = 4096
    near_contexts: tuple[int, ...] = (16384, 65536)  # decoded first, through a small arena
    far_context: int = 262144  # last, because its arena is 37 GiB of pinned memory
    decode_steps: int = 16
    profiled_steps: int = 5
    restored: int = 32768
    cold: int = 32768  # the longest prompt that is prefilled cold
    rows: tuple[int, ...] = (64, 128, 256)
    rows_prompt: int = 4096
    append_rows: int = 256  # M of pagers without a model
    engine_rows: int | None = None  # M; None: the default

    @property
    def contexts(self) -> tuple[int, ...]:
        return tuple(sorted({self.short, self.middle, self.long}))

    @property
    def scanned_chunks(self) -> tuple[int, ...]:
        of_contexts = {tokens // CHUNK_TOKENS for tokens in (self.middle, self.long)}
        return tuple(sorted({*of_contexts, self.most_scanned}))

    @property
    def page_token_bytes(self) -> int:
        """K/V of one token and layer, every kv head."""
        return 2 * self.kv_heads * self.head_dim * 2

    def attention_layers(self, tokens: int) -> int:
        """So many layers that together they are far larger than any cache."""
        layers = -(-self.rotated_bytes // (tokens * self.page_token_bytes))
        return min(self.layers, max(layers, 1 if not self.rotated_bytes else 2))

    def layout(self, layers: int | None = None) -> Layout:
        return Layout(
            layers=layers or self.layers,
            kv_heads=self.kv_heads,
            k_dim=self.head_dim,
            v_dim=self.head_dim,
            chunk_tokens=CHUNK_TOKENS,
            k_dtype="bfloat16",
            v_dtype="bfloat16",
        )

    def model_config(self, layers: int | None = None) -> Any:
        return Qwen3Config(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=layers or self.layers,
            num_attention_heads=self.q_heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=2 * self.far_context,
            tie_word_embeddings=False,
            dtype=torch.bfloat16,
        )


FULL = Sizes()
REHEARSAL = Sizes(
    layers=2,
    kv_heads=2,
    q_heads=4,
    head_dim=64,
    hidden=64,
    intermediate=64,
    vocab=128,
    runs=1,
    copy_bytes=64 * KIB,
    link_bytes=64 * KIB,
    matmul=64,
    pinned_bytes=(MIB, 2 * MIB),
    paged_chunks=(1, 2),
    duplex_chunks=2,
    wave_layers=2,
    rotated_bytes=0,
    short=192,
    middle=640,
    long=640,
    batch_contexts=(128,),
    batch=2,
    prefill_rows=(16,),
    product_rows=(1, 20, 70),
    most_scanned=10,
    scan_layers=1,
    scan_rows=64,
    selected=1,
    pool=768,
    near_contexts=(256, 512),
    far_context=768,
    decode_steps=2,
    profiled_steps=1,
    restored=256,
    cold=128,
    rows=(16,),
    rows_prompt=32,
    append_rows=64,
    engine_rows=16,
)
