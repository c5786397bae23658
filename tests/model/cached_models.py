"""Small models that generate with a kvpager cache, and with a stock one."""

from __future__ import annotations

from functools import cache

import torch
import transformers
from reference_models import ARCHITECTURES, VOCAB, build, prompt

from kvpager._model.seam.causal_lm import handed
from kvpager.transformers_cache.cache import Cache

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
_COMMON = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# Beside those of reference_models.
OTHERS = {
    "gpt2": (
        transformers.GPT2Config,  # learned positions
        {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512},
    ),
    "opt": (
        transformers.OPTConfig,  # positions counted from the mask
        {
            "hidden_size": 64,
            "ffn_dim": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "word_embed_proj_dim": 64,
            "max_position_embeddings": 512,
        },
    ),
    "phi3": (transformers.Phi3Config, SMALL),
    "gemma3": (
        transformers.Gemma3TextConfig,
        {
            **SMALL,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "deepseek_v3": (
        transformers.DeepseekV3Config,  # keys and values of other sizes, grouped experts
        {
            "hidden_size": 64,
            "intermediate_size": 96,
            "moe_intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
        },
    ),
}
NAMES = [*ARCHITECTURES, *OTHERS]


def small(name, **changes):
    """A small model with random weights, its own for the caller."""
    if name in ARCHITECTURES:
        shape = dict(SMALL)
        if name in ("mistral", "gemma2", "gpt_oss"):
            shape["sliding_window"] = 24
        if name == "qwen3_moe":
            shape["moe_intermediate_size"] = 32
        model = build(name, **{**shape, **changes})
        if name == "gemma2":
            model.set_attn_implementation("eager")  # some releases' sdpa leaves the soft cap out
        if name == "qwen3_moe":
            model.set_experts_implementation("grouped_mm")  # which no engine takes
        return model
    kind, options = OTHERS[name]
    torch.manual_seed(sum(map(ord, name)))
    config = kind(**{**_COMMON, **options, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(2)
    return model


@cache
def shared(name="llama"):
    """One model for all tests that leave it as it is."""
    return small(name)


def make_cache(model, **options):
    """A cache with a pool of a few chunks and few rows per forward."""
    settings = {"pool_tokens": 96, "rows": 32, "chunk_tokens": 16, "host_bytes": "64MiB"}
    return Cache(model, **{**settings, **options})


def ids_of(length, seed=0):
    """Token ids [1, length]."""
    return torch.as_tensor(prompt(length, seed))[None]


def generate(model, ids, cache=None, tokens=8, **options):
    """What `generate` returns, with its logits; greedy unless told otherwise."""
    return model.generate(
        ids,
        max_new_tokens=tokens,
        return_dict_in_generate=True,
        output_logits=True,
        **{"do_sample": False, **options},
        **handed(model, cache),
    )


def forward(model, ids, cache=None, **options):
    """Logits of one call, without gradients."""
    with torch.no_grad():
        return model(ids, **options, **handed(model, cache)).logits


def assert_close(actual, expected):
    """The same tokens, and logits up to rounding."""
    assert actual.sequences.tolist() == expected.sequences.tolist()
    torch.testing.assert_close(
        torch.stack(actual.logits), torch.stack(expected.logits), atol=2e-4, rtol=1e-4
    )
