"""Trains or evaluates the tiny two-hop model that is shipped with kvpager.

    PYTHONPATH=bench python models/train_two_hop.py --out DIR           # the full recipe, 600 steps
    PYTHONPATH=bench python models/train_two_hop.py --out DIR --smoke   # a few steps
    PYTHONPATH=bench python models/train_two_hop.py --evaluate DIR      # at 1K, 4K and 16K tokens

The result is a stock SmolLM3ForCausalLM. See README.md beside this file for what it is good for.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from training import COLDEST_SOFTMAX, Average, Curriculum, adam, jump, rate_factor
from transformers import SmolLM3Config, SmolLM3ForCausalLM
from two_hop_batches import ANSWER_END, VALUE, TwoHopSampler
from two_hop_eval import measure
from two_hop_init import initialise_two_hop
from two_hop_task import TwoHopTask

from kvpager.cli import needles

OFFSET_STRENGTH = 6.0  # of the structured start: see two_hop_init.py
MATCH_STRENGTH = 1.5
BLIND_SHARE = 0.7  # of batches in which questions see the document in the last layer alone
END_WEIGHT = 0.1  # of `<E>` in the loss, which is easy beside values
DOCUMENT_TOKENS = 512  # of a document in the evaluation, on average

# 724,608 parameters; K/V of 4 KiB per token in fp32.
ARCHITECTURE: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "no_rope_layers": [1, 0, 1, 0],  # 1 means the layer has RoPE
    "layer_types": ["full_attention"] * 4,
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
class Recipe:
    """One optimisation run: AdamW from zero moments, warm-up, flat rate, cosine to 2%."""

    steps: int
    learning_rate: float
    longest: int  # tokens the curriculum may reach
    tokens_per_step: int


RECIPE = Recipe(steps=600, learning_rate=1e-3, longest=512, tokens_per_step=4096)


def build_model() -> SmolLM3ForCausalLM:
    """The architecture with random weights."""
    return SmolLM3ForCausalLM(SmolLM3Config(**ARCHITECTURE))


class Trainer:
    """Runs a recipe on one model."""

    def __init__(self, model: SmolLM3ForCausalLM, seed: int) -> None:
        self.model = model
        self.sampler = TwoHopSampler(TwoHopTask(model.config.vocab_size, seed))
        self.rng = np.random.default_rng([seed, 1])
        self.curriculum = Curriculum(self.rng)
        self._attentions = [layer.self_attn for layer in model.model.layers]
        self._scaling = self._attentions[0].scaling
        self._mask: Tensor | None = None

    def run(self, recipe: Recipe, report_every: int = 50) -> float:
        """Trains through `recipe`, printing progress; returns the last smoothed loss."""
        hooks = [
            attention.register_forward_pre_hook(self._put_mask, with_kwargs=True)
            for attention in self._attentions[:-1]
        ]
        optimiser = adam(self.model, recipe.learning_rate)
        loss_average, accuracy_average = Average(), Average()
        started = time.monotonic()
        self.curriculum.begin()
        for step in range(1, recipe.steps + 1):
            for group in optimiser.param_groups:
                group["lr"] = recipe.learning_rate * rate_factor(step, recipe.steps)
            loss, accuracy = self._step(recipe, optimiser)
            loss_average.add(loss)
            accuracy_average.add(accuracy)
            self.curriculum.advance(step, accuracy_average.value, recipe.longest)
            if step % report_every == 0 or step == recipe.steps:
                print(
                    f"step {step}/{recipe.steps} up to {self.curriculum.longest} tokens: "
                    f"loss {loss_average.value:.4f}, value accuracy {accuracy_average.value:.4f}, "
                    f"{time.monotonic() - started:.0f} s",
                    flush=True,
                )
        for hook in hooks:
            hook.remove()
        for attention in self._attentions:
            attention.scaling = self._scaling
        return loss_average.value

    def _step(self, recipe: Recipe, optimiser: torch.optim.AdamW) -> tuple[float, float]:
        """One optimiser step; the answer loss and the accuracy of values before it."""
        tokens = self.curriculum.draw()
        batch = self.sampler.batch(max(4, recipe.tokens_per_step // tokens), tokens)
        positions = np.tile(np.arange(tokens), (len(batch.ids), 1))
        if self.curriculum.has_begun:
            for sequence, row in zip(batch.ids, positions, strict=True):
                starts = np.flatnonzero((sequence == needles.KEY) | (sequence == needles.QUESTION))
                jump(self.rng, row, starts)
            factor = self.rng.uniform(COLDEST_SOFTMAX, 1.0)
            for attention in self._attentions:
                attention.scaling = self._scaling * factor
        blind = self.rng.random() < BLIND_SHARE
        self._mask = blind_mask(torch.from_numpy(batch.questions)) if blind else None

        ids, parts = torch.from_numpy(batch.ids), torch.from_numpy(batch.parts)
        states = self.model.model(
            input_ids=ids,
            position_ids=torch.from_numpy(positions),
            # No mask is causal by index; transformers would take jumps for packed sequences.
            attention_mask={"full_attention": None},
            use_cache=False,
        ).last_hidden_state
        row, column = parts.nonzero(as_tuple=True)
        logits, wanted = self.model.lm_head(states[row, column]), ids[row, column + 1]
        weights = torch.where(parts[row, column] == ANSWER_END, END_WEIGHT, 1.0)
        losses = nn.functional.cross_entropy(logits, wanted, reduction="none")
        loss = (losses * weights).sum() / weights.sum()

        optimiser.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        optimiser.step()
        right = (logits.argmax(-1) == wanted)[parts[row, column] == VALUE]
        return float(loss.detach()), float(right.float().mean())

    def _put_mask(
        self, _module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return arguments, {**named, "attention_mask": self._mask}


def blind_mask(questions: Tensor) -> Tensor:
    """A causal mask in which a question sees itself and the first token alone.

    questions: [B, T] int64, 0 in the document. Returns [B, 1, T, T] bool. Below the last layer it
    leaves the first hop to the document's own rows: a question that sees the definitions only when
    it is too late to follow a reference has to find the reference followed already.
    """
    tokens = questions.shape[1]
    same = questions[:, :, None] == questions[:, None, :]
    seen = torch.ones(tokens, tokens, dtype=torch.bool).tril() & same
    seen[:, :, 0] = True
    return seen[:, None]


def evaluate(path: Path, lengths: Sequence[int], facts: int, texts: int) -> None:
    """Prints exact match of the checkpoint at `path` for every length."""
    model = SmolLM3ForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="sdpa"
    )
    for tokens in lengths:
        started = time.monotonic()
        task = TwoHopTask(model.config.vocab_size, seed=tokens)
        documents = max(2, tokens // DOCUMENT_TOKENS)
        result = measure(model, task, tokens, documents, facts, texts)
        print(
            f"{tokens} tokens in {documents} documents, n = {texts * facts} and "
            f"{texts * (facts // 2)} local: exact match {result.whole:.3f} read whole, "
            f"{result.alone:.3f} with documents read alone, {result.alone_local:.3f} of local facts"
            f" ({time.monotonic() - started:.0f} s)",
            flush=True,
        )


def smoke_recipe() -> Recipe:
    """The recipe with few small steps."""
    return replace(RECIPE, steps=12, tokens_per_step=768)


def train(out: Path, recipe: Recipe, seed: int) -> float:
    """Trains from the structured start, saving to `out` at the end; the last loss."""
    torch.manual_seed(seed)
    model = build_model()
    initialise_two_hop(model, offset_strength=OFFSET_STRENGTH, match_strength=MATCH_STRENGTH)
    loss = Trainer(model, seed).run(recipe)
    model.save_pretrained(out)
    print(f"saved {out}")
    return loss


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    job = parser.add_mutually_exclusive_group(required=True)
    job.add_argument("--out", type=Path, metavar="DIR", help="train, and save the model here")
    job.add_argument("--evaluate", type=Path, metavar="DIR", help="evaluate the model saved here")
    parser.add_argument("--smoke", action="store_true", help="train a few steps only")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (default 0)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[1024, 4096, 16384], help="tokens of a text"
    )
    parser.add_argument("--facts", type=int, default=16, help="across documents (default 16)")
    parser.add_argument("--texts", type=int, default=2, help="per length (default 2)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    if options.evaluate is not None:
        evaluate(options.evaluate, options.lengths, options.facts, options.texts)
    else:
        train(options.out, smoke_recipe() if options.smoke else RECIPE, options.seed)


if __name__ == "__main__":
    main()
