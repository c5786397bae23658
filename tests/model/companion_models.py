"""Targets and drafts of every kind of cache that mostly agree on what comes next.

All share embeddings and head, and what their layers add is small: so guesses are mostly right,
whatever kind of layers the draft has, and bits depend on all that a layer sees all the same.
"""

from __future__ import annotations

import torch
from recurrent_models import build_recurrent
from reference_models import CHUNK, COMMON, VOCAB, build

WINDOW = 40
HIDDEN = 64
SMALL = {
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
KINDS = ("dense", "windowed", "recurrent")
_ADDED = 0.1  # how much of what layers add is left
_LAST = ("o_proj", "out_proj", "down_proj")  # weights that make it


def member(kind, *, layers=4):
    """A model of the family: every layer dense, every layer windowed, or a recurrent hybrid."""
    if kind == "recurrent":
        model = build_recurrent("qwen3_next")
    else:
        architecture = {"dense": "llama", "windowed": "mistral"}[kind]
        model = build(architecture, **SMALL, num_hidden_layers=layers)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in _LAST):
                parameter.mul_(_ADDED)
        for module in (model.get_input_embeddings(), model.get_output_embeddings()):
            module.weight.copy_(torch.randn(VOCAB, HIDDEN, generator=generator))
    return model


__all__ = ["CHUNK", "COMMON", "KINDS", "WINDOW", "member"]
