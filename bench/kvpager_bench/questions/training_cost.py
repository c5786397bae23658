"""What a training step costs with the rollout's bits, beside transformers' with SDPA.

    kvpager bench training_cost --
    kvpager bench training_cost -- --shapes 0.1b

Forward and backward of the same texts: one text, and a group of completions behind one prompt,
which transformers computes text by text. Processor time, which does not count waiting for a busy
machine's processors; the model's shape is that of SmolLM2-135M, all layers or the first ones.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from kvpager import Engine
from kvpager_bench import subjects
from kvpager_bench.harness import Column
from kvpager_bench.questions.training import GROUP, STOCK, Texts, stock_logprobs
from kvpager_bench.study import Asked, Option, Study, Table

SHAPES = {"0.1b": 30, "0.1b, 6 layers": 6}  # layers

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
)


def model_of(shape: str, dtype: str) -> Any:
    """Random weights in the shape of SmolLM2-135M."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=SHAPES[shape],
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
    )
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model = model.to(subjects.DTYPES[dtype]).eval()
    model.set_attn_implementation("sdpa")
    return model


def texts_of(kind: str, tokens: int) -> Texts:
    """One text, of which all but the first token count; or a group behind one prompt."""
    random = np.random.default_rng(0)
    if kind == "one text":
        ids = random.integers(3, 49000, tokens)
        return [(ids[:1], ids[1:])]
    prompt = random.integers(3, 49000, tokens)
    return [(prompt, random.integers(3, 49000, tokens // 16)) for _ in range(GROUP)]


def seconds(step: Callable[[], torch.Tensor], model: Any, repeats: int) -> float:
    """Processor time of a training step; the least of some, after one that is not counted."""
    found = []
    for _ in range(repeats + 1):
        start = time.process_time()
        loss = step()
        loss.backward()  # type: ignore[no-untyped-call]
        found.append(time.process_time() - start)
        model.zero_grad()
    return min(found[1:])


def stock_step(model: Any, texts: Texts) -> torch.Tensor:
    """Text by text, as little memory allows; the last one's loss is left to the caller."""
    losses = (stock_logprobs(model, *pair).sum() for pair in texts)
    for _ in texts[1:]:
        next(losses).backward()  # type: ignore[no-untyped-call]
    return next(losses)


def measure_cost(asked: Asked, shape: str, dtype: str, kind: str) -> None:
    texts, repeats = texts_of(kind, asked.options.tokens), asked.options.repeats
    model = model_of(shape, dtype)
    found = {STOCK: seconds(lambda: stock_step(model, texts), model, repeats)}
    for products in ("torch", "kvpager"):
        with Engine(model, pool_tokens=8192, linear=products) as engine:
            found[products] = seconds(
                lambda: torch.cat([one.logprobs for one in engine.logprobs(texts)]).sum(),
                model,
                repeats,
            )
        gc.collect()
    asked.report("training_cost").add(
        shape=shape,
        dtype=dtype,
        texts=kind,
        tokens=sum(len(prompt) + len(completion) for prompt, completion in texts),
        transformers_s=found[STOCK],
        kvpager_s=found["torch"],
        kvpager_own_s=found["kvpager"],
        ratio=found["torch"] / found[STOCK],
        own_ratio=found["kvpager"] / found[STOCK],
    )


def measure(asked: Asked) -> None:
    for shape in asked.options.shapes:
        for dtype in asked.options.dtypes:
            for kind in ("one text", f"{GROUP} behind a prompt"):
                measure_cost(asked, shape, dtype, kind)
    cost = asked.report()
    for row in cost.rows:
        group = row["texts"] != "one text"
        limit = 0.5 if group else 1.2
        cost.judge(
            f"{row['shape']}, {row['dtype']}, {row['texts']}: at most {limit} of transformers",
            cost.number(row, "ratio") <= limit,
            f"{cost.number(row, 'ratio'):.2f}; {cost.number(row, 'own_ratio'):.2f} with kvpager's "
            "own linear layers",
        )


STUDY = Study(
    measure,
    (Table("training_cost", "A training step, processor time", COST),),
    (
        Option("tokens", 2048, quick=128, help="of a text, or of a group's prompt"),
        Option("repeats", 2, quick=1),
        Option("shapes", ["0.1b, 6 layers"], full=list(SHAPES), among=SHAPES),
        Option("dtypes", ["fp32", "bf16"], quick=["fp32"], among=("fp32", "bf16")),
    ),
    {"transformers_attention": "sdpa"},
)

if __name__ == "__main__":
    STUDY.main()
