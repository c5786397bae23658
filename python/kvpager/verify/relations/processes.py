"""Fresh processes: restored from a file, re-scored from token ids, under other kernels."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpager import _core
from kvpager._runtime.scheduling.agreement import Agreement
from kvpager.config import config_to_json
from kvpager.verify.check import Check, DoesNotApplyError
from kvpager.verify.recording import Recording
from kvpager.verify.sweep import PLAIN

if TYPE_CHECKING:
    from kvpager.verify.subject import Subject

_TIERS = ("base", "v3", "v4")


def restored(subject: Subject, check: Check) -> None:
    """Saved, and restored in a fresh process under several configurations, then continued."""
    sweep = subject.sweep
    with subject.fresh_engine() as engine:
        chunk_bytes = engine.layout.chunk_bytes
        cuts = sweep.cuts[: 2 if subject.effort == "short" else None]
        snapshots = {}
        for cut in cuts:
            snapshots[cut] = str(subject.workdir / f"restored-{cut}.kvp")
            with engine.session() as session:
                session.prefill(subject.prompt[:cut])
                session.save(snapshots[cut])
    cases = [
        (cut, name, changes)
        for cut in cuts
        for name, changes in _elsewhere(subject, chunk_bytes).items()
        if cut == cuts[0] or not changes or subject.effort == "full"
    ]
    tasks = [
        {
            "do": "restore",
            "snapshot": snapshots[cut],
            "config": config_to_json(subject.config.replace(**changes)),
            "ids": subject.prompt.tolist(),
            "new_tokens": sweep.new_tokens if subject.all_exact else 0,
        }
        for cut, _, changes in cases
    ]
    (results,) = subject.in_fresh_processes(({}, tasks))
    for (cut, name, _), result in zip(cases, results):
        check.case(f"restored at {cut}, {name}")
        recording = Recording.load(Path(result["recording"]))
        cold = subject.cold(np.array(result["summary"]["tokens"], dtype=np.int32))
        check.recording(recording, cold)
        used = result["summary"]["restored"], result["summary"]["consumed"]
        check.require(used == (cut, cut), f"{used[0]} tokens restored, {used[1]} of them used")
    subject.forget()


def _elsewhere(subject: Subject, chunk_bytes: int) -> dict[str, dict[str, Any]]:
    """Configurations that decide where bytes live, and must not change them."""
    sweep = subject.sweep
    chunks = -(-(sweep.length + sweep.new_tokens) // sweep.chunk)
    disk = subject.workdir / "disk"
    disk.mkdir(exist_ok=True)
    return {
        "same pool": {},
        "small pool, shuffled and poisoned blocks": {
            "pool_tokens": sweep.least_pool,
            "debug_shuffle_seed": subject.seed + 9,
            "debug_poison": True,
        },
        "twice the pool, other policy": {
            "pool_tokens": 2 * subject.config.pool_size,
            "policy": "lru",
        },
        "disk tier": {
            "pool_tokens": sweep.least_pool,
            "host_bytes": 2 * chunk_bytes,
            "disk_path": str(disk),
            "disk_bytes": 4 * (chunks + 2) * chunk_bytes,
        },
    }


def rescored(subject: Subject, check: Check) -> None:
    """Generated text, then its token ids alone given to `Engine.score` in a fresh process."""
    sweep = subject.sweep
    new_tokens = max(sweep.new_tokens, 16)
    engine = subject.engine()
    sessions = [subject.session() for _ in range(2)]
    prompts = [subject.prompt[: sweep.chunk + 3], subject.ids(sweep.chunk - 2, seed=600)]
    engine.prefill_many(zip(sessions, prompts))
    told: dict[int, list[float]] = {id(session): [] for session in sessions}
    stream = engine.generate_many(
        sessions, new_tokens, temperature=1.0, seed=[5, 6], **PLAIN, logprobs=True
    )
    for session, token in stream:
        told[id(session)].append(token.logprob)
    texts = [session.tokens for session in sessions]
    generated = [np.array(told[id(session)], dtype=np.float32) for session in sessions]
    for session in sessions:
        session.close()
    config = config_to_json(subject.config)
    task = {"do": "score", "texts": [text.tolist() for text in texts], "config": config}
    ((result,),) = subject.in_fresh_processes(({}, [task]))
    rows, scored = result["summary"]["rows"], result["summary"]["texts"]
    for i, (text, seen, told_there) in enumerate(zip(texts, generated, scored)):
        check.case(f"re-scored, text {i}")
        logprobs = np.array(told_there["logprobs"], dtype=np.uint32).view(np.float32)
        first = len(text) - len(seen)
        check.bits(
            seen,
            logprobs[-len(seen) :],
            lambda at, first=first: (
                f"log-probability of token {first + at[0]}" if at else "log-probabilities"
            ),  # type: ignore[misc]
        )
        check.bits(logprobs, subject.cold(text).logprobs(), "log-probabilities of the whole text")
        forwards, least = told_there["forwards"], -(-(len(text) - 1) // rows)
        check.require(
            forwards == least,
            f"scoring {len(text)} tokens took {forwards} forwards, expected {least}: they are "
            "given and need no decoding",
        )
        check.note(str(Agreement.between(seen, logprobs[-len(seen) :])))
    subject.forget()


def kernel_tiers(subject: Subject, check: Check) -> None:
    """A cold run in fresh processes that are made to use our kernels' other tiers."""
    if subject.model.device.type != "cpu" or subject.config.device == "shim":
        raise DoesNotApplyError("instruction sets are the CPU's, and attention ran elsewhere")
    mine = _core.isa_name().split("+")[0]
    others = [tier for tier in _TIERS[: _TIERS.index(mine)] if tier != mine]
    if not others:
        raise DoesNotApplyError(f"this machine runs the {mine} tier alone")
    task = {
        "do": "cold",
        "ids": subject.prompt.tolist(),
        "config": config_to_json(subject.config),
    }
    jobs = [({"KVPAGER_ISA": tier}, [task]) for tier in others]
    cold = subject.cold(subject.prompt)
    for tier, (result,) in zip(others, subject.in_fresh_processes(*jobs)):
        check.case(f"tier {tier}")
        ran = result["summary"]["isa"]
        check.require(ran.startswith(tier), f"{ran} ran")
        check.recording(Recording.load(Path(result["recording"])), cold)
    check.note(f"{', '.join(others)} against {mine}")
