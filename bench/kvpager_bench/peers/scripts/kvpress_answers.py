"""Answers questions about a document whose cache kvpress has compressed.

Task: model (a folder), document (token ids), prompts (lists of ids), answer_tokens, presses (a list
of [name, compression_ratio]; ratio: the share that is dropped), threads. Answer: {"answers": one
list of answers per press, "kept": tokens kept per layer and head}. The document is prefilled once
per press, before any question is known, as kvpress does; what is dropped is gone. Every question
starts from the compressed cache.
"""

from __future__ import annotations

import copy
import json
import sys
from typing import Any

import torch
import transformers
from kvpress import KnormPress, SnapKVPress, StreamingLLMPress
from transformers import AutoModelForCausalLM, DynamicCache

transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]

PRESSES = {
    "SnapKV": SnapKVPress,
    "KNorm": KnormPress,
    "StreamingLLM": StreamingLLMPress,
}


class Unrotated(torch.nn.Module):
    """Rotary embeddings of a layer that has none: the presses rotate queries by what this gives."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (*position_ids.shape, self.dim)
        return torch.ones(shape, dtype=x.dtype), torch.zeros(shape, dtype=x.dtype)


def unrotated_layers(model: Any) -> list[Any]:
    return [
        layer.self_attn
        for layer in model.model.layers
        if not getattr(layer.self_attn, "use_rope", True)
    ]


def tell_presses(model: Any) -> None:
    """A layer without rotary embeddings gets cos = 1 and sin = 0; it does not look at them."""

    def identity(_: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        cos, sin = kwargs["position_embeddings"]
        kwargs["position_embeddings"] = (torch.ones_like(cos), torch.zeros_like(sin))
        return args, kwargs

    for attention in unrotated_layers(model):
        attention.register_forward_pre_hook(identity, with_kwargs=True)


@torch.inference_mode()
def compressed(model: Any, press: Any, document: torch.Tensor) -> Any:
    cache = DynamicCache()
    with press(model):
        for attention in unrotated_layers(model):
            attention.rotary_emb = Unrotated(attention.head_dim)
        model.model(input_ids=document, past_key_values=cache)
    return cache


@torch.inference_mode()
def answer(model: Any, cache: Any, length: int, prompt: list[int], tokens: int) -> list[int]:
    said: list[int] = []
    ids, position = prompt, length
    for _ in range(tokens):
        positions = torch.arange(position, position + len(ids))[None]
        logits = model(
            input_ids=torch.tensor([ids]), past_key_values=cache, position_ids=positions
        ).logits
        position += len(ids)
        ids = [int(logits[0, -1].argmax())]
        said += ids
    return said


def main() -> None:
    task = json.loads(sys.stdin.read())
    torch.set_num_threads(task["threads"])
    model: Any = AutoModelForCausalLM.from_pretrained(task["model"], attn_implementation="sdpa")
    model.eval()
    tell_presses(model)
    document = torch.tensor([task["document"]])
    answers: list[list[list[int]]] = []
    kept: list[list[int]] = []
    for name, ratio in task["presses"]:
        cache = compressed(model, PRESSES[name](compression_ratio=ratio), document)
        kept.append([int(layer.keys.shape[2]) for layer in cache.layers])
        length, tokens = document.shape[1], task["answer_tokens"]
        answers.append(
            [answer(model, copy.deepcopy(cache), length, p, tokens) for p in task["prompts"]]
        )
    print(json.dumps({"answers": answers, "kept": kept}))


if __name__ == "__main__":
    main()
