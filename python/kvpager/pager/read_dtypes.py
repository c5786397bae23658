"""What stored elements are read back in."""

from __future__ import annotations

import torch

READ_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "q8": torch.float32,
    "q4": torch.float32,
}
