"""One turn of llama.cpp in a fresh process: cold, or from a saved state.

task: shape, model (a GGUF file, written when it is not there), threads, batch, kv, document and
question (token ids), action:
  "cold": prefills both; saves the document's state to `state` in between, which is timed apart.
  "warm": restores `state`, then takes in the question.
Answers seconds and the token after the question.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from llama_model import Context, write_model


def main(task: dict[str, Any]) -> dict[str, Any]:
    model, state = Path(task["model"]), Path(task["state"])
    document, question = task["document"], task["question"]
    if not model.exists():
        write_model(model, task["shape"])
    start = time.perf_counter()
    context = Context(
        model,
        tokens=-(-(len(document) + len(question)) // 256) * 256,
        batch=task["batch"],
        threads=task["threads"],
        kv=task["kv"],
    )
    answer: dict[str, Any] = {"load_s": time.perf_counter() - start}
    start = time.perf_counter()
    if task["action"] == "cold":
        context.forward(document)
        prefill_s = time.perf_counter() - start
        start = time.perf_counter()
        answer["file_bytes"] = context.save(state, document)
        answer["save_s"] = time.perf_counter() - start
        start = time.perf_counter()
        answer["token"] = context.forward(question)
        answer["first_token_s"] = prefill_s + time.perf_counter() - start
        return answer
    tokens = context.load(state)
    answer["restore_s"] = time.perf_counter() - start
    answer["token"] = context.forward(question)
    answer["first_token_s"] = time.perf_counter() - start
    if tokens != len(document):
        raise RuntimeError(f"{tokens} tokens were restored, {len(document)} saved")
    return answer


if __name__ == "__main__":
    print(json.dumps(main(json.load(sys.stdin))))
