"""What the turns are held against: a cold start, and the same conversation never interrupted."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvpager.cli.demo.compare import Difference, differing_kv, raw
from kvpager.cli.demo.conversation import ask, prefill
from kvpager.cli.demo.plan import Plan
from kvpager.cli.demo.turn import PLAN_FILE, make_engine, save_logits, snapshot_file
from kvpager.pager import Pager, open_snapshot

_COLD_SALT = "cold"  # a namespace of its own: no prefix can be shared with it


def run_reference(job: dict[str, Any]) -> dict[str, Any]:
    """Runs both, leaves the uninterrupted logits of every turn, compares every turn's K/V."""
    workdir = Path(job["workdir"])
    plan = Plan.load(workdir / PLAN_FILE)
    engine, seconds = make_engine(job)
    with engine:
        cold_s = _cold(engine, plan, workdir, job["quiet"])
        start = time.perf_counter()
        session = engine.session()
        prefill(session, plan.document, "uninterrupted: prefill", job["quiet"])
        seconds["prefill_s"] = time.perf_counter() - start
        found, tokens = 0, []
        for turn, questions in enumerate(plan.turns, start=1):
            answers, _ = ask(session, questions, f"uninterrupted turn {turn}")
            save_logits(workdir, f"uninterrupted {turn}", answers.all_logits())
            found += sum(answers.found)
            tokens.append(answers.tokens)
        kv = Difference()
        for turn in range(1, len(plan.turns) + 1):
            kv.add(_compare(engine, session.sequence, snapshot_file(workdir, turn), turn))
        return {
            **seconds,
            "cold_first_token_s": cold_s,
            "needles_found": found,
            "answers": tokens,
            "tokens": session.length,
            "kv": asdict(kv),
        }


def _cold(engine: Any, plan: Plan, workdir: Path, quiet: bool) -> float:
    """Seconds to the last turn's first token without a restore; its logits are left for comparison.

    The prompt is the conversation up to and with that turn's first question, taken from the
    snapshot that the turn restored.
    """
    last = len(plan.turns)
    info = open_snapshot(snapshot_file(workdir, last - 1))
    prompt = [*info.tokens.tolist()]
    if info.session["pending"] is not None:
        prompt.append(info.session["pending"])
    prompt += plan.turns[-1][0].ids
    start = time.perf_counter()
    session = engine.adopt(engine.pager.sequence(salt=_COLD_SALT))
    with session:
        prefill(session, prompt, "cold: prefill", quiet)
        next(iter(session.generate(1, eos=None)))
        taken = time.perf_counter() - start
        save_logits(workdir, "cold", raw(session.logits)[None])
    return taken


def _compare(engine: Any, whole: Any, path: Path, turn: int) -> Difference:
    """A turn's saved K/V against the uninterrupted ones.

    In a pager of its own: within one, equal chunks are one chunk, and equal to itself.
    """
    config = engine.config.replace(device="cpu")  # nothing is computed there
    other = Pager(engine.layout, config, rows=engine.rows, fingerprint=engine.fingerprint)
    try:
        saved = other.restore(open_snapshot(path), salt=engine.namespace)
        difference = differing_kv(saved, whole, engine.layout.layers, f"turn {turn}")
        saved.close()
    finally:
        other.close()
    return difference
