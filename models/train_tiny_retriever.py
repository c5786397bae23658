"""Trains or evaluates the tiny retrieval model that is shipped with kvpager.

    python models/train_tiny_retriever.py --out DIR           # the full recipe, 3650 steps
    python models/train_tiny_retriever.py --out DIR --smoke   # a few steps of every stage
    python models/train_tiny_retriever.py --evaluate DIR      # at 512, 4K and 16K tokens

The result is a stock SmolLM3ForCausalLM. See README.md beside this file for what it is good for.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from needle_batches import FILLER, VALUE, BatchSampler
from retriever_eval import BEST_CHUNKS, measure
from retriever_init import initialise_retriever
from torch import Tensor, nn
from training import COLDEST_SOFTMAX, Average, Curriculum, adam, jump, rate_factor
from transformers import SmolLM3Config, SmolLM3ForCausalLM

from kvpager.cli import needles
from kvpager.cli.needles import NeedleTask

OFFSET_STRENGTH = 4.0  # of the structured start: see retriever_init.py
MATCH_STRENGTH = 1.0

# 526,208 parameters; K/V of 2 KiB per token in fp32.
ARCHITECTURE: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "no_rope_layers": [1, 0],  # 1 means the layer has RoPE
    "layer_types": ["full_attention", "full_attention"],
    "use_sliding_window": False,
    "sliding_window": None,
    "attention_bias": True,
    "tie_word_embeddings": True,
    "initializer_range": 0.06,
    "pad_token_id": needles.PAD,
    "bos_token_id": needles.BOS,
    "eos_token_id": needles.END,
}


@dataclass(frozen=True)
class Stage:
    """One optimisation run: AdamW from zero moments, warm-up, flat rate, cosine to 2%."""

    steps: int
    learning_rate: float
    longest: int  # tokens the curriculum may reach
    salience: float  # weight of the key-salience term
    tokens_per_step: int = 8192


RECIPE = (
    Stage(steps=1200, learning_rate=2e-3, longest=512, salience=0.0),
    Stage(steps=800, learning_rate=1.5e-3, longest=1024, salience=0.1),
    Stage(steps=700, learning_rate=1e-3, longest=1024, salience=0.3),
    Stage(steps=950, learning_rate=1e-3, longest=1024, salience=0.15),
)


def build_model() -> SmolLM3ForCausalLM:
    """The architecture with random weights."""
    return SmolLM3ForCausalLM(SmolLM3Config(**ARCHITECTURE))


class Trainer:
    """Runs stages on one model; the curriculum's length carries over from stage to stage."""

    def __init__(self, model: SmolLM3ForCausalLM, seed: int) -> None:
        self.model = model
        self.sampler = BatchSampler(NeedleTask(model.config.vocab_size, seed), value_tokens=(2, 7))
        self.rng = np.random.default_rng([seed, 1])
        self.curriculum = Curriculum(self.rng)
        self._retrieval_keys: list[Tensor] = []
        # The layer without RoPE retrieves: its raw keys are what is attended to.
        self._retriever = model.model.layers[1].self_attn
        self._scaling = self._retriever.scaling

    def run(self, stage: Stage, name: str, report_every: int = 100) -> float:
        """Trains through `stage`, printing progress; returns the last smoothed loss."""
        hook = self._retriever.k_proj.register_forward_hook(
            lambda _module, _inputs, output: self._retrieval_keys.append(output)
        )
        optimiser = adam(self.model, stage.learning_rate)
        loss_average, accuracy_average = Average(), Average()
        started = time.monotonic()
        self.curriculum.begin()
        for step in range(1, stage.steps + 1):
            for group in optimiser.param_groups:
                group["lr"] = stage.learning_rate * rate_factor(step, stage.steps)
            loss, accuracy = self._step(stage, optimiser)
            loss_average.add(loss)
            accuracy_average.add(accuracy)
            self.curriculum.advance(step, accuracy_average.value, stage.longest)
            if step % report_every == 0 or step == stage.steps:
                print(
                    f"{name} step {step}/{stage.steps} up to {self.curriculum.longest} tokens: "
                    f"loss {loss_average.value:.4f}, token accuracy {accuracy_average.value:.4f}, "
                    f"{time.monotonic() - started:.0f} s",
                    flush=True,
                )
        hook.remove()
        for layer in self.model.model.layers:
            layer.self_attn.scaling = self._scaling
        return loss_average.value

    def _step(self, stage: Stage, optimiser: torch.optim.AdamW) -> tuple[float, float]:
        """One optimiser step; the answer loss and the token accuracy before it."""
        tokens = self.curriculum.draw()
        batch = self.sampler.batch(max(4, stage.tokens_per_step // tokens), tokens)
        positions = np.tile(np.arange(tokens), (len(batch.ids), 1))
        if self.curriculum.has_begun:
            for sequence, row in zip(batch.ids, positions, strict=True):
                starts = np.flatnonzero((sequence == needles.KEY) | (sequence == needles.QUESTION))
                jump(self.rng, row, starts)
            factor = self.rng.uniform(COLDEST_SOFTMAX, 1.0)
            for layer in self.model.model.layers:
                layer.self_attn.scaling = self._scaling * factor

        ids = torch.from_numpy(batch.ids)
        self._retrieval_keys.clear()
        states = self.model.model(
            input_ids=ids,
            position_ids=torch.from_numpy(positions),
            # No mask is causal by index; transformers would take jumps for packed sequences.
            attention_mask={"full_attention": None},
            use_cache=False,
        ).last_hidden_state
        row, column = torch.from_numpy(batch.parts).nonzero(as_tuple=True)
        logits, wanted = self.model.lm_head(states[row, column]), ids[row, column + 1]
        loss = nn.functional.cross_entropy(logits, wanted)
        total = loss
        if stage.salience:
            roles = torch.from_numpy(batch.roles)
            total = loss + stage.salience * key_salience(self._retrieval_keys[0], roles)

        optimiser.zero_grad(set_to_none=True)
        torch.autograd.backward(total)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        optimiser.step()
        accuracy = (logits.argmax(-1) == wanted).float().mean()
        return float(loss.detach()), float(accuracy)


def key_salience(keys: Tensor, roles: Tensor) -> Tensor:
    """Centred key energy of filler relative to that of values, a scalar to be kept small.

    keys: [B, T, kv_heads * head_dim]. roles: [B, T]. Knows nothing of chunks or of how they are
    summarised; it only asks that keys worth finding stand out from those that are not.
    """
    filler = keys[roles == FILLER]
    centre = filler.mean(0)
    return (filler - centre).square().mean() / (keys[roles == VALUE] - centre).square().mean()


def evaluate(path: Path, lengths: Sequence[int], needle_count: int, documents: int) -> None:
    """Prints exact match and chunk recall of the checkpoint at `path` for every length."""
    model = SmolLM3ForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="sdpa"
    )
    for tokens in lengths:
        started = time.monotonic()
        task = NeedleTask(model.config.vocab_size, seed=tokens)
        result = measure(model, task, tokens, needle_count, documents)
        recall = ", ".join(f"{name} {share:.2f}" for name, share in result.chunk_recall.items())
        print(
            f"{tokens} tokens, {needle_count} needles, n = {documents * needle_count}: "
            f"exact match {result.exact_match:.3f}; needle's chunk in the best {BEST_CHUNKS} by "
            f"{recall} ({time.monotonic() - started:.0f} s)",
            flush=True,
        )


def smoke_recipe() -> tuple[Stage, ...]:
    """Every stage of the recipe, a few small steps each."""
    return tuple(replace(stage, steps=12, tokens_per_step=768) for stage in RECIPE)


def train(out: Path, recipe: Sequence[Stage], seed: int) -> float:
    """Trains from the structured start, saving to `out` after every stage; the last loss."""
    torch.manual_seed(seed)
    model = build_model()
    initialise_retriever(model, offset_strength=OFFSET_STRENGTH, match_strength=MATCH_STRENGTH)
    trainer = Trainer(model, seed)
    loss = math.nan
    for number, stage in enumerate(recipe, 1):
        loss = trainer.run(stage, f"stage {number}/{len(recipe)}")
        model.save_pretrained(out)
    print(f"saved {out}")
    return loss


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    job = parser.add_mutually_exclusive_group(required=True)
    job.add_argument("--out", type=Path, metavar="DIR", help="train, and save the model here")
    job.add_argument("--evaluate", type=Path, metavar="DIR", help="evaluate the model saved here")
    parser.add_argument("--smoke", action="store_true", help="train a few steps per stage only")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (default 0)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[512, 4096, 16384], help="document tokens"
    )
    parser.add_argument("--needles", type=int, default=16, help="per document (default 16)")
    parser.add_argument("--documents", type=int, default=2, help="per length (default 2)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    if options.evaluate is not None:
        evaluate(options.evaluate, options.lengths, options.needles, options.documents)
    else:
        train(options.out, smoke_recipe() if options.smoke else RECIPE, options.seed)


if __name__ == "__main__":
    main()
