"""A tiny model of an architecture, with random weights, that transformers itself can run."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from architecture_table.shrink import VOCAB, small_configurations

_MOST_PARAMETERS = 100_000_000
_TOKENS = 96
_SCALE = 2.0  # as initialised, all tokens look alike


class NotBuiltError(Exception):
    """No small configuration of an architecture gives a model that runs."""


def build(model_type: str) -> Any:
    """A model in eval mode, in float32, the same in every process.

    Raises:
        NotBuiltError: says what went wrong with the last configuration that was tried.
    """
    reason = "no configuration was tried"
    for make in small_configurations(CONFIG_MAPPING[model_type], model_type):
        try:
            return _built(make())
        except Exception as error:  # noqa: PERF203  # of any kind: another may do
            reason = f"{type(error).__name__}: {error}"
            if "Unrecognized configuration class" in reason:
                reason = "its text part alone is no causal LM of transformers"
    raise NotBuiltError(reason)


def _built(config: Any) -> Any:
    make: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in make(config).parameters())
    if size > _MOST_PARAMETERS:
        raise ValueError(f"{size:,} parameters, which no option that is known here makes fewer")
    torch.manual_seed(0)
    model = make(config).eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.mul_(_SCALE)
    before = model.config._attn_implementation  # noqa: SLF001  # no public name
    for implementation in (before, "eager"):  # some shapes suit one of them alone
        model.set_attn_implementation(implementation)
        with torch.inference_mode():
            logits = model(torch.arange(_TOKENS)[None] % VOCAB, use_cache=False).logits
        if not logits.isfinite().all():
            raise ValueError("its logits are not finite")
    model.set_attn_implementation(before)
    return model
