"""The transformers seam: an unmodified causal LM whose attention runs over chunks."""

from __future__ import annotations

from kvpager.hf.attach import Attachment
from kvpager.hf.attention import NAME, running
from kvpager.hf.head import HEAD_ROWS, Head
from kvpager.hf.probe import packed_inputs, probe_model, same_bits
from kvpager.hf.support import check_supported

__all__ = [
    "HEAD_ROWS",
    "NAME",
    "Attachment",
    "Head",
    "check_supported",
    "packed_inputs",
    "probe_model",
    "running",
    "same_bits",
]
