"""Keys that are harder to summarise and mean the same: q.k is kept, what a box sees is not.

The shipped model was trained with a term that makes its keys easy to select by, so it cannot choose
the scorer for other models. Its retrieving layer has no rotary embedding and no norm between the
projections and the dot product. There, for any invertible A per kv head and any vector b,

    k' = A k + b,    q' = A^-T q    gives    q'.k' = q.k + q'.b,

and q'.b is the same for every key, so softmax does not see it: full attention answers as before, up
to rounding. A and b go into the weights and biases of k_proj and q_proj; the model stays stock.
"""

from __future__ import annotations

from typing import Any

import torch

from kvpager_bench import subjects

TRAINED = "trained"
PLAIN = subjects.PLAIN
VARIANTS = {
    TRAINED: "as shipped",
    PLAIN: "of the checkpoint whose keys were not made easy to select by",
    "rotated": "random rotation per kv head: no dimension means anything by itself",
    "skewed": "random invertible map of condition number 16: keys large where queries are small",
    "offset": "rotated, and four channels per kv head carry an offset of eight times the keys' rms",
}
RETRIEVING_LAYER = 1
CONDITION = 16.0
OFFSET_CHANNELS = 4
OFFSET_SCALE = 8.0
_CALIBRATION_TOKENS = 2048


def load_with_keys(variant: str) -> Any:
    """A tiny retriever with keys of this kind."""
    if variant == PLAIN:
        return subjects.load_model(subjects.PLAIN)
    return harden(subjects.load_model(subjects.SHIPPED), variant)


def harden(model: Any, variant: str, seed: int = 0) -> Any:
    """Changes `model`, a shipped tiny retriever, in place, and returns it."""
    if variant not in VARIANTS or variant == PLAIN:
        raise ValueError(f"{variant!r} is no change of the shipped model's keys")
    if variant == TRAINED:
        return model
    attention = model.model.layers[RETRIEVING_LAYER].self_attn
    if attention.use_rope:
        raise ValueError(f"layer {RETRIEVING_LAYER} has rotary embeddings, which do not commute")
    kv_heads, dim = model.config.num_key_value_heads, model.config.head_dim
    group = model.config.num_attention_heads // kv_heads
    generator = torch.Generator().manual_seed(seed)
    rms = _key_rms(model, attention)
    with torch.no_grad():
        for head in range(kv_heads):
            maps, inverse = _maps(variant, dim, generator)
            _apply(attention.k_proj, head, dim, maps)
            for query_head in range(head * group, (head + 1) * group):
                _apply(attention.q_proj, query_head, dim, inverse.T)
            if variant == "offset":
                channels = torch.randperm(dim, generator=generator)[:OFFSET_CHANNELS]
                signs = torch.randint(2, (OFFSET_CHANNELS,), generator=generator) * 2 - 1
                attention.k_proj.bias[head * dim + channels] += OFFSET_SCALE * rms * signs
    return model


def _maps(variant: str, dim: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """A and its inverse, [dim, dim] float64."""
    left = _rotation(dim, generator)
    if variant != "skewed":
        return left, left.T
    right = _rotation(dim, generator)
    exponent = torch.linspace(-0.5, 0.5, dim, dtype=torch.float64)
    scale = CONDITION**exponent
    return left @ torch.diag(scale) @ right, right.T @ torch.diag(1 / scale) @ left.T


def _rotation(dim: int, generator: torch.Generator) -> torch.Tensor:
    """Uniform over rotations and reflections."""
    q, r = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64))
    rotation: torch.Tensor = q * torch.sign(torch.diagonal(r))
    return rotation


def _apply(projection: Any, head: int, dim: int, maps: torch.Tensor) -> None:
    rows = slice(head * dim, (head + 1) * dim)
    for parameter in (projection.weight, projection.bias):
        parameter[rows] = (maps @ parameter[rows].double()).to(parameter.dtype)


@torch.inference_mode()
def _key_rms(model: Any, attention: Any) -> float:
    """Of one key element, over random tokens."""
    seen: list[torch.Tensor] = []
    hook = attention.k_proj.register_forward_hook(lambda _m, _i, output: seen.append(output))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(8, model.config.vocab_size, (1, _CALIBRATION_TOKENS), generator=generator)
    try:
        model(input_ids=ids, use_cache=False, logits_to_keep=1)
    finally:
        hook.remove()
    return float(seen[0].square().mean().sqrt())
