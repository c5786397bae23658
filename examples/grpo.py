"""GRPO in plain torch, whose first ratio is exactly 1: rollouts and training are one function.

    python grpo.py [--steps N]

The policy is a tiny model, and the reward a toy: the share of a completion's ids that are even.
"""

import argparse

import torch
from transformers import AutoModelForCausalLM

import kvpager
from kvpager.cli.needles import NeedleTask, shipped_model_path

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
model = AutoModelForCausalLM.from_pretrained(shipped_model_path())
optimiser = torch.optim.AdamW(model.parameters(), lr=3e-4)
prompts = [NeedleTask(seed=seed).document(200, 2).ids for seed in range(4) for _ in range(8)]

with kvpager.Engine(model, pool_tokens=8192) as engine:
    for step in range(parser.parse_args().steps):
        seeds = range(32 * step, 32 * step + 32)
        rollouts = engine.run(prompts, 24, temperature=1.0, seed=seeds, eos=None, logprobs=True)
        rewards = torch.tensor([float((one.tokens % 2 == 0).mean()) for one in rollouts]).view(4, 8)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / rewards.std().clamp(min=0.01)
        texts = engine.logprobs([(p, one.tokens) for p, one in zip(prompts, rollouts)])
        loss = torch.zeros(())
        for text, rollout, advantage in zip(texts, rollouts, advantages.flatten()):
            ratio = (text.logprobs - torch.from_numpy(rollout.logprobs)).exp()
            assert (ratio == 1).all()  # in every bit
            clipped = ratio.clamp(0.8, 1.2)
            loss = loss - torch.minimum(ratio * advantage, clipped * advantage).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        optimiser.zero_grad()
        engine.weights_changed()
        print(f"step {step:3}  reward {rewards.mean():.3f}")
