"""Seconds in which llama.cpp restores a state file into its cache, which is there already.

task: shape, model (a GGUF file, written when it is not there), threads, kv, batch, context, state
(where the file goes; K/V are random), states ("cached", "dropped" from the page cache), runs.
Answers {file_bytes, seconds: {state: [per run]}}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from llama_model import Context, write_model, write_state

_BLOCK = 8 << 20


def main(task: dict[str, Any]) -> dict[str, Any]:
    model, path = Path(task["model"]), Path(task["state"])
    if not model.exists():
        write_model(model, task["shape"])
    size = write_state(path, task["shape"], task["context"], task["kv"])
    context = Context(
        model,
        tokens=-(-task["context"] // 256) * 256,
        batch=task["batch"],
        threads=task["threads"],
        kv=task["kv"],
    )
    seconds = {
        state: [restore(context, path, state, task["context"]) for _ in range(task["runs"] + 1)][1:]
        for state in task["states"]
    }
    path.unlink()
    return {"file_bytes": size, "seconds": seconds}


def restore(context: Context, path: Path, state: str, tokens: int) -> float:
    with path.open("rb") as file:
        if state == "dropped":
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        else:
            while file.read(_BLOCK):
                pass
    start = time.perf_counter()
    restored = context.load(path)
    elapsed = time.perf_counter() - start
    if restored != tokens:
        raise RuntimeError(f"{restored} of {tokens} tokens were restored")
    return elapsed


if __name__ == "__main__":
    print(json.dumps(main(json.load(sys.stdin))))
