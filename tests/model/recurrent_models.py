"""Small models with recurrent layers and random weights."""

from __future__ import annotations

import warnings

import torch
import transformers
from reference_models import DTYPES, VOCAB

from kvpager import Engine

CHUNK = 16

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_PURE = {"num_attention_heads": None, "num_key_value_heads": None}
_MAMBA2 = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
_DELTA = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT = {  # attention over compressed keys and values
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}

# By name: configuration class, and what differs from _COMMON.
_MODELS = {
    "qwen3_next": (
        "Qwen3NextConfig",
        {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 32},
    ),
    "qwen3_5": ("Qwen3_5TextConfig", _DELTA),
    "olmo_hybrid": ("OlmoHybridConfig", {**_DELTA, "head_dim": None}),
    "kimi_linear": ("KimiLinearConfig", {**_LATENT, "linear_head_dim": 16, "linear_num_heads": 4}),
    "bailing_hybrid": (
        "BailingHybridConfig",
        {**_LATENT, "head_dim": 16, "n_group": 1, "topk_group": 1},
    ),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"] * 2}),
    "mamba2": (
        "Mamba2Config",
        {
            **_PURE,
            "state_size": 16,
            "num_heads": 8,
            "head_dim": 16,
            "n_groups": 1,
            "chunk_size": 16,
        },
    ),
    "bamba": ("BambaConfig", {**_MAMBA2, "attn_layer_indices": [1, 3]}),
    "falcon_h1": ("FalconH1Config", {**_MAMBA2, "mamba_d_ssm": 128, "lm_head_multiplier": 0.5}),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {
            **_MAMBA2,
            "layer_types": ["mamba", "attention"] * 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 64,
        },
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            "head_dim": 16,
            "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "ssm_state_size": 16,
            "n_groups": 1,
            "chunk_size": 16,
        },
    ),
    "zamba2": (  # layers share one attention
        "Zamba2Config",
        {
            "layers_block_type": ["mamba", "hybrid"] * 2,
            "mamba_d_state": 16,
            "mamba_headdim": 32,
            "n_mamba_heads": 4,
            "mamba_ngroups": 1,
            "chunk_size": 16,
            "num_mem_blocks": 1,
            "use_mem_rope": True,
        },
    ),
    "zaya": ("ZayaConfig", {"head_dim": 16}),
    # Their recurrence goes on from a state by single tokens only.
    "mamba": ("MambaConfig", {**_PURE, "state_size": 8}),
    "falcon_mamba": ("FalconMambaConfig", {**_PURE, "state_size": 8}),
    "jamba": (
        "JambaConfig",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_d_state": 8,
            "mamba_dt_rank": 8,
        },
    ),
    "zamba": (  # layers share one attention, which has no layer of its own
        "ZambaConfig",
        {
            "num_hidden_layers": 6,
            "num_key_value_heads": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 8,
            "n_mamba_heads": 2,
        },
    ),
}
STEPPING = ("mamba", "falcon_mamba", "jamba", "zamba")
WHOLE_CHUNKS = tuple(name for name in _MODELS if name not in STEPPING)
RECURRENT = tuple(_MODELS)


def build_recurrent(name, dtype="float32", **changes):
    """A model of RECURRENT, the same in every process; skips a test where it is not known."""
    kind, options = _MODELS[name]
    if not hasattr(transformers, kind):
        import pytest

        pytest.skip(f"this release of transformers has no {kind}")
    settings = {**_COMMON, **options, **changes}
    config = getattr(transformers, kind)(
        **{key: value for key, value in settings.items() if value is not None}
    )
    torch.manual_seed(sum(map(ord, name)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_config(config).eval().to(DTYPES[dtype])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(3)  # as initialised, all tokens look alike
    return model


def make_recurrent_engine(model, *, pool_tokens=96, **options):
    """An engine with a small pool and small chunks; every option can be overridden."""
    settings = {"exact": "reuse", "chunk_tokens": CHUNK, "host_bytes": "64MiB"}
    return Engine(model, pool_tokens=pool_tokens, **{**settings, **options})
