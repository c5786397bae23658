"""What linear layers cost with kvpager's own products, alone and in a whole model.

    kvpager bench linear
    kvpager bench linear -- --parts products --dtypes bf16
    kvpager bench linear -- --parts model

Products: one layer after another of matrices that no cache holds, of some rows, with kvpager's
products and with torch's by turns, each called from Python, beside reading as many bytes of memory.
"core_us" is of few rows in the core alone, as a decode step runs them, "compressed_us" the same
with lossless copies of the weights, which are bfloat16's in either dtype, and "cached_us" with one
matrix again and again, which is then in a cache. No product is faster than the longer of reading
its weights and that; "of_limit" is this limit beside "core_us". Model: a model of the
shape of Qwen3-0.6B with random weights decodes behind a short prompt, and computes a prompt on
memory that prompts before it used: an engine with kvpager's products, one that reads compressed
copies of its weights, one with torch's products, and transformers over the same weights, by turns;
"of_reading" is the time of reading the weights once, as they are, beside that of a step. llama.cpp
decodes with weights of the same shape and dtype in a process of its own, behind the prompt and
behind a long context of random K/V, all of which either attends to.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import torch
from transformers import DynamicCache

from kvpager import Engine, Session, _core
from kvpager._model.seam.linear import product
from kvpager._runtime.execution.operations import Memory, Op, step
from kvpager._runtime.execution.workers import new_workers
from kvpager_bench import harness, machine, subjects
from kvpager_bench.harness import Column, Report, Subject, Timing
from kvpager_bench.peers import llama
from kvpager_bench.study import Asked, Option, Study, Table

PARTS = ("products", "model")
SHAPES = ((1024, 3072), (3072, 1024), (1024, 1024))  # (depth, outputs)
ROWS = (1, 2, 4, 8, 16, 64, 256)
MATRICES_BYTES = 256 << 20
PROMPT = 256
PROMPTS_BEFORE = 7  # that are not timed: as many as it takes to have used all memory for K/V once
POOL_TOKENS = 2048
HOST_BYTES = 192 << 20
STEPS = 8  # tokens of a turn
FEW_ROWS = 16  # whose products are bound by reading weights
CONTEXTS = (8192,)  # of random K/V, beside llama.cpp
OF_MEMORY = 0.9  # aim of a few rows
OF_TORCH = 0.9  # and of many
DECODE_AIM = {"bf16": 3.0, "fp32": 2.0}  # times transformers
OF_READING = 0.8
LLAMA_AIM = 0.95
LLAMA_AIM_FAR = 1.0  # from 8K tokens on

PRODUCTS = (
    Column("dtype", text=True),
    Column("layer", text=True),
    Column("rows", "", 4),
    Column("us", "us"),
    Column("torch_us", "us"),
    Column("faster", "x torch", 2),
    Column("core_us", "us"),
    Column("compressed_us", "us", optional=True),
    Column("cached_us", "us", optional=True),
    Column("read_gbs", "GB/s of memory"),
    Column("of_memory", "", 2),
    Column("of_limit", "", 2, optional=True),
    Column("gflops", "GFLOP/s"),
    Column("spread", "(max-min)/median", 2),
)
MODEL = (
    Column("dtype", text=True),
    Column("subject", text=True),
    Column("tokens_per_s", "tokens/s"),
    Column("over_transformers", "x", 2),
    Column("of_reading", "", 2, optional=True),
    Column("prompt_s", "s of 256 tokens", 2, optional=True),
    Column("start_s", "s", 2, optional=True),
    Column("restart_s", "s", 2, optional=True),
    Column("spread", "(max-min)/median", 2),
)


def in_program(
    workers: _core.Workers,
    x: torch.Tensor,
    weights: torch.Tensor,
    copies: _core.CompressedWeights | None = None,
) -> Callable[[], object]:
    """One product after another as a decode step computes them: in the core, without Python."""
    memory = Memory()
    steps = [
        step(Op("linear", x.new_empty(len(x), weight.shape[0]), (x, weight, None)), memory)
        for weight in weights
    ]
    return partial(_core.Program(workers, steps, memory.tensors, [], copies).run, None, [])


def measure_products(dtype: str, report: Report, threads: int, rounds: int) -> None:
    kind = subjects.DTYPES[dtype]
    workers = new_workers(threads)
    memory = machine.MemoryReader()
    for depth, outputs in SHAPES:
        weight_bytes = depth * outputs * kind.itemsize
        copies = max(2, MATRICES_BYTES // weight_bytes)
        weights = torch.randn(copies, outputs, depth).to(torch.bfloat16).to(kind)
        compressed = _core.CompressedWeights()
        is_compressed = compressed.add(workers, weights)
        for rows in ROWS:
            x = torch.randn(rows, depth).to(kind)
            used = weights[: copies if rows <= FEW_ROWS else 2]

            def own(x: torch.Tensor = x, used: torch.Tensor = used) -> None:
                for weight in used:
                    product(workers, x, weight)

            def torchs(x: torch.Tensor = x, used: torch.Tensor = used) -> None:
                for weight in used:
                    torch.nn.functional.linear(x, weight)

            turns = {"own": Subject(own), "torch": Subject(torchs), "memory": Subject(memory)}
            if rows <= FEW_ROWS:
                turns["program"] = Subject(in_program(workers, x, used))
                one = used[:1].expand(len(used), -1, -1)
                turns["cached"] = Subject(in_program(workers, x, one))
                if is_compressed:
                    turns["compressed"] = Subject(in_program(workers, x, used, compressed))
            with torch.inference_mode():
                found = harness.interleave(turns, runs=rounds, warm_up=1)
            each = {name: timing.median / len(used) for name, timing in found.items()}
            ours, theirs, alone = each["own"], each["torch"], each.get("program", each["own"])
            cached, unpacked = each.get("cached"), each.get("compressed")
            bandwidth = memory.bytes / found["memory"].median
            reading = weight_bytes / bandwidth
            work = 2 * depth * outputs * rows
            report.add(
                dtype=dtype,
                layer=f"{depth} to {outputs}",
                rows=rows,
                us=ours * 1e6,
                torch_us=theirs * 1e6,
                faster=theirs / ours,
                core_us=alone * 1e6,
                compressed_us=unpacked * 1e6 if unpacked else harness.NOT_APPLICABLE,
                cached_us=cached * 1e6 if cached else harness.NOT_APPLICABLE,
                read_gbs=bandwidth * 1e-9,
                of_memory=reading / alone,
                of_limit=max(reading, cached) / alone if cached else harness.NOT_APPLICABLE,
                gflops=work / ours * 1e-9,
                spread=found["own"].spread,
            )
            what = f"linear layer of {depth} to {outputs}, {rows} rows, {dtype}"
            if rows == max(ROWS):
                us = ours * 1e6, theirs * 1e6
                report.compare(what, *us, "torch", "us", OF_TORCH, lower_is_better=True)
            if rows == 1:
                gbs = weight_bytes / alone * 1e-9, bandwidth * 1e-9
                report.compare(what, *gbs, "memory bandwidth", "GB/s", OF_MEMORY)
                if unpacked:
                    us = unpacked * 1e6, alone * 1e6
                    figure, peer = f"{what}, compressed weights", "the weights as they are"
                    report.compare(figure, *us, peer, "us", lower_is_better=True)


STOCK, MODULES = "transformers", "kvpager, module by module"
COMPRESSED = "kvpager, compressed weights"
# Engines by what is said of them: their options.
ENGINES: Mapping[str, Mapping[str, Any]] = {
    "kvpager": {"linear": "kvpager"},
    COMPRESSED: {"linear": "kvpager", "compress_weights": True},
    MODULES: {"linear": "kvpager", "graphs": False},
    "torch": {"linear": "torch"},
}


def started(model: Any, options: Mapping[str, Any], proofs: str) -> tuple[Engine, float]:
    """An engine of a model, and the seconds that it took to start.

    proofs: the folder of those that it remembers, empty before the first start.
    """
    with mock.patch.dict(os.environ, {"KVPAGER_CACHE": proofs}):
        make = partial(Engine, model, pool_tokens=POOL_TOKENS, host_bytes=HOST_BYTES, **options)
        seconds, engine = harness.timed(make)
        return engine, seconds


def said(name: str) -> str:
    """Of an engine: "kvpager's products, module by module"."""
    whose, *how = name.split(", ")
    return ", ".join([f"{whose}'s products", *how])


def decoded_far(model: Any, context: int, rounds: int) -> Timing:
    """Seconds per token behind so many tokens of random K/V, with all of them in the pool."""
    room = context + PROMPT + STEPS * (rounds + 1)
    pool_tokens = -(-room // 64) * 64
    with Engine(model, pool_tokens=pool_tokens, linear="kvpager") as engine:
        subjects.record_steps(engine)
        session = engine.session()
        subjects.inject(session.sequence, engine.layout, context)
        turn = Subject(partial(session.generate, STEPS, eos=None))
        return harness.interleave({"far": turn}, runs=rounds, warm_up=1)["far"].per(STEPS)


def stock_steps(model: Any, cache: DynamicCache, steps: int) -> None:
    for _ in range(steps):
        subjects.stock_step(model, cache, [9])


def prompt_time(compute: Callable[[int], object], rounds: int) -> Timing:
    """Of a prompt that is another one each time."""
    seconds = [
        harness.timed(partial(compute, number))[0] for number in range(PROMPTS_BEFORE + rounds)
    ]
    return Timing(tuple(seconds[PROMPTS_BEFORE:]))


def stock_prompt(model: Any, number: int) -> None:
    subjects.stock_prefill(model, subjects.random_ids(model, PROMPT, seed=number + 1))


def computed(engine: Engine, number: int) -> None:
    with engine.session() as session:
        session.prefill(subjects.random_ids(engine.model, PROMPT, seed=number + 1))


def measure_model(dtype: str, report: Report, threads: int, rounds: int, *, peer: bool) -> None:
    model = subjects.load_model(f"0.6b-{dtype}")
    weight_bytes = sum(tensor.nbytes for tensor in model.parameters())
    memory = machine.MemoryReader()
    engines: dict[str, Engine] = {}
    starts: dict[str, tuple[Any, float]] = {}
    with ExitStack() as stack, torch.inference_mode():
        proofs = stack.enter_context(tempfile.TemporaryDirectory())
        for name, options in ENGINES.items():
            first, cold = started(model, options, proofs)
            first.close()
            engines[name], warm = started(model, options, proofs)
            stack.callback(engines[name].close)
            subjects.record_steps(engines[name])
            if name in ("kvpager", "torch"):  # others are proven before, by the first of these
                starts[name] = cold, warm
            elif name == COMPRESSED:
                starts[name] = harness.NOT_APPLICABLE, warm
        ids = subjects.random_ids(model, PROMPT)
        sessions: dict[str, Session] = {name: one.session() for name, one in engines.items()}
        for session in sessions.values():
            session.prefill(ids)
        stock = subjects.beside(model)
        cache, _ = subjects.stock_prefill(stock, ids)

        turns = {n: Subject(partial(s.generate, STEPS, eos=None)) for n, s in sessions.items()}
        turns[STOCK] = Subject(partial(stock_steps, stock, cache, STEPS))
        found = harness.interleave({**turns, "memory": Subject(memory)}, runs=rounds, warm_up=1)
        prompts = {n: prompt_time(partial(computed, one), rounds) for n, one in engines.items()}
        prompts[STOCK] = prompt_time(partial(stock_prompt, stock), rounds)
    reading = weight_bytes * found["memory"].median / memory.bytes
    steps = {name: found[name].median / STEPS for name in turns}
    for name, seconds in steps.items():
        start, restart = starts.get(name, (harness.NOT_APPLICABLE, harness.NOT_APPLICABLE))
        report.add(
            dtype=dtype,
            subject=name if name == STOCK else f"engine, {said(name)}",
            tokens_per_s=1 / seconds,
            over_transformers=steps[STOCK] / seconds,
            of_reading=reading / seconds,
            prompt_s=prompts[name].median,
            start_s=start,
            restart_s=restart,
            spread=found[name].spread,
        )
    judge(report, dtype, steps, reading, prompts)
    restarts = starts["kvpager"][1], starts["kvpager"][0]
    figure = f"second start of an engine, {dtype}"
    report.compare(figure, *restarts, "its first", "s", lower_is_better=True)
    if not peer:
        return
    shape = llama.shape_of(model)
    del stock, engines, sessions, turns
    ours = {PROMPT: steps["kvpager"]}
    for context in CONTEXTS:
        ours[context] = decoded_far(model, context, rounds).median
    del model
    decoded = llama.decode(shape, list(ours), threads=threads, tokens=STEPS, runs=rounds)
    for context, ours_s in ours.items():
        near = context == PROMPT
        figure = f"decode, {dtype}" if near else f"decode behind {context} tokens, {dtype}"
        rates = 1 / ours_s, 1 / decoded[context].median
        aim = LLAMA_AIM if near else LLAMA_AIM_FAR
        report.compare(figure, *rates, llama.title(), "tokens/s", aim)
    rates = 1 / steps[COMPRESSED], 1 / decoded[PROMPT].median
    report.compare(f"decode, compressed weights, {dtype}", *rates, llama.title(), "tokens/s")


def judge(
    report: Report,
    dtype: str,
    steps: Mapping[str, float],
    reading: float,
    prompts: Mapping[str, Timing],
) -> None:
    """Puts the model's times beside their peers'."""
    for figure, ours, peer, theirs, aim in (
        ("decode", "kvpager", STOCK, steps[STOCK], None),
        ("decode", "kvpager", "kvpager, torch's products", steps["torch"], None),
        ("decode", "kvpager", MODULES, steps[MODULES], None),
        ("decode", "kvpager", "reading the weights", reading, OF_READING),
        ("decode, compressed weights", COMPRESSED, STOCK, steps[STOCK], DECODE_AIM[dtype]),
        ("decode, compressed weights", COMPRESSED, "kvpager", steps["kvpager"], None),
        (
            "decode, compressed weights",
            COMPRESSED,
            "reading the weights as they are",
            reading,
            None,
        ),
    ):
        rates = 1 / steps[ours], 1 / theirs
        report.compare(f"{figure}, {dtype}", *rates, peer, "tokens/s", aim)
    for name, peer, aim in (("torch", "kvpager, torch's products", 1.0), (STOCK, STOCK, None)):
        seconds = prompts["kvpager"].median, prompts[name].median
        figure = f"a prompt of {PROMPT} tokens, {dtype}"
        report.compare(figure, *seconds, peer, "s", aim, lower_is_better=True)


def measure(asked: Asked) -> None:
    o = asked.options
    for dtype in o.dtypes if "products" in o.parts else ():
        measure_products(dtype, asked.report("linear"), asked.threads, o.rounds)
    if "model" not in o.parts:
        return
    report, reason = asked.report("linear_model"), llama.missing()
    if reason and not asked.quick:
        report.skip(llama.title(), reason)
    for dtype in o.dtypes:
        peer = not (asked.quick or reason)
        measure_model(dtype, report, asked.threads, o.rounds, peer=peer)


STUDY = Study(
    measure,
    (
        Table("linear", "What do linear layers cost?", PRODUCTS),
        Table("linear_model", "What does a model cost with kvpager's linear layers?", MODEL),
    ),
    (
        Option("parts", PARTS, among=PARTS),
        Option("dtypes", ["bf16", "fp32"]),
        Option("rounds", 7, quick=3),
    ),
    {"rows": list(ROWS), "prompt": PROMPT, "steps": STEPS},
)

if __name__ == "__main__":
    STUDY.main()
