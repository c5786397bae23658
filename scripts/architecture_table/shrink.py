"""Small configurations of any architecture: few layers, and windows that short texts cross."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

WINDOW = 24
LAYERS = 4
VOCAB = 128

# By what architectures call them; only options that a configuration has are set.
_SMALL: Mapping[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 512),
    **dict.fromkeys(("model_max_length", "context_length", "max_target_positions"), 512),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "emb_dim", "embedding_dim"), 64),
    **dict.fromkeys(("embedding_size", "word_embed_proj_dim", "input_embedding_size"), 64),
    **dict.fromkeys(("attention_hidden_size", "lru_width", "output_embedding_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), LAYERS),
    **dict.fromkeys(("decoder_layers", "num_decoder_layers", "num_blocks"), LAYERS),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4
    ),
    **dict.fromkeys(("num_decoder_attention_heads", "attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "dim_head", "d_head", "kv_channels", "attention_head_size"), 16),
    **dict.fromkeys(("swa_head_dim", "attention_head_dim", "global_head_dim"), 16),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"), 96),
    **dict.fromkeys(("dim_ff", "dff", "d_inner", "n_inner", "feed_forward_size"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("shared_experts_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("intermediate_size_mlp", "dense_intermediate_size"), 96),
    **dict.fromkeys(("expert_ffn_hidden_size", "moe_shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("zero_expert_num", "moe_num_shared_experts", "n_shared_experts"), 1),
    **dict.fromkeys(("sliding_window", "local_attention", "attention_window_size"), WINDOW),
    **dict.fromkeys(("sliding_window_size", "window_size"), WINDOW),
    **dict.fromkeys(("attention_chunk_size", "keep_window_size"), WINDOW),
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 32,
    "indexer_compress_ratio": 4,
    "index_topk": WINDOW,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "use_sliding_window": True,
    "max_window_layers": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 16,
    "rotary_dim": 8,
    "query_pre_attn_scalar": 16,
    "hidden_size_per_layer_input": 16,
    "laurel_rank": 8,
    "num_kv_shared_layers": 0,
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 16),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 16),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 16),
    "mamba_d_ssm": 128,
    "mamba_dt_rank": 8,
    "time_step_rank": 8,
    "o_groups": 2,
    "o_lora_rank": 16,
    "altup_num_inputs": 2,
    "dim_model_base": 32,
    "router_hidden_size": 16,
    "hc_lowrank": 16,
    "ple_embed_dim": 16,
    "ngram_vocab_size_base": 64,
    "split_ngram_parts": 4,
    "adapter_rank": 8,
    "gated_norm_rank": 8,
    "num_layers_per_stack": 2,
    "block_multiple_of": 16,
    "expert_layer_period": 2,
    "is_decoder": True,
    "encoder_layers": 1,
    "num_encoder_layers": 1,
    "encoder_ffn_dim": 96,
    "encoder_attention_heads": 4,
    "num_encoder_attention_heads": 4,
}
# Mamba 2 needs heads x their size to be expand x hidden: 8 x 16 = 2 x 64.

# Where one set of options does not fit an architecture, these are tried on top of it, in turn.
_ATTEMPTS: tuple[Mapping[str, Any], ...] = (
    {},
    {"num_key_value_heads": 4, "num_kv_heads": 4},
    {"head_dim": None},
    {"hidden_size": 128, "num_attention_heads": 8, "attention_hidden_size": 128},
    {"q_lora_rank": None},
    {"qk_head_dim": 8, "head_dim": 8},
    {"num_attention_heads": 12, "hidden_size": 96, "head_dim": 8, "num_key_value_heads": 12},
)
# What no general rule finds.
_OWN: Mapping[str, Mapping[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]},
    "zamba": {"attention_hidden_size": 128, "attention_head_dim": 32, "mamba_dt_rank": 8},
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "num_mem_blocks": 1,
        "use_mem_rope": True,
        "n_mamba_heads": 4,
        "mamba_headdim": 32,
        "mamba_ngroups": 1,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "zaya": {"num_experts_per_tok": 1},
    "reformer": {
        "attn_layers": ["local", "lsh"],
        "axial_pos_shape": [16, 32],
        "axial_pos_embds_dim": [32, 32],
    },
}
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id", "cls_token_id")


def small_configurations(kind: type[Any], model_type: str) -> Iterator[Callable[[], Any]]:
    """What makes configurations of a class to try, the most telling first. Making one may fail."""
    for attempt in _ATTEMPTS:
        yield partial(_small, kind, {**_SMALL, **attempt, **_OWN.get(model_type, {})})


def _small(kind: type[Any], small: Mapping[str, Any]) -> Any:
    try:
        default = kind()
    except ValueError:  # a default that its own check refuses
        default = kind(hidden_size_per_layer_input=0)
    text = default.get_text_config(decoder=True)
    for name in ("token_budget", "compress_ratio"):  # None in a default that does not run
        if hasattr(text, name) and getattr(text, name) is None:
            small = {**small, "token_budget": 32, "compress_ratio": 4}
    if type(text) is type(default):
        text = default  # of an encoder-decoder, with the names that it has there
    return type(text)(**_options(text, small))


def _options(default: Any, small: Mapping[str, Any]) -> dict[str, Any]:
    aliases: Mapping[str, str] = getattr(type(default), "attribute_map", {})
    has = {**default.to_dict(), **vars(default)}
    wanted: dict[str, Any] = {}
    for name in has:
        for known in (aliases.get(name, name), name):
            if known in small:
                wanted[name] = small[known]
    depth = getattr(default, "num_hidden_layers", None)
    for name, value in has.items():
        each = isinstance(value, (list, tuple)) and len(value) == depth and len(value) > 0
        if each and name not in wanted:
            wanted[name] = _per_layer(value)
        elif name in _TOKENS and value is not None:
            wanted[name] = _TOKENS.index(name)
    return wanted


def _per_layer(values: Any) -> list[Any]:
    """Every kind that layers of the default have, each once, then again from the first."""
    kinds = list(dict.fromkeys(values))
    if all(type(kind) is int and kind > WINDOW for kind in kinds):
        kinds = [96 if max(kinds) > 256 else 4]  # widths, or heads
    return [kinds[i % len(kinds)] for i in range(LAYERS)]
