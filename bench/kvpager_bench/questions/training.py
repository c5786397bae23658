"""Steps of GRPO whose trainer has the rollout's bits, and whose trainer is transformers'.

    kvpager bench training --
    kvpager bench training -- --steps 20

Policy: the shipped tiny model in bfloat16, rolled out by kvpager on both sides. The reward is the
share of even token ids, which 200 steps can teach. At each step the trainer's log-probabilities are
compared with those that the rollout had, as raw bits; then its loss moves the policy. Both sides
begin with the same weights, prompts and seeds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvpager import Agreement, Engine
from kvpager.cli.needles import NeedleTask
from kvpager_bench import subjects
from kvpager_bench.harness import Column
from kvpager_bench.study import Asked, Option, Study, Table

CLIP, NEW, GROUP, PROMPTS, LEARNING_RATE = 0.2, 24, 8, 4, 3e-4
POINTS = 20  # of a curve of rewards
TRAINERS = ("kvpager", "transformers")
STOCK = "transformers"

STEPS = (
    Column("trainer", text=True),
    Column("steps"),
    Column("tokens"),
    Column("differing"),
    Column("differing_share", "%"),
    Column("max_abs_delta"),
    Column("clip_fraction"),
    Column("approx_kl"),
    Column("first_reward"),
    Column("last_reward"),
)
REWARDS = (Column("step"), *map(Column, TRAINERS))
Texts = list[tuple[Any, Any]]  # pairs (prompt, completion)


def logprobs_of(trainer: str, model: Any, engine: Engine, texts: Texts) -> list[torch.Tensor]:
    """Log-probabilities of each completion, attached to autograd."""
    if trainer == STOCK:
        return [stock_logprobs(model, prompt, completion) for prompt, completion in texts]
    return [found.logprobs for found in engine.logprobs(texts)]


def stock_logprobs(model: Any, prompt: Any, completion: Any) -> torch.Tensor:
    """Log-probabilities of a completion, from transformers' forward with SDPA."""
    ids = torch.from_numpy(np.concatenate([prompt, completion]).astype(np.int64))
    keep = torch.arange(len(prompt) - 1, len(ids) - 1)
    logits = model(ids[None, :-1], use_cache=False, logits_to_keep=keep).logits[0].float()
    found = torch.log_softmax(logits, -1)
    return found.gather(1, torch.from_numpy(np.asarray(completion, np.int64))[:, None])[:, 0]


def learn(asked: Asked, trainer: str) -> list[float]:
    """The steps of one trainer, and its row; returns the mean reward of each step."""
    model = subjects.load_model("shipped-bf16").requires_grad_(True)
    optimiser = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    prompts = [NeedleTask(seed=seed).document(200, 2).ids for seed in range(PROMPTS)]
    groups = [prompt for prompt in prompts for _ in range(GROUP)]
    before, again, rewards = list[Any](), list[Any](), list[float]()
    steps = asked.options.steps
    with Engine(model, pool_tokens=8192) as engine:
        for step in range(steps):
            seeds = range(step * len(groups), (step + 1) * len(groups))
            rollouts = engine.run(groups, NEW, temperature=1.0, seed=seeds, eos=None, logprobs=True)
            texts = [(prompt, one.tokens) for prompt, one in zip(groups, rollouts)]
            reward = torch.tensor([float(np.mean(one.tokens % 2 == 0)) for one in rollouts])
            of_group = reward.view(-1, GROUP)
            spread = of_group.std(1, keepdim=True) + 1e-4
            advantages = ((of_group - of_group.mean(1, keepdim=True)) / spread).flatten()
            losses = []
            for now, one, advantage in zip(
                logprobs_of(trainer, model, engine, texts), rollouts, advantages
            ):
                assert one.logprobs is not None
                ratio = (now - torch.from_numpy(one.logprobs)).exp()
                clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
                losses.append(-torch.minimum(ratio * advantage, clipped * advantage).mean())
                before.append(one.logprobs)
                again.append(now.detach().numpy())
            loss = torch.stack(losses).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            optimiser.zero_grad()
            engine.weights_changed()
            rewards.append(float(reward.mean()))
    agreement = Agreement.between(np.concatenate(before), np.concatenate(again))
    tenth = max(1, steps // 10)
    asked.report("training").add(
        trainer=trainer,
        steps=steps,
        tokens=agreement.tokens,
        differing=agreement.differing,
        differing_share=100 * agreement.differing / agreement.tokens,
        max_abs_delta=agreement.max_abs_delta,
        clip_fraction=agreement.clip_fraction,
        approx_kl=agreement.approx_kl,
        first_reward=float(np.mean(rewards[:tenth])),
        last_reward=float(np.mean(rewards[-tenth:])),
    )
    return rewards


def measure(asked: Asked) -> None:
    rewards = {trainer: learn(asked, trainer) for trainer in TRAINERS}
    size = max(1, asked.options.steps // POINTS)
    for start in range(0, asked.options.steps, size):
        means = {name: float(np.mean(each[start : start + size])) for name, each in rewards.items()}
        asked.report("training_rewards").add(step=start + size, **means)
    report = asked.report("training")
    ours, theirs = ({row["trainer"]: row for row in report.rows}[name] for name in TRAINERS)
    report.judge(
        "kvpager's trainer: at every step 0 log-probabilities differ from the rollout's",
        report.number(ours, "differing") == 0 and report.number(ours, "approx_kl") == 0,
        f"{ours['tokens']:,} log-probabilities compared; of transformers' "
        f"{report.number(theirs, 'differing_share'):.1f}% differ",
    )


STUDY = Study(
    measure,
    (
        Table("training", "GRPO: the trainer's log-probabilities beside the rollout's", STEPS),
        Table("training_rewards", "GRPO: mean reward of the steps up to each", REWARDS),
    ),
    (Option("steps", 200, quick=3),),
    {"transformers_attention": "sdpa"},
)

if __name__ == "__main__":
    STUDY.main()
