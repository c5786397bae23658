"""An engine on a device gives what the CPU's gives, to the bit where the CPU's order is asked for.

On the shim the model runs on the CPU, so that all that differs is kvpager's own part: the pool in
device memory, copies that come as late as they may, and the GPU's kernels. On a GPU nothing is
compared with the CPU but the reference attention itself (test_device_pager.py).
"""

from __future__ import annotations

import pytest
import torch
from bits import assert_same_bits, assert_same_session
from devices import DEVICES, require, tensors_of
from reference_models import SHIPPED, build, make_engine, prompt

from kvpager import Engine, FingerprintMismatchError, PagerConfig, TopK
from kvpager.verify import RELATIONS, Subject, verify, verify_engine

NEW = 6
TOPK = TopK(chunks=2, sinks=16, recent=32)
SMALL = {"host_bytes": "16MiB"}
# What tensor cores have kernels for: chunks of 64 tokens.
TENSOR = {"chunk_tokens": 64, "pool_tokens": 384, "rows": 32, "host_bytes": "256MiB"}


@pytest.fixture(params=DEVICES)
def device(request):
    return require(request.param)


@pytest.fixture
def shim():
    return require("shim")


def run(engine, ids):
    """A session that took the prompt in two parts and generated; and its text."""
    session = engine.session()
    session.prefill(ids[: len(ids) // 2])
    session.prefill(ids)
    text = session.generate(NEW, eos=None).tokens.tolist()
    return session, text


CASES = [
    ("llama", "float32", {}),
    ("llama", "bfloat16", {"selection": TOPK}),
    ("qwen3", "float32", {"selection": TOPK}),
    ("qwen3", "bfloat16", {}),
    ("mistral", "bfloat16", {}),  # windows
    ("gemma2", "float32", {}),  # soft caps
    ("gpt_oss", "bfloat16", {}),  # sinks
    ("llama", "bfloat16", {"kv_dtype": "q8"}),
    ("gpt_oss", "float32", {"kv_dtype": "q8", "selection": TOPK}),
    ("llama", "bfloat16", {"kv_dtype": "q4"}),
    ("gpt_oss", "float32", {"kv_dtype": "q4", "selection": TOPK}),
    ("qwen3", "float32", {"kv_dtype": "k8v4", "selection": TOPK, "float_layers": (1,)}),
    ("llama", "float32", {"kv_dtype": "q8", "kv_rotation": True}),
    ("llama", "float16", {"hidden": 1024, **TENSOR}),  # a shape that tensor cores would take
]


@pytest.mark.parametrize(("architecture", "dtype", "options"), CASES, ids=str)
def test_the_reference_order_gives_the_cpus_bits_end_to_end(
    architecture, dtype, options, shim, closing
):
    options = dict(options)
    model = build(architecture, dtype, hidden=options.pop("hidden", 256))
    ids = prompt(90 if "selection" in options or "chunk_tokens" in options else 50)
    options = {**SMALL, "attention": "reference", "recall_chunks": 2, **options}
    mine = closing(make_engine(model, device=shim, **options))
    theirs = closing(make_engine(model, **options))
    assert mine.fingerprint == theirs.fingerprint  # equal fingerprints: equal bits
    ours, text = run(mine, ids)
    expected, expected_text = run(theirs, ids)
    assert text == expected_text
    assert_same_session(ours, expected, "on the shim")
    assert mine.stats()["device_bytes"] > 0
    assert_same_bits(mine.score(ids[:20]).logprobs, theirs.score(ids[:20]).logprobs, "scores")


def test_the_shipped_model_tells_the_same_from_a_pool_far_smaller_than_the_prompt(shim, closing):
    model = build(SHIPPED)
    ids = prompt(200)
    settings = {"rows": 16, "chunk_tokens": 16, "pool_tokens": 80, "host_bytes": "32MiB"}
    mine = closing(Engine(model, device=shim, **settings))
    theirs = closing(Engine(model, **settings))
    ours, text = run(mine, ids)
    expected, expected_text = run(theirs, ids)
    assert text == expected_text
    assert_same_session(ours, expected, "through a small pool")
    stats = mine.stats()
    assert stats["chunks_evicted"] > 5
    assert (
        stats["bytes_written_through"] == stats["chunks_sealed"] * stats["chunk_bytes"]
    )  # and never again


@pytest.mark.parametrize("missed", ["direct", "staged"])
@pytest.mark.parametrize("selection", [None, TOPK], ids=["dense", "topk"])
def test_how_a_missed_chunk_is_read_changes_no_bit(missed, selection, shim, closing):
    model = build("llama", "bfloat16")
    ids = prompt(150)
    options = {**SMALL, "attention": "reference"}
    if selection is not None:
        options["selection"] = selection
    mine = closing(make_engine(model, device=shim, missed_chunks=missed, **options))
    theirs = closing(make_engine(model, **options))
    assert_same_session(run(mine, ids)[0], run(theirs, ids)[0], missed)


def selections(engine, session, layers):
    """Chunks that rows at the end would choose, for made-up queries."""
    layout = engine.layout
    queries = torch.randn(
        8, 8, layout.k_dim, generator=torch.Generator().manual_seed(3), dtype=torch.float32
    )
    return [session.sequence.select(layer, q) for layer in range(layers) for q in queries]


def test_rows_choose_the_chunks_the_cpu_chooses(shim, closing):
    model = build("qwen3", "float32")
    ids = prompt(160)
    mine = closing(make_engine(model, device=shim, selection=TOPK, attention="reference", **SMALL))
    theirs = closing(make_engine(model, selection=TOPK, **SMALL))
    for engine in (mine, theirs):
        engine.session().prefill(ids)
    ours, expected = (run(engine, ids)[0] for engine in (mine, theirs))
    assert selections(mine, ours, 3) == selections(theirs, expected, 3)
    assert [c.selected for c in ours.ledger()] == [c.selected for c in expected.ledger()]


def test_a_snapshot_of_the_reference_order_serves_the_cpu_and_the_shim_alike(
    shim, closing, tmp_path
):
    model = build("llama", "bfloat16")
    ids = prompt(100)
    options = {**SMALL, "attention": "reference", "device": "cpu"}
    engines = {
        name: closing(make_engine(model, **{**options, "device": name})) for name in ("cpu", shim)
    }
    whole, text = run(engines["cpu"], ids)
    for saved in engines:
        path = tmp_path / f"{saved}.kvsnap"
        first = engines[saved].session()
        first.prefill(ids[:70])
        first.save(path)
        for restored in engines:
            session = engines[restored].restore(path)
            assert {chunk.provenance for chunk in session.ledger()} == {"exact"}
            session.prefill(ids)
            assert session.restored_tokens_consumed == 70
            assert session.generate(NEW, eos=None).tokens.tolist() == text
            assert_same_session(session, whole, f"saved on {saved}, restored on {restored}")


def test_a_snapshot_of_tensor_cores_is_refused_elsewhere_or_taken_as_approximate(
    shim, closing, tmp_path
):
    model = build("llama", "bfloat16", hidden=1024)
    mine = closing(make_engine(model, device=shim, **TENSOR))
    theirs = closing(make_engine(model, **TENSOR))
    assert str(mine.fingerprint["kernel_version"]).startswith("tensor")
    session = mine.session()
    session.prefill(prompt(140))
    path = tmp_path / "turn.kvsnap"
    session.save(path)
    with pytest.raises(FingerprintMismatchError, match=r"PagerConfig\.attention") as refused:
        theirs.restore(path)
    assert refused.value.field == "kernel_version"
    taken = theirs.restore(path, on_mismatch="approximate")
    assert {chunk.provenance for chunk in taken.ledger()} == {"approximate"}
    again = mine.restore(path)
    assert_same_session(again, session, "restored where it was saved")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"selection": TOPK},
        {"kv_dtype": "q8", "selection": TOPK},
        {"kv_dtype": "q8", "float_layers": (0,)},
    ],
    ids=["dense", "topk", "q8-topk", "q8-float-layer"],
)
def test_relations_hold_on_tensor_cores(options, device):
    model = build("llama", "bfloat16", hidden=1024).to(tensors_of(device))
    config = PagerConfig(device=device, **TENSOR, **options)
    relations = [
        relation
        for relation in RELATIONS
        if not relation.processes and (relation.at_start or relation.name == "paged")
    ]
    with Subject(model, config, effort="start") as subject:
        assert str(subject.engine().fingerprint["kernel_version"]).startswith("tensor")
        report = verify(subject, relations)
    assert report.kept, report.verdict()
    for outcome in report.outcomes:
        assert outcome.status == "does not apply" or outcome.comparison.bits > 0, outcome.relation


def test_an_engine_verifies_itself_on_a_device(device, closing):
    model = build("qwen3", "bfloat16").to(tensors_of(device))
    engine = closing(make_engine(model, device=device, verify=verify_engine, **SMALL))
    assert engine.stats()["forwards"] == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pool_sizes_packing_and_restores_show_in_no_bit(dtype, device, closing, tmp_path):
    model = build("qwen3", dtype).to(tensors_of(device))
    ids = prompt(120)
    small = closing(make_engine(model, device=device, pool_tokens=96, **SMALL))
    large = closing(make_engine(model, device=device, pool_tokens=512, **SMALL))
    session, text = run(small, ids)
    expected, expected_text = run(large, ids)
    assert text == expected_text
    assert_same_session(session, expected, "in a small pool")
    assert small.stats()["chunks_evicted"] > 0
    session.save(tmp_path / "turn.kvsnap")
    restored = large.restore(tmp_path / "turn.kvsnap")
    assert_same_session(restored, expected, "restored")
    completions = large.run([ids[:60], ids[:35], ids], NEW, eos=None)
    assert completions[2].tokens.tolist() == text
