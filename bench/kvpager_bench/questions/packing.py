"""The gain of packing: tokens per second as sessions fill the rows of a forward, and beyond.

    kvpager bench packing --
    kvpager bench packing -- --sessions 1,8,64 --rows 64

`Engine.run` completes 1 to 128 prompts at a time with forwards of at most M rows: short prompts of
one length, and mixed ones. Beside it, in the same turns: stock transformers' `generate` on a batch
padded on the left and its `generate_batch`, which is continuous batching, with as many tokens to a
forward and room for all requests; and, once per kind of prompts, `run` on one prompt after
the other. Time is from the call to the last token, prefill included; tokens are those that were
generated.

Bits: tokens, log-probabilities and K/V of what was packed are compared with those of the same
prompt run alone in another engine. For transformers the texts are compared in the same way.
"""

from __future__ import annotations

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
from kvpager.requests.request import RequestCompletion
from kvpager.verify.bits import Comparison, compare_bits
from kvpager_bench import harness, subjects
from kvpager_bench.harness import Column, Report, Subject, Timing
from kvpager_bench.study import Asked, Option, Study, Table

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
        for layer in range(a.core.facts.layout.layers):
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
    """Prompts run one after the other, by us, and transformers' texts of them."""

    ours: Packed
    rate: float
    texts: list[list[int]]


def measure_alone(kind: str, ours: Packed, stock: Batched, o: Any) -> Alone:
    model = ours.engine.model
    prompts = draw_prompts(kind, model, min(o.alone, max(o.sessions)), seed=1)
    tokens = len(prompts) * o.new_tokens
    unseen = draw_prompts(kind, model, 1, seed=0)
    ours.run(unseen, o.new_tokens)
    ours.drop()
    stock.run(unseen, o.new_tokens)
    seconds, _ = harness.timed(lambda: ours.run(prompts, o.new_tokens, together=False))
    ours.require_whole(o.new_tokens)
    texts = []
    for prompt in prompts:
        stock.run([prompt], o.new_tokens)
        texts += stock.texts
    return Alone(ours, tokens / seconds, texts)


def measure_kind(report: Report, kind: str, model: Any, o: Any) -> None:
    config = PagerConfig(pool_tokens=POOL_TOKENS, rows=o.rows, host_bytes=0)
    stock = Batched(subjects.beside(model))
    continuous = Continuous(model, o.rows)
    with Engine(model, config, salt="alone") as one, Engine(model, config, salt="packed") as many:
        alone = measure_alone(kind, Packed(one), stock, o)
        packed = Packed(many)
        for sessions in o.sessions:
            measure_sessions(report, kind, sessions, packed, stock, continuous, alone, o)


def measure_sessions(
    report: Report,
    kind: str,
    sessions: int,
    packed: Packed,
    stock: Batched,
    continuous: Continuous,
    alone: Alone,
    o: Any,
) -> None:
    model, new_tokens = packed.engine.model, o.new_tokens
    continuous.run(draw_prompts(kind, model, sessions, seed=100 * sessions), new_tokens)
    # The compared run comes last; those before it have prompts that are not cached.
    fresh = iter(
        draw_prompts(kind, model, sessions, seed=seed)
        for seed in (*(100 * sessions + run for run in range(2, o.runs + 1)), 1)
    )
    turn: list[Prompt] = []

    def draw() -> None:
        nonlocal turn
        packed.drop()
        turn = next(fresh)

    turns: list[dict[str, Timing]] = []
    for _ in range(o.runs):
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
            rates = tokens / timing.median, tokens / seconds
            figure = f"{sessions} {kind} prompts at a time, {o.subject} of {LAYERS} layers"
            report.compare(figure, *rates, f"transformers, {how}", "tokens/s", AHEAD)


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


def measure(asked: Asked) -> None:
    o, report = asked.options, asked.report()
    model = subjects.load_model(o.subject, layers=LAYERS)
    for kind in o.kinds:
        measure_kind(report, kind, model, o)
        judge(report, kind, o.rows)


KINDS = (SHORT, MIXED)
STUDY = Study(
    measure,
    (Table("packing", "Sessions packed into forwards of {rows} rows", COLUMNS),),
    (
        Option("subject", "gqa8-bf16", subjects.SHIPPED, help="a model of subjects.py"),
        Option("kinds", KINDS, among=KINDS),
        Option("sessions", [1, 2, 4, 8, 16, 32, 64, 128], [1, 2, 8]),
        Option("rows", DEFAULT_ROWS["cpu"][0], 16, help="M"),
        Option("new-tokens", 32, 8),
        Option("alone", 6, help="prompts run one after the other"),
        Option("runs", 2, 1),
    ),
    {"layers": LAYERS, "short_tokens": SHORT_TOKENS, "mixed_tokens": list(MIXED_TOKENS)},
)

if __name__ == "__main__":
    STUDY.main()
