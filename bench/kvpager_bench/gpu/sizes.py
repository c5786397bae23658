"""What a run of the GPU benchmark measures: the shape of the model and how much of everything."""

from __future__ import annotations

from dataclasses import dataclass, replace
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

    paged_chunks: tuple[int, ...] = (1, 32)
    duplex_chunks: int = 64

    rotated_bytes: int = 256 * MIB  # attention: K/V of the layers that take turns, at least
    decode_contexts: tuple[int, ...] = (2048, 8192, 32768, 131072)
    batch_contexts: tuple[int, ...] = (2048, 8192, 32768)
    batch: int = 8
    prefill_rows: tuple[int, ...] = (64, 256)
    prefill_contexts: tuple[int, ...] = (2048, 8192, 32768, 131072)

    scanned_chunks: tuple[int, ...] = (2048, 16384)
    scan_layers: int = 2
    scan_rows: int = 1024
    selected: int = 32

    pool: int = 4096
    contexts: tuple[int, ...] = (8192, 16384, 32768, 65536, 131072, 262144)
    decode_steps: int = 16
    resident_context: int = 32768  # also decoded with a pool that holds it whole
    restored: tuple[int, ...] = (32768, 131072)
    cold: int = 32768  # the longest prompt that is prefilled cold
    rows: tuple[int, ...] = (64, 128, 256)
    rows_prompt: int = 4096
    dense_layers: int = 4
    dense_context: int = 8192
    append_rows: int = 256  # M of pagers without a model
    engine_rows: int | None = None  # M; None: the default

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
            max_position_embeddings=2 * max(*self.contexts, self.dense_context),
            tie_word_embeddings=False,
            dtype=torch.bfloat16,
        )


FULL = Sizes()
QUICK = replace(
    FULL,
    runs=7,
    copy_bytes=GIB,
    link_bytes=256 * MIB,
    decode_contexts=(2048, 32768),
    batch_contexts=(8192,),
    prefill_contexts=(2048, 32768),
    scanned_chunks=(2048,),
    contexts=(16384, 65536),
    decode_steps=6,
    restored=(32768,),
    cold=8192,
    rows=(64, 256),
    rows_prompt=2048,
    dense_context=4096,
)
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
    paged_chunks=(1, 2),
    duplex_chunks=2,
    rotated_bytes=0,
    decode_contexts=(192,),
    batch_contexts=(128,),
    batch=2,
    prefill_rows=(16,),
    prefill_contexts=(192,),
    scanned_chunks=(10,),
    scan_layers=1,
    scan_rows=64,
    selected=1,
    pool=768,
    contexts=(256, 512),
    decode_steps=2,
    resident_context=256,
    restored=(256,),
    cold=128,
    rows=(16,),
    rows_prompt=32,
    dense_layers=1,
    dense_context=1536,
    append_rows=64,
    engine_rows=16,
)
