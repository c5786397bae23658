"""Every tensor that meets a model is made where the model is: tried with a GPU that is simulated.

The arithmetic is the CPU's, so that results are known; only the places of tensors are made up.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from reference_models import build, make_engine, prompt
from simulated_gpu import GPU, MAKERS, MixedDevicesError, SimulatedGpu, on_gpu, pretend
from torch.overrides import TorchFunctionMode, resolve_name

import kvpager
from kvpager import PagerConfig, TopK
from kvpager._model.proof.prove import settle_rows
from kvpager._model.proof.shapes import probe_shapes
from kvpager._model.seam.attach import attach
from kvpager._model.watch.looks import only_looks
from kvpager.segments import Combined, Deviation, QueryGuided, SegmentHead
from kvpager.verify import RELATIONS, Subject, verify, verify_engine
from kvpager_bench.plain_transformers import compare_with_transformers

PACKAGE = str(Path(kvpager.__file__).parent)
MODELS = [
    ("llama", "bfloat16"),
    ("qwen3", "float32"),
    ("gemma2", "bfloat16"),
    ("gpt_oss", "bfloat16"),
]


def run(engine):
    with engine, engine.session() as session:
        session.prefill(prompt(50))
        text = session.generate(6, eos=None, speculate="prompt-lookup").tokens.tolist()
        return text, session.logits, session.sequence.read_kv(1, 0, session.committed)


def test_saving_scoring_and_packing_mix_no_devices(monkeypatch, tmp_path):
    pretend(monkeypatch)
    model = build("llama", "bfloat16")
    selection = TopK(chunks=2, sinks=16, recent=32)
    with SimulatedGpu(model), make_engine(model, selection=selection) as engine:
        session = engine.session()
        session.prefill(prompt(120))
        session.save(tmp_path / "turn.kvsnap")
        engine.restore(tmp_path / "turn.kvsnap").append([5, 6, 7])
        assert np.isfinite(engine.score(prompt(40)).sum)
        completions = engine.run([prompt(20), prompt(30)], 3, eos=None, temperature=1.0)
        assert [completion.finish_reason for completion in completions] == ["length", "length"]


@pytest.mark.parametrize(("architecture", "dtype"), [MODELS[0], MODELS[-1]], ids=str)
def test_putting_a_text_together_from_segments_mixes_no_devices(architecture, dtype, monkeypatch):
    pretend(monkeypatch)
    model = build(architecture, dtype)
    policy = Combined(SegmentHead(3), QueryGuided(0.1), Deviation(0.1))

    def assemble(engine):
        with engine:
            engine.cache_segment(prompt(50, 1), name="a")
            engine.cache_segment(prompt(41, 2), name="b")
            session = engine.assemble([prompt(9, 3), "b", "a", prompt(7, 4)], repair=policy)
            return session.assembly.rows, session.logits

    rows, logits = assemble(make_engine(model, linear="torch"))  # as on a GPU
    with SimulatedGpu(model):
        found_rows, found = assemble(make_engine(model))
    assert found_rows == rows
    assert torch.equal(found, logits)


@pytest.mark.parametrize(("architecture", "dtype"), MODELS, ids=str)
def test_an_engine_of_a_model_on_a_gpu_mixes_no_devices(architecture, dtype, monkeypatch):
    pretend(monkeypatch)
    model = build(architecture, dtype)
    text, logits, kv = run(make_engine(model, linear="torch"))
    with SimulatedGpu(model) as gpu:
        engine = make_engine(model)
        assert engine.pager.device == GPU
        assert engine.fingerprint["device"] == "cuda"
        assert engine.fingerprint["processor"] == "GPU, 9.0, 132 multiprocessors"
        found, found_logits, found_kv = run(engine)
        assert not on_gpu(found_logits)
        assert gpu.operations > 1000
    assert found == text
    assert torch.equal(found_logits, logits)
    assert all(map(torch.equal, found_kv, kv))


def test_the_row_proof_and_the_table_of_shapes_run_where_the_model_is(monkeypatch):
    model = build("qwen3_moe", "bfloat16")
    with SimulatedGpu(model):
        attach(model)
        seen, counts, _ = settle_rows(model, (32,))
        assert all(on_gpu(x) for x in (seen.tokens, seen.hidden, *seen.layers[0]))
        reports = probe_shapes(model, 32)
    assert reports
    assert settle_rows(model, (32,))[1] == counts


def test_many_rows_are_worth_having_alone_on_a_gpu(monkeypatch):
    """Where no small count is proven to be as exact, a decode step pays for all rows."""
    pretend(monkeypatch)
    model = build("llama", "bfloat16")
    options = {"rows": None, "pool_tokens": 1024, "small_rows": "fixed"}
    with make_engine(model, **options) as engine:
        assert engine.rows == 64
    with SimulatedGpu(model), make_engine(model, **options) as engine:
        assert engine.rows == 256
    options["pool_tokens"] = 960
    with SimulatedGpu(model), make_engine(model, **options) as engine:
        assert engine.rows == 128


def test_relations_and_the_peer_run_where_the_model_is(monkeypatch):
    pretend(monkeypatch)
    model = build("llama", "bfloat16")
    config = PagerConfig(pool_tokens=96, rows=32, chunk_tokens=16, host_bytes="64MiB")
    relations = [relation for relation in RELATIONS if relation.at_start]
    with SimulatedGpu(model):
        with Subject(model, config, effort="start") as subject:
            report = verify(subject, relations)
        assert report.about["device"].startswith("cuda:0 (GPU")
        peer = compare_with_transformers(model, [prompt(12)], new_tokens=3)
    assert report.kept, report.verdict()
    assert len(peer[0].first_forks) == 1


def test_the_simulated_gpu_minds_what_a_gpu_minds():
    layer = torch.nn.Linear(4, 4)
    with SimulatedGpu(layer), torch.inference_mode():
        there = layer(torch.ones(2, 4, device=GPU))
        assert on_gpu(there)
        assert there.device == layer.weight.device == GPU
        assert there.cpu().device.type == "cpu"
        for mistake in (
            lambda: layer(torch.ones(2, 4)),
            lambda: there + torch.ones(4),
            lambda: there[torch.arange(1)],
            lambda: there.numpy(),
            lambda: torch.equal(there, torch.ones(2, 4)),
            lambda: torch.randn(2, device=GPU, generator=torch.Generator().manual_seed(0)),
        ):
            with pytest.raises(MixedDevicesError):
                mistake()
    assert not on_gpu(layer.weight)


@only_looks
class SaysWhere(TorchFunctionMode):
    """Notes every tensor that a file of the package makes without saying on which device."""

    def __init__(self):
        super().__init__()
        self.made = 0
        self.unsaid = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in MAKERS:
            caller = sys._getframe(1)
            if caller.f_code.co_filename.startswith(PACKAGE):
                self.made += 1
                if (kwargs or {}).get("device") is None:
                    place = f"{caller.f_code.co_filename}:{caller.f_lineno}"
                    self.unsaid.append(f"{place}: {resolve_name(func)}")
        return func(*args, **(kwargs or {}))


def test_the_package_says_of_every_tensor_it_makes_where_it_is_to_be():
    with SaysWhere() as mode:
        with make_engine(build("qwen3_moe", "bfloat16"), verify=verify_engine) as engine:
            engine.score(prompt(40))
        pager = engine.pager
        assert pager is not None
    assert mode.made > 100
    assert mode.unsaid == []


def test_a_tensor_made_without_saying_where_is_noticed():
    source = "import torch\ntorch.empty(1)\ntorch.zeros(2, device='cpu')\n"
    with SaysWhere() as mode:
        exec(compile(source, f"{PACKAGE}/made_up.py", "exec"), {})
    assert len(mode.unsaid) == 1
    assert mode.made == 2
