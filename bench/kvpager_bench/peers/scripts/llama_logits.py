"""What llama.cpp's model says with K/V of several types.

task: shape, weights (an .npz file with transformers' names), model (the GGUF file to write), caches
(types of K and V), windows (token ids), scored, threads, folder. Writes the logits that predict the
last `scored` tokens of each window, float32 [scored, vocab]; answers {"files": {cache: names}}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from llama_model import Context, write_model

_BATCH = 512
# Its flash attention rounds K/V of this type to those of half as many bits on a CPU.
_FLOATS = "f32"


def main(task: dict[str, Any]) -> dict[str, Any]:
    model, folder = Path(task["model"]), Path(task["folder"])
    with np.load(task["weights"]) as weights:
        write_model(model, task["shape"], weights)
    return {"files": {kv: [*measure(task, model, folder, kv)] for kv in task["caches"]}}


def measure(task: dict[str, Any], model: Path, folder: Path, kv: str) -> list[str]:
    names = []
    for number, ids in enumerate(task["windows"]):
        context = Context(
            model,
            tokens=-(-len(ids) // 256) * 256,
            batch=_BATCH,
            threads=task["threads"],
            kv=kv,
            flash=kv != _FLOATS,
        )
        name = f"llama-{kv}-{number}.npy"
        np.save(folder / name, context.logits(ids[:-1], task["scored"]))
        context.close()
        names.append(name)
    return names


if __name__ == "__main__":
    print(json.dumps(main(json.load(sys.stdin))))
