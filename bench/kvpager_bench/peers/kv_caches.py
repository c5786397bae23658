"""Other systems' caches with K/V in fewer bits: what their models say, with the same weights.

llama.cpp keeps what it prefills in the cache's type at once, as kvpager does. A QuantizedCache of
transformers lets a prefill attend to K/V as they were computed, quantises them behind it, and keeps
the last of them, up to 128 tokens, in floats; so what follows the prompt comes in small steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvpager_bench.peers import environments, llama
from kvpager_bench.peers.environments import PeerError
from kvpager_bench.places import scratch_folder

TIMEOUT = 3600.0
STEP_TOKENS = 64  # of a QuantizedCache behind the prompt: half of what it keeps in floats
F32, F16, Q8, Q4 = "f32", "f16", "q8_0", "q4_0"
FLOATS, FP8, INT4, INT2 = "DynamicCache", "fp8", "quanto int4", "quanto int2"
# Of the caches that stand beside ours of as many.
BITS = {Q8: "8", FP8: "8", Q4: "4", INT4: "4"}

Task = dict[str, Any]
Logits = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Caches:
    """What one peer is asked for. caches: by name; the first one keeps K/V in the model's dtype."""

    name: str
    by: str
    script: str
    caches: tuple[str, ...]

    @property
    def title(self) -> str:
        """What tables call it, with its version."""
        return environments.PEERS[self.name].title


LLAMA = Caches("llama", "llama.cpp", "llama_logits", (F32, F16, Q8, Q4))
QUANTO = Caches("quanto", "transformers", "quantised_logits", (FLOATS, FP8, INT4, INT2))
PEERS = (LLAMA, QUANTO)
PLAIN = frozenset(peer.caches[0] for peer in PEERS)
SETTINGS = {peer.by: list(peer.caches) for peer in PEERS} | {"step_tokens": STEP_TOKENS}


@contextlib.contextmanager
def logits(
    peer: Caches,
    model: Any,
    windows: Sequence[npt.NDArray[np.int32]],
    scored: int,
    threads: int,
) -> Iterator[Mapping[str, Sequence[Logits]]]:
    """Of each cache and window, a call that reads the logits [scored, vocab], float32.

    They predict the last `scored` tokens of the window. What a call reads is gone with the block.

    Raises PeerError when the peer is missing or fails, or cannot have the model.
    """
    found = environments.find(peer.name)
    if isinstance(found, environments.Missing):
        raise PeerError(found.reason)
    with scratch_folder() as folder:
        weights = _llama_model(model, folder) if peer is LLAMA else _saved_model(model, folder)
        task = weights | {
            "caches": list(peer.caches),
            "windows": [window.tolist() for window in windows],
            "scored": scored,
            "threads": threads,
            "step": STEP_TOKENS,
            "folder": str(folder),
        }
        answer = environments.call(peer.name, peer.script, task, TIMEOUT)
        yield {
            cache: [_reader(folder / file, scored, model) for file in answer["files"][cache]]
            for cache in peer.caches
        }


def _reader(path: Path, scored: int, model: Any) -> Logits:
    shape = (scored, model.config.vocab_size)

    def read() -> torch.Tensor:
        found = np.load(path)
        if found.shape != shape or not np.isfinite(found).all():
            raise PeerError(f"{path.name} has {found.shape} logits, not all of them finite")
        return torch.from_numpy(found)

    return read


def _saved_model(model: Any, folder: Path) -> Task:
    path = folder / "model"
    model.save_pretrained(path)
    return {"model": str(path)}


def _llama_model(model: Any, folder: Path) -> Task:
    """Its weights by transformers' names, from which the script writes a GGUF file."""
    config = model.config
    rotary = config.rope_parameters
    if config.model_type != "qwen3" or rotary.get("rope_type", "default") != "default":
        raise PeerError(f"a model of type {config.model_type} is not written for it here")
    path = folder / "weights.npz"
    np.savez(path, **{name: p.detach().float().numpy() for name, p in model.named_parameters()})
    return {
        "shape": llama.shape_of(model)
        | {
            "rope_base": float(rotary["rope_theta"]),
            "epsilon": config.rms_norm_eps,
            "tied": bool(config.tie_word_embeddings),
        },
        "weights": str(path),
        "model": str(folder / "model.gguf"),
    }
