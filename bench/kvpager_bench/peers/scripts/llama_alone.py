"""A conversation with llama.cpp in a fresh process.

task: model (a GGUF file), threads, batch, kv, context (room in the KV cache), prompt (a file of its
ids), state (a file), steps, runs, action:
  "unpack": where `model` is not there, writes it in bfloat16 from `packed`, a quantised one.
  "cold": answers as `conversation.held`.
  "warm": restores it and computes a token more; answers restored_s, and fresh_s from the start.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import llama_cpp
from conversation import held, prompt_of, seconds, since_start
from llama_model import Context


def main(task: dict[str, Any]) -> dict[str, Any]:
    model = Path(task["model"])
    if task["action"] == "unpack":
        if not model.exists():
            unpack(Path(task["packed"]), model)
        return {}
    room = -(-(task["context"] + 1) // 256) * 256
    context = Context(
        model, tokens=room, batch=task["batch"], threads=task["threads"], kv=task["kv"]
    )
    ids, state, token = prompt_of(task), Path(task["state"]), 0

    def prefill() -> None:
        nonlocal token
        token = context.forward(ids)

    def decode() -> None:
        nonlocal token
        for _ in range(task["steps"]):
            token = context.forward([token])

    def restored() -> None:
        if context.load(state) != len(ids):
            raise RuntimeError(f"the state of {len(ids)} tokens was not restored whole")
        context.forward(ids[:1])

    if task["action"] == "warm":
        return {"restored_s": seconds(restored), "fresh_s": since_start()}
    answer: dict[str, Any] = held(task, prefill, decode, lambda: context.save(state, ids))
    return answer


def unpack(packed: Path, model: Path) -> None:
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_BF16
    settings.allow_requantize = True
    code = llama_cpp.llama_model_quantize(
        str(packed).encode(), str(model).encode(), ctypes.byref(settings)
    )
    if code:
        raise RuntimeError(f"llama_model_quantize answered {code}")


if __name__ == "__main__":
    print(json.dumps(main(json.load(sys.stdin))))
