"""A part of `kvpager demo` in a process of its own: a turn, or the reference for all turns."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from kvpager import Engine
from kvpager._support.children import serve
from kvpager.cli.demo import ANSWER_TOKENS, Question
from kvpager.cli.models import load_model
from kvpager.config import config_from_json
from kvpager.pager import TIER_RESIDENT, Pager, open_snapshot
from kvpager.verify.bits import Comparison, compare_bits

if TYPE_CHECKING:
    from kvpager import GenerationOptions, Session
    from kvpager.pager import Sequence

_COUNTERS = (
    "pool_bytes",
    "resident_bytes",
    "host_bytes_used",
    "disk_bytes_used",
    "summary_bytes_used",
    "chunks_recalled",
    "chunks_evicted",
    "bytes_paged_in",
)
_GREEDY: GenerationOptions = {"eos": None, "generation_config": None}
_COMPARED = 4096  # tokens of K/V at a time


def work(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Runs turn number job["turn"], from 1; the reference if that is None."""
    config = config_from_json(job["config"])
    model = load_model(job["model"], job["dtype"], config.device)
    with Engine(model, config, threads=job["threads"]) as engine:
        load_s = time.time() - job["started_at"]
        return (reference if job["turn"] is None else turn)(engine, job) | {"load_s": load_s}


def turn(engine: Engine, job: dict[str, Any]) -> dict[str, Any]:
    """Restores (or prefills), asks and saves; leaves a snapshot and logits in the work folder."""
    number, facts = job["turn"], {}
    start = time.perf_counter()
    if number == 1:
        session = engine.session()
        session.prefill(job["document"], progress=not job["quiet"])
        facts["prefill_s"] = time.perf_counter() - start
    else:
        session = engine.restore(_snapshot(job, number - 1))
        facts["restore_s"] = time.perf_counter() - start
    restored = session.restored_tokens
    questions = job["questions"][number - 1]
    out = sum(_paged_out(session, question) for question in questions)
    first_token_at, answers, logits = ask(session, questions)
    asked_s = time.perf_counter() - first_token_at
    stats = engine.stats()
    size = session.save(_snapshot(job, number)).bytes_written
    save_file({"logits": logits}, _logits(job, number))
    return {
        "turn": number,
        **facts,
        "first_token_s": first_token_at - start,
        "tokens_per_s": len(logits) / asked_s,
        "answers": answers,
        "needles_asked": sum(question["answer"] is not None for question in questions),
        "needles_found": _found(questions, answers),
        "needles_paged_out_at_start": out,
        "restored_tokens": restored,
        "tokens": session.length,
        "snapshot_bytes": size,
        "rows": engine.rows,
        "threads": torch.get_num_threads(),
        "token_bytes": engine.layout.token_bytes,
        **{name: stats[name] for name in _COUNTERS},
    }


def reference(engine: Engine, job: dict[str, Any]) -> dict[str, Any]:
    """A cold start, and the same conversation never interrupted; compares every turn with them."""
    turns = range(1, len(job["questions"]) + 1)
    kept = {n: load_file(_logits(job, n))["logits"] for n in turns}
    cold_s, logits = _cold(engine, job)
    found = compare_bits(kept[turns[-1]][0], logits, "cold start: logits")
    start = time.perf_counter()
    session = engine.session()
    session.prefill(job["document"], progress=not job["quiet"])
    prefill_s = time.perf_counter() - start
    needles = 0
    for number in turns:
        questions = job["questions"][number - 1]
        _, answers, logits = ask(session, questions)
        found += compare_bits(kept[number], logits, f"turn {number}: logits")
        needles += _found(questions, answers)
    for number in turns:
        found += compare_kv(engine, session.sequence, _snapshot(job, number), f"turn {number}")
    return {
        "cold_first_token_s": cold_s,
        "prefill_s": prefill_s,
        "needles_found": needles,
        "tokens": session.length,
        "compared_bits": found.bits,
        "differing_bits": found.differing_bits + (not found.same and not found.differing_bits),
        "first_difference": None if found.first is None else str(found.first),
    }


def ask(session: Session, questions: list[Question]) -> tuple[float, list[list[int]], torch.Tensor]:
    """Time of the first token, the greedy answers, and logits [tokens, vocab] behind them all."""
    first, answers, logits = 0.0, [], []
    for question in questions:
        session.append(question["ids"])
        answer = []
        for token in session.generate(ANSWER_TOKENS, **_GREEDY, stream="tokens"):
            first = first or time.perf_counter()
            answer.append(token)
            logits.append(session.logits.cpu())
        answers.append(answer)
    return first, answers, torch.stack(logits)


def _cold(engine: Engine, job: dict[str, Any]) -> tuple[float, torch.Tensor]:
    """Seconds to the last turn's first token without a restore, and its logits.

    The prompt is the conversation up to and with that turn's first question, taken from the
    snapshot that the turn restored; in a namespace of its own, with which no prefix can be shared.
    """
    info = open_snapshot(_snapshot(job, len(job["questions"]) - 1))
    pending = info.session["pending"]
    prompt = [*info.tokens.tolist(), *([] if pending is None else [pending])]
    prompt += job["questions"][-1][0]["ids"]
    start = time.perf_counter()
    with engine.adopt(engine.pager.sequence(salt="cold")) as session:
        session.prefill(prompt, progress=not job["quiet"])
        next(iter(session.generate(1, **_GREEDY, stream="tokens")))
        return time.perf_counter() - start, session.logits.cpu()


def compare_kv(engine: Engine, whole: Sequence, path: Path, name: str) -> Comparison:
    """The saved tokens and K/V of a turn of this name against the uninterrupted ones.

    In a pager of its own: within one, equal chunks are one chunk, and equal to itself.
    """
    config = engine.config.replace(device="cpu")  # nothing is computed there
    other = Pager(engine.layout, config, rows=engine.rows, fingerprint=engine.fingerprint)
    try:
        saved = other.restore(open_snapshot(path), salt=engine.core.tenant.namespace)
        end = saved.length
        found = compare_bits(saved.tokens, whole.tokens[:end], f"{name}: token ids")
        for start in range(0, end, _COMPARED):
            stop = min(start + _COMPARED, end)
            for layer in range(engine.layout.layers):
                pairs = zip(saved.read_kv(layer, start, stop), whole.read_kv(layer, start, stop))
                for part, (mine, theirs) in zip("KV", pairs):
                    place = f"{name}: {part} of layer {layer}, positions from {start}"
                    found += compare_bits(mine, theirs, place)
        saved.close()
    finally:
        other.close()
    return found


def _paged_out(session: Session, question: Question) -> bool:
    """Whether none of the needle's chunks is in the pool now, by the ledger."""
    if question["needle"] is None:
        return False
    start, stop = question["needle"]
    size = session.core.facts.layout.chunk_tokens
    tiers = session.sequence.residency()["tiers"][start // size : -(-stop // size)]
    return not (tiers & TIER_RESIDENT).any()


def _found(questions: list[Question], answers: list[list[int]]) -> int:
    return sum(question["answer"] == given for question, given in zip(questions, answers))


def _snapshot(job: dict[str, Any], number: int) -> Path:
    return Path(job["workdir"]) / f"turn{number}.kvsnap"


def _logits(job: dict[str, Any], number: int) -> Path:
    return Path(job["workdir"]) / f"turn{number}.logits"


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:], work))
