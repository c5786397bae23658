"""TRL's GRPO with kvpager's rollouts and log-probabilities. `make test-trl` installs TRL."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

trl = pytest.importorskip("trl", reason="TRL is not installed: pip install 'kvpager[trl]'")
from datasets import Dataset  # noqa: E402
from peft import LoraConfig  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from kvpager import InvalidArgumentError  # noqa: E402
from kvpager.connectors.trl import GRPOTrainer  # noqa: E402

FOLDER = Path(__file__).parents[2] / "models" / "tiny-coder"
ARGUMENTS = ("peft_config", "rollout_func", "tools")
PROMPTS = ["def add(a, b):", "import os", "class Foo:", "for i in range("]


class Comparing(GRPOTrainer):
    """Notes how many of a step's log-probabilities differ from those of the rollout."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.differing = []

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        with torch.no_grad():
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
            mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
            width = inputs["completion_ids"].size(1)
            now, _, _ = self._get_per_token_logps_and_entropies(model, ids, mask, width)
        counted = inputs["completion_mask"].bool()
        before = inputs["old_per_token_logps"]
        self.differing.append(int((now[counted] != before[counted]).sum()))
        return loss


def trainer(folder, kind=GRPOTrainer, **options):
    settings = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 12,
        "max_steps": 4,
        "temperature": 0.9,
        "learning_rate": 1e-4,
        "report_to": [],
        "logging_steps": 1,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "save_strategy": "no",
    }
    arguments = {name: options.pop(name) for name in ARGUMENTS if name in options}
    return kind(
        AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32),
        lambda completions, **_: [sum(c == " " for c in text) / 40 for text in completions],
        args=trl.GRPOConfig(output_dir=str(folder), **{**settings, **options}),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS * 8}),
        processing_class=AutoTokenizer.from_pretrained(FOLDER),
        engine_options={"pool_tokens": 4096, "rows": 64},
        **arguments,
    )


def test_the_first_inner_step_has_the_bits_of_the_policy_that_was_sampled(tmp_path):
    made = trainer(tmp_path, Comparing, num_iterations=2, max_steps=4)
    made.train()
    first, second = made.differing[::2], made.differing[1::2]
    assert first == [0, 0]
    assert all(second)


def test_a_reference_model_gives_its_log_probabilities_without_gradients(tmp_path):
    made = trainer(tmp_path, beta=0.1, max_steps=2)
    made.train()
    losses = [entry for entry in made.state.log_history if "kl" in entry]
    assert losses[0]["kl"] == 0  # the policy is the reference model, in every bit
    assert losses[-1]["kl"] > 0


@pytest.mark.parametrize("checkpointing", [False, True])
def test_adapters_are_trained_beside_the_model_without_them_as_the_reference(
    tmp_path, checkpointing
):
    adapters = LoraConfig(target_modules="all-linear", r=4)
    options = {"beta": 0.1, "learning_rate": 1e-3, "gradient_checkpointing": checkpointing}
    made = trainer(
        tmp_path, Comparing, peft_config=adapters, num_iterations=2, max_steps=4, **options
    )
    made.train()
    assert made.differing[::2] == [0, 0]
    losses = [entry["kl"] for entry in made.state.log_history if "kl" in entry]
    assert losses[0] == 0  # new adapters add zeros
    assert all(losses[1:])


@pytest.mark.parametrize("name", ["rollout_func", "tools"])
def test_other_ways_of_generating_are_refused_by_name(tmp_path, name):
    with pytest.raises(InvalidArgumentError, match=f"{name} is given"):
        trainer(tmp_path, **{name: [lambda: None]})
