"""How long a saved turn takes to answer again in a fresh process, beside computing it again.

    kvpager bench warm
    kvpager bench warm -- --shapes shipped --contexts 4096,32768 --runs 5

Every turn is a process of its own; imports, loading the model and making the engine are timed
apart. "First token" runs from looking the snapshot up to the first token after a question of four
tokens. Beside it, with the same prompt: the cold prefill by the same engine, stock transformers
(one-shot, sdpa) and its DynamicCache read back from torch.save and safetensors files, and llama.cpp
with a model of random weights of the same shape, cold and from its own state file. Files are
measured in the page cache and dropped from it. A restored turn's logits must have the bits of the
cold one's.

Then whole states, byte for byte, into memory that is there: ours into the pool, every byte
verified, beside reading the file in large plain reads, llama.cpp's state file into its cache, and
LMCache's adapters for files, with objects of our chunk size and of its own; the fastest counts.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvpager_bench import file_peers, harness, subjects, turns
from kvpager_bench.file_peers import FILE_STATES, TENSOR_FILES
from kvpager_bench.harness import NOT_APPLICABLE, Cell, Column, Report, Timing
from kvpager_bench.peers import llama, lmcache
from kvpager_bench.places import scratch_folder

LAYERS = 1  # of "gqa8-*": at 32K, two of them take its three cold prefills beyond the budget
CONTEXT = 32768  # that aims speak of
CHUNK_TOKENS = 64
LMCACHE_TOKENS = (CHUNK_TOKENS, 256)  # per object: our chunk, and its own default

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
STATE_COLUMNS = (
    Column("shape", text=True),
    Column("context", "tokens"),
    Column("file", text=True),
    Column("state_mib", "MiB"),
    Column("restore_gbs", "GB/s"),
    Column("restore_spread", "(max-min)/median", 2),
    Column("read_gbs", "GB/s"),
    Column("llama_gbs", "GB/s", optional=True),
    Column("lmcache_gbs", "GB/s", optional=True),
    Column("lmcache_store_gbs", "GB/s", optional=True),
    Column("lmcache_way", text=True),
)


class Case:
    """All processes of one shape and context."""

    def __init__(
        self, shape: str, context: int, arguments: argparse.Namespace, folder: Path
    ) -> None:
        self.shape, self.context = shape, context
        self.arguments = arguments
        self.folder = folder
        self.path = folder / "turn.kvsnap"
        self.task = {
            "shape": shape,
            "layers": arguments.layers,
            "context": context,
            "threads": arguments.threads,
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
            threads=case.arguments.threads,
        )
        self._cold = self._turn("cold") if self.here else {}
        self.cold_s: Cell = self._cold.get("first_token_s", NOT_APPLICABLE)

    def warm_ms(self, state: str) -> Cell:
        """To the first token from the state file. Its bits are its own, but they must not vary."""
        if not self.here:
            return NOT_APPLICABLE
        answers = []
        for _ in range(self.case.arguments.runs):
            file_peers.prepare(self.state, state)
            answers.append(self._turn("warm"))
        tokens = {answer["token"] for answer in (*answers, self._cold)}
        if len(tokens) != 1:
            raise harness.NondeterministicSubjectError(
                f"{self.case.name}: llama.cpp's cold and restored turns gave {len(tokens)} tokens"
            )
        return _median(answers) * 1e3


def measure_turns(case: Case, report: Report) -> None:
    arguments = case.arguments
    cold = case.run("cold", path=str(case.path))
    stock = case.run("stock_cold", folder=str(case.folder))
    print(
        f"{case.name}: cold {cold['first_token_s']:.2f} s, transformers "
        f"{stock['first_token_s']:.2f} s",
        flush=True,
    )
    peer = LlamaTurns(case, cold)
    for state in FILE_STATES:
        warm = case.repeat("warm", case.path, state, arguments.runs)
        outcomes = {(run["token"], run["logits"]) for run in (cold, *warm)}
        if len(outcomes) != 1:
            raise harness.NondeterministicSubjectError(
                f"{case.name}: cold and restored turns gave {len(outcomes)} different logits"
            )
        reload_ms = {
            how: 1e3
            * _median(
                case.repeat(
                    "stock_reload", case.folder / how, state, arguments.reload_runs, how=how
                )
            )
            for how in TENSOR_FILES
        }
        read_s = harness.measure(
            lambda: file_peers.read_file(case.path),
            runs=arguments.runs,
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
        print(f"{case.name}, {state}: first token {first.median * 1e3:.1f} ms", flush=True)


def measure_state(case: Case, report: Report) -> None:
    arguments = case.arguments
    ours = case.run(
        "state", path=str(case.path), states=list(FILE_STATES), runs=arguments.state_runs
    )
    case.path.unlink()
    payload: int = ours["payload_bytes"]
    llama_gbs = _llama_state(case, ours["llama_shape"])
    cached_files = _lmcache_files(case, payload)
    for state in FILE_STATES:
        rates = Timing(tuple(ours[state]["rates"]))
        files = [entry for entry in cached_files if entry.state == state]
        best = min(files, key=lambda entry: entry.load.median) if files else None
        stored = min((entry.store.median for entry in files), default=None)
        report.add(
            shape=case.shape,
            context=case.context,
            file=state,
            state_mib=payload / 2**20,
            restore_gbs=rates.median / 1e9,
            restore_spread=rates.spread,
            read_gbs=ours["file_bytes"] / Timing(tuple(ours[state]["read_s"])).median / 1e9,
            llama_gbs=llama_gbs.get(state, NOT_APPLICABLE),
            lmcache_gbs=payload / best.load.median / 1e9 if best else NOT_APPLICABLE,
            lmcache_store_gbs=payload / stored / 1e9 if stored else NOT_APPLICABLE,
            lmcache_way=f"{best.adapter}, {best.object_bytes >> 10} KiB" if best else "skipped",
        )
        print(
            f"{case.name}, {state}: the whole state at {rates.median / 1e9:.2f} GB/s",
            flush=True,
        )


def _llama_state(case: Case, shape: Mapping[str, Any]) -> dict[str, float]:
    if llama.missing():
        return {}
    rates = llama.restore_rates(
        shape,
        case.context,
        case.folder / "llama.state",
        FILE_STATES,
        threads=case.arguments.threads,
        runs=case.arguments.state_runs,
    )
    return {state: rate / 1e9 for state, rate in rates.items()}


def _lmcache_files(case: Case, payload: int) -> list[lmcache.Files]:
    if lmcache.missing():
        return []
    token_bytes = payload // case.context
    sizes = [tokens * token_bytes for tokens in LMCACHE_TOKENS]
    return lmcache.files(case.folder, payload, sizes, FILE_STATES, runs=case.arguments.state_runs)


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
        warm_ms = report.number(row, "first_token_ms")
        beside = partial(report.compare, figure, ours=warm_ms, unit="ms", lower_is_better=True)
        beside(
            theirs=1e3 * report.number(row, "transformers_cold_s"),
            peer="transformers, one-shot prefill",
            aim=aim,
        )
        beside(theirs=1e3 * report.number(row, "cold_s"), peer="its own prefill", aim=aim)
        for how, column in zip(TENSOR_FILES, ("torch_save_ms", "safetensors_ms")):
            beside(theirs=report.number(row, column), peer=f"transformers from {how}", aim=None)
        if row["llama_ms"] != NOT_APPLICABLE:
            beside(
                theirs=report.number(row, "llama_ms"),
                peer=f"{llama.title()} from its state",
                aim=None,
            )
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


def compare_states(report: Report) -> None:
    for row in report.rows:
        name = harness.tokens_name(int(report.number(row, "context")))
        figure = f"restoring all of a state, {name}, {row['shape']}, file {row['file']}"
        beside = partial(
            report.compare, figure, ours=report.number(row, "restore_gbs"), unit="GB/s"
        )
        beside(theirs=report.number(row, "read_gbs"), peer="reading the file into memory", aim=0.9)
        if row["llama_gbs"] != NOT_APPLICABLE:
            beside(theirs=report.number(row, "llama_gbs"), peer=llama.title(), aim=1.0)
        if row["lmcache_gbs"] != NOT_APPLICABLE:
            beside(theirs=report.number(row, "lmcache_gbs"), peer=lmcache.title(), aim=1.0)


def main() -> None:
    parser = harness.cli(__doc__)
    parser.add_argument("--shapes", type=harness.parse_list)
    parser.add_argument("--contexts", type=harness.parse_ints)
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the gqa8 shapes")
    parser.add_argument("--runs", type=int, default=3, help="fresh processes per restore")
    parser.add_argument("--reload-runs", type=int, default=1, help="of stock caches read back")
    parser.add_argument("--state-runs", type=int, default=3, help="restores of whole states")
    parser.add_argument("--folder", type=Path, help="where states go; a temporary folder")
    arguments = parser.parse_args()
    cases = cases_of(arguments)
    record = harness.start(arguments)
    settings = {
        "layers": {subjects.SHIPPED: 2, "gqa8": arguments.layers},
        "pool_tokens": turns.POOL_TOKENS,
        "chunks": turns.CHUNKS,
        "runs": arguments.runs,
        "llama_batch": llama.BATCH,
    }
    turn_report = Report(
        harness.report_name("warm", arguments),
        "Time to the first token after a restore in a fresh process, beside a cold prefill",
        TURN_COLUMNS,
        settings,
        record,
    )
    state_report = Report(
        harness.report_name("warm_state", arguments),
        "Restoring the whole of a state, byte for byte",
        STATE_COLUMNS,
        settings,
        record,
    )
    for peer in (llama, lmcache):
        if reason := peer.missing():
            state_report.skip(peer.title(), reason)
    if reason := llama.missing():
        turn_report.skip(llama.title(), reason)
    for shape, context in cases:
        with scratch_folder(arguments.folder) as folder:
            case = Case(shape, context, arguments, folder)
            measure_turns(case, turn_report)
            if context == max(other for name, other in cases if name == shape):
                measure_state(case, state_report)
    compare_turns(turn_report)
    compare_states(state_report)
    turn_report.finish()
    state_report.finish()


def cases_of(arguments: argparse.Namespace) -> list[tuple[str, int]]:
    """What is measured: (shape, context). The larger shape once, at the context aims speak of."""
    if arguments.quick:
        arguments.runs, arguments.state_runs = 2, 1
        usual = [("shipped", 2048), ("shipped", 4096), ("gqa8-bf16", 2048)]
    elif arguments.full:
        arguments.runs = max(arguments.runs, 5)
        usual = [
            (shape, tokens)
            for shape in ("shipped", "gqa8-bf16")
            for tokens in (4096, 8192, 16384, 32768, 65536)
        ]
    else:
        usual = [("shipped", 4096), ("shipped", CONTEXT), ("gqa8-bf16", CONTEXT)]
    if not (arguments.shapes or arguments.contexts):
        return usual
    shapes = arguments.shapes or list(dict.fromkeys(shape for shape, _ in usual))
    contexts = arguments.contexts or sorted({tokens for _, tokens in usual})
    return [(shape, tokens) for shape in shapes for tokens in contexts]


if __name__ == "__main__":
    main()
