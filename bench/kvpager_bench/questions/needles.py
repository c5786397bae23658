"""Which scorer finds the needles: every scorer beside full attention, an oracle and a window.

    kvpager bench needles --                      # the whole table; restartable, cell by cell
    kvpager bench needles -- --cells trained/16K  # cells whose names contain this
    kvpager bench needles -- --keys trained       # without the variants of hard keys

A cell is keys/context/needles/chunks/policy. It prefills for itself, under its own selection, and
asks every question in a fork of the prefilled session; an answer counts if all four tokens are
right. Needles lie outside the sinks and the widest window. `exact` is the oracle (all keys, in
float32); `window` sees the sinks and as many recent tokens as top-k reads. Finished cells are kept
in build/bench and reused until kvpager changes; --fresh measures again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import xxhash

from kvpager import Dense, Engine, PagerConfig, Session, TopK
from kvpager.config import Window
from kvpager.weights import weights_digest
from kvpager_bench import harness
from kvpager_bench.hard_keys import TRAINED, VARIANTS, load_with_keys
from kvpager_bench.harness import NOT_APPLICABLE, Column, Report
from kvpager_bench.subjects import RECENT, SINKS, questions

ORACLE = "exact"
SCORERS = ("mean", "bits2")
DENSE, WINDOW = "full attention", "window"
CHUNK_TOKENS = 64
POOL_TOKENS = 2048
ANSWER_TOKENS = 4
CELL_DIR = harness.SCRATCH_DIR / "needles"

COLUMNS = (
    Column("keys", text=True),
    Column("context", "tokens"),
    Column("needles"),
    Column("chunks", optional=True),
    Column("policy", text=True),
    Column("found"),
    Column("asked"),
    Column("full_attention_found"),
    Column("summary_bytes", "per token and kv head", optional=True),
    Column("scan_ms", "per decode step", optional=True),
    Column("step_ms", "per decode step"),
    Column("prefill_s", "per document"),
)


@dataclass(frozen=True)
class Cell:
    """One prefill policy on documents of one kind. chunks is 0 for full attention."""

    keys: str
    context: int
    needles: int
    chunks: int
    policy: str

    @property
    def name(self) -> str:
        chunks = f"{self.chunks}c" if self.chunks else "all"
        context = harness.tokens_name(self.context)
        return f"{self.keys}/{context}/{self.needles}n/{chunks}/{self.policy}"

    @property
    def selection(self) -> Dense | TopK | Window:
        if self.policy == DENSE:
            return Dense()
        if self.policy == WINDOW:
            return Window(recent=window_tokens(self.chunks), sinks=SINKS)
        return TopK(chunks=self.chunks, sinks=SINKS, recent=RECENT, scorer=self.policy)


def window_tokens(chunks: int) -> int:
    """What top-k reads beside the sinks."""
    return RECENT + chunks * CHUNK_TOKENS


def all_cells(arguments: argparse.Namespace) -> Iterator[Cell]:
    for keys in arguments.keys:
        contexts = arguments.contexts if keys == TRAINED else arguments.hard_contexts
        for context in contexts:
            for needles in arguments.needles:
                yield Cell(keys, context, needles, 0, DENSE)
                for chunks in arguments.chunks:
                    for policy in (WINDOW, *arguments.scorers, ORACLE):
                        yield Cell(keys, context, needles, chunks, policy)


def measure_cell(cell: Cell, model: Any, seeds: int, quiet: int) -> dict[str, Any]:
    """Prefills `seeds` documents and asks every question about each."""
    found: list[bool] = []
    prefill_seconds = []
    steps = scan = wall = 0.0
    config = PagerConfig(
        pool_tokens=POOL_TOKENS, chunk_tokens=CHUNK_TOKENS, selection=cell.selection
    )
    with Engine(model, config) as engine:
        for seed in range(1, seeds + 1):
            asked = questions(cell.context, cell.needles, seed, quiet=quiet)
            with engine.session() as session:
                start = time.perf_counter()
                session.prefill(asked.document.ids)
                prefill_seconds.append(time.perf_counter() - start)
                if seed == 1:
                    harness.require_deterministic(
                        partial(_first_answer, session, asked.prompts[0]), cell.name
                    )
                for prompt, answer in zip(asked.prompts, asked.answers):
                    with session.fork() as fork:
                        fork.append(prompt)
                        before, start = engine.stats(), time.perf_counter()
                        tokens = fork.generate(ANSWER_TOKENS).tokens.tolist()
                        wall += time.perf_counter() - start
                        after = engine.stats()
                    found.append(tokens == answer)
                    steps += after["forwards"] - before["forwards"]
                    scan += after["seconds_scan"] - before["seconds_scan"]
        stats = engine.stats()
        tokens_per_summary = engine.layout.layers * engine.layout.kv_heads * CHUNK_TOKENS
        return {
            "found": sum(found),
            "asked": len(found),
            "summary_bytes": stats["summary_bytes_per_chunk"] / tokens_per_summary,
            "scan_seconds": scan / steps,
            "step_seconds": wall / steps,
            "prefill_seconds": harness.Timing(tuple(prefill_seconds)).median,
        }


def _first_answer(session: Session, prompt: list[int]) -> tuple[list[int], str]:
    with session.fork() as fork:
        fork.append(prompt)
        tokens = fork.generate(ANSWER_TOKENS).tokens.tolist()
        return tokens, harness.digest(fork.logits)


def cached_cell(
    cell: Cell, key: str, measure: Callable[[], dict[str, Any]], fresh: bool
) -> dict[str, Any]:
    """The cell's numbers from its file if that holds `key`, else measured and written."""
    path = CELL_DIR / (cell.name.replace("/", "-").replace(" ", "-") + ".json")
    if not fresh and path.is_file():
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["key"] == key:
            numbers: dict[str, Any] = kept["numbers"]
            return numbers
    numbers = measure()
    path.parent.mkdir(parents=True, exist_ok=True)
    harness.write_text(path, json.dumps({"cell": asdict(cell), "key": key, "numbers": numbers}))
    return numbers


def judge(report: Report) -> None:
    """The best scorer against full attention, the window against nothing."""
    for title, keys in (("keys as trained", [TRAINED]), ("hard keys", [*VARIANTS][1:])):
        rows = [row for row in report.rows if row["keys"] in keys]
        lost: dict[str, float] = {}
        for row in rows:
            policy = str(row["policy"])
            missing = report.number(row, "full_attention_found") - report.number(row, "found")
            lost[policy] = max(lost.get(policy, missing), missing)
        worst = {scorer: lost[scorer] for scorer in SCORERS if scorer in lost}
        if not worst:
            continue
        best = min(worst, key=lambda scorer: (worst[scorer], SCORERS.index(scorer)))
        listed = ", ".join(f"{name} {count:.0f}" for name, count in worst.items())
        report.judge(
            f"{title}: the best scorer ({best}) is within one needle of full attention "
            "in every cell",
            worst[best] <= 1,
            f"most needles lost in a cell: {listed}; oracle {lost[ORACLE]:.0f}",
        )
        shares = [
            report.number(row, "found") / report.number(row, "asked")
            for row in rows
            if row["policy"] == WINDOW
        ]
        report.judge(
            f"{title}: a window alone finds next to nothing outside it",
            max(shares) <= 0.05,
            f"at most {max(shares):.1%} of the needles",
        )


def parse_arguments() -> argparse.Namespace:
    parser = harness.cli(__doc__)
    parser.add_argument("--cells", default="", help="only cells whose names contain this")
    parser.add_argument("--keys", type=harness.parse_list, default=list(VARIANTS))
    parser.add_argument("--contexts", type=harness.parse_ints, default=[16384, 32768])
    parser.add_argument("--hard-contexts", type=harness.parse_ints, default=[16384])
    parser.add_argument("--needles", type=harness.parse_ints, default=[16, 64])
    parser.add_argument("--chunks", type=harness.parse_ints, default=[8, 32])
    parser.add_argument("--scorers", type=harness.parse_list, default=list(SCORERS))
    parser.add_argument("--asked", type=int, default=32, help="least questions per cell")
    parser.add_argument("--fresh", action="store_true", help="measure finished cells again")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.contexts = arguments.hard_contexts = [4096]
        arguments.needles, arguments.chunks, arguments.asked = [16], [8], 16
        arguments.keys = arguments.keys[:2]
    return arguments


def main() -> None:
    arguments = parse_arguments()
    record = harness.start(arguments)
    cells = [cell for cell in all_cells(arguments) if arguments.cells in cell.name]
    if not cells:
        raise SystemExit(f"no cell's name contains {arguments.cells!r}")
    # Every row needs full attention's figure for its documents beside it.
    bases = {Cell(cell.keys, cell.context, cell.needles, 0, DENSE) for cell in cells}
    wanted = [cell for cell in all_cells(arguments) if cell in bases or cell in cells]
    quiet = window_tokens(max(arguments.chunks)) + 2 * CHUNK_TOKENS
    version = harness.native_digest()
    numbers: dict[Cell, dict[str, Any]] = {}
    keys, model, weights = "", None, ""
    for index, cell in enumerate(wanted):
        if cell.keys != keys:
            keys, model = cell.keys, load_with_keys(cell.keys)
            weights = weights_digest(model)
        seeds = -(-arguments.asked // cell.needles)
        key = xxhash.xxh3_64_hexdigest(
            json.dumps([version, weights, record["threads"], record["cpu"], seeds, quiet]).encode()
        )
        start = time.perf_counter()
        numbers[cell] = cached_cell(
            cell,
            key,
            partial(measure_cell, cell, model, seeds, quiet),
            arguments.fresh,
        )
        print(
            f"[{index + 1}/{len(wanted)}] {cell.name}: {numbers[cell]['found']}"
            f"/{numbers[cell]['asked']}  {time.perf_counter() - start:.1f} s",
            flush=True,
        )

    name = harness.report_name("needles", arguments)
    report = Report(
        name=name + ("-partial" if arguments.cells else ""),
        question="Needles found by each scorer, with what its summaries and its scan cost",
        columns=COLUMNS,
        settings={
            "sinks": SINKS,
            "recent": RECENT,
            "chunk_tokens": CHUNK_TOKENS,
            "pool_tokens": POOL_TOKENS,
            "quiet_tail": quiet,
            "variants": VARIANTS,
        },
        environment=record,
    )
    for cell, measured in numbers.items():
        base = numbers[Cell(cell.keys, cell.context, cell.needles, 0, DENSE)]
        scores = cell.policy not in (DENSE, WINDOW)
        report.add(
            keys=cell.keys,
            context=cell.context,
            needles=cell.needles,
            chunks=cell.chunks or NOT_APPLICABLE,
            policy=cell.policy,
            found=measured["found"],
            asked=measured["asked"],
            full_attention_found=base["found"],
            summary_bytes=measured["summary_bytes"] if scores else NOT_APPLICABLE,
            scan_ms=measured["scan_seconds"] * 1e3 if scores else NOT_APPLICABLE,
            step_ms=measured["step_seconds"] * 1e3,
            prefill_s=measured["prefill_seconds"],
        )
    if not arguments.cells:  # a part of the table proves nothing
        judge(report)
    report.finish()


if __name__ == "__main__":
    main()
