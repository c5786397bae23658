"""`python -m kvpager.verify.child JOB.json`: one part of a verification in a fresh process.

A job is a JSON object: "model" (folder), "weights" (its digest), "dtype", "experts"
(implementation, or null), "threads", "device" (the model's) and "tasks",
each with "do", "config" (see config.py) and:

- "cold": "ids"; records a cold run.
- "restore": "snapshot", "ids" and "new_tokens"; restores, prefills the rest, generates, records.
- "score": "texts", token ids each; the log-probabilities that `Engine.score` returns.

Buffers that transformers does not save, such as a rotary embedding's frequencies, are in a file
next to the weights: they are computed on load, and differ in a model that was cast as a whole.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file, save_file

from kvpager._support.children import serve
from kvpager.verify.sweep import PLAIN

_FILE = "kvpager-buffers.safetensors"


def save_buffers(model: Any, folder: Path) -> None:
    """Writes all buffers of a model beside its weights."""
    tensors = {name: buffer.clone() for name, buffer in model.named_buffers()}
    save_file(tensors, folder / _FILE)


def load_buffers(model: Any, folder: Path) -> None:
    """Replaces a loaded model's buffers by those that `save_buffers` wrote, if it did."""
    if not (folder / _FILE).is_file():
        return
    for name, tensor in load_file(folder / _FILE).items():
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner).register_buffer(leaf, tensor, persistent=False)


def main(argv: list[str]) -> int:
    """Runs the job that a file describes; returns the exit code."""
    return serve(argv, _work)


def _work(job: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """For each task its "summary", JSON-able, and its "recording", a file, or None."""
    results = []
    job["doing"] = "load"
    model = _load(job)
    for number, task in enumerate(job["tasks"]):
        job["doing"] = task["do"]
        summary, recording = _TASKS[task["do"]](model, task)
        path = None
        if recording is not None:
            path = str(folder / f"{number}.safetensors")
            recording.save(Path(path))
        results.append({"summary": summary, "recording": path})
    return results


def _load(job: Mapping[str, Any]) -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from kvpager._model.weights.digests import weights_digest
    from kvpager.errors import InvalidArgumentError
    from kvpager.verify.child import load_buffers

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(job["threads"])
    options = {} if job["experts"] is None else {"experts_implementation": job["experts"]}
    model: Any = AutoModelForCausalLM.from_pretrained(
        job["model"], dtype=getattr(torch, job["dtype"]), local_files_only=True, **options
    )
    load_buffers(model, Path(job["model"]))
    digest = weights_digest(model)
    if digest != job["weights"]:
        raise InvalidArgumentError(
            f"{job['model']} holds weights {digest}, and the model that is verified has "
            f"{job['weights']}; save the model there, or leave its folder out"
        )
    return model.to(job["device"]).eval()


def _engine(model: Any, task: Mapping[str, Any]) -> Any:
    from kvpager.config import config_from_json
    from kvpager.engine import Engine

    return Engine(model, config_from_json(task["config"]))


def _cold(model: Any, task: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    from kvpager import _core
    from kvpager.verify.recording import cold_run

    with _engine(model, task) as engine:
        return {"isa": _core.isa_name()}, cold_run(
            engine, np.array(task["ids"], dtype=np.int32), "cold"
        )


def _restore(model: Any, task: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    from kvpager.verify.recording import record

    with _engine(model, task) as engine:
        session = engine.restore(task["snapshot"])
        restored = session.restored_tokens
        session.prefill(np.array(task["ids"], dtype=np.int32))
        logits = {session.committed - 1: session.logits}
        if task["new_tokens"]:
            for _ in session.generate(
                task["new_tokens"], temperature=1.0, seed=7, **PLAIN, stream="tokens"
            ):
                logits[session.committed - 1] = session.logits
        recording = record(session, logits)
        summary = {
            "restored": restored,
            "consumed": session.restored_tokens_consumed,
            "tokens": session.tokens.tolist(),
            "evicted": engine.stats()["chunks_evicted"],
        }
        return summary, recording


def _score(model: Any, task: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    texts = []
    with _engine(model, task) as engine:
        for ids in task["texts"]:
            before = engine.stats()["model_forwards"]
            score = engine.score(np.array(ids, dtype=np.int32))
            texts.append(
                {
                    "logprobs": score.logprobs.view(np.uint32).tolist(),  # bits, which JSON keeps
                    "forwards": engine.stats()["model_forwards"] - before,
                }
            )
        return {"texts": texts, "rows": engine.rows}, None


_TASKS: Mapping[str, Callable[[Any, Mapping[str, Any]], tuple[dict[str, Any], Any]]] = {
    "cold": _cold,
    "restore": _restore,
    "score": _score,
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
