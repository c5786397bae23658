"""What transformers' model says with caches that quantise K/V.

task: model (a folder), caches (names of CACHES), windows (token ids), scored, step, threads,
folder. The prompt, all but the last `scored` tokens of a window, is one forward; what follows comes
`step` tokens at a time. Writes the logits that predict the last `scored` tokens of each window,
float32 [scored, vocab]; answers {"files": {cache: names}}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, QuantizedCache

transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]

CACHES: dict[str, Callable[[Any], Any]] = {
    "DynamicCache": lambda config: DynamicCache(config=config),
    "fp8": lambda config: QuantizedCache("fp8", config),
    "quanto int4": lambda config: QuantizedCache("quanto", config, nbits=4),
    "quanto int2": lambda config: QuantizedCache("quanto", config, nbits=2),
}


@torch.inference_mode()
def logits(model: Any, cache: Any, ids: list[int], scored: int, step: int) -> torch.Tensor:
    """[scored, vocab]: after each of the last `scored` of ids."""
    tokens = torch.tensor([ids])
    prompt = len(ids) - scored + 1  # its last row is the first of them
    said = [model(tokens[:, :prompt], past_key_values=cache, logits_to_keep=1).logits[0]]
    said += [
        model(part, past_key_values=cache).logits[0]
        for part in torch.split(tokens[:, prompt:], step, dim=1)
    ]
    return torch.cat(said)


def main() -> None:
    task = json.load(sys.stdin)
    torch.set_num_threads(task["threads"])
    folder = Path(task["folder"])
    model: Any = AutoModelForCausalLM.from_pretrained(task["model"], attn_implementation="sdpa")
    model.eval()
    files: dict[str, list[str]] = {}
    for cache in task["caches"]:
        files[cache] = []
        for number, ids in enumerate(task["windows"]):
            name = f"{cache.replace(' ', '-')}-{number}.npy"
            said = logits(
                model, CACHES[cache](model.config), ids[:-1], task["scored"], task["step"]
            )
            np.save(folder / name, said.float().numpy())
            files[cache].append(name)
    print(json.dumps({"files": files}))


if __name__ == "__main__":
    main()
