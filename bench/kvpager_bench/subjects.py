"""The models, documents and stock caches that the benchmarks measure, by name."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache, Qwen3Config, Qwen3ForCausalLM

from kvpager import Engine, Layout
from kvpager._model.seam.causal_lm import handed
from kvpager._runtime.execution.recordings import WORTH
from kvpager.cli.needles import Document, NeedleTask, shipped_model_path
from kvpager.pager import READ_DTYPES, Sequence
from kvpager_bench import file_peers

SHIPPED = "shipped"
PLAIN = "plain"  # trained like the shipped one, but for the term that makes its keys easy
SHAPES = (SHIPPED, "gqa8-fp32", "gqa8-bf16")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_QWEN3: Mapping[str, Mapping[str, Any]] = {
    "gqa8": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
        "vocab_size": 151936,
    },
    "untied": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
        "initializer_range": 0.05,
    },
}
SINKS = 64
RECENT = 256
PREFILL_TOKENS = 512  # per forward of the stock model, where it is not one-shot
INJECT_TOKENS = 1024  # K/V made at a time

# Shapes of K/V for what needs no model: 2 KiB per token, and 16 KiB.
LAYOUTS = {
    SHIPPED: Layout(layers=2, kv_heads=2, k_dim=64, v_dim=64),
    "gqa4-bf16": Layout(
        layers=8, kv_heads=4, k_dim=128, v_dim=128, k_dtype="bfloat16", v_dtype="bfloat16"
    ),
}


def load_model(shape: str, *, layers: int = 8) -> Any:
    """A model in eval mode.

    "shipped" is the trained tiny retriever, fp32, K/V of 2 KiB per token; "shipped-bf16" computes
    in bfloat16; "plain" is its sibling whose keys were not made easy to select by, which only a
    checkout has. "gqa8-*" has the shape of eight layers of a Qwen3 model of hidden size 1024: 16
    query and 8 kv heads of 128 and random weights; what it computes is meaningless, what it costs
    is not. "0.6b-*" has that of
    Qwen3-0.6B, all layers and the whole vocabulary, likewise, and its weights are bfloat16's, as
    those of its checkpoint are, whatever their dtype. "untied-*" is a small one with a head of its
    own and larger weights, whose text does not fall into repeating itself.
    layers: of "gqa8-*", to have less of it.
    """
    name, _, dtype = shape.partition("-")
    if name in (SHIPPED, PLAIN) and dtype in ("", *DTYPES):
        path = shipped_model_path("tiny-retriever" if name == SHIPPED else "tiny-retriever-plain")
        trained: Any = AutoModelForCausalLM.from_pretrained(path)
        return trained.to(DTYPES[dtype or "fp32"]).eval()
    if name not in _QWEN3 or dtype not in DTYPES:
        raise ValueError(f"shape is {shape!r}; expected one of {SHAPES}, or another dtype of them")
    config = Qwen3Config(
        head_dim=128,
        max_position_embeddings=131072,
        **{
            "vocab_size": 4096,
            **_QWEN3[name],
            **({"num_hidden_layers": layers} if name == "gqa8" else {}),
        },
    )
    torch.manual_seed(0)
    model: Any = Qwen3ForCausalLM(config)
    if name == "0.6b":
        model = model.to(torch.bfloat16)
    return model.to(DTYPES[dtype]).eval()


def head_dim(config: Any) -> int:
    """Elements of one key of a model."""
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def token_bytes(model: Any) -> int:
    """K/V of one token in the model's own dtype, all layers."""
    config = model.config
    heads = config.num_key_value_heads * head_dim(config)
    return int(2 * config.num_hidden_layers * heads * model.dtype.itemsize)


def beside(model: Any) -> Any:
    """The same model over the same weights, for stock runs while an engine has attached the other.

    Nothing but configuration and module objects is copied.
    """
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


@dataclass(frozen=True)
class Questions:
    """A document and what is asked of it: prompts [N, 4], answers [N, 4]."""

    document: Document
    prompts: list[list[int]]
    answers: list[list[int]]


def questions(tokens: int, needles: int, seed: int, *, quiet: int) -> Questions:
    """A document whose needles lie in neither the sinks nor the last `quiet` tokens."""
    task = NeedleTask(seed=seed)
    document = task.document(tokens, needles, avoid=[(0, SINKS), (tokens - quiet, tokens)])
    return Questions(
        document,
        [task.query(key).tolist() for key in document.keys],
        [task.answer(value).tolist() for value in document.values],
    )


def random_ids(model: Any, tokens: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.int32]]:
    vocab = model.get_input_embeddings().weight.shape[0]
    return np.random.default_rng(seed).integers(8, vocab, tokens, dtype=np.int32)


def random_kv(layout: Any, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [layers, tokens, kv_heads, dim], for measuring time and nothing else."""
    generator = torch.Generator().manual_seed(seed)
    dtype = READ_DTYPES[layout.k_dtype]
    shape = (layout.layers, tokens, layout.kv_heads)
    k = torch.randn(*shape, layout.k_dim, generator=generator).to(dtype)
    v = torch.randn(*shape, layout.v_dim, generator=generator).to(dtype)
    return k, v


def inject(
    sequence: Sequence,
    layout: Any,
    tokens: int,
    *,
    vocab: int = 1024,
    seed: int = 0,
    provenance: str = "decode",
) -> None:
    """Appends `tokens` positions of random ids and random K/V."""
    generator = np.random.default_rng(seed)
    for start in range(0, tokens, INJECT_TOKENS):
        count = min(INJECT_TOKENS, tokens - start)
        ids = generator.integers(8, vocab, count, dtype=np.int32)
        k, v = random_kv(layout, count, seed=int(generator.integers(2**31)))
        sequence.append(ids, k, v, provenance=provenance)


def record_steps(engine: Engine, sessions: int = 1) -> None:
    """Decodes until forwards of so many sessions are replayed, for engines that record them."""
    prompts = [random_ids(engine.model, 8, seed=number) for number in range(sessions)]
    engine.run(prompts, WORTH + 3, eos=None)


# The stock transformers way, for comparison: its own attention and DynamicCache.


@torch.inference_mode()
def stock_prefill(
    model: Any, ids: np.ndarray[Any, Any], step: int | None = None
) -> tuple[DynamicCache, torch.Tensor]:
    """The cache of `ids` and the logits [vocab] after them; in one forward, or in steps."""
    cache = DynamicCache(config=model.config)
    tokens = torch.from_numpy(np.asarray(ids, dtype=np.int64)).to(model.device)[None]
    for part in torch.split(tokens, step or tokens.shape[1], dim=1):
        logits = model(input_ids=part, logits_to_keep=1, **handed(model, cache)).logits
    return cache, logits[0, -1]


@torch.inference_mode()
def stock_step(model: Any, cache: DynamicCache, ids: list[int]) -> torch.Tensor:
    """Logits [vocab] after `ids`, which join the cache."""
    tokens = torch.tensor([ids], device=model.device)
    output = model(input_ids=tokens, logits_to_keep=1, **handed(model, cache))
    logits: torch.Tensor = output.logits[0, -1]
    return logits


def stock_save(cache: Any, path: Path, how: str) -> None:
    """how: one of `file_peers.TENSOR_FILES`."""
    tensors = {
        f"{name}{i}": tensor.contiguous()
        for i, layer in enumerate(cache.layers)
        for name, tensor in (("k", layer.keys), ("v", layer.values))
    }
    file_peers.save_tensors(tensors, path, how)


def stock_load(model: Any, path: Path, how: str) -> DynamicCache:
    tensors = file_peers.load_tensors(path, how)
    cache = DynamicCache(config=model.config)
    for i in range(len(tensors) // 2):
        cache.update(tensors[f"k{i}"], tensors[f"v{i}"], i)
    return cache
