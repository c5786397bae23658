"""Models that have a tokenizer and a chat template of their own, made here."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB = 512
END = "<|im_end|>"
SPECIAL = ["<|endoftext|>", "<|im_start|>", END]

# As Qwen's: each message between marks, and thinking of earlier turns left out.
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and '</think>' in message.content %}"
    "{{ message.content.split('</think>')[-1] }}{% else %}{{ message.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking %}<think>{% endif %}{% endif %}"
)
# As Llama 2's: spaces around, an end of sequence behind each answer.
INST = (
    "{% for message in messages %}{% if message.role == 'user' %}"
    "{{ bos_token + '[INST] ' + message.content.strip() + ' [/INST]' }}"
    "{% elif message.role == 'system' %}{{ raise_exception('no system messages') }}"
    "{% else %}{{ ' ' + message.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)

_ROOT = Path(__file__).resolve().parents[2]


def _lines() -> list[str]:
    """A text that never changes, so that the tokens do not."""
    return (_ROOT / "LICENSE").read_text(encoding="utf-8").splitlines()


@cache
def byte_level() -> Any:
    """A BPE over bytes with ChatML, as Qwen has: any text is decoded as it was encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 8,  # as models have more ids than tokens
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_lines(), trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    wrapped.chat_template = CHATML
    return wrapped


@cache
def metaspace() -> Any:
    """A BPE with spaces as letters and bytes as fallback, as SentencePiece makes for Llama 2."""
    special = ["<unk>", "<s>", "</s>"]
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trained = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    trained.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    trained.pre_tokenizer = pre_tokenizers.Split(Regex("(?=▁)"), "isolated")
    trained.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 8,
        special_tokens=special + fallback,
        limit_alphabet=90,
        show_progress=False,
    )
    trained.train_from_iterator(_lines(), trainer)
    trained.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", special.index("<s>"))]
    )
    made = json.loads(trained.to_str())  # bytes are plain tokens, which a text shows
    made["added_tokens"] = [one for one in made["added_tokens"] if one["content"] in special]
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(made)),
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )
    wrapped.chat_template = INST
    return wrapped


@cache
def model() -> Any:
    """A Llama of 2 layers with random weights."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.2,
        eos_token_id=SPECIAL.index(END),
    )
    made = LlamaForCausalLM(config).eval()
    with torch.no_grad():  # special tokens are never the likeliest
        made.lm_head.weight[: len(SPECIAL)] = 0
    return made
