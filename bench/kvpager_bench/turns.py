"""Turns of a conversation in fresh processes: cold, restored, and as stock transformers has them.

`python -m kvpager_bench.turns --worker TASK` does one and answers a line of JSON. Imports, loading
the model and making the engine are timed apart from the turn, which runs from looking the saved
state up to the first token after a question of four tokens.

task: what (a key of WORKERS), shape and layers (of `subjects.load_model`), context, threads, and
what the worker reads besides.
"""

from __future__ import annotations

import time

_PROCESS_START = time.perf_counter()

import argparse  # the clock starts before the imports it times
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvpager import Engine, PagerConfig, TopK
from kvpager_bench import harness, subjects
from kvpager_bench.file_peers import TENSOR_FILES
from kvpager_bench.peers import llama

POOL_TOKENS = 2048
CHUNKS = 32
NEEDLES = 16
QUIET = 512


class Turn:
    """A fresh process's model, prompt and clock."""

    def __init__(self, task: dict[str, Any], *, engine: bool) -> None:
        torch.set_num_threads(task["threads"])
        self.imports_s = time.perf_counter() - _PROCESS_START
        start = time.perf_counter()
        self.model = subjects.load_model(task["shape"], layers=task["layers"])
        self.model_load_s = time.perf_counter() - start
        self.document, self.question = prompt(task)
        self.prompt = np.concatenate([self.document, self.question])
        start = time.perf_counter()
        self.engine = Engine(self.model, configuration()) if engine else None
        self.engine_s = time.perf_counter() - start

    def setup(self) -> dict[str, float]:
        return {
            "imports_s": self.imports_s,
            "model_load_s": self.model_load_s,
            "engine_s": self.engine_s,
        }


def configuration() -> PagerConfig:
    return PagerConfig(
        pool_tokens=POOL_TOKENS, selection=TopK(chunks=CHUNKS), beyond_max_positions=True
    )


def prompt(task: dict[str, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """A document of needles and a question about one; every vocabulary here has their tokens."""
    asked = subjects.questions(task["context"], NEEDLES, seed=1, quiet=QUIET)
    return asked.document.ids, np.asarray(asked.prompts[0], dtype=asked.document.ids.dtype)


def work_cold(task: dict[str, Any]) -> dict[str, Any]:
    """Prefills all of the prompt; the document's state is saved on the way, which does not count.

    Also answers the model's shape and the prompt, for peers that have to be given them.
    """
    turn = Turn(task, engine=True)
    assert turn.engine is not None
    start = time.perf_counter()
    session = turn.engine.session()
    session.prefill(turn.document)
    prefill_s = time.perf_counter() - start
    saved = session.save(task["path"])
    start = time.perf_counter()
    session.prefill(turn.prompt)
    token = next(session.generate(1, stream="tokens"))
    return {
        "first_token_s": prefill_s + time.perf_counter() - start,
        "token": token,
        "logits": harness.digest(session.logits),
        "file_bytes": saved.bytes_written,
        "llama_shape": llama.shape_of(turn.model),
        "document": turn.document.tolist(),
        "question": turn.question.tolist(),
        **turn.setup(),
    }


def work_warm(task: dict[str, Any]) -> dict[str, Any]:
    turn = Turn(task, engine=True)
    assert turn.engine is not None
    start = time.perf_counter()
    session = turn.engine.restore(task["path"])
    restored = time.perf_counter()
    session.prefill(turn.prompt)
    token = next(session.generate(1, stream="tokens"))
    end = time.perf_counter()
    return {
        "restore_s": restored - start,
        "first_token_s": end - start,
        "payload_bytes": turn.engine.stats()["snapshot_bytes_read"],
        "token": token,
        "logits": harness.digest(session.logits),
        **turn.setup(),
    }


def work_stock_cold(task: dict[str, Any]) -> dict[str, Any]:
    """One-shot prefill of the whole prompt; then the document's cache is saved for the reloads."""
    turn = Turn(task, engine=False)
    start = time.perf_counter()
    cache, logits = subjects.stock_prefill(turn.model, turn.prompt)
    token = int(logits.argmax())
    seconds = time.perf_counter() - start
    cache.crop(-len(turn.question))
    for how in TENSOR_FILES:
        subjects.stock_save(cache, Path(task["folder"]) / how, how)
    return {"first_token_s": seconds, "token": token}


def work_stock_reload(task: dict[str, Any]) -> dict[str, Any]:
    turn = Turn(task, engine=False)
    start = time.perf_counter()
    cache = subjects.stock_load(turn.model, Path(task["path"]), task["how"])
    logits = subjects.stock_step(turn.model, cache, turn.question.tolist())
    token = int(logits.argmax())
    return {"first_token_s": time.perf_counter() - start, "token": token}


WORKERS = {
    "cold": work_cold,
    "warm": work_warm,
    "stock_cold": work_stock_cold,
    "stock_reload": work_stock_reload,
}


def run(what: str, **task: Any) -> dict[str, Any]:
    """One worker in a process of its own. Raises MissingNumberError when it fails."""
    return harness.run_worker("kvpager_bench.turns", {"what": what, **task})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", required=True)
    task = json.loads(parser.parse_args().worker)
    print(json.dumps(WORKERS[task["what"]](task)))


if __name__ == "__main__":
    main()
