"""Answers questions about a document whose cache kvpress has compressed.

Task: model (a folder), document (token ids), prompts (lists of ids), answer_tokens, presses (a list
of [name, compression_ratio]; ratio: the share that is dropped), threads. Answer: {"answers": one
list of answers per press, "kept": tokens kept per layer and head, "seconds", "unsuited": {press:
why the model is none that it was made for}}, whose presses are not asked. The document is
prefilled once per press, before any question is known, as kvpress does; what is dropped is gone.
Every question starts from the compressed cache.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from typing import Any

import torch
import transformers
from kvpress import ExpectedAttentionPress, KnormPress, SnapKVPress, StreamingLLMPress
from kvpress.utils import get_prerope_query_states
from transformers import AutoModelForCausalLM, DynamicCache

transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]

PRESSES = {
    "SnapKV": SnapKVPress,
    "ExpectedAttention": ExpectedAttentionPress,
    "KNorm": KnormPress,
    "StreamingLLM": StreamingLLMPress,
}


_USUAL = 0.99  # of a document's queries


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


def _distances(states: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
    """Of states [heads, n, dim] from the mean of `past`, in its deviations; mean of heads, [n]."""
    mean = past.mean(dim=1, keepdim=True)
    covariance = (past - mean).transpose(1, 2) @ (past - mean) / past.shape[1]
    values, vectors = torch.linalg.eigh(covariance)
    scale = values.clamp(min=1e-9 * float(values.max())).rsqrt()[:, None]
    apart: torch.Tensor = ((states - mean) @ vectors * scale).square().mean(dim=-1).sqrt()
    return apart.mean(dim=0)


@torch.inference_mode()
def unexpected_queries(model: Any, document: torch.Tensor, prompts: list[list[int]]) -> str:
    """Why attention cannot be expected from a document's queries; empty where it can.

    ExpectedAttention takes the queries to come for more of what the document's were: normal, of
    their mean and covariance. Where the questions' are farther from that mean (Mahalanobis, mean of
    heads and questions) than nearly all of those, it scores keys for queries that nobody asks.
    """
    press = ExpectedAttentionPress()
    worst = (0.0, 0, 0.0, 0.0)
    seen: list[torch.Tensor] = []
    for layer, decoder in enumerate(model.model.layers):
        attention = decoder.self_attn

        def note(module: Any, _: Any, kwargs: dict[str, Any]) -> None:
            states = get_prerope_query_states(module, kwargs["hidden_states"])
            seen.append(states[0].double())

        hook = attention.register_forward_pre_hook(note, with_kwargs=True)
        try:
            cache = DynamicCache()
            model.model(input_ids=document, past_key_values=cache)
            past = seen.pop()[:, press.n_sink :]  # [heads, tokens, dim]
            start = document.shape[1]
            for prompt in prompts:
                positions = torch.arange(start, start + len(prompt))[None]
                model.model(
                    input_ids=torch.tensor([prompt]),
                    past_key_values=copy.deepcopy(cache),
                    position_ids=positions,
                )
            asked = torch.stack([states[:, -1] for states in seen], dim=1)  # [heads, prompts, dim]
        finally:
            hook.remove()
            seen.clear()
        usual = float(_distances(past, past).quantile(_USUAL))
        question = float(_distances(asked, past).mean())
        worst = max(worst, (question / usual, layer, question, usual))
    ratio, layer, question, usual = worst
    if ratio <= 1:
        return ""
    return (
        f"a question's queries at layer {layer} are {question:.1f} standard deviations from the "
        f"document's mean, {_USUAL:.0%} of whose own are within {usual:.1f}; this press keeps what "
        "queries like the document's would read"
    )


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
    seconds: list[float] = []
    unsuited: dict[str, str] = {}
    expecting = any(name == "ExpectedAttention" for name, _ in task["presses"])
    if expecting and (why := unexpected_queries(model, document, task["prompts"])):
        unsuited["ExpectedAttention"] = why
    for name, ratio in task["presses"]:
        if name in unsuited:
            answers.append([])
            kept.append([])
            seconds.append(0.0)
            continue
        start = time.perf_counter()
        cache = compressed(model, PRESSES[name](compression_ratio=ratio), document)
        seconds.append(time.perf_counter() - start)
        kept.append([int(layer.keys.shape[2]) for layer in cache.layers])
        answers.append(
            [
                answer(
                    model, copy.deepcopy(cache), document.shape[1], prompt, task["answer_tokens"]
                )
                for prompt in task["prompts"]
            ]
        )
    said = {"answers": answers, "kept": kept, "seconds": seconds, "unsuited": unsuited}
    print(json.dumps(said))


if __name__ == "__main__":
    main()
