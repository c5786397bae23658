"""A mixture of experts on a CPU: decode and prefill beside the ways that transformers runs them.

    kvpager bench experts
    kvpager bench experts -- --dtypes bf16 --experts 64

One session of a Qwen3-MoE shape with random weights. transformers runs its experts in three ways:
"eager" and "grouped_mm" multiply rows that share an expert together, in another order of
operations for each number of them, and "batched_mm" copies the matrices of every row's experts
first, which is all that exactness could be had with where kvpager's products are not used. A
prefill with it takes minutes at these sizes, and is left out. Before anything is timed, tokens that
are decoded one by one beside another session have to have the bits of a prefill.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import torch
import transformers

from kvpager import Engine
from kvpager.hf.weights import has_expert_weights as is_experts
from kvpager.verify.bits import compare_bits
from kvpager_bench import harness, subjects
from kvpager_bench.harness import NOT_APPLICABLE, Column, Report, Subject

OURS = "kvpager"
WAYS = ("eager", "grouped_mm", "batched_mm")
CONTEXT = 256
CHECKED = 24  # tokens whose bits are compared
AIM = 1.0

COLUMNS = (
    Column("dtype", text=True),
    Column("way", text=True),
    Column("weights_mib", "MiB"),
    Column("decode_ms", "ms"),
    Column("decode_spread", "(max-min)/median", 2),
    Column("prefill_tokens_per_s", "1/s", optional=True),
    Column("prefill_spread", "(max-min)/median", 2, optional=True),
    Column("start_s", "s", optional=True),
)


def make_model(dtype: str, arguments: argparse.Namespace) -> Any:
    """The shape with random weights."""
    config: Any = transformers.AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=4096,
        hidden_size=arguments.hidden,
        intermediate_size=2 * arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // 64,
        num_key_value_heads=max(1, arguments.hidden // 256),
        head_dim=64,
        num_experts=arguments.experts,
        num_experts_per_tok=arguments.chosen,
        moe_intermediate_size=arguments.hidden // 2,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(config, dtype=subjects.DTYPES[dtype])
    return model.eval()


class Ours:
    """An engine, however transformers would run the experts."""

    def __init__(self, model: Any) -> None:
        start = time.perf_counter()
        self.engine = Engine(model, pool_tokens=4 * (CONTEXT + 256))
        self.start_seconds = time.perf_counter() - start
        self._check(model)
        subjects.record_steps(self.engine)
        self._base = self.engine.session()
        self._base.prefill(subjects.random_ids(model, CONTEXT))
        self._stream: Iterator[int] = iter(())
        self._model, self._drawn = model, 0

    def _check(self, model: Any) -> None:
        ids = subjects.random_ids(model, CHECKED + 8, seed=9)
        with self.engine.session() as whole, self.engine.session() as stepwise:
            whole.prefill(ids)
            stepwise.prefill(ids[:8])
            for at in range(8, len(ids)):
                stepwise.append(ids[at : at + 1])
            if not compare_bits(stepwise.logits, whole.logits, "logits").same:
                raise harness.NondeterministicSubjectError("decoded tokens have other bits")

    def decoding(self, tokens: int) -> Subject:
        def before() -> None:
            session = self._base.fork()
            self._stream = session.generate(tokens + 2, eos=None, stream="tokens")
            next(self._stream)
            next(self._stream)

        def call() -> None:
            for _ in range(tokens):
                next(self._stream)

        return Subject(call, before)

    def prefilling(self) -> Subject:
        def call() -> None:
            self._drawn += 1
            with self.engine.session() as session:
                session.prefill(subjects.random_ids(self._model, CONTEXT, seed=self._drawn))

        return Subject(call)


class Stock:
    """transformers, with one way to run experts."""

    def __init__(self, model: Any, way: str) -> None:
        self._model = subjects.beside(model)
        self._model.set_experts_implementation(way)
        told = {m.config._experts_implementation for m in self._model.modules() if is_experts(m)}  # noqa: SLF001
        assert told == {way}
        self._ids = subjects.random_ids(model, CONTEXT)
        self._cache, _ = subjects.stock_prefill(self._model, self._ids[:8])

    def decoding(self, tokens: int) -> Subject:
        def call() -> None:
            for token in range(tokens):
                subjects.stock_step(self._model, self._cache, [token + 8])

        return Subject(call)

    def prefilling(self) -> Subject:
        return Subject(lambda: subjects.stock_prefill(self._model, self._ids))


def measure(report: Report, dtype: str, arguments: argparse.Namespace) -> None:
    """One dtype: every way, by turns."""
    model = make_model(dtype, arguments)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    stock = {way: Stock(model, way) for way in WAYS}
    ours = Ours(model)
    try:
        decodes = harness.interleave(
            {OURS: ours.decoding(arguments.steps)}
            | {way: one.decoding(arguments.steps) for way, one in stock.items()},
            runs=arguments.runs,
            warm_up=1,
        )
        prefills = harness.interleave(
            {OURS: ours.prefilling()}
            | {way: one.prefilling() for way, one in stock.items() if way != "batched_mm"},
            runs=arguments.runs,
            warm_up=1,
        )
    finally:
        ours.engine.close()
    for way, decode in decodes.items():
        prefill = prefills.get(way)
        report.add(
            dtype=dtype,
            way=way,
            weights_mib=weights / 2**20,
            decode_ms=1e3 * decode.median / arguments.steps,
            decode_spread=decode.spread,
            prefill_tokens_per_s=NOT_APPLICABLE if prefill is None else CONTEXT / prefill.median,
            prefill_spread=NOT_APPLICABLE if prefill is None else prefill.spread,
            start_s=ours.start_seconds if way == OURS else NOT_APPLICABLE,
        )
    for what, times, per in (("decode", decodes, arguments.steps), ("prefill", prefills, CONTEXT)):
        for way in WAYS:
            if way in times:
                report.compare(
                    f"{what} of a mixture, {dtype}",
                    ours=per / times[OURS].median,
                    theirs=per / times[way].median,
                    peer=f"transformers, {way}",
                    unit="tokens/s",
                    aim=AIM,
                )


def main() -> None:
    parser = harness.cli(__doc__)
    parser.add_argument("--dtypes", type=harness.parse_list, default=["bf16", "fp32"])
    parser.add_argument("--hidden", type=int, default=1024, help="a multiple of 256")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=32, help="of a layer")
    parser.add_argument("--chosen", type=int, default=8, help="experts that a token takes")
    parser.add_argument("--steps", type=int, default=8, help="tokens decoded at a time")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.hidden, arguments.layers, arguments.experts, arguments.runs = 256, 2, 8, 1
        arguments.chosen = 2
    record = harness.start(arguments)
    report = Report(
        harness.report_name("experts", arguments),
        "Mixtures of experts on a CPU: decode and prefill by how experts run",
        COLUMNS,
        {
            "context": CONTEXT,
            **{key: getattr(arguments, key) for key in ("hidden", "layers", "experts", "chosen")},
            "steps": arguments.steps,
            "runs": arguments.runs,
        },
        record,
    )
    for dtype in arguments.dtypes:
        measure(report, dtype, arguments)
    report.finish()


if __name__ == "__main__":
    main()
