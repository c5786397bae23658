"""A turn: restore (or prefill), ask, save. Runs in a fresh process."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from kvpager.cli.demo.conversation import ask, prefill
from kvpager.cli.demo.plan import Plan
from kvpager.cli.models import load_model
from kvpager.cli.pager_options import config_from_json
from kvpager.report.trace import save_episodes
from kvpager.stores.permissions import open_private

PLAN_FILE = "plan.json"


def snapshot_file(workdir: Path, turn: int) -> Path:
    """What turn number `turn`, from 1, saves."""
    return workdir / f"turn{turn}.kvsnap"


def logits_file(workdir: Path, name: str) -> Path:
    """Raw logits behind each answered token, [tokens, bytes]."""
    return workdir / f"{name}.logits.npy"


def save_logits(workdir: Path, name: str, logits: np.ndarray[Any, Any]) -> None:
    """Keeps a part's logits: they tell which tokens were answered."""
    with open_private(logits_file(workdir, name)) as file:
        np.save(file, logits)


def trace_file(workdir: Path, turn: int) -> Path:
    """The turn's episodes."""
    return workdir / f"turn{turn}.trace.npz"


def make_engine(job: dict[str, Any]) -> tuple[Any, dict[str, float]]:
    """The job's engine, and the seconds that imports, model and engine took."""
    imports = time.time() - job["started_at"]
    from kvpager import Engine

    start = time.perf_counter()
    config = config_from_json(job["config"])
    model = load_model(job["model"], job["dtype"], config.device)
    loaded = time.perf_counter()
    engine = Engine(model, config, threads=job["threads"])
    seconds = {
        "imports_s": imports,
        "model_load_s": loaded - start,
        "engine_s": time.perf_counter() - loaded,
    }
    return engine, seconds


def run_turn(job: dict[str, Any]) -> dict[str, Any]:
    """Runs turn number job["turn"] and leaves its snapshot, logits and trace in the work folder."""
    workdir, turn = Path(job["workdir"]), int(job["turn"])
    plan = Plan.load(workdir / PLAN_FILE)
    engine, seconds = make_engine(job)
    label = f"turn {turn}"
    traces = []
    with engine:
        start = time.perf_counter()
        if turn == 1:
            session = engine.session()
            traces.append(prefill(session, plan.document, f"{label}: prefill", job["quiet"]))
            seconds["prefill_s"] = time.perf_counter() - start
        else:
            session = engine.restore(snapshot_file(workdir, turn - 1))
            seconds["restore_s"] = time.perf_counter() - start
        restored = session.restored_tokens
        answers, trace = ask(session, plan.turns[turn - 1], label)
        seconds["first_token_s"] = answers.first_token_at - start
        stats = engine.stats()
        saving = time.perf_counter()
        size = session.save(snapshot_file(workdir, turn)).bytes_written
        seconds["save_s"] = time.perf_counter() - saving
        save_logits(workdir, label, answers.all_logits())
        save_episodes(trace_file(workdir, turn), [t.episode() for t in (*traces, trace)])
        return {
            "turn": turn,
            **seconds,
            **answers.to_json(),
            "restored_tokens": restored,
            "tokens": session.length,
            "snapshot_bytes": size,
            **_pager_facts(engine, stats),
        }


def _pager_facts(engine: Any, stats: dict[str, Any]) -> dict[str, Any]:
    import torch

    counted = (
        "pool_bytes",
        "resident_bytes",
        "staging_bytes",
        "host_bytes_used",
        "disk_bytes_used",
        "summary_bytes_used",
        "chunks_recalled",
        "chunks_evicted",
        "slices_streamed",
        "bytes_paged_in",
        "snapshot_bytes_read",
    )
    return {
        "rows": engine.rows,
        "threads": torch.get_num_threads(),
        "token_bytes": engine.layout.token_bytes,
        **{name: stats[name] for name in counted},
    }
