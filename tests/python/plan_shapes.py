"""Configurations of models, as JSON has them, that plans are made for."""

from __future__ import annotations

import json

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "dtype": "bfloat16",
}
QWEN3_MOE_30B = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "dtype": "bfloat16",
}


def write_config(folder, values, **changes):
    """The path of a file with the configuration, some fields changed."""
    path = folder / "model.json"
    path.write_text(json.dumps({**values, **changes}), encoding="utf-8")
    return path
