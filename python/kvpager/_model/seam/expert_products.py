"""Experts of an engine's forwards through kvpager's own products, on the CPU.

transformers looks up how a layer's experts run by a name in the model's configuration, as it looks
up attention. While an engine runs its model, and only in its thread (context), configurations of
its experts answer with kvpager's name (as in attach.py): nothing is written to a model.

Rows that chose the same expert are multiplied together, so that its matrices are read once and none
are copied, and each has the bits that it would have alone (csrc/include/kvpager/linear.h).
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.integrations import moe

from kvpager._model.seam import linear
from kvpager._model.seam.attach import redirect
from kvpager._model.weights.supported import has_expert_weights

NAME = "kvpager"


def takes_experts(model: torch.nn.Module) -> bool:
    """Whether a model has layers with experts, and all are of a kind that is multiplied here.

    That is a module whose forward transformers chooses by its configuration, with matrices as
    [experts, outputs, inputs].
    """
    experts = [module for module in model.modules() if has_expert_weights(module)]
    if not experts or not all(map(_takes, experts)):
        return False
    moe.ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    return redirect("_experts_implementation", _own_experts)


def expert_configurations(model: torch.nn.Module) -> frozenset[int]:
    """Ids of the configurations of a model's experts, if they are multiplied here; else none."""
    if not takes_experts(model):
        return frozenset()
    configs: list[Any] = [m.config for m in model.modules() if has_expert_weights(m)]
    return frozenset(map(id, configs))


def multiplies(module: Any, *args: torch.Tensor, **kwargs: torch.Tensor) -> bool:
    """Whether a module's experts are multiplied here, in this context.

    It is tried, with the arguments of a call.
    """
    layers = linear.running_layers()
    if layers is None or id(getattr(module, "config", None)) not in layers.experts:
        return False
    noting = linear.Noting(layers)
    with torch.inference_mode(), linear.computing(noting):
        module(*args, **kwargs)
    return noting.of_expert_rows == 2  # up and down


def _takes(module: Any) -> bool:
    code = getattr(type(module).forward, "__code__", None)
    weights = [name for name, one in module.named_parameters(recurse=False) if one.ndim == 3]
    wanted = {"gate_up_proj" if getattr(module, "has_gate", True) else "up_proj", "down_proj"}
    return (
        getattr(code, "co_filename", None) == moe.__file__
        and "forward" not in vars(module)
        and isinstance(getattr(module, "config", None), PreTrainedConfig)
        and not getattr(module, "is_transposed", True)
        and not getattr(module, "_is_expert_parallel", False)
        and set(weights) == wanted
    )


def experts_forward(
    module: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """As transformers' "batched_mm", without its copies of matrices; as transformers registers it.

    Takes hidden states [M, hidden], int64 [M, k] and the weights of these experts [M, k]; returns
    [M, hidden].
    """
    rows, choices = top_k_index.shape
    first = "gate_up_proj" if module.has_gate else "up_proj"
    up = _product(module, first, hidden_states, top_k_index)
    if up is None:
        made: torch.Tensor = moe.batched_mm_experts_forward(
            module, hidden_states, top_k_index, top_k_weights
        )
        return made
    inner = module._apply_gate(up) if module.has_gate else module.act_fn(up)  # noqa: SLF001  # as transformers does
    down = _product(module, "down_proj", inner, top_k_index)
    if down is None:
        raise RuntimeError(f"{type(module).__name__} has matrices of several kinds")
    if getattr(module, "has_post_expert_norm", False):
        down = module.post_expert_norm(down)
    weighted = down * top_k_weights.reshape(-1).unsqueeze(-1)
    return weighted.view(rows, choices, -1).sum(dim=1).to(hidden_states.dtype)


def _product(module: Any, name: str, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor | None:
    layers = linear.running_layers()
    if layers is None or torch.is_autocast_enabled("cpu"):
        return None
    bias = getattr(module, f"{name}_bias") if getattr(module, "has_bias", False) else None
    return layers.product(x, getattr(module, name), bias, chosen)


def _own_experts(config: Any) -> str | None:
    layers = linear.running_layers()
    return NAME if layers is not None and id(config) in layers.experts else None
