"""GGUF files that are written here."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

LAYERS = 2


def qwen(vocab: int) -> Qwen3ForCausalLM:
    """A Qwen3 of 2 layers with random weights that bfloat16 holds exactly."""
    torch.manual_seed(5)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,  # what transformers takes for a GGUF file, whatever that says
        rms_norm_eps=2**-20,
        max_position_embeddings=4096,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config).eval()
    for weight in model.parameters():
        weight.data = weight.bfloat16().float()
    return model


def write_gguf(path: Path, model: Qwen3ForCausalLM, tokenizer: object) -> Path:
    """Writes a model of `qwen` and a byte-level BPE with its chat template; returns the path."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    trained = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(trained["vocab"], key=trained["vocab"].get)
    tokens += [f"<unused{i}>" for i in range(config.vocab_size - len(tokens))]
    special = set(tokenizer.all_special_tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    kinds = gguf.TokenType
    writer.add_token_types(
        [kinds.CONTROL if token in special else kinds.NORMAL for token in tokens]
    )
    writer.add_token_merges([" ".join(merge) for merge in trained["merges"]])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template(tokenizer.chat_template)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":  # tied
            writer.add_tensor(names.get_name(name, (".weight",)), tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
