"""Whose products the linear layers of an engine are: kvpager's, or torch's."""

from __future__ import annotations

from typing import Any

import torch

from kvpager import _core
from kvpager.errors import UnsupportedModelError

_AVX2 = 3  # its level of x86-64


def use_own_products(asked: str, model: Any) -> bool:
    """Whether an engine's linear layers are kvpager's own products.

    "auto" follows a rule about the processor and the dtype, and no measurement: which products they
    are decides bits, and two machines of one kind, or one machine on two days, have to agree. The
    rule is what `kvpager bench linear` shows (adr/0068), and knows nothing of KVPAGER_ISA, which
    changes no bit.

    Args:
        asked: `PagerConfig.linear`.
        model: whose they are.

    Raises:
        UnsupportedModelError: "kvpager" for a model on a GPU.
    """
    on_cpu = model.device.type == "cpu"
    if asked == "kvpager" and not on_cpu:
        raise UnsupportedModelError(
            f'PagerConfig.linear is "kvpager" and the model is on {model.device}; those products '
            'run on the CPU alone: expected "auto" or "torch"'
        )
    if asked != "auto" or not on_cpu:
        return asked == "kvpager"
    return _is_fast(model.dtype, _core.processor())


def _is_fast(dtype: torch.dtype, processor: dict[str, int]) -> bool:
    if dtype == torch.bfloat16 and processor["level"] > _AVX2:
        # Without the instruction whose order they keep they take several, where torch's library has
        # kernels of its own; AMX tiles, which it uses, are faster than the instruction.
        return bool(processor["bf16"] and not processor["amx"])
    # With AVX2 alone torch has bfloat16 and float16 in plain loops.
    known = (torch.float32, torch.bfloat16, torch.float16)
    return dtype in known and processor["level"] >= _AVX2
