"""Does the model on paper predict what the other questions measured?

    kvpager bench plan

Measures this machine's rates as `kvpager plan --device measure` does, with memory and disk
bandwidth as the other questions measure them, and sets what docs/scaling.md makes of them beside
the figures in the results folder. Nothing is fitted to those figures. Results of another machine
or with another number of threads are left out and named.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvpager import Dense, TopK
from kvpager.config import DEFAULT_SCORER, Selection
from kvpager.needles import shipped_model_path
from kvpager.plan import Cost, KvShape, Machine, ModelShape, Run, costs, read_shape, shape_of
from kvpager.plan.measure import measure
from kvpager_bench import harness, machine, subjects
from kvpager_bench.harness import Column, Report

FACTOR = 1.5  # that a prediction is to be within, either way
QUERY_TOKENS = 4  # that a warm turn adds
SESSIONS = 32  # of the packed work of "overhead"
BOUNDLESS = 1 << 20  # chunks of a host arena that holds everything

COLUMNS = (
    Column("source", text=True),
    Column("figure", text=True),
    Column("predicted_ms", "ms"),
    Column("measured_ms", "ms"),
    Column("predicted_over_measured", "x", 2),
    Column("bound", text=True),
)


@dataclass(frozen=True)
class Prediction:
    """A figure on paper, and as it was measured."""

    figure: str
    cost: Cost
    measured_seconds: float
    term: str = ""  # one of the cost's terms; empty: all

    @property
    def seconds(self) -> float:
        return self.cost.of(self.term) if self.term else self.cost.seconds

    @property
    def ratio(self) -> float:
        return self.seconds / self.measured_seconds


class Shapes:
    """Shapes of the benchmarks' models by name, read without making weights."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], ModelShape] = {}

    def __call__(self, name: str, layers: int = 8) -> ModelShape:
        if (name, layers) not in self._known:
            self._known[name, layers] = self._read(name, layers)
        return self._known[name, layers]

    @staticmethod
    def _read(name: str, layers: int) -> ModelShape:
        if name.startswith(subjects.SHIPPED):
            shape = read_shape(shipped_model_path())
            return shape.replace_dtype("bfloat16") if name.endswith("bf16") else shape
        with torch.device("meta"):
            return shape_of(subjects.load_model(name, layers=layers), loaded=False)


@dataclass(frozen=True)
class Paper:
    """What predictions are made from."""

    machine: Machine
    shapes: Shapes

    def run(
        self, shape: ModelShape, selection: Selection, pool_tokens: int, rows: int = 256
    ) -> Run:
        """A run whose host arena holds everything, as the benchmarks' do."""
        kv = KvShape.of(shape, 64, "auto", DEFAULT_SCORER)
        return Run(shape, kv, self.machine, rows, selection, pool_tokens // 64, BOUNDLESS)


def of_decode(report: Report, paper: Paper) -> Iterator[Prediction]:
    """A decode step, and its parts."""
    for row in report.rows:
        name, at = str(row["shape"]), int(report.number(row, "context"))
        shape = paper.shapes(name, int(report.settings["layers"]))
        chunks = int(report.settings.get("chunks", 32))
        pool = int(report.settings.get("pool_tokens", 4096))
        run = paper.run(shape, TopK(chunks=chunks), pool)
        step = costs.decode(run, at)
        where = f"{name}, {harness.tokens_name(at)}"
        for column, term in (("scan_ms", "scan"), ("attention_ms", "attention")):
            # Calls are counted apart; the clock inside them is not.
            yield Prediction(
                f"decode, {term}: {where}",
                _with_call(step, term, shape),
                report.number(row, column) / 1e3,
                term,
            )
        whole = _seconds(report, row, ("step_ms",), ("tokens_per_s",))
        yield Prediction(f"decode, top-k step: {where}", step, whole)
        dense = _seconds(report, row, ("dense_step_ms",), ("dense_tokens_per_s",))
        run = replace(run, selection=Dense())
        yield Prediction(f"decode, dense step: {where}", costs.decode(run, at), dense)


def _with_call(cost: Cost, term: str, shape: ModelShape) -> Cost:
    """The cost with each layer's fixed share of a call in the term that is looked at."""
    call = costs.CALL_SECONDS * shape.layers / 2
    return cost.plus(Cost((costs.Term(term, call),)))


def _seconds(
    report: Report, row: Mapping[str, Any], times: tuple[str, ...], rates: tuple[str, ...]
) -> float:
    for name in times:
        if name in row:
            return report.number(row, name) / 1e3
    return 1 / report.number(row, next((name for name in rates if name in row), times[0]))


def of_save(report: Report, paper: Paper) -> Iterator[Prediction]:
    """Saving whole files."""
    for row in report.rows:
        name, at = str(row["layout"]), int(report.number(row, "context"))
        seconds = report.number(row, "file_mib") * 2**20 / report.number(row, "save_gbs") / 1e9
        run = _without_model(paper, name)
        yield Prediction(f"save: {name}, {harness.tokens_name(at)}", costs.save(run, at), seconds)


def of_restore(report: Report, paper: Paper) -> Iterator[Prediction]:
    """Opening and restoring files that the page cache holds."""
    for row in report.rows:
        if row["file"] != "cached":
            continue
        name, at = str(row["layout"]), int(report.number(row, "context"))
        yield Prediction(
            f"restore: {name}, {harness.tokens_name(at)}",
            costs.restore(_without_model(paper, name), at),
            report.number(row, "restore_ms") / 1e3,
        )


def _without_model(paper: Paper, layout: str) -> Run:
    known = subjects.LAYOUTS[layout]
    kv = KvShape.of_layout(known.native(), DEFAULT_SCORER)
    shape = paper.shapes(subjects.SHIPPED)
    return Run(shape, kv, paper.machine, 64, TopK(chunks=32), 64, BOUNDLESS)


def of_warm(report: Report, paper: Paper) -> Iterator[Prediction]:
    """Cold prefills, and first tokens of restored turns."""
    chunks = int(report.settings.get("chunks", 32))
    pool = int(report.settings.get("pool_tokens", 2048))
    layers = report.settings["layers"]  # by the shape's name without its dtype
    told = set()
    for row in report.rows:
        name = str(row.get("shape", report.settings.get("shape", subjects.SHIPPED)))
        at = int(report.number(row, "context"))
        shape = paper.shapes(name, int(layers[name.partition("-")[0]]))
        run = paper.run(shape, TopK(chunks=chunks), pool)
        where = f"{name}, {harness.tokens_name(at)}"
        if where not in told:
            told.add(where)
            yield Prediction(
                f"cold prefill, top-k: {where}",
                costs.prefill(run, 0, at),
                report.number(row, "cold_s"),
            )
        yield Prediction(
            f"first token, restored, {row['file']} file: {where}",
            costs.first_token(run, at, QUERY_TOKENS, cached=row["file"] == "cached"),
            report.number(row, "first_token_ms") / 1e3,
        )


def of_overhead(report: Report, paper: Paper) -> Iterator[Prediction]:
    """Forwards of a model whose context is short."""
    layers = int(report.settings.get("layers", 4))
    for row in report.rows:
        name, work, rows = str(row["shape"]), str(row["work"]), int(report.number(row, "rows"))
        run = paper.run(paper.shapes(name, layers), Dense(), 40 * 64)
        if work.startswith("prefill"):
            cost = costs.prefill(run, 0, rows)
        else:
            cost = costs.decode(run, 128, 1 if "one session" in work else SESSIONS)
        yield Prediction(f"{work}: {name}", cost, report.number(row, "ours_ms") / 1e3)


def of_attention(report: Report, paper: Paper) -> Iterator[Prediction]:
    """The attention kernel alone: one row by bandwidth, many by arithmetic."""
    for row in report.rows:
        if row["sdpa_ms"] == harness.NOT_APPLICABLE:
            continue  # another instruction-set tier than a plan is for
        rows, at = int(report.number(row, "rows")), int(report.number(row, "context"))
        heads, kv_heads, dim = (int(n) for n in str(row["shape"]).split("/"))
        dtype_bytes = 4 if str(row["dtype"]) in ("fp32", "float32") else 2
        if rows == 1:
            moved = 2.0 * at * kv_heads * dim * dtype_bytes
            seconds = moved / (paper.machine.bandwidth * paper.machine.attention_share)
        else:
            flops = 4.0 * rows * heads * dim * (at - rows / 2)
            seconds = flops / paper.machine.attention_flops
        yield Prediction(
            f"attention, {row['dtype']}, {rows} rows: {row['shape']}, {harness.tokens_name(at)}",
            Cost((costs.Term("attention", seconds),)),
            report.number(row, "attend_ms") * 1e-3,
        )


Reader = Callable[[Report, Paper], Iterator[Prediction]]
READERS: Mapping[str, Reader] = {
    "attention": of_attention,
    "decode": of_decode,
    "warm": of_warm,
    "snapshot_save": of_save,
    "snapshot_read": of_restore,
    "overhead": of_overhead,
}


def this_machine(threads: int) -> Machine:
    """Rates as the plan measures them, but for what the harness measures longer."""
    memory = machine.memory_bandwidth(threads)
    read, copy = memory.reads.median, memory.copies.median  # as a rule, not at best
    disk = machine.disk_bandwidth(harness.SCRATCH_DIR)
    quick = measure(("float32", "bfloat16"), harness.SCRATCH_DIR)
    return replace(
        quick,
        bandwidth=read,
        copy=copy,
        scan=quick.scan / quick.bandwidth * read,
        link=read,
        disk_write=disk.writes.median,
    )


def why_not(report: Report, record: Mapping[str, Any]) -> str:
    """Why a report says nothing of this machine; empty if it does."""
    for name in ("cpu", "cores", "threads", "isa"):
        if report.environment[name] != record[name]:
            return f"{name} was {report.environment[name]}, and is {record[name]} here"
    return ""


def collect(paper: Paper, record: Mapping[str, Any], report: Report, suffix: str = "") -> None:
    """One row per figure that was measured, in the order of the questions.

    suffix: of the results' names, such as "-quick".
    """
    for name, reader in READERS.items():
        path = harness.results_dir() / f"{name}{suffix}.json"
        if not path.exists():
            report.skip(name, "was not measured")
            continue
        measured = harness.load_report(path)
        if reason := why_not(measured, record):
            report.skip(name, reason)
            continue
        try:
            predictions = list(reader(measured, paper))
        except (KeyError, harness.MissingNumberError) as error:
            report.skip(name, f"its table is another one than is known here: {error}")
            continue
        for prediction in predictions:
            report.add(
                source=name,
                figure=prediction.figure,
                predicted_ms=1e3 * prediction.seconds,
                measured_ms=1e3 * prediction.measured_seconds,
                predicted_over_measured=prediction.ratio,
                bound=prediction.term or prediction.cost.bound,
            )


def judge(report: Report) -> None:
    """How near each source's figures are predicted, and all of them."""
    for name in dict.fromkeys(str(row["source"]) for row in report.rows):
        rows = [row for row in report.rows if row["source"] == name]
        off = [max(ratio, 1 / ratio) for ratio in (_ratio(report, row) for row in rows)]
        report.judge(
            f"{name}: half of the figures are predicted within a factor of {FACTOR}",
            statistics.median(off) <= FACTOR,
            f"median factor {statistics.median(off):.2f}, worst {max(off):.2f}, "
            f"{sum(factor <= FACTOR for factor in off)} of {len(off)} within",
        )


def _ratio(report: Report, row: Mapping[str, Any]) -> float:
    return report.number(row, "predicted_over_measured")


def describe(found: Machine) -> dict[str, Any]:
    """The machine's rates, for the report's settings."""
    values = {
        name: value for name, value in vars(found).items() if isinstance(value, (int, float, str))
    }
    return values | {
        f"products_{dtype}": [[rows, seconds] for rows, seconds in products.points]
        for dtype, products in found.products.items()
    }


def main() -> None:
    """Runs the command line."""
    arguments = harness.cli(__doc__).parse_args()
    record = harness.start(arguments)
    found = this_machine(arguments.threads)
    report = Report(
        harness.report_name("plan", arguments),
        "What the model on paper predicts, beside what was measured",
        COLUMNS,
        {"machine": describe(found), "factor": FACTOR},
        record,
    )
    suffix = report.name.removeprefix("plan")
    collect(Paper(found, Shapes()), record, report, suffix)
    if not report.rows:
        reasons = "; ".join(f"{skipped.peer} {skipped.reason}" for skipped in report.skipped)
        raise harness.MissingNumberError(
            f"{harness.results_dir()} has nothing to compare with: {reasons}. Run other questions "
            "first, in the same size"
        )
    judge(report)
    report.finish()


if __name__ == "__main__":
    main()
