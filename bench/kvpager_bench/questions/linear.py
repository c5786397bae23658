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
"of_reading" is the time of reading the weights once, as they are, beside that of a step. "Beside
Python" they decode while another thread runs Python without pause, as a server's do that parses or
tokenizes: who takes the interpreter's lock again in a step waits for it each time. llama.cpp
decodes with weights of the same shape and dtype in a process of its own, behind the prompt and
behind a long context of random K/V, all of which either attends to.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from transformers import DynamicCache

from kvpager import Engine, Session, _core
from kvpager.execution.operations import Memory, Op, step
from kvpager.execution.workers import new_workers
from kvpager.hf.linear import product
from kvpager_bench import harness, machine, subjects
from kvpager_bench.harness import Column, Report, Subject, Timing
from kvpager_bench.peers import llama

PARTS = ("products", "model")
SHAPES = ((1024, 3072), (3072, 1024), (1024, 1024))  # (depth, outputs)
ROWS = (1, 2, 4, 8, 16, 64, 256)
MATRICES_BYTES = 256 << 20
PROMPT = 256
PROMPTS_BEFORE = 7  # that are not timed: as many as it takes to have used all memory for K/V once
POOL_TOKENS = 2048
HOST_BYTES = 192 << 20
STEPS = 8  # tokens of a turn
ROUNDS_BESIDE = 2  # of one token each, which takes transformers 20 s beside a thread of Python
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
    memory = machine.MemoryReader(threads)
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
                report.compare(
                    what,
                    ours=ours * 1e6,
                    theirs=theirs * 1e6,
                    peer="torch",
                    unit="us",
                    aim=OF_TORCH,
                    lower_is_better=True,
                )
            if rows == 1:
                report.compare(
                    what,
                    ours=weight_bytes / alone * 1e-9,
                    theirs=bandwidth * 1e-9,
                    peer="memory bandwidth",
                    unit="GB/s",
                    aim=OF_MEMORY,
                )
                if unpacked:
                    report.compare(
                        f"{what}, compressed weights",
                        ours=unpacked * 1e6,
                        theirs=alone * 1e6,
                        peer="the weights as they are",
                        unit="us",
                        aim=None,
                        lower_is_better=True,
                    )
            print(f"{what}: {theirs / ours:.2f} x torch", flush=True)


COMPRESSED = "kvpager, compressed weights"
# Engines by what is said of them: their options.
ENGINES: Mapping[str, Mapping[str, Any]] = {
    "kvpager": {"linear": "kvpager"},
    COMPRESSED: {"linear": "kvpager", "compress_weights": True},
    "kvpager, module by module": {"linear": "kvpager", "graphs": False},
    "torch": {"linear": "torch"},
}


def started(model: Any, options: Mapping[str, Any], proofs: str) -> tuple[Engine, float]:
    """An engine of a model, and the seconds that it took to start.

    proofs: the folder of those that it remembers, empty before the first start.
    """
    with mock.patch.dict(os.environ, {"KVPAGER_CACHE": proofs}):
        begun = time.perf_counter()
        engine = Engine(model, pool_tokens=POOL_TOKENS, host_bytes=HOST_BYTES, **options)
        return engine, time.perf_counter() - begun


def said(name: str) -> str:
    """Of an engine: "kvpager's products, module by module"."""
    whose, *how = name.split(", ")
    return ", ".join([f"{whose}'s products", *how])


@contextmanager
def python_beside() -> Iterator[None]:
    """Another thread runs Python without pause as long as the block does."""
    ended = threading.Event()

    def work() -> None:
        number = 0
        while not ended.is_set():
            number = (number * 3 + 1) % 1_000_003

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def decoded_far(model: Any, context: int, rounds: int) -> Timing:
    """Seconds per token behind so many tokens of random K/V, with all of them in the pool."""
    room = context + PROMPT + STEPS * (rounds + 1)
    pool_tokens = -(-room // 64) * 64
    with Engine(model, pool_tokens=pool_tokens, linear="kvpager") as engine:
        subjects.record_steps(engine)
        session = engine.session()
        subjects.inject(session.sequence, engine.layout, context)
        turn = Subject(partial(session.generate, STEPS, eos=None))
        found = harness.interleave({"far": turn}, runs=rounds, warm_up=1)["far"]
    return Timing(tuple(seconds / STEPS for seconds in found.runs))


def stock_steps(model: Any, cache: DynamicCache, steps: int) -> None:
    for _ in range(steps):
        subjects.stock_step(model, cache, [9])


def prompt_time(compute: Callable[[int], object], rounds: int) -> Timing:
    """Of a prompt that is another one each time."""
    seconds = []
    for number in range(PROMPTS_BEFORE + rounds):
        begun = time.perf_counter()
        compute(number)
        seconds.append(time.perf_counter() - begun)
    return Timing(tuple(seconds[PROMPTS_BEFORE:]))


def computed(engine: Engine, number: int) -> None:
    with engine.session() as session:
        session.prefill(subjects.random_ids(engine.model, PROMPT, seed=number + 1))


def measure_model(dtype: str, report: Report, threads: int, rounds: int, *, peer: bool) -> None:
    model = subjects.load_model(f"0.6b-{dtype}")
    weight_bytes = sum(tensor.nbytes for tensor in model.parameters())
    memory = machine.MemoryReader(threads)
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

        def decoding(name: str, steps: int) -> Subject:
            if name == "transformers":
                return Subject(partial(stock_steps, stock, cache, steps))
            return Subject(partial(sessions[name].generate, steps, eos=None))

        turns = {name: decoding(name, STEPS) for name in (*engines, "transformers")}
        turns["memory"] = Subject(memory)
        found = harness.interleave(turns, runs=rounds, warm_up=1)
        slow = {name: decoding(name, 1) for name in ("kvpager", "transformers")}
        with python_beside():
            beside = harness.interleave(slow, runs=ROUNDS_BESIDE, warm_up=0)
        prompts = {
            name: prompt_time(partial(computed, engine), rounds) for name, engine in engines.items()
        }

        def stock_prompt(number: int) -> None:
            subjects.stock_prefill(stock, subjects.random_ids(model, PROMPT, seed=number + 1))

        prompts["transformers"] = prompt_time(stock_prompt, rounds)
    reading = weight_bytes * found["memory"].median / memory.bytes
    steps = {name: found[name].median / STEPS for name in (*engines, "transformers")}
    for name, seconds in steps.items():
        known = starts.get(name)
        report.add(
            dtype=dtype,
            subject=name if name == "transformers" else f"engine, {said(name)}",
            tokens_per_s=1 / seconds,
            over_transformers=steps["transformers"] / seconds,
            of_reading=reading / seconds,
            prompt_s=prompts[name].median,
            start_s=known[0] if known else harness.NOT_APPLICABLE,
            restart_s=known[1] if known else harness.NOT_APPLICABLE,
            spread=found[name].spread,
        )
        print(
            f"{dtype} {name}: {1 / seconds:.2f} tokens/s, {reading / seconds:.2f} of reading",
            flush=True,
        )
    judge(report, dtype, steps, reading, prompts)
    judge_beside(report, dtype, steps["kvpager"], beside)
    report.compare(
        f"second start of an engine, {dtype}",
        ours=starts["kvpager"][1],
        theirs=starts["kvpager"][0],
        peer="its first",
        unit="s",
        aim=None,
        lower_is_better=True,
    )
    if peer:
        shape = llama.shape_of(model)
        del stock, engines, sessions
        ours = {PROMPT: steps["kvpager"]}
        for context in CONTEXTS:
            ours[context] = decoded_far(model, context, rounds).median
        del model
        decoded = llama.decode(shape, list(ours), threads=threads, tokens=STEPS, runs=rounds)
        for context, step in ours.items():
            near = context == PROMPT
            report.compare(
                f"decode, {dtype}" if near else f"decode behind {context} tokens, {dtype}",
                ours=1 / step,
                theirs=1 / decoded[context].median,
                peer=llama.title(),
                unit="tokens/s",
                aim=LLAMA_AIM if near else LLAMA_AIM_FAR,
            )
        report.compare(
            f"decode, compressed weights, {dtype}",
            ours=1 / steps[COMPRESSED],
            theirs=1 / decoded[PROMPT].median,
            peer=llama.title(),
            unit="tokens/s",
            aim=None,
        )


def judge_beside(report: Report, dtype: str, alone: float, found: Mapping[str, Timing]) -> None:
    """Adds what decodes beside a thread of Python. alone: seconds of our step without."""
    beside = {name: timing.median for name, timing in found.items()}
    for name, seconds in beside.items():
        engine = name if name == "transformers" else f"engine, {said(name)}"
        report.add(
            dtype=dtype,
            subject=f"{engine}, beside Python",
            tokens_per_s=1 / seconds,
            over_transformers=beside["transformers"] / seconds,
            of_reading=harness.NOT_APPLICABLE,
            prompt_s=harness.NOT_APPLICABLE,
            start_s=harness.NOT_APPLICABLE,
            restart_s=harness.NOT_APPLICABLE,
            spread=found[name].spread,
        )
    for peer, theirs in (("transformers", beside["transformers"]), ("kvpager alone", alone)):
        report.compare(
            f"decode beside a thread of Python, {dtype}",
            ours=1 / beside["kvpager"],
            theirs=1 / theirs,
            peer=peer,
            unit="tokens/s",
            aim=None,
        )


def judge(
    report: Report,
    dtype: str,
    steps: Mapping[str, float],
    reading: float,
    prompts: Mapping[str, Timing],
) -> None:
    """Puts the model's times beside their peers'."""
    ours = 1 / steps["kvpager"]
    for peer, theirs, aim in (
        ("transformers", 1 / steps["transformers"], None),
        ("kvpager, torch's products", 1 / steps["torch"], None),
        ("kvpager, module by module", 1 / steps["kvpager, module by module"], None),
        ("reading the weights", 1 / reading, OF_READING),
    ):
        report.compare(
            f"decode, {dtype}", ours=ours, theirs=theirs, peer=peer, unit="tokens/s", aim=aim
        )
    for peer, theirs, aim in (
        ("transformers", 1 / steps["transformers"], DECODE_AIM[dtype]),
        ("kvpager", ours, None),
        ("reading the weights as they are", 1 / reading, None),
    ):
        report.compare(
            f"decode, compressed weights, {dtype}",
            ours=1 / steps[COMPRESSED],
            theirs=theirs,
            peer=peer,
            unit="tokens/s",
            aim=aim,
        )
    for name, peer, aim in (
        ("torch", "kvpager, torch's products", 1.0),
        ("transformers", "transformers", None),
    ):
        report.compare(
            f"a prompt of {PROMPT} tokens, {dtype}",
            ours=prompts["kvpager"].median,
            theirs=prompts[name].median,
            peer=peer,
            unit="s",
            aim=aim,
            lower_is_better=True,
        )


def main() -> None:
    parser = harness.cli(__doc__)
    parser.add_argument("--parts", type=harness.parse_list, default=list(PARTS))
    parser.add_argument("--dtypes", type=harness.parse_list, default=["bf16", "fp32"])
    arguments: argparse.Namespace = parser.parse_args()
    environment = harness.start(arguments)
    rounds = 3 if arguments.quick else 7
    for part in arguments.parts:
        report = Report(
            harness.report_name("linear" if part == "products" else "linear_model", arguments),
            "What do linear layers cost?"
            if part == "products"
            else "What does a model cost with kvpager's linear layers?",
            PRODUCTS if part == "products" else MODEL,
            {"dtypes": arguments.dtypes, "rows": list(ROWS), "prompt": PROMPT, "steps": STEPS},
            environment,
        )
        peer = part == "model" and not arguments.quick
        if peer and (reason := llama.missing()):
            report.skip(llama.title(), reason)
            peer = False
        for dtype in arguments.dtypes:
            if part == "products":
                measure_products(dtype, report, arguments.threads, rounds)
            else:
                measure_model(dtype, report, arguments.threads, rounds, peer=peer)
        report.finish()


if __name__ == "__main__":
    main()
