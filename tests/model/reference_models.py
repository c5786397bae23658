"""Small models with random weights, and what transformers computes with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import transformers

from kvpager import Engine

VOCAB = 300
ROWS = 32
CHUNK = 16
KV_DTYPE = "auto"  # the fixture `kv_dtype` changes it

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# Shapes by hidden size; COMMON is the first.
SIZES = {
    256: {},
    1024: {
        "hidden_size": 1024,
        "intermediate_size": 1536,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "head_dim": 64,
        "moe_intermediate_size": 64,
    },
}

ARCHITECTURES = {
    "llama": (transformers.LlamaConfig, {}),
    "qwen3": (transformers.Qwen3Config, {}),  # normalises queries and keys
    "mistral": (transformers.MistralConfig, {"sliding_window": 40}),
    "smollm3": (transformers.SmolLM3Config, {"no_rope_layers": [1, 0, 1]}),  # a layer without RoPE
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,  # rows that share an expert
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
    ),
    # Beyond the promise, for the head and the attention options they bring.
    "gemma2": (
        transformers.Gemma2Config,  # soft caps, low enough to be felt, and windows
        {
            "sliding_window": 40,
            "attn_logit_softcapping": 1.0,
            "final_logit_softcapping": 2.0,
            "query_pre_attn_scalar": 32,
        },
    ),
    "granite": (transformers.GraniteConfig, {"logits_scaling": 8.0}),
    "cohere": (transformers.CohereConfig, {"logit_scale": 0.25}),
    "gpt_oss": (
        transformers.GptOssConfig,  # attention sinks, experts, windows
        {
            "sliding_window": 40,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
}
# Of these, log-probabilities with gradients alone are tried.
MORE_ARCHITECTURES = {
    "qwen2": (transformers.Qwen2Config, {}),  # biases
    "olmo2": (transformers.Olmo2Config, {}),  # norms after attention, and of all heads together
    "phi3": (transformers.Phi3Config, {}),  # one product for queries, keys and values
}
EXPERTS = ("qwen3_moe", "gpt_oss")
SHIPPED = "tiny-retriever"
PROMISED = ["llama", "qwen3", "mistral", "smollm3", SHIPPED]
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,  # to compare with; no engine takes it
}


def build(architecture, dtype="float32", *, hidden=256, tied=None, group=None, **changes):
    """The shipped model, or one with random weights, the same in every process.

    hidden: one of SIZES. tied: whether input and output embeddings are one matrix; by default as
    the architecture has it. group: query heads per kv head. `changes` go into its configuration.
    """
    if architecture == SHIPPED:
        folder = Path(__file__).parents[2] / "models" / SHIPPED
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype]).eval()
    kind, options = {**ARCHITECTURES, **MORE_ARCHITECTURES}[architecture]
    shape = {**COMMON, **options, **SIZES[hidden]}
    if architecture == "smollm3":
        shape["no_rope_layers"] = shape["no_rope_layers"][: shape["num_hidden_layers"]]
    if tied is not None:
        shape["tie_word_embeddings"] = tied
    if group is not None:
        shape["num_key_value_heads"] = shape["num_attention_heads"] // group
    config = kind(**{**shape, **changes})
    torch.manual_seed(sum(map(ord, architecture)))
    model = transformers.AutoModelForCausalLM.from_config(config).eval().to(DTYPES[dtype])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(2)  # as initialised, all tokens look alike
    if architecture in EXPERTS:
        model.set_experts_implementation("batched_mm")
    return model


def make_engine(model, *, pool_tokens=96, **options):
    """An engine with a small pool and few rows; every option can be overridden."""
    settings = {"rows": ROWS, "chunk_tokens": CHUNK, "host_bytes": "256MiB"}
    settings["kv_dtype"] = KV_DTYPE
    return Engine(model, pool_tokens=pool_tokens, **{**settings, **options})


def prompt(length, seed=0):
    """Token ids [length] int64, never a special token."""
    return np.random.default_rng(seed).integers(3, VOCAB, length)


def stock_logits(model, ids):
    """Logits [n, vocab] of one ordinary forward with transformers' own attention."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            return model(torch.as_tensor(np.asarray(ids))[None], use_cache=False).logits[0]
    finally:
        model.set_attn_implementation(before)


def set_checkpoints(model, enabled=True, **options):
    """Has layers computed again for their gradients, or not; named so since transformers 5.23."""
    name = "enable" if enabled else "disable"
    prefix = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    getattr(model, f"{prefix}_checkpointing_{name}")(*([options] if options else []))
