"""Trains, evaluates or asks tiny-coder, the small language model that comes with kvpager.

    python models/train_tiny_coder.py --out DIR               # the full recipe: about an hour
    python models/train_tiny_coder.py --out DIR --resume      # goes on from DIR's checkpoint
    python models/train_tiny_coder.py --out DIR --smoke       # a few steps of every stage
    python models/train_tiny_coder.py --evaluate DIR          # perplexity on held-out sources
    python models/train_tiny_coder.py --complete DIR "def f"  # goes on with a text

The result is a stock Qwen3ForCausalLM that completes Python. It is trained on the sources of the
running Python's standard library. See README.md beside this file for what it is good for.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))
from coder_text import END_OF_TEXT, Corpus, train_tokenizer

from kvpager_bench.library_text import held_out_texts, training_texts

# 6,951,680 parameters; K/V of 12 KiB per token in fp32.
ARCHITECTURE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "bos_token_id": None,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
CHECKPOINT = "checkpoint.pt"  # beside the model while it trains
CHECKPOINT_STEPS = 100
LOGIT_TOKENS = 4096  # logits of that many tokens are in memory at a time


@dataclass(frozen=True)
class Stage:
    """Steps with windows of one length."""

    tokens: int
    windows: int  # of a step
    steps: int
    jumps: bool = False  # in positions


RECIPE = (
    Stage(tokens=512, windows=4, steps=1400),
    Stage(tokens=2048, windows=2, steps=300, jumps=True),
    Stage(tokens=8192, windows=1, steps=50, jumps=True),
    Stage(tokens=32768, windows=1, steps=3),
)
SMOKE = tuple(Stage(tokens, windows=2, steps=3) for tokens in (32, 64, 96, 128))
PEAK_RATE = 3e-3
LAST_RATE = 1e-4
WARM_UP_STEPS = 40
JUMPS = 3  # in the positions of a window, up to the model's longest


def build_model() -> Qwen3ForCausalLM:
    """The architecture with random weights."""
    return Qwen3ForCausalLM(Qwen3Config(**ARCHITECTURE))


def learning_rate(step: int, done: float) -> float:
    """Of the step with this number, when the share `done` of all tokens has been read: a cosine."""
    cosine = 0.5 * (1 + math.cos(math.pi * done))
    return min(1.0, step / WARM_UP_STEPS) * (LAST_RATE + (PEAK_RATE - LAST_RATE) * cosine)


def optimisers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the embeddings and for vectors."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    embeddings = [p for name, p in model.named_parameters() if "embed" in name]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": embeddings, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [
        torch.optim.Muon(matrices, lr=PEAK_RATE, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95)),
    ]


def jumping_positions(rng: np.random.Generator, windows: int, tokens: int) -> Tensor:
    """[windows, tokens]: ascending positions below the longest, with up to JUMPS gaps a row.

    Short windows so show distances of long ones. Half of the rows have no gap.
    """
    positions = np.tile(np.arange(tokens), (windows, 1))
    room = ARCHITECTURE["max_position_embeddings"] - tokens
    for row in positions:
        if rng.random() < 0.5:
            continue
        for gap in np.diff(np.sort(rng.integers(room, size=JUMPS)), prepend=0):
            row[int(rng.integers(tokens)) :] += gap
    return torch.from_numpy(positions)


def token_losses(model: Qwen3ForCausalLM, ids: Tensor, positions: Tensor | None = None) -> Tensor:
    """[B, T - 1]: the cross-entropy of every token but the first, given those before it."""
    states = model.model(
        input_ids=ids,
        position_ids=positions,
        # No mask is causal by index; transformers would take jumps for packed sequences.
        attention_mask={"full_attention": None},
        use_cache=False,
    ).last_hidden_state[:, :-1]
    losses = [
        nn.functional.cross_entropy(
            model.lm_head(part).float().flatten(0, 1), wanted.flatten(), reduction="none"
        ).view(wanted.shape)
        for part, wanted in zip(
            torch.split(states, LOGIT_TOKENS, 1),
            torch.split(ids[:, 1:], LOGIT_TOKENS, 1),
            strict=True,
        )
    ]
    return torch.cat(losses, 1)


class Trainer:
    """Runs a recipe on one model; `step` counts the steps of all stages."""

    def __init__(
        self,
        model: Qwen3ForCausalLM,
        corpus: Corpus,
        recipe: Sequence[Stage],
        out: Path,
        seed: int,
    ) -> None:
        self.model, self.corpus, self.recipe, self.out = model, corpus, recipe, out
        self.seed = seed
        self.optimisers = optimisers(model)
        self.step = 0
        self.loss = math.nan  # smoothed

    def run(self) -> float:
        """Trains from `step` to the end; returns the last smoothed loss."""
        total = sum(stage.tokens * stage.windows * stage.steps for stage in self.recipe)
        first = read = 0
        for number, stage in enumerate(self.recipe):
            shape = (stage.steps, stage.windows, stage.tokens)
            if self.step < first + stage.steps:
                windows = self.corpus.windows(number, stage.steps * stage.windows, stage.tokens)
                self._run_stage(number, torch.from_numpy(windows).view(shape), first, read, total)
            first += stage.steps
            read += math.prod(shape)
        return self.loss

    def _run_stage(self, number: int, windows: Tensor, first: int, read: int, total: int) -> None:
        steps, tokens = len(windows), windows[0].numel()
        started, resumed = time.monotonic(), self.step
        while self.step < first + steps:
            at = self.step - first
            self.step += 1
            rate = learning_rate(self.step, (read + at * tokens) / total)
            positions = None
            if self.recipe[number].jumps:
                rng = np.random.default_rng([self.seed, number, self.step])
                positions = jumping_positions(rng, *windows[at].shape)
            loss = self._train_step(windows[at], positions, rate)
            self.loss = loss if math.isnan(self.loss) else 0.95 * self.loss + 0.05 * loss
            if self.step % 10 == 0 or at + 1 == steps or tokens > 20_000:
                seconds = (time.monotonic() - started) / (self.step - resumed)
                print(
                    f"stage {number + 1}/{len(self.recipe)} step {at + 1}/{steps}: "
                    f"loss {self.loss:.4f}, rate {rate:.2e}, {tokens / seconds:.0f} tokens/s, "
                    f"{seconds * (steps - at - 1) / 60:.1f} min left of the stage",
                    flush=True,
                )
            if self.step % CHECKPOINT_STEPS == 0 or at + 1 == steps:
                self.save()

    def _train_step(self, ids: Tensor, positions: Tensor | None, rate: float) -> float:
        with torch.autocast("cpu", torch.bfloat16):
            loss = token_losses(self.model, ids, positions).mean()
        self.model.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = rate
            optimiser.step()
        return float(loss.detach())

    def save(self) -> None:
        """The model, and what resuming needs."""
        save_model(self.model, self.out)
        state = {
            "model": self.model.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
            "step": self.step,
            "loss": self.loss,
        }
        unfinished = self.out / f"{CHECKPOINT}.new"
        torch.save(state, unfinished)
        unfinished.replace(self.out / CHECKPOINT)

    def resume(self) -> None:
        """Takes up what save() wrote."""
        state = torch.load(self.out / CHECKPOINT, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.step, self.loss = int(state["step"]), float(state["loss"])


def save_model(model: Qwen3ForCausalLM, out: Path) -> None:
    """Configuration and bfloat16 weights; the model is loaded in float32 all the same."""
    model.config.dtype = torch.float32
    model.config.save_pretrained(out)
    ends = [ARCHITECTURE["eos_token_id"], ARCHITECTURE["pad_token_id"]]
    cast(Any, GenerationConfig)(eos_token_id=ends, pad_token_id=ends[1]).save_pretrained(out)
    weights = {
        name: weight.detach().to(torch.bfloat16).contiguous()
        for name, weight in model.state_dict().items()
        if name != "lm_head.weight"  # tied
    }
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """The tokenizer's files; its class by the name that every release of transformers knows."""
    tokenizer.save_pretrained(out)
    path = out / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings["model_max_length"] = ARCHITECTURE["max_position_embeddings"]
    path.write_text(json.dumps(settings, indent=2) + "\n")


def load(path: Path) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """The model, in float32, and the tokenizer that lie in a folder."""
    model = Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    model.train(False)
    return model, PreTrainedTokenizerFast.from_pretrained(path)


def held_out_windows(tokenizer: PreTrainedTokenizerFast, tokens: int) -> Tensor:
    """[count, tokens]: as many windows as the held-out sources, one after the other, fill."""
    text = END_OF_TEXT.join(source for _, source in held_out_texts())
    ids = torch.tensor(tokenizer.backend_tokenizer.encode(text).ids)
    count = len(ids) // tokens
    return ids[: count * tokens].view(count, tokens)


@torch.no_grad()
def evaluate(path: Path, lengths: Sequence[int], windows: int) -> None:
    """Prints the perplexity on held-out sources for every length, and that of its last quarter."""
    model, tokenizer = load(path)
    for tokens in lengths:
        started = time.monotonic()
        chosen = held_out_windows(tokenizer, tokens)
        chosen = chosen[torch.linspace(0, len(chosen) - 1, min(windows, len(chosen))).long()]
        losses = torch.cat([token_losses(model, window[None]) for window in chosen])
        late = losses[:, -tokens // 4 :]
        print(
            f"{tokens} tokens, {len(chosen)} windows: perplexity {losses.mean().exp():.3f}, "
            f"of the last quarter {late.mean().exp():.3f} ({time.monotonic() - started:.0f} s)",
            flush=True,
        )


def complete(path: Path, text: str, new_tokens: int) -> str:
    """What the model says after `text`, greedily."""
    model, tokenizer = load(path)
    ids = torch.tensor([tokenizer.backend_tokenizer.encode(text).ids])
    made = cast(Any, model).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
    )
    return str(tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True))


def train(out: Path, recipe: Sequence[Stage], seed: int, *, resume: bool, limit: int = 0) -> float:
    """Trains to the recipe's end, saving to `out` on the way; the last loss.

    limit: of the training texts, when not 0.
    """
    torch.manual_seed(seed)
    texts = training_texts()[: limit or None]
    out.mkdir(parents=True, exist_ok=True)
    if resume:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(out)
    else:
        tokenizer = train_tokenizer([source for _, source in texts])
        save_tokenizer(tokenizer, out)
    trainer = Trainer(build_model(), Corpus(texts, tokenizer, seed), recipe, out, seed)
    if resume:
        trainer.resume()
    loss = trainer.run()
    (out / CHECKPOINT).unlink(missing_ok=True)
    print(f"saved {out}")
    return loss


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    job = parser.add_mutually_exclusive_group(required=True)
    job.add_argument("--out", type=Path, metavar="DIR", help="train, and save the model here")
    job.add_argument("--evaluate", type=Path, metavar="DIR", help="evaluate the model saved here")
    job.add_argument(
        "--complete", nargs=2, metavar=("DIR", "TEXT"), help="print what the model says after TEXT"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--smoke", action="store_true", help="train a few steps per stage only")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (default 0)")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default 2)")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[4096, 16384, 32768], help="tokens to evaluate at"
    )
    parser.add_argument("--windows", type=int, default=8, help="at most, per length (default 8)")
    parser.add_argument("--new-tokens", type=int, default=100, help="to complete (default 100)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    if options.evaluate is not None:
        evaluate(options.evaluate, options.lengths, options.windows)
    elif options.complete is not None:
        print(complete(Path(options.complete[0]), options.complete[1], options.new_tokens))
    else:
        recipe, limit = (SMOKE, 40) if options.smoke else (RECIPE, 0)
        train(options.out, recipe, options.seed, resume=options.resume, limit=limit)


if __name__ == "__main__":
    main()
