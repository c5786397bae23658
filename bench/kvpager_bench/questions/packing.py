"""The gain of packing: tokens per second as sessions fill the rows of a forward, and beyond.

    kvpager bench packing --
    kvpager bench packing -- --sessions 1,8,64 --rows 64

`Engine.run` completes 1 to 128 prompts at a time with forwards of at most M rows: short prompts of
one length, and mixed ones. Beside it, in the same turns: stock transformers' `generate` on a batch
padded on the left and its `generate_batch`, which is continuous batching, with as many tokens to a
forward and room for all requests; and, once per kind of prompts, `run` and `generate` on one prompt
after the other. Time is from the call to the last token, prefill included; tokens are those that
were generated.

Bits: tokens, log-probabilities and K/V of what was packed are compared with those of the same
prompt run alone in another engine. For transformers the texts are compared in the same way.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from kvpager import Engine, PagerConfig
from kvpager.config import DEFAULT_ROWS
from kvpager.requests.completion import RequestCompletion
from kvpager.verify.bits import Comparison, compare_bits
from kvpager_bench import harness, subjects
from kvpager_bench.harness import Column, Report, Subject, Timing

SHORT, MIXED = "short", "mixed"
SHORT_TOKENS = 32
MIXED_TOKENS = (8, 184)  # drawn in pairs of one sum, so that every even count has one mean
POOL_TOKENS = 32768
LAYERS = 4
SPARE_PAGES = 8  # of continuous batching, beside one for each request
JUDGED = (1, 8, 32, 128)  # numbers of sessions
AHEAD = 1.0  # aim, times transformers

Prompt: TypeAlias = "np.ndarray[Any, np.dtype[np.int32]]"

COLUMNS = (
    Column("prompts", text=True),
    Column("sessions"),
    Column("prompt_tokens"),
    Column("tokens_per_s", "1/s"),
    Column("spread", "(max-min)/median", 2),
    Column("over_one_by_one", "x"),
    Column("rows_used", "% of rows run"),
    Column("forwards"),
    Column("first_token_s", "s, median"),
    Column("one_by_one_tokens_per_s", "1/s"),
    Column("transformers_batch_tokens_per_s", "1/s"),
    Column("transformers_one_by_one_tokens_per_s", "1/s"),
    Column("over_transformers_batch", "x"),
    Column("transformers_continuous_tokens_per_s", "1/s"),
    Column("over_transformers_continuous", "x"),
    Column("bits_compared"),
    Column("differing_bits"),
    Column("texts_compared"),
    Column("texts_changed"),
    Column("transformers_texts_changed"),
)


def draw_prompts(kind: str, model: Any, count: int, seed: int) -> list[Prompt]:
    """Prompt i is the same for every count that has it."""
    least, most = MIXED_TOKENS
    lengths = [SHORT_TOKENS] * count
    if kind == MIXED:
        mean, widest = (least + most) // 2, (most - least) // 2
        apart = np.random.default_rng(seed).integers(0, widest, count, endpoint=True)
        apart[0] = 0  # the first pair is two of mean length: a count of one has it too
        lengths = [mean + (apart[i // 2], -apart[i // 2])[i % 2] for i in range(count)]
    return [
        subjects.random_ids(model, length, seed=1000 * seed + i) for i, length in enumerate(lengths)
    ]


@dataclass
class Bits:
    """What packed completions have in common with the same prompts alone."""

    comparison: Comparison
    texts_changed: int


class Packed:
    """`Engine.run` over some prompts at a time; a prompt is never run twice in an engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.completions: list[RequestCompletion] = []
        self.work: dict[str, float] = {}

    def run(self, prompts: Sequence[Prompt], new_tokens: int, *, together: bool = True) -> None:
        before = self.engine.stats()
        groups = [list(prompts)] if together else [[prompt] for prompt in prompts]
        self.completions = []
        for group in groups:
            self.completions += self.engine.run(
                group, new_tokens, eos=None, logprobs=True, keep_sessions=True
            )
        after = self.engine.stats()
        self.work = {
            name: after[name] - before[name]
            for name in ("model_forwards", "model_rows", "model_rows_used")
        }

    def require_whole(self, new_tokens: int) -> None:
        for completion in self.completions:
            if completion.finish_reason != "length" or len(completion.tokens) != new_tokens:
                raise harness.MissingNumberError(
                    f"prompt {completion.index} ended with {completion.finish_reason!r} after "
                    f"{len(completion.tokens)} tokens: {completion.error}"
                )

    def drop(self) -> None:
        for completion in self.completions:
            if completion.session is not None:
                completion.session.close()
        self.completions = []


def compare(packed: Sequence[RequestCompletion], alone: Sequence[RequestCompletion]) -> Bits:
    """Of the prompts that both have run."""
    total, changed = Comparison(), 0
    for mine, reference in zip(packed, alone):
        where = f"prompt {mine.index}"
        total += compare_bits(mine.tokens, reference.tokens, f"{where}: tokens")
        changed += mine.tokens.tolist() != reference.tokens.tolist()
        assert mine.logprobs is not None
        assert reference.logprobs is not None
        total += compare_bits(mine.logprobs, reference.logprobs, f"{where}: log-probabilities")
        a, b = mine.session, reference.session
        assert a is not None
        assert b is not None
        for layer in range(a.core.layout.layers):
            ours = a.sequence.read_kv(layer, 0, a.committed)
            for x, y in zip(ours, b.sequence.read_kv(layer, 0, b.committed)):
                total += compare_bits(x, y, f"{where}: K/V of layer {layer}")
    if not total.elements:
        raise harness.MissingNumberError("nothing was compared")
    return Bits(total, changed)


class Batched:
    """Stock `generate` on a batch padded on the left."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.texts: list[list[int]] = []

    @torch.inference_mode()
    def run(self, prompts: Sequence[Prompt], new_tokens: int) -> None:
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.from_numpy(prompt)
            mask[row, longest - len(prompt) :] = 1
        out = self._model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=False,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            pad_token_id=0,
            eos_token_id=None,
        )
        self.texts = out[:, longest:].tolist()

    def run_one_by_one(self, prompts: Sequence[Prompt], new_tokens: int) -> None:
        texts = []
        for prompt in prompts:
            self.run([prompt], new_tokens)
            texts += self.texts
        self.texts = texts


class Continuous:
    """Stock `generate_batch`: continuous batching over a paged cache, on a model of its own."""

    def __init__(self, model: Any, rows: int) -> None:
        self._model = subjects.beside(model)
        self._rows = rows

    def run(self, prompts: Sequence[Prompt], new_tokens: int) -> None:
        finished = self._model.generate_batch(
            [prompt.tolist() for prompt in prompts],
            generation_config=GenerationConfig(  # type: ignore[no-untyped-call]
                do_sample=False,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
                pad_token_id=0,
                eos_token_id=-1,
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                max_batch_tokens=self._rows, num_blocks=len(prompts) + SPARE_PAGES
            ),
            persistent_manager=True,
        )
        for request, one in finished.items():
            if one.error is not None or len(one.generated_tokens) != new_tokens:
                raise harness.MissingNumberError(
                    f"{request} of generate_batch ended with {one.error!r} after "
                    f"{len(one.generated_tokens)} tokens"
                )
        if len(finished) != len(prompts):
            raise harness.MissingNumberError(
                f"generate_batch finished {len(finished)} of {len(prompts)} requests"
            )

    def forget(self) -> None:
        """The cache, which is as large as the first call of `run` said."""
        self._model.destroy_cached_continuous_batching_manager()


@dataclass(frozen=True)
class Alone:
    """Prompts run one after the other, by us and by transformers."""

    ours: Packed
    rate: float
    texts: list[list[int]]
    stock_rate: float


def measure_alone(kind: str, ours: Packed, stock: Batched, arguments: argparse.Namespace) -> Alone:
    model = ours.engine.model
    prompts = draw_prompts(kind, model, min(arguments.alone, max(arguments.sessions)), seed=1)
    tokens = len(prompts) * arguments.new_tokens
    unseen = draw_prompts(kind, model, 1, seed=0)
    ours.run(unseen, arguments.new_tokens)
    ours.drop()
    stock.run(unseen, arguments.new_tokens)
    timings = harness.interleave(
        {
            "ours": Subject(lambda: ours.run(prompts, arguments.new_tokens, together=False)),
            "stock": Subject(lambda: stock.run_one_by_one(prompts, arguments.new_tokens)),
        },
        runs=1,
        warm_up=0,
    )
    ours.require_whole(arguments.new_tokens)
    return Alone(
        ours, tokens / timings["ours"].median, stock.texts, tokens / timings["stock"].median
    )


def measure_kind(report: Report, kind: str, model: Any, arguments: argparse.Namespace) -> None:
    config = PagerConfig(pool_tokens=POOL_TOKENS, rows=arguments.rows, host_bytes=0)
    stock = Batched(subjects.beside(model))
    continuous = Continuous(model, arguments.rows)
    with Engine(model, config, salt="alone") as one, Engine(model, config, salt="packed") as many:
        alone = measure_alone(kind, Packed(one), stock, arguments)
        packed = Packed(many)
        for sessions in arguments.sessions:
            measure_sessions(report, kind, sessions, packed, stock, continuous, alone, arguments)


def measure_sessions(
    report: Report,
    kind: str,
    sessions: int,
    packed: Packed,
    stock: Batched,
    continuous: Continuous,
    alone: Alone,
    arguments: argparse.Namespace,
) -> None:
    model, new_tokens = packed.engine.model, arguments.new_tokens
    continuous.run(draw_prompts(kind, model, sessions, seed=100 * sessions), new_tokens)
    # The compared run comes last; those before it have prompts that are not cached.
    fresh = iter(
        draw_prompts(kind, model, sessions, seed=seed)
        for seed in (*(100 * sessions + run for run in range(2, arguments.runs + 1)), 1)
    )
    turn: list[Prompt] = []

    def draw() -> None:
        nonlocal turn
        packed.drop()
        turn = next(fresh)

    turns: list[dict[str, Timing]] = []
    for _ in range(arguments.runs):
        draw()
        taken = harness.interleave(
            {
                "ours": Subject(lambda: packed.run(turn, new_tokens)),
                "stock": Subject(lambda: stock.run(turn, new_tokens)),
                "continuous": Subject(lambda: continuous.run(turn, new_tokens)),
            },
            runs=1,
            warm_up=0,
        )
        packed.require_whole(new_tokens)
        turns.append(taken)
    continuous.forget()
    timing, batch, paged = (
        Timing(tuple(taken[name].median for taken in turns))
        for name in ("ours", "stock", "continuous")
    )
    tokens = sessions * new_tokens
    bits = compare(packed.completions, alone.ours.completions)
    firsts = [completion.first_token_s for completion in packed.completions]
    compared = min(sessions, len(alone.texts))
    report.add(
        prompts=kind,
        sessions=sessions,
        prompt_tokens=sum(len(prompt) for prompt in turn),
        tokens_per_s=tokens / timing.median,
        spread=timing.spread,
        over_one_by_one=tokens / timing.median / alone.rate,
        rows_used=100 * packed.work["model_rows_used"] / packed.work["model_rows"],
        forwards=int(packed.work["model_forwards"]),
        first_token_s=statistics.median(first for first in firsts if first is not None),
        one_by_one_tokens_per_s=alone.rate,
        transformers_batch_tokens_per_s=tokens / batch.median,
        transformers_one_by_one_tokens_per_s=alone.stock_rate,
        over_transformers_batch=batch.median / timing.median,
        transformers_continuous_tokens_per_s=tokens / paged.median,
        over_transformers_continuous=paged.median / timing.median,
        bits_compared=bits.comparison.bits,
        differing_bits=bits.comparison.differing_bits,
        texts_compared=compared,
        texts_changed=bits.texts_changed,
        transformers_texts_changed=sum(
            a != b for a, b in zip(stock.texts[:compared], alone.texts[:compared], strict=True)
        ),
    )
    packed.drop()
    for how, seconds in (("a padded batch", batch.median), ("continuous batching", paged.median)):
        if sessions in JUDGED:
            report.compare(
                f"{sessions} {kind} prompts at a time, {arguments.subject} of {LAYERS} layers",
                ours=tokens / timing.median,
                theirs=tokens / seconds,
                peer=f"transformers, {how}",
                unit="tokens/s",
                aim=AHEAD,
            )
    print(
        f"{kind} {sessions}: {tokens / timing.median:.1f} tokens/s, transformers "
        f"{tokens / batch.median:.1f}, with continuous batching {tokens / paged.median:.1f}",
        flush=True,
    )


def judge(report: Report, kind: str, rows: int) -> None:
    mine = [row for row in report.rows if row["prompts"] == kind]
    filling = [row for row in mine if report.number(row, "sessions") <= rows]
    rates = [report.number(row, "tokens_per_s") for row in filling]
    report.judge(
        f"{kind}: tokens per second grow with sessions until the {rows} rows are full",
        all(later > 0.9 * earlier for earlier, later in itertools.pairwise(rates))
        and rates[-1] > rates[0],
        ", ".join(f"{row['sessions']}: {rate:.0f}/s" for row, rate in zip(filling, rates)),
    )
    differing = sum(report.number(row, "differing_bits") for row in mine)
    report.judge(
        f"{kind}: no bit of a session depends on what it was packed with",
        differing == 0,
        f"{differing:.0f} of {sum(report.number(row, 'bits_compared') for row in mine):,.0f} bits "
        "of tokens, log-probabilities and K/V differ",
    )


def main() -> None:
    parser = harness.cli(__doc__)
    parser.add_argument("--subject", default="gqa8-bf16", help="a model of subjects.py")
    parser.add_argument("--kinds", type=harness.parse_list, default=[SHORT, MIXED])
    parser.add_argument(
        "--sessions", type=harness.parse_ints, default=[1, 2, 4, 8, 16, 32, 64, 128]
    )
    parser.add_argument("--rows", type=int, default=DEFAULT_ROWS["cpu"][0], help="M")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--alone", type=int, default=6, help="prompts run one after the other")
    parser.add_argument("--runs", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.subject, arguments.sessions = subjects.SHIPPED, [1, 2, 8]
        arguments.rows, arguments.new_tokens, arguments.runs = 16, 8, 1
    record = harness.start(arguments)
    report = Report(
        harness.report_name("packing", arguments),
        f"Sessions packed into forwards of {arguments.rows} rows",
        COLUMNS,
        {
            "subject": arguments.subject,
            "layers": LAYERS,
            "rows": arguments.rows,
            "new_tokens": arguments.new_tokens,
            "short_tokens": SHORT_TOKENS,
            "mixed_tokens": list(MIXED_TOKENS),
            "runs": arguments.runs,
        },
        record,
    )
    model = subjects.load_model(arguments.subject, layers=LAYERS)
    for kind in arguments.kinds:
        measure_kind(report, kind, model, arguments)
        judge(report, kind, arguments.rows)
    report.finish()


if __name__ == "__main__":
    main()
