"""How long a saved turn takes to answer again in a fresh process, beside computing it again.

    kvpager bench warm
    kvpager bench warm -- --cases shipped:4096,shipped:32768 --runs 5

Every turn is a process of its own; imports, loading the model and making the engine are timed
apart. "First token" runs from looking the snapshot up to the first token after a question of four
tokens. Beside it, with the same prompt: the cold prefill by the same engine, stock transformers
(one-shot, sdpa) and its DynamicCache read back from torch.save and safetensors files, and llama.cpp
with a model of random weights of the same shape, cold and from its own state file. Files are
measured in the page cache and dropped from it. A restored turn's logits must have the bits of the
cold one's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvpager_bench import file_peers, harness, subjects, turns
from kvpager_bench.file_peers import FILE_STATES, TENSOR_FILES
from kvpager_bench.harness import NOT_APPLICABLE, Cell, Column, Report, Timing
from kvpager_bench.peers import llama
from kvpager_bench.places import scratch_folder
from kvpager_bench.study import Asked, Option, Study, Table

LAYERS = 1  # of "gqa8-*": at 32K, two of them take its three cold prefills beyond the budget
CONTEXT = 32768  # that aims speak of

TURN_COLUMNS = (
    Column("shape", text=True),
    Column("context", "tokens"),
    Column("file", text=True),
    Column("restore_ms", "ms"),
    Column("first_token_ms", "ms"),
    Column("first_token_spread", "(max-min)/median", 2),
    Column("cold_s", "s"),
    Column("cold_over_warm", "x"),
    Column("transformers_cold_s", "s"),
    Column("torch_save_ms", "ms"),
    Column("safetensors_ms", "ms"),
    Column("llama_ms", "ms", optional=True),
    Column("llama_cold_s", "s", optional=True),
    Column("payload_read_mib", "MiB"),
    Column("file_mib", "MiB"),
    Column("read_file_ms", "ms"),
    Column("needed_at_read_rate_ms", "ms"),
    Column("imports_s", "s"),
    Column("model_load_s", "s"),
    Column("engine_s", "s"),
)


class Case:
    """All processes of one shape and context."""

    def __init__(self, shape: str, context: int, asked: Asked, folder: Path) -> None:
        self.shape, self.context = shape, context
        self.options, self.threads = asked.options, asked.threads
        self.folder = folder
        self.path = folder / "turn.kvsnap"
        self.task = {
            "shape": shape,
            "layers": asked.options.layers,
            "context": context,
            "threads": asked.threads,
        }
        self.name = f"{shape}, {harness.tokens_name(context)}"

    def run(self, what: str, **more: Any) -> dict[str, Any]:
        return turns.run(what, **self.task, **more)

    def repeat(
        self, what: str, file: Path, state: str, runs: int, **more: Any
    ) -> list[dict[str, Any]]:
        """Fresh processes over one file, in the page cache or dropped from it."""
        answers = []
        for _ in range(runs):
            file_peers.prepare(file, state)
            answers.append(self.run(what, path=str(file), **more))
        return answers


class LlamaTurns:
    """llama.cpp's turns of a case; nothing where it cannot be had."""

    def __init__(self, case: Case, cold: Mapping[str, Any]) -> None:
        self.case = case
        self.here = llama.missing() is None
        self.state = case.folder / "llama.state"
        self._turn = partial(
            llama.turn,
            shape=cold["llama_shape"],
            document=cold["document"],
            question=cold["question"],
            state=self.state,
            threads=case.threads,
        )
        self._cold = self._turn("cold") if self.here else {}
        self.cold_s: Cell = self._cold.get("first_token_s", NOT_APPLICABLE)

    def warm_ms(self, state: str) -> Cell:
        """To the first token from the state file. Its bits are its own, but they must not vary."""
        if not self.here:
            return NOT_APPLICABLE
        answers = []
        for _ in range(self.case.options.runs):
            file_peers.prepare(self.state, state)
            answers.append(self._turn("warm"))
        tokens = {answer["token"] for answer in (*answers, self._cold)}
        if len(tokens) != 1:
            raise harness.NondeterministicSubjectError(
                f"{self.case.name}: llama.cpp's cold and restored turns gave {len(tokens)} tokens"
            )
        return _median(answers) * 1e3


def measure_turns(case: Case, report: Report) -> None:
    o = case.options
    cold = case.run("cold", path=str(case.path))
    stock = case.run("stock_cold", folder=str(case.folder))
    peer = LlamaTurns(case, cold)
    for state in FILE_STATES:
        warm = case.repeat("warm", case.path, state, o.runs)
        outcomes = {(run["token"], run["logits"]) for run in (cold, *warm)}
        if len(outcomes) != 1:
            raise harness.NondeterministicSubjectError(
                f"{case.name}: cold and restored turns gave {len(outcomes)} different logits"
            )
        reload_ms = {
            how: 1e3
            * _median(case.repeat("stock_reload", case.folder / how, state, o.reload_runs, how=how))
            for how in TENSOR_FILES
        }
        read_s = harness.measure(
            lambda: file_peers.read_file(case.path),
            runs=o.runs,
            before=partial(file_peers.prepare, case.path, state),
        ).median
        needed = {run["payload_bytes"] for run in warm}
        if len(needed) != 1:
            raise harness.NondeterministicSubjectError(f"payload read varies: {sorted(needed)}")
        payload_bytes, file_bytes = needed.pop(), cold["file_bytes"]
        first = Timing(tuple(run["first_token_s"] for run in warm))
        report.add(
            shape=case.shape,
            context=case.context,
            file=state,
            restore_ms=_median(warm, "restore_s") * 1e3,
            first_token_ms=first.median * 1e3,
            first_token_spread=first.spread,
            cold_s=cold["first_token_s"],
            cold_over_warm=cold["first_token_s"] / first.median,
            transformers_cold_s=stock["first_token_s"],
            torch_save_ms=reload_ms["torch.save"],
            safetensors_ms=reload_ms["safetensors"],
            llama_ms=peer.warm_ms(state),
            llama_cold_s=peer.cold_s,
            payload_read_mib=payload_bytes / 2**20,
            file_mib=file_bytes / 2**20,
            read_file_ms=read_s * 1e3,
            needed_at_read_rate_ms=payload_bytes / (file_bytes / read_s) * 1e3,
            imports_s=_median(warm, "imports_s"),
            model_load_s=_median(warm, "model_load_s"),
            engine_s=_median(warm, "engine_s"),
        )


def _median(runs: Sequence[Mapping[str, Any]], name: str = "first_token_s") -> float:
    return Timing(tuple(run[name] for run in runs)).median


def compare_turns(report: Report) -> None:
    for row in report.rows:
        context = int(report.number(row, "context"))
        aim = 30.0 if context == CONTEXT else None
        figure = (
            f"first token of a saved turn, {harness.tokens_name(context)}, {row['shape']}, "
            f"file {row['file']}"
        )
        for column, scale, peer, least in (
            ("transformers_cold_s", 1e3, "transformers, one-shot prefill", aim),
            ("cold_s", 1e3, "its own prefill", aim),
            ("torch_save_ms", 1, "transformers from torch.save", None),
            ("safetensors_ms", 1, "transformers from safetensors", None),
            ("llama_ms", 1, f"{llama.title()} from its state", None),
        ):
            if row[column] != NOT_APPLICABLE:
                times = report.number(row, "first_token_ms"), scale * report.number(row, column)
                report.compare(figure, *times, peer, "ms", least, lower_is_better=True)
    judge_flat(report)


def judge_flat(report: Report) -> None:
    """Whether a restore costs the same however long the context is."""
    for shape in dict.fromkeys(row["shape"] for row in report.rows):
        for state in FILE_STATES:
            rows = {
                int(report.number(row, "context")): row
                for row in report.rows
                if (row["shape"], row["file"]) == (shape, state)
            }
            small, large = min(rows), max(rows)
            if small == large:
                continue
            grown = {
                column: report.number(rows[large], column) / report.number(rows[small], column)
                for column in ("restore_ms", "first_token_ms", "payload_read_mib")
            }
            report.judge(
                f"{shape}, file {state}: restore at {harness.tokens_name(large)} at most 1.3 "
                f"times that at {harness.tokens_name(small)}",
                grown["restore_ms"] <= 1.3,
                f"restore {grown['restore_ms']:.2f}, first token {grown['first_token_ms']:.2f}, "
                f"payload {grown['payload_read_mib']:.2f}",
            )


def measure(asked: Asked) -> None:
    asked.settings["layers"] = {subjects.SHIPPED: 2, "gqa8": asked.options.layers}
    report = asked.report()
    if reason := llama.missing():
        report.skip(llama.title(), reason)
    for case in asked.options.cases:
        shape, _, context = case.rpartition(":")
        with scratch_folder(asked.options.folder) as folder:
            measure_turns(Case(shape, int(context), asked, folder), report)
    compare_turns(report)


SHAPES = ("shipped", "gqa8-bf16")
STUDY = Study(
    measure,
    (
        Table(
            "warm",
            "Time to the first token after a restore in a fresh process, beside a cold prefill",
            TURN_COLUMNS,
        ),
    ),
    (
        Option(
            "cases",
            ["shipped:4096", f"shipped:{CONTEXT}", f"gqa8-bf16:{CONTEXT}"],
            ["shipped:2048", "shipped:4096", "gqa8-bf16:2048"],
            [f"{shape}:{4096 << i}" for shape in SHAPES for i in range(5)],
            "SHAPE:TOKENS,...",
        ),
        Option("layers", LAYERS, help="of the gqa8 shapes"),
        Option("runs", 3, 2, 5, "fresh processes per restore"),
        Option("reload-runs", 1, help="of stock caches read back"),
        Option("folder", None, help="where states go; a temporary folder", kind=Path),
    ),
    {"pool_tokens": turns.POOL_TOKENS, "chunks": turns.CHUNKS, "llama_batch": llama.BATCH},
)

if __name__ == "__main__":
    STUDY.main()
