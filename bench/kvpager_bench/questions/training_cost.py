"""What a training step costs with the rollout's bits, beside transformers' with SDPA.

    kvpager bench training_cost --
    kvpager bench training_cost -- --shapes 0.1b

Forward and backward of the same texts, each way in a process of its own: one text, and a group of
completions behind one prompt, which transformers computes text by text. Processor time, which does
not count waiting for a busy machine's processors, and the memory that a step takes beside the
weights: gradients, activations, and kvpager's pool. Before a measured step all weights change, as
an optimiser changes them; `Engine.weights_changed` has a column of its own. Shapes of SmolLM2-135M
and Qwen3-0.6B with random weights, all layers or the first ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from kvpager import Engine
from kvpager_bench import harness, subjects
from kvpager_bench.harness import Column
from kvpager_bench.questions.training import GROUP, STOCK, Texts, stock_logprobs
from kvpager_bench.study import Asked, Option, Study, Table

COMMON = {"tie_word_embeddings": True, "max_position_embeddings": 8192}
SMOLLM2 = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
}
QWEN3 = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


class Shape(NamedTuple):
    """A model's shape. share: texts are as many times shorter than was asked for."""

    kind: Any
    config: dict[str, int]
    layers: int
    share: int


SHAPES = {
    "0.1b-6-layers": Shape(LlamaConfig, SMOLLM2, 6, 1),
    "0.6b-6-layers": Shape(Qwen3Config, QWEN3, 6, 4),
    "0.1b": Shape(LlamaConfig, SMOLLM2, 30, 1),
    "0.6b": Shape(Qwen3Config, QWEN3, 28, 4),
}
# What computes a step: transformers, kvpager with torch's linear layers, and with its own.
WAYS: dict[str, Any] = {STOCK: None, "torch": "torch", "kvpager": "kvpager"}

COST = (
    Column("shape", text=True),
    Column("dtype", text=True),
    Column("texts", text=True),
    Column("tokens"),
    Column("transformers_s", "s"),
    Column("kvpager_s", "s"),
    Column("kvpager_own_s", "s"),
    Column("ratio"),
    Column("own_ratio"),
    Column("transformers_mib", "MiB"),
    Column("kvpager_mib", "MiB"),
    Column("memory_ratio"),
    Column("weights_changed_s", "s"),
    Column("weights_changed_ratio"),
)


def model_of(shape: Shape, dtype: str) -> Any:
    config = shape.kind(**COMMON, **shape.config, num_hidden_layers=shape.layers)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model = model.to(subjects.DTYPES[dtype]).eval()
    model.set_attn_implementation("sdpa")
    return model


def texts_of(kind: str, tokens: int) -> Texts:
    """One text, of which all but the first token count; or a group behind half as long a prompt."""
    random = np.random.default_rng(0)
    if kind == "one text":
        ids = random.integers(3, 49000, tokens)
        return [(ids[:1], ids[1:])]
    prompt = random.integers(3, 49000, tokens // 2)
    return [(prompt, random.integers(3, 49000, tokens // 32)) for _ in range(GROUP)]


def stock_step(model: Any, texts: Texts) -> torch.Tensor:
    """Text by text, as little memory allows; the last one's loss is left to the caller."""
    losses = (stock_logprobs(model, *pair).sum() for pair in texts)
    for _ in texts[1:]:
        next(losses).backward()  # type: ignore[no-untyped-call]
    return next(losses)


def measured(
    step: Callable[[], torch.Tensor],
    model: Any,
    repeats: int,
    changed: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Memory of the first step, and the least processor time of those after it.

    changed: called when the weights have changed.
    """

    def run() -> None:
        model.zero_grad()
        step().backward()  # type: ignore[no-untyped-call]

    memory = harness.peak_growth(run)
    found, of_changes = [], []
    for _ in range(repeats):
        with torch.no_grad():
            torch._foreach_mul_([*model.parameters()], 0.999)  # as optimisers do
        start = time.process_time()
        changed()
        of_changes.append(time.process_time() - start)
        start = time.process_time()
        run()
        found.append(time.process_time() - start)
    return {"seconds": min(found), "bytes": memory, "changed": min(of_changes)}


def work(task: dict[str, Any]) -> dict[str, Any]:
    """A way's training steps."""
    model, texts = model_of(SHAPES[task["shape"]], task["dtype"]), texts_of(*task["texts"])
    if task["way"] == STOCK:
        return measured(lambda: stock_step(model, texts), model, task["repeats"])
    with Engine(model, pool_tokens=8192, linear=WAYS[task["way"]]) as engine:
        return measured(
            lambda: torch.cat([one.logprobs for one in engine.logprobs(texts)]).sum(),
            model,
            task["repeats"],
            engine.weights_changed,
        )


def measure_cost(asked: Asked, shape: str, dtype: str, kind: str) -> None:
    tokens = asked.options.tokens // SHAPES[shape].share
    task = {"shape": shape, "dtype": dtype, "texts": (kind, tokens)}
    found = {
        way: asked.work("step", way=way, repeats=asked.options.repeats, **task) for way in WAYS
    }
    seconds = {way: one["seconds"] for way, one in found.items()}
    memory = {way: one["bytes"] for way, one in found.items()}
    asked.report("training_cost").add(
        shape=shape,
        dtype=dtype,
        texts=kind,
        tokens=sum(len(prompt) + len(completion) for prompt, completion in texts_of(kind, tokens)),
        transformers_s=seconds[STOCK],
        kvpager_s=seconds["torch"],
        kvpager_own_s=seconds["kvpager"],
        ratio=seconds["torch"] / seconds[STOCK],
        own_ratio=seconds["kvpager"] / seconds[STOCK],
        transformers_mib=memory[STOCK] / 2**20,
        kvpager_mib=memory["torch"] / 2**20,
        memory_ratio=memory["torch"] / memory[STOCK],
        weights_changed_s=found["torch"]["changed"],
        weights_changed_ratio=found["torch"]["changed"] / seconds["torch"],
    )


def measure(asked: Asked) -> None:
    for shape in asked.options.shapes:
        for dtype in asked.options.dtypes:
            for kind in ("one text", f"{GROUP} behind a prompt"):
                measure_cost(asked, shape, dtype, kind)
    cost = asked.report()
    for row in cost.rows:
        one = row["texts"] == "one text"
        limit = 1.2 if one else 0.5
        what = f"{row['shape']}, {row['dtype']}, {row['texts']}"
        cost.judge(
            f"{what}: at most {limit} of transformers",
            cost.number(row, "ratio") <= limit,
            f"{cost.number(row, 'ratio'):.2f}; {cost.number(row, 'own_ratio'):.2f} with kvpager's "
            "own linear layers",
        )
        cost.judge(
            f"{what}: weights_changed takes at most 5% of a step",
            cost.number(row, "weights_changed_ratio") <= 0.05,
            f"{cost.number(row, 'weights_changed_ratio'):.1%}",
        )
        if one:
            cost.judge(
                f"{what}: a step takes at most 1.3 of transformers' memory",
                cost.number(row, "memory_ratio") <= 1.3,
                f"{cost.number(row, 'memory_ratio'):.2f}",
            )


STUDY = Study(
    measure,
    (Table("training_cost", "A training step: processor time and memory", COST),),
    (
        Option("tokens", 4096, quick=256, help="of a text; a group's prompt has half as many"),
        Option("repeats", 1),
        Option(
            "shapes",
            ["0.1b-6-layers", "0.6b-6-layers"],
            quick=["0.1b-6-layers"],
            full=list(SHAPES),
            among=SHAPES,
        ),
        Option("dtypes", ["fp32", "bf16"], quick=["fp32"], among=("fp32", "bf16")),
    ),
    {"transformers_attention": "sdpa"},
    {"step": work},
)

if __name__ == "__main__":
    STUDY.main()
