"""How long a saved turn takes to answer again in a fresh process, beside computing it again.

    kvpager bench restore --
    kvpager bench restore -- --contexts 4096,32768 --runs 3

Every figure comes from a process of its own; imports, loading the model and making the engine are
timed apart from the turn. "First token" runs from looking the snapshot up to the first token after
a question of four tokens. Beside it: the cold prefill of the same prompt by the same engine, stock
transformers (one-shot, sdpa), and its DynamicCache read back from torch.save and safetensors files;
"read" is the whole snapshot through plain reads. Files are measured in the page cache and dropped
from it. The restored turn's logits must have the bits of the cold one's.
"""

from __future__ import annotations

import time

_PROCESS_START = time.perf_counter()

import argparse  # the clock starts before the imports it times
import json
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvpager import Engine, PagerConfig, TopK
from kvpager.config import DEFAULT_SCORER
from kvpager_bench import file_peers, harness, subjects
from kvpager_bench.file_peers import FILE_STATES, TENSOR_FILES
from kvpager_bench.harness import Column, Report, Timing

POOL_TOKENS = 2048
CHUNKS = 32
NEEDLES = 16
QUIET = 512

COLUMNS = (
    Column("context", "tokens"),
    Column("file", text=True),
    Column("restore_ms", "ms"),
    Column("first_token_ms", "ms"),
    Column("first_token_spread", "(max-min)/median", 2),
    Column("cold_s", "s"),
    Column("cold_over_warm", "x"),
    Column("transformers_cold_s", "s"),
    Column("torch_save_reload_ms", "ms"),
    Column("safetensors_reload_ms", "ms"),
    Column("payload_read_mib", "MiB"),
    Column("file_mib", "MiB"),
    Column("read_file_ms", "ms"),
    Column("needed_at_read_rate_ms", "ms"),
    Column("imports_s", "s"),
    Column("model_load_s", "s"),
    Column("engine_s", "s"),
)


class Turn:
    """A fresh process's model, prompt and clock."""

    def __init__(self, task: dict[str, Any], *, engine: bool) -> None:
        torch.set_num_threads(task["threads"])
        self.imports_s = time.perf_counter() - _PROCESS_START
        start = time.perf_counter()
        self.model = subjects.load_model(subjects.SHIPPED)
        self.model_load_s = time.perf_counter() - start
        asked = subjects.questions(task["context"], NEEDLES, seed=1, quiet=QUIET)
        self.document = asked.document.ids
        self.question = asked.prompts[0]
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
    return PagerConfig(pool_tokens=POOL_TOKENS, selection=TopK(chunks=CHUNKS))


# Workers: one task, one process, one JSON line.


def work_save(task: dict[str, Any]) -> dict[str, Any]:
    """Prefills the document and saves it."""
    turn = Turn(task, engine=True)
    assert turn.engine is not None
    session = turn.engine.session()
    session.prefill(turn.document)
    return {"file_bytes": session.save(task["path"]).bytes_written}


def work_cold(task: dict[str, Any]) -> dict[str, Any]:
    turn = Turn(task, engine=True)
    assert turn.engine is not None
    start = time.perf_counter()
    session = turn.engine.session()
    session.prefill(turn.prompt)
    token = next(session.generate(1))
    return {
        "first_token_s": time.perf_counter() - start,
        "token": token,
        "logits": harness.digest(session.logits),
        **turn.setup(),
    }


def work_warm(task: dict[str, Any]) -> dict[str, Any]:
    turn = Turn(task, engine=True)
    assert turn.engine is not None
    start = time.perf_counter()
    session = turn.engine.restore(task["path"])
    restored = time.perf_counter()
    session.prefill(turn.prompt)
    token = next(session.generate(1))
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
    logits = subjects.stock_step(turn.model, cache, turn.question)
    token = int(logits.argmax())
    return {"first_token_s": time.perf_counter() - start, "token": token}


WORKERS = {
    "save": work_save,
    "cold": work_cold,
    "warm": work_warm,
    "stock_cold": work_stock_cold,
    "stock_reload": work_stock_reload,
}


class Context:
    """All processes of one context length."""

    def __init__(self, tokens: int, arguments: argparse.Namespace, folder: Path) -> None:
        self.common = {"context": tokens, "threads": arguments.threads, "runs": arguments.runs}
        self.runs: int = arguments.runs
        self.folder = folder
        self.path = folder / "turn.kvsnap"

    def run(self, what: str, **more: Any) -> dict[str, Any]:
        return harness.run_worker(__spec__.name, {"what": what, **self.common, **more})

    def repeat(
        self, what: str, file: Path, state: str, *, runs: int, **more: Any
    ) -> list[dict[str, Any]]:
        """Fresh processes over one file, in the page cache or dropped from it."""
        answers = []
        for _ in range(runs):
            file_peers.prepare(file, state)
            answers.append(self.run(what, path=str(file), **more))
        return answers


def measure_context(
    tokens: int, arguments: argparse.Namespace, folder: Path, report: Report
) -> None:
    context = Context(tokens, arguments, folder)
    saved = context.run("save", path=str(context.path))
    cold = [context.run("cold") for _ in range(arguments.cold_runs)]
    stock = context.run("stock_cold", folder=str(folder))
    for state in FILE_STATES:
        warm = context.repeat("warm", context.path, state, runs=context.runs)
        outcomes = {(run["token"], run["logits"]) for run in (*cold, *warm)}
        if len(outcomes) != 1:
            raise harness.NondeterministicSubjectError(
                f"{tokens} tokens: cold and restored turns gave {len(outcomes)} different logits"
            )
        read_s = harness.measure(
            lambda: file_peers.read_file(context.path),
            runs=context.runs,
            before=partial(file_peers.prepare, context.path, state),
        ).median
        reload_ms = {
            how: 1e3
            * _median(
                context.repeat(
                    "stock_reload", folder / how, state, runs=arguments.cold_runs, how=how
                )
            )
            for how in TENSOR_FILES
        }
        first = Timing(tuple(run["first_token_s"] for run in warm))
        cold_s = _median(cold)
        payload = {run["payload_bytes"] for run in warm}
        if len(payload) != 1:
            raise harness.NondeterministicSubjectError(f"payload read varies: {sorted(payload)}")
        needed = payload.pop()
        report.add(
            context=tokens,
            file=state,
            restore_ms=Timing(tuple(run["restore_s"] for run in warm)).median * 1e3,
            first_token_ms=first.median * 1e3,
            first_token_spread=first.spread,
            cold_s=cold_s,
            cold_over_warm=cold_s / first.median,
            transformers_cold_s=stock["first_token_s"],
            torch_save_reload_ms=reload_ms["torch.save"],
            safetensors_reload_ms=reload_ms["safetensors"],
            payload_read_mib=needed / 2**20,
            file_mib=saved["file_bytes"] / 2**20,
            read_file_ms=read_s * 1e3,
            needed_at_read_rate_ms=needed / (saved["file_bytes"] / read_s) * 1e3,
            imports_s=_median(warm, "imports_s"),
            model_load_s=_median(warm, "model_load_s"),
            engine_s=_median(warm, "engine_s"),
        )
        print(f"{tokens} tokens, {state}: {first.median * 1e3:.1f} ms, cold {cold_s:.2f} s")


def _median(runs: list[dict[str, Any]], name: str = "first_token_s") -> float:
    return Timing(tuple(run[name] for run in runs)).median


def judge(report: Report) -> None:
    for state in FILE_STATES:
        rows = {int(report.number(r, "context")): r for r in report.rows if r["file"] == state}
        small, large = min(rows), min(32768, max(rows))
        ratio = report.number(rows[large], "cold_over_warm")
        name = harness.tokens_name(large)
        report.judge(
            f"{state} file: first token at {name} at least 30 times sooner than a cold prefill",
            ratio >= 30,
            f"{ratio:.0f}x",
        )
        grown = [
            report.number(rows[large], column) / report.number(rows[small], column)
            for column in ("restore_ms", "first_token_ms", "payload_read_mib")
        ]
        report.judge(
            f"{state} file: restore at {name} at most 1.3 times that at "
            f"{harness.tokens_name(small)}, payload read flat",
            grown[0] <= 1.3 and grown[2] <= 1.3,
            f"restore {grown[0]:.2f}, first token {grown[1]:.2f}, payload {grown[2]:.2f}",
        )


def main() -> None:
    parser = harness.cli(__doc__)
    parser.add_argument("--contexts", type=harness.parse_ints)
    parser.add_argument("--runs", type=int, default=5, help="fresh processes per restore")
    parser.add_argument("--cold-runs", type=int, default=2, help="of cold and of stock processes")
    parser.add_argument("--folder", type=Path, help="where snapshots go; a temporary folder")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        task = json.loads(arguments.worker)
        print(json.dumps(WORKERS[task["what"]](task)))
        return
    if arguments.quick:
        arguments.runs, arguments.cold_runs = 2, 1
    contexts = arguments.contexts or (
        [2048, 4096] if arguments.quick else [4096, 8192, 16384, 32768, 65536]
    )
    record = harness.start(arguments)
    settings = {
        "shape": subjects.SHIPPED,
        "pool_tokens": POOL_TOKENS,
        "chunks": CHUNKS,
        "scorer": DEFAULT_SCORER,
        "runs": arguments.runs,
    }
    report = Report(
        harness.report_name("restore", arguments),
        "Time to the first token after a restore in a fresh process, beside a cold prefill",
        COLUMNS,
        settings,
        record,
    )
    folder = Path(tempfile.mkdtemp(prefix="kvpager-bench-", dir=arguments.folder))
    try:
        for tokens in contexts:
            measure_context(tokens, arguments, folder, report)
    finally:
        shutil.rmtree(folder)
    judge(report)
    report.finish()


if __name__ == "__main__":
    main()
