"""llama.cpp beside us: a model of random weights of the same shape, its states and its decode.

Threads are as many as ours, batches those of the stock model, K and V of as many bytes as ours.
Every function runs processes of the peer and raises `PeerError` when it is missing or fails.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kvpager_bench.harness import Timing
from kvpager_bench.peers import environments
from kvpager_bench.places import SCRATCH_DIR, scratch_folder

NAME = "llama"
BATCH = 512
TIMEOUT = 900.0
_WEIGHTS = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def title() -> str:
    """What tables call it, with its version."""
    return environments.PEERS[NAME].title


def missing() -> str | None:
    """Why it cannot be had; None when it can."""
    found = environments.find(NAME)
    return found.reason if isinstance(found, environments.Missing) else None


def shape_of(model: Any) -> dict[str, Any]:
    """What a llama.cpp model is made of to cost what a transformers `model` costs."""
    config = model.config
    return {
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "intermediate": config.intermediate_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab": config.vocab_size,
        "weights": _WEIGHTS[model.dtype],
    }


def turn(
    action: str,
    shape: Mapping[str, Any],
    document: Sequence[int],
    question: Sequence[int],
    state: Path,
    *,
    threads: int,
) -> dict[str, Any]:
    """A cold or a warm turn in a fresh process; see `scripts/llama_turn.py`."""
    task = _task(shape, threads) | {
        "action": action,
        "batch": BATCH,
        "document": list(document),
        "question": list(question),
        "state": str(state),
    }
    return environments.call(NAME, "llama_turn", task, TIMEOUT)


def decode(
    shape: Mapping[str, Any],
    contexts: Sequence[int],
    *,
    threads: int,
    tokens: int = 16,
    runs: int = 3,
) -> dict[int, Timing]:
    """Seconds per token of greedy decode behind each of `contexts` tokens of random K/V."""
    with scratch_folder() as folder:
        task = _task(shape, threads) | {
            "contexts": list(contexts),
            "tokens": tokens,
            "runs": runs,
            "folder": str(folder),
        }
        answer = environments.call(NAME, "llama_decode", task, TIMEOUT)
    return {
        row["context"]: Timing(tuple(seconds / tokens for seconds in row["seconds"]))
        for row in answer["rows"]
    }


def _task(shape: Mapping[str, Any], threads: int) -> dict[str, Any]:
    kv = "f32" if shape["weights"] == "f32" else "f16"
    return {"shape": dict(shape), "model": str(_model(shape)), "threads": threads, "kv": kv}


def _model(shape: Mapping[str, Any]) -> Path:
    """Where the GGUF file of a shape lies; the peer writes it on first use."""
    folder = SCRATCH_DIR / "gguf"
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(dict(sorted(shape.items())))
    return folder.resolve() / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.gguf"
