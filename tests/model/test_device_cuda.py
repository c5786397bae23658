"""What only a GPU can show: with transformers on it, at sizes that a processor is too slow for.

Run by `pytest -m cuda`; everything is made up or shipped, so that no network is needed.
"""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
import transformers
from bits import assert_same_bits, assert_same_session
from devices import require
from reference_models import build, make_engine, prompt, stock_logits

from kvpager import Engine, FingerprintMismatchError, InvalidArgumentError, PagerConfig, TopK
from kvpager._model.identity.fingerprint import RULES
from kvpager._model.weights.digests import weights_digest
from kvpager.errors import UnsupportedModelError
from kvpager.verify import RELATIONS, Subject, verify, verify_engine

pytestmark = pytest.mark.cuda

SMALL = {"host_bytes": "256MiB"}
TOLERANCE = {"float32": 2e-3, "bfloat16": 0.2, "float16": 0.05}  # of logits of models this small


@pytest.fixture(autouse=True)
def cuda():
    require("cuda")
    yield
    gc.collect()
    torch.cuda.empty_cache()


def on_gpu(architecture, dtype="bfloat16", **shape):
    return build(architecture, dtype, **shape).to("cuda")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral", "gemma2"])
def test_logits_are_those_of_stock_transformers_but_for_rounding(architecture, dtype, closing):
    ids = prompt(150)
    expected = stock_logits(build(architecture, dtype).double(), ids)
    model = on_gpu(architecture, dtype)
    engine = closing(make_engine(model, **SMALL))
    session = engine.session()
    session.prefill(ids)
    assert session.logits.device.type == "cpu"
    difference = (session.logits.double() - expected[-1].double()).abs().max()
    scale = max(1.0, float(expected[-1].double().abs().max()))
    assert difference <= TOLERANCE[dtype] * scale


@pytest.mark.parametrize("exact", ["all", "reuse"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("selection", ["dense", "topk"])
def test_every_relation_holds(dtype, selection, exact):
    model = on_gpu("llama", dtype, hidden=1024)
    options = {"selection": TopK(chunks=2, sinks=16, recent=48)} if selection == "topk" else {}
    config = PagerConfig(
        pool_tokens=96, rows=32, chunk_tokens=16, host_bytes="256MiB", exact=exact, **options
    )
    relations = [relation for relation in RELATIONS if not relation.processes]
    with Subject(model, config, effort="start") as subject:
        report = verify(subject, relations)
    assert report.kept, report.verdict()
    assert report.about["device"].startswith("cuda:0 (")


def test_relations_between_processes_hold():
    model = on_gpu("qwen3", hidden=1024)
    config = PagerConfig(pool_tokens=96, rows=32, chunk_tokens=16, host_bytes="256MiB")
    relations = [relation for relation in RELATIONS if relation.processes]
    with Subject(model, config, effort="start") as subject:
        report = verify(subject, relations)
    assert report.kept, report.verdict()
    told = {outcome.relation: outcome.status for outcome in report.outcomes}
    assert told["kernel tiers"] == "does not apply"
    assert told["restored"] == told["re-scored"] == "same"


def test_decode_steps_are_replayed_as_graphs_with_the_bits_of_launches():
    model = large()
    ids = np.random.default_rng(1).integers(0, 32000, 700)
    told = {}
    for graphs in (False, True):
        config = PagerConfig(pool_tokens=512, host_bytes="512MiB", graphs=graphs)
        with Engine(model, config) as engine, engine.session() as session:
            session.prefill(ids)
            text = session.generate(40, eos=None).tokens.tolist()
            told[graphs] = text, session.logits.clone(), engine.stats()["graph_replays"]
    (said, logits, none), (again, replayed, count) = told[False], told[True]
    assert again == said
    assert torch.equal(replayed, logits)
    assert none == 0
    assert count >= 39


def large():
    """About 0.4 billion parameters in the shape of a Llama, in bfloat16."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=128,
        max_position_embeddings=65536,
    )
    with torch.device("cuda"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


@pytest.mark.parametrize("selection", ["dense", "topk"])
def test_greedy_text_of_a_larger_model_shows_neither_pool_nor_company_nor_restore(
    selection, tmp_path
):
    """12K tokens through a pool of 2K, 96 tokens decoded, one in company, one after a restore."""
    model = large()
    ids = np.random.default_rng(0).integers(0, 32000, 12_000)
    options = {"selection": TopK(chunks=16)} if selection == "topk" else {}
    texts, kv = {}, {}
    for name, pool in (("small", 2048), ("large", 16_384)):
        with Engine(model, pool_tokens=pool, host_bytes="2GiB", **options) as engine:
            session = engine.session()
            session.prefill(ids)
            texts[name] = session.generate(96, eos=None).tokens.tolist()
            kv[name] = [session.sequence.read_kv(layer, 0, session.committed) for layer in (0, 7)]
            if name == "small":
                stats = engine.stats()
                assert stats["chunks_evicted"] > 100
                assert (
                    stats["bytes_written_through"] == stats["chunks_sealed"] * stats["chunk_bytes"]
                )
                session.trim(11_000)
                session.save(tmp_path / "turn.kvsnap")
                continue
            other = np.random.default_rng(1).integers(0, 32000, 3000)
            fresh = np.concatenate([other[:64], ids])
            alone = engine.run([fresh], 32, eos=None)[0].tokens.tolist()
            company = engine.run([other, fresh, ids[:500]], 32, eos=None, temperature=0.0)
            assert company[1].tokens.tolist() == alone
            restored = engine.restore(tmp_path / "turn.kvsnap")
            restored.prefill(ids)
            assert restored.restored_tokens_consumed == 11_000
            texts["restored"] = restored.generate(96, eos=None).tokens.tolist()
    assert texts["small"] == texts["large"] == texts["restored"]
    for ours, theirs in zip(kv["small"], kv["large"]):
        for a, b in zip(ours, theirs):
            assert_same_bits(a, b, "K/V through another pool")


def test_the_fingerprint_says_what_bits_depend_on_there(closing):
    engine = closing(make_engine(on_gpu("llama"), **SMALL))
    assert list(engine.fingerprint) == list(RULES)
    assert engine.fingerprint["device"] == "cuda"
    assert torch.cuda.get_device_name(0) in engine.fingerprint["processor"]
    assert str(torch.version.cuda) in engine.fingerprint["cuda"]
    assert "unknown" not in engine.fingerprint["cuda"]
    assert engine.fingerprint["threads"] == 0
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        engine.session().prefill(prompt(20))  # the host's threads do not matter
        again = closing(make_engine(engine.model, **SMALL))
    finally:
        torch.set_num_threads(threads)
    assert again.fingerprint == engine.fingerprint


def test_weights_have_one_digest_wherever_they_are():
    model = build("llama", "bfloat16")
    here = weights_digest(model)
    assert weights_digest(model.to("cuda")) == here
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 3] += 1
    assert weights_digest(model) != here


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (torch.backends.cuda.matmul, "allow_tf32", True),
        (torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
        (torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False),
    ],
    ids=lambda value: str(value),
)
def test_a_switch_that_changes_bits_is_refused_while_an_engine_is_open(
    owner, name, value, closing, tmp_path
):
    model = on_gpu("llama")
    engine = closing(make_engine(model, **SMALL))
    session = engine.session()
    session.prefill(prompt(20))
    session.save(tmp_path / "turn.kvsnap")
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        with pytest.raises(InvalidArgumentError, match=name if "tf32" not in name else "."):
            session.append([5, 6])
        other = closing(make_engine(model, **SMALL))
        with pytest.raises(FingerprintMismatchError) as refused:
            other.restore(tmp_path / "turn.kvsnap")
        assert refused.value.field == "cuda_settings"
    finally:
        setattr(owner, name, before)
    session.append([5, 6])


def test_autocast_and_a_model_that_was_moved_are_refused(closing):
    model = on_gpu("llama", "float32")
    engine = closing(make_engine(model, **SMALL))
    session = engine.session()
    session.prefill(prompt(20))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        with pytest.raises(InvalidArgumentError, match="autocast"):
            session.append([5])
        with torch.autocast("cuda", enabled=False):
            session.append([5])
    model.to("cpu")
    with pytest.raises(InvalidArgumentError, match="is on cpu, but was on cuda:0"):
        session.append([6])
    model.to("cuda")
    session.append([6])


def test_tuned_kernels_are_refused(closing):
    model = on_gpu("llama")
    torch.cuda.tunable.write_file_on_exit(False)
    torch.cuda.tunable.enable(True)
    try:
        with pytest.raises(UnsupportedModelError, match="tunable"):
            make_engine(model, **SMALL)
    finally:
        torch.cuda.tunable.enable(False)
    session = closing(make_engine(model, **SMALL)).session()
    session.prefill(prompt(20))


def test_a_model_that_is_only_partly_on_the_gpu_is_refused():
    model = build("llama")
    model.model.layers[1].to("cuda")
    with pytest.raises(UnsupportedModelError, match=r"cpu, cuda:0.*one device"):
        make_engine(model, **SMALL)


def test_a_snapshot_of_the_cpu_is_refused_or_approximate(closing, tmp_path):
    ids = prompt(60)
    with make_engine(build("llama"), **SMALL) as engine, engine.session() as session:
        session.prefill(ids)
        session.save(tmp_path / "turn.kvsnap")
    mine = closing(make_engine(on_gpu("llama", "float32"), **SMALL))
    with pytest.raises(FingerprintMismatchError) as refused:
        mine.restore(tmp_path / "turn.kvsnap")
    assert refused.value.field == "device"
    session = mine.restore(tmp_path / "turn.kvsnap", on_mismatch="approximate")
    session.append([5, 6, 7])
    assert {chunk.provenance for chunk in session.ledger()} == {"approximate"}


def test_two_engines_of_one_model_give_the_same_bits(closing, tmp_path):
    model = on_gpu("qwen3", hidden=1024)
    ids = prompt(120)
    first, second = (closing(make_engine(model, verify=verify_engine, **SMALL)) for _ in range(2))
    sessions = [engine.session() for engine in (first, second)]
    for session in sessions:
        session.prefill(ids)
        session.generate(20, eos=None, speculate="prompt-lookup").tokens.tolist()
    assert_same_session(*sessions, "of another engine")
    scored = [engine.score(sessions[0].tokens).logprobs for engine in (first, second)]
    assert_same_bits(*scored, "scores")
