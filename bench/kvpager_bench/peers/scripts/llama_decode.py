"""Tokens per second of llama.cpp's greedy decode against the context.

task: shape, model (a GGUF file, written when it is not there), threads, kv, contexts, tokens (per
run), runs, folder (for states). The context is random K/V, restored from a state file, because
prefilling it takes longer than all the rest. Answers {"rows": [{context, seconds: [per run]}]}.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from llama_model import Context, write_model, write_state

_BATCH = 512


def main(task: dict[str, Any]) -> dict[str, Any]:
    model = Path(task["model"])
    if not model.exists():
        write_model(model, task["shape"])
    return {"rows": [measure(task, model, tokens) for tokens in task["contexts"]]}


def measure(task: dict[str, Any], model: Path, tokens: int) -> dict[str, Any]:
    state = Path(task["folder"]) / f"llama-{tokens}.state"
    write_state(state, task["shape"], tokens, task["kv"])
    room = tokens + (task["runs"] + 1) * task["tokens"] + 1
    context = Context(
        model, tokens=-(-room // 256) * 256, batch=_BATCH, threads=task["threads"], kv=task["kv"]
    )
    try:
        if context.load(state) != tokens:
            raise RuntimeError(f"the state of {tokens} tokens was not restored whole")
    finally:
        state.unlink()
    token = context.forward([1])
    seconds = []
    for _ in range(task["runs"] + 1):
        start = time.perf_counter()
        for _ in range(task["tokens"]):
            token = context.forward([token])
        seconds.append(time.perf_counter() - start)
    context.close()
    return {"context": tokens, "seconds": seconds[1:]}


if __name__ == "__main__":
    print(json.dumps(main(json.load(sys.stdin))))
