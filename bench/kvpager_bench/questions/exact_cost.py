"""What exactness costs: decode and prefill by rows, dtype and mode, beside the ordinary way.

    kvpager bench exact_cost --
    kvpager bench exact_cost -- --subjects gqa8-fp32 --rows 64,256

One session of a Qwen3 shape of hidden size 1024, in which matrix products dominate, and of the
shipped model, in which they do not. Modes: "all" with forwards of M rows only ("all, M only"),
"all" with the smaller row counts that the engine proved at start, "reuse", and False. The ordinary
way is stock transformers over the same weights: one-shot prefill, and one-token steps over a
DynamicCache with torch's attention. It takes turns with the four modes of one M, and every ratio
is between figures of the same turns.

A decode step under "reuse" is the mean over one whole chunk, so that what it computes again when
the chunk fills is in it. Before anything is timed, the logits after the same prompt and the same
decoded tokens are compared as raw bits: "all" has to have those of "all, M only", "reuse" those
after the prompt, and every mode has to agree with itself.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from kvpager import Engine, PagerConfig, Session
from kvpager.config import DEFAULT_ROWS
from kvpager_bench import harness, subjects
from kvpager_bench.exact_cost_table import exact_cost_table
from kvpager_bench.harness import NOT_APPLICABLE, Column, Report, Subject, Timing

FIXED, ALL, REUSE, FREE = "all, M only", "all", "reuse", "False"
MODES: Mapping[str, Mapping[str, Any]] = {
    FIXED: {"exact": "all", "small_rows": "fixed"},
    ALL: {"exact": "all"},
    REUSE: {"exact": "reuse"},
    FREE: {"exact": False},
}
STOCK = "transformers"
CHUNK_TOKENS = 64
CONTEXT = 256  # tokens before the first one that is decoded
POOL_TOKENS = 2048
CHECKED_TOKENS = 3
BEARABLE = 1.25
DEFAULT = DEFAULT_ROWS["cpu"][0]
NOTED_ROWS = (64,)  # of a subject that is slow enough to be but a note

COLUMNS = (
    Column("subject", text=True),
    Column("rows"),
    Column("mode", text=True),
    Column("proven", text=True),
    Column("decode_ms", "ms"),
    Column("decode_spread", "(max-min)/median", 2),
    Column("decode_over_transformers", "x"),
    Column("prefill_tokens_per_s", "1/s"),
    Column("prefill_spread", "(max-min)/median", 2),
    Column("prefill_over_transformers", "x"),
    Column("start_s", "s"),
    Column("proof_s", "s", optional=True),
    Column("transformers_decode_ms", "ms"),
    Column("transformers_prefill_tokens_per_s", "1/s"),
)


class Prompts:
    """Random prompts of one length, each drawn once: nothing of one is ever held already."""

    def __init__(self, model: Any, tokens: int) -> None:
        self._model = model
        self._tokens = tokens
        self._drawn = 0

    def draw(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        self._drawn += 1
        return subjects.random_ids(self._model, self._tokens, seed=self._drawn)


class Ours:
    """One engine in one mode: a session that decodes, and sessions that prefill."""

    def __init__(self, model: Any, rows: int, mode: str, context: Any, prompts: Prompts) -> None:
        start = time.perf_counter()
        self.engine = Engine(
            model,
            PagerConfig(
                pool_tokens=POOL_TOKENS,
                chunk_tokens=CHUNK_TOKENS,
                rows=rows,
                host_bytes=0,
                **MODES[mode],
            ),
        )
        self.start_seconds = time.perf_counter() - start
        subjects.record_steps(self.engine)
        self._prompts = prompts
        self._base = self.engine.session()
        self._base.prefill(context)
        self._session: Session | None = None
        self._stream: Iterator[int] = iter(())
        self._ids = prompts.draw()

    @property
    def proven(self) -> str:
        """The row counts its forwards may have below M, as the engine found them."""
        smaller = self.engine.row_counts.smaller
        return "+".join(map(str, smaller)) if smaller else "-"

    def bits(self) -> tuple[str, str]:
        """Of the logits after the prompt, and after a few tokens decoded from there."""
        with self._base.fork() as fork:
            after_prompt = harness.digest(fork.logits)
            decoded = [
                fork.logits for _ in fork.generate(CHECKED_TOKENS, eos=None, stream="tokens")
            ]
            return after_prompt, harness.digest(*decoded)

    def decoding(self, tokens: int) -> Subject:
        def call() -> None:
            for _ in range(tokens):
                next(self._stream)

        return Subject(call, lambda: self._begin_decoding(tokens))

    def _begin_decoding(self, tokens: int) -> None:
        """One step ahead of the clock: the first token costs no forward, the second warms."""
        self._drop()
        self._session = self._base.fork()
        self._stream = self._session.generate(tokens + 2, eos=None, stream="tokens")
        next(self._stream)
        next(self._stream)

    def prefilling(self) -> Subject:
        def before() -> None:
            self._drop()
            self._ids = self._prompts.draw()
            self._session = self.engine.session()

        def call() -> None:
            assert self._session is not None
            self._session.prefill(self._ids)

        return Subject(call, before)

    def _drop(self) -> None:
        if self._session is not None:
            self._session.close()


class Ordinary:
    """Stock transformers."""

    def __init__(self, model: Any, context: Any, prompts: Prompts) -> None:
        self._model = model
        self._prompts = prompts
        self._cache, self._logits = subjects.stock_prefill(model, context)
        self._ids = prompts.draw()

    def decoding(self, tokens: int) -> Subject:
        def before() -> None:
            self._cache.crop(CONTEXT - self._cache.get_seq_length())
            self._token = int(self._logits.argmax())
            self._step()

        def call() -> None:
            for _ in range(tokens):
                self._step()

        return Subject(call, before)

    def _step(self) -> None:
        logits = subjects.stock_step(self._model, self._cache, [self._token])
        self._token = int(logits.argmax())

    def prefilling(self) -> Subject:
        def before() -> None:
            self._ids = self._prompts.draw()

        return Subject(lambda: subjects.stock_prefill(self._model, self._ids), before)


def measure_rows(
    report: Report, subject: str, model: Any, rows: int, arguments: argparse.Namespace
) -> None:
    """One M: every mode and the ordinary way, taking turns."""
    prompts = Prompts(model, arguments.prompt_tokens)
    context = subjects.random_ids(model, CONTEXT, seed=0)
    ordinary = Ordinary(subjects.beside(model), context, prompts)
    ours = {mode: Ours(model, rows, mode, context, prompts) for mode in arguments.modes}
    try:
        check_bits(ours, f"{subject}, {rows} rows")
        steps = dict.fromkeys([STOCK, *ours], arguments.steps) | {REUSE: CHUNK_TOKENS}
        if FIXED in ours:
            steps[FIXED] = max(2, arguments.steps // 4)
        decodes = harness.interleave(
            {STOCK: ordinary.decoding(steps[STOCK])}
            | {mode: engine.decoding(steps[mode]) for mode, engine in ours.items()},
            runs=arguments.runs,
            warm_up=0,
        )
        prefills = harness.interleave(
            {STOCK: ordinary.prefilling()}
            | {mode: engine.prefilling() for mode, engine in ours.items()},
            runs=arguments.runs,
            warm_up=0 if subject.startswith("gqa8") else 1,
        )
        stock_step = decodes[STOCK].median / steps[STOCK]
        unproven = ours[FREE].start_seconds if FREE in ours else None
        for mode, engine in ours.items():
            step = decodes[mode].median / steps[mode]
            report.add(
                subject=subject,
                rows=rows,
                mode=mode,
                proven=engine.proven,
                decode_ms=1e3 * step,
                decode_spread=decodes[mode].spread,
                decode_over_transformers=step / stock_step,
                prefill_tokens_per_s=rate(prefills[mode], arguments),
                prefill_spread=prefills[mode].spread,
                prefill_over_transformers=prefills[mode].median / prefills[STOCK].median,
                start_s=engine.start_seconds,
                proof_s=NOT_APPLICABLE
                if unproven is None
                else max(0.0, engine.start_seconds - unproven),
                transformers_decode_ms=1e3 * stock_step,
                transformers_prefill_tokens_per_s=rate(prefills[STOCK], arguments),
            )
            print(
                f"{subject} {rows} {mode}: {1e3 * step:.1f} ms, transformers "
                f"{1e3 * stock_step:.1f} ms",
                flush=True,
            )
    finally:
        for engine in ours.values():
            engine.engine.close()


def rate(prefill: Timing, arguments: argparse.Namespace) -> float:
    return float(arguments.prompt_tokens / prefill.median)


def check_bits(ours: Mapping[str, Ours], where: str) -> None:
    """A mode agrees with itself, and the exact ones with each other as far as they promise it."""
    seen = {mode: engine.bits() for mode, engine in ours.items()}
    for mode, engine in ours.items():
        if engine.bits() != seen[mode]:
            raise harness.NondeterministicSubjectError(f"{where}: mode {mode!r} changes by itself")
    for mode, promised in ((ALL, 2), (REUSE, 1)):
        if FIXED in seen and mode in seen and seen[mode][:promised] != seen[FIXED][:promised]:
            raise harness.NondeterministicSubjectError(
                f"{where}: mode {mode!r} gave {seen[mode]}, forwards of M rows alone "
                f"{seen[FIXED]}; the row counts it proved are not of one class"
            )


def judge(report: Report, subject: str) -> None:
    """What the default mode costs at the M that suits the subject best, and at the default M."""
    rows = [row for row in report.rows if row["subject"] == subject and row["mode"] == ALL]
    if len(rows) < 2:
        return
    worse = {
        int(report.number(row, "rows")): max(
            report.number(row, "decode_over_transformers"),
            report.number(row, "prefill_over_transformers"),
        )
        for row in rows
    }
    least = min(worse.values())
    evidence = "the greater of decode and prefill, by M: " + ", ".join(
        f"{count}: {times:.2f}x" for count, times in worse.items()
    )
    report.judge(
        f'{subject}: at some M "all" takes no more than {BEARABLE}x as long as transformers, in '
        "decode and in prefill",
        least <= BEARABLE,
        evidence,
    )
    if DEFAULT in worse:
        report.judge(
            f"{subject}: the default M = {DEFAULT} is the best, or within a tenth of it",
            worse[DEFAULT] <= 1.1 * least,
            evidence,
        )


def main() -> None:
    parser = harness.cli(__doc__)
    parser.add_argument(
        "--subjects",
        type=harness.parse_list,
        default=["gqa8-bf16", "gqa8-fp32", "gqa8-fp16", subjects.SHIPPED],
    )
    parser.add_argument("--rows", type=harness.parse_ints, default=[16, 32, 64, 128, 256])
    parser.add_argument(
        "--modes", type=lambda text: text.split(";"), default=list(MODES), help="apart by ;"
    )
    parser.add_argument("--layers", type=int, default=4, help="of the Qwen3 shape")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="of each timed prefill")
    parser.add_argument("--steps", type=int, default=12, help="tokens decoded at a time")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--compact", action="store_true", help="print the last run in short")
    arguments = parser.parse_args()
    name = harness.report_name("exact_cost", arguments)
    if arguments.compact:
        print(exact_cost_table(harness.load_report(harness.results_dir() / f"{name}.json")))
        return
    if arguments.quick:
        arguments.subjects = [subjects.SHIPPED]
        arguments.rows, arguments.steps, arguments.runs = arguments.rows[:2], 4, 1
    record = harness.start(arguments)
    report = Report(
        name,
        "What exactness costs one session, by rows M, dtype and mode",
        COLUMNS,
        {
            "chunk_tokens": CHUNK_TOKENS,
            "context": CONTEXT,
            "prompt_tokens": arguments.prompt_tokens,
            "layers": arguments.layers,
            "steps": arguments.steps,
            "runs": arguments.runs,
        },
        record,
    )
    for subject in arguments.subjects:
        model = subjects.load_model(subject, layers=arguments.layers)
        noted = subject.endswith("fp16")  # processors without such instructions take seconds
        for rows in arguments.rows:
            if not noted:
                measure_rows(report, subject, model, rows, arguments)
            elif rows in NOTED_ROWS:
                few = argparse.Namespace(**vars(arguments) | {"runs": 1, "modes": [ALL, FREE]})
                measure_rows(report, subject, model, rows, few)
        judge(report, subject)
    report.finish()
    print("\n" + exact_cost_table(report))


if __name__ == "__main__":
    main()
