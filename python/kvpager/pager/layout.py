"""The shape of a chunk."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvpager import _core
from kvpager.errors import InvalidArgumentError

# What stored elements are read back in.
READ_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "q8": torch.float32,
    "q4": torch.float32,
}


@dataclass(frozen=True)
class Layout:
    """Shape of a chunk: layers x {K, V} x kv_heads x chunk_tokens x head_dim.

    Args:
        layers: layers of the model.
        kv_heads: key/value heads per layer.
        k_dim: head_dim of keys, a multiple of 16.
        v_dim: head_dim of values, a multiple of 16.
        chunk_tokens: tokens per chunk: 16, 32, 64, 128 or 256.
        k_dtype: in which keys are stored: "float32", "float16", "bfloat16", or fewer bits, "q8" or
            "q4" (csrc/include/kvpager/codes.h); "q4" needs a k_dim that is a multiple of 32.
        v_dtype: likewise for values.

    Raises:
        InvalidArgumentError: naming the field that is out of range.
    """

    layers: int
    kv_heads: int
    k_dim: int
    v_dim: int
    chunk_tokens: int = 64
    k_dtype: str = "float32"
    v_dtype: str = "float32"

    def __post_init__(self) -> None:
        self.native()

    def native(self) -> _core.Layout:
        """The core's own value of this layout, validated."""
        try:
            return _core.Layout(
                layers=self.layers,
                kv_heads=self.kv_heads,
                chunk_tokens=self.chunk_tokens,
                k_dim=self.k_dim,
                v_dim=self.v_dim,
                k_dtype=self.k_dtype,
                v_dtype=self.v_dtype,
            )
        except TypeError as error:
            raise InvalidArgumentError(f"{self!r}: {error}") from error

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk in the pool, padding included."""
        return self.native().chunk_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of K/V per token, as a full cache would hold them."""
        return self.native().token_bytes
