"""Processes that run a small engine under one instruction-set tier each and say what it computed.

They are forked from one process that has imported everything and computed nothing: a kernel chooses
its tier when it is first called, so that each child is as fresh as a new interpreter and costs a
tenth of one.

    python isa_children.py FOLDER < stages.json

Stages are lists of jobs {"tier", "job", "arguments"}; a stage begins when the one before has ended.
The answer of job j of stage s is in FOLDER/s-j.json.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from kvpager import Dense, Engine, PagerConfig, TopK, _core
from kvpager.errors import InvalidArgumentError
from kvpager.pager import Layout, Pager

C, ROWS, VOCAB = 16, 16, 300
PROMPT = np.random.default_rng(5).integers(3, VOCAB, 18 * C + 5)
MORE = np.random.default_rng(6).integers(3, VOCAB, 3 * C + 2)

# What is run: the model's dtype and the engine's options.
SUBJECTS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "dense, float32": (torch.float32, {"selection": Dense()}),
    "top-k, bfloat16": (
        torch.bfloat16,
        {"selection": TopK(chunks=3, sinks=C, recent=2 * C)},
    ),
    "top-k, kept in float16": (
        torch.float32,
        {"selection": TopK(chunks=3, sinks=C, recent=2 * C), "kv_dtype": "float16"},
    ),
}


def make_engine(subject: str) -> Engine:
    """The same weights in every process; a pool of a third of the context."""
    dtype, options = SUBJECTS[subject]
    torch.manual_seed(11)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
    )
    model = transformers.LlamaForCausalLM(config).eval().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)  # as initialised, all tokens look alike
    return Engine(
        model,
        pool_tokens=6 * C,
        chunk_tokens=C,
        rows=ROWS,
        small_rows="fixed",
        host_bytes="16MiB",
        threads=1,
        **options,
    )


def digest(tensor: torch.Tensor) -> str:
    raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(raw, digest_size=16).hexdigest()


def described(session: Any) -> dict[str, Any]:
    """Everything a session holds that a user could see, bit for bit."""
    engine = session.core.facts
    found: dict[str, Any] = {"tokens": session.tokens.tolist(), "logits": digest(session.logits)}
    queries = torch.from_numpy(np.random.default_rng(7).standard_normal((4, 32)).astype(np.float32))
    for layer in range(engine.layout.layers):
        k, v = session.sequence.read_kv(layer, 0, session.committed)
        found[f"keys {layer}"], found[f"values {layer}"] = digest(k), digest(v)
        found[f"selected {layer}"] = session.sequence.select(layer, queries)
    return found


def make(subject: str, path: str) -> dict[str, Any]:
    """Prefill, decode, save."""
    with make_engine(subject) as engine:
        session = engine.session()
        session.prefill(PROMPT)
        generated = session.generate(20, temperature=0.7, seed=3, eos=None).tokens.tolist()
        found = {"generated": generated, **described(session)}
        session.save(path)
    reader = _core.SnapshotReader.open(path)
    found["summaries"] = reader.summary_checksums.tolist()
    found["digest"] = reader.logical_digest
    return found


def go_on(subject: str, path: str, save: str) -> dict[str, Any]:
    """Restore what another process saved, append, decode, save."""
    with make_engine(subject) as engine:
        session = engine.restore(path)
        found = {f"restored {name}": value for name, value in described(session).items()}
        session.append(MORE)
        generated = session.generate(12, temperature=0.7, seed=4, eos=None).tokens.tolist()
        found.update({"generated": generated, **described(session)})
        session.save(save)
    found["digest"] = _core.SnapshotReader.open(save).logical_digest
    return found


def score(subject: str, path: str) -> dict[str, Any]:
    """Log-probabilities of a saved text, teacher-forced."""
    tokens = _core.SnapshotReader.open(path).tokens
    with make_engine(subject) as engine:
        return {"logprobs": digest(torch.as_tensor(engine.score(tokens).logprobs))}


def refuse() -> dict[str, Any]:
    """What making a pager says; no message if it is made."""
    try:
        Pager(Layout(1, 1, 16, 16, chunk_tokens=C), PagerConfig(8 * C, chunk_tokens=C), rows=C)
    except InvalidArgumentError as error:
        return {"message": str(error)}
    return {"message": "", "isa": _core.isa_name()}


JOBS = {"make": make, "go_on": go_on, "score": score, "refuse": refuse}


def run(path: Path, job: dict[str, Any]) -> None:
    """One child: its answer goes into a file of its own."""
    os.environ["KVPAGER_ISA"] = job["tier"]
    answer: dict[str, Any]
    try:
        answer = JOBS[job["job"]](**job["arguments"])
        if job["job"] != "refuse":
            answer["isa"] = _core.isa_name()
    except Exception:
        answer = {"error": traceback.format_exc()}
    path.write_text(json.dumps(answer))


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    for stage, jobs in enumerate(json.load(sys.stdin)):
        running: list[int] = []
        for number, job in enumerate(jobs):
            child = os.fork()
            if child == 0:
                try:
                    run(folder / f"{stage}-{number}.json", job)
                finally:
                    os._exit(0)
            running.append(child)
            if len(running) == 2:
                os.waitpid(running.pop(0), 0)
        for child in running:
            os.waitpid(child, 0)


if __name__ == "__main__":
    main()
