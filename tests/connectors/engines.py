"""Runs vLLM engines on a CPU, each in a process of its own, with kvpager's tier or vLLM's own."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 512
PROMPT_TOKENS = 600
BLOCK_TOKENS = 64
WHOLE = PROMPT_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS  # 576: all that can be stored of a prompt


def prompt(seed: int, tokens: int = PROMPT_TOKENS) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(VOCABULARY) for _ in range(tokens)]


def save_model(folder: Path, seed: int, *, heads: int = 2, head_dim: int = 32) -> Path:
    """A random Qwen3 of 4 layers, in bfloat16; `heads` have K/V."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=2 * heads,
        num_key_value_heads=heads,
        head_dim=head_dim,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    return _saved(Qwen3ForCausalLM(config), folder)


def save_windowed_model(folder: Path, seed: int) -> Path:
    """A random Gemma 3, half of whose layers see 128 tokens: two groups of K/V."""
    torch.manual_seed(seed)
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * 2,
        query_pre_attn_scalar=32,
    )
    return _saved(Gemma3ForCausalLM(config), folder)


def _saved(model: Any, folder: Path) -> Path:
    for parameter in model.parameters():
        if parameter.ndim == 2:  # the usual ones give flat logits, which hide wrong K/V
            torch.nn.init.normal_(parameter, std=0.08)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def save_adapter(folder: Path, seed: int) -> Path:
    """A random LoRA adapter of `save_model`'s model, of rank 8."""
    torch.manual_seed(seed)
    folder.mkdir(exist_ok=True)
    weights = {}
    for layer in range(4):
        for name, width in (("q_proj", 128), ("k_proj", 64), ("v_proj", 64)):
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{place}.lora_A.weight"] = torch.randn(8, 128) * 0.1
            weights[f"{place}.lora_B.weight"] = torch.randn(width, 8) * 0.1
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 8,
        "lora_alpha": 16,
        "bias": "none",
    }
    config["target_modules"] = ["q_proj", "k_proj", "v_proj"]
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@dataclass(frozen=True)
class Answer:
    """cached: tokens of the prompt that were loaded. logprobs: of the two best tokens, by place.

    seconds: from the request to the answer, for a step of one prompt.
    """

    cached: int
    tokens: list[int]
    logprobs: list[dict[str, float]]
    seconds: float = 0.0

    def is_as(self, other: Answer) -> bool:
        """Whether tokens and log-probabilities are those of another answer, to the bit."""
        return (self.tokens, self.logprobs) == (other.tokens, other.logprobs)

    @property
    def is_finite(self) -> bool:
        return all(math.isfinite(value) for place in self.logprobs for value in place.values())


@dataclass(frozen=True)
class Run:
    answers: list[list[Answer]]
    metrics: dict[str, float]
    log: str

    @property
    def answer(self) -> Answer:
        """The only one."""
        ((answer,),) = self.answers
        return answer

    def count(self, name: str) -> int:
        return int(self.metrics.get(name, 0))


@dataclass
class Started:
    pid: int
    out: Path
    log: Path
    engine: str


@dataclass
class Engines:
    """A process that starts engines; a context manager."""

    folder: Path
    process: subprocess.Popen[str] = field(init=False)

    def __enter__(self) -> Engines:
        tests = Path(__file__).parents[1]
        paths = [str(tests), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "connectors.engine_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(self.folder / "vllm.log").open("w"),
            text=True,
            env=os.environ | variables | {"KVPAGER_CACHE": str(self.folder / "cache")},
        )
        while self._line() != "ready":
            pass
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)

    def start(
        self,
        model: Path,
        tier: dict[str, Any] | None,
        steps: Sequence[dict[str, Any]],
        *,
        wait: bool = False,
        report: str | None = None,
        pauses: bool = False,
        **engine: Any,
    ) -> Started:
        """Starts an engine.

        tier: `kvpager_tier` or `fs_tier`; None: without one. pauses: waits for a millisecond where
        nothing was computed, as the loop of vLLM's server does. engine: arguments of `LLM`.
        """
        name = f"test-{uuid.uuid4().hex}"
        request: dict[str, Any] = {
            "model": str(model),
            "engine": engine,
            "steps": list(steps),
            "out": str(self.folder / f"{name}.json"),
            "log": str(self.folder / f"{name}.log"),
            "wait": wait,
            "pauses": pauses,
            "transfer": None if tier is None else _transfer(tier, name),
        }
        if report is not None:
            request["report"] = report
        self._send(request)
        out, log = Path(request["out"]), Path(request["log"])
        return Started(int(self._line()), out, log, name)

    def reap(self, started: Started) -> None:
        """Waits for an engine that was killed, and removes the shared memory that it left."""
        self._send({"reap": started.pid})
        assert self._line() == "ended"
        Path(f"/dev/shm/vllm_offload_{started.engine}.mmap").unlink(missing_ok=True)

    def run(
        self,
        model: Path,
        tier: dict[str, Any] | None,
        steps: Sequence[dict[str, Any]],
        **options: Any,
    ) -> Run:
        """Runs an engine to its end."""
        started = self.start(model, tier, steps, wait=True, **options)
        assert self._line() == "ended"
        log = started.log.read_text()
        assert started.out.exists(), log[-4000:]
        found = json.loads(started.out.read_text())
        answers = [[Answer(**one) for one in result] for result in found["results"]]
        return Run(answers, _flat(found["metrics"]), log)

    def ask(self, model: Path, tier: dict[str, Any], ids: list[int], **options: Any) -> Run:
        """Runs an engine for one prompt."""
        return self.run(model, tier, [{"prompts": [ids]}], **options)

    def _send(self, request: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, (self.folder / "vllm.log").read_text()[-4000:]
        return line.strip()


def _transfer(tier: dict[str, Any], engine: str) -> dict[str, Any]:
    extra = {
        "spec_name": "CpuTieringSpec",
        "spec_module_path": "connectors.cpu_spec",
        "cpu_bytes_to_use": 64 << 20,
        **tier["extra"],
    }
    return {
        "kv_connector": tier["connector"],
        "kv_role": "kv_both",
        "engine_id": engine,
        "kv_connector_extra_config": extra,
    }


def kvpager_tier(store: Path, byte_budget: int | str = "1GiB", **options: Any) -> dict[str, Any]:
    extra = {"path": str(store), "byte_budget": byte_budget, **options}
    return {"connector": "KvpagerConnector", "extra": extra}


def fs_tier(store: Path) -> dict[str, Any]:
    return {
        "connector": "OffloadingConnector",
        "extra": {"secondary_tiers": [{"type": "fs", "root_dir": str(store)}]},
    }


def _flat(metrics: Sequence[dict[str, Any]]) -> dict[str, float]:
    """By name, and by result where there is one: `loaded_chunks.hit`."""
    found: dict[str, float] = {}
    for metric in metrics:
        name = metric["name"].removeprefix("vllm:kvpager_")
        result = metric["labels"].get("result")
        found[f"{name}.{result}" if result else name] = metric["value"]
    return found
