"""Sessions that are saved and restored: what is read, what is refused, and what a refusal costs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from bits import assert_same_session
from damage import damage_chunk, flip, sections
from reference_models import CHUNK, build, make_engine, prompt

import kvpager
from kvpager import (
    CapacityError,
    CorruptSnapshotError,
    FingerprintMismatchError,
    PrefixMismatchError,
    TopK,
)
from kvpager.stores import DirectoryStore


@pytest.fixture(scope="module")
def model(kv_dtype):
    return build("llama")


@pytest.fixture
def engine(model, closing):
    return closing(make_engine(model))


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("snapshots") / "turn"
    write(model, path, 100)
    return path


@pytest.fixture
def copy(saved, tmp_path):
    (tmp_path / "copy").write_bytes(saved.read_bytes())
    return tmp_path / "copy"


def test_every_way_to_save_saves_the_same_session_and_says_what_it_did(engine, tmp_path):
    session = engine.session()
    session.prefill(prompt(70))
    next(session.generate(1, eos=None, stream="tokens"))
    store = DirectoryStore(tmp_path / "store")
    reports = {
        "file": session.save(tmp_path / "file"),
        "beside": session.save(tmp_path / "beside", wait=False).result(),
        "store": session.save("turn", store=store),
        "store beside": session.save("again", store=store, wait=False).result(),
        "sequence": session.sequence.save(tmp_path / "sequence"),
    }
    assert {report.logical_digest for report in reports.values()} == {
        reports["file"].logical_digest
    }
    assert {(report.tokens, report.chunks) for report in reports.values()} == {(70, 5)}
    assert reports["store beside"].chunks_written == 1  # the tail
    expected = session.fork().generate(5, eos=None).tokens.tolist()
    for name, where in (("file", None), ("beside", None), ("turn", store), ("again", store)):
        again = engine.restore(name if where else tmp_path / name, store=where)
        assert again.pending == session.pending
        assert again.generate(5, eos=None).tokens.tolist() == expected


def test_a_restore_reads_metadata_and_the_tail_and_a_turn_reads_what_it_selects(
    model, tmp_path, closing
):
    selection = TopK(chunks=1, sinks=CHUNK, recent=32)
    with make_engine(model, selection=selection) as engine, engine.session() as session:
        session.prefill(prompt(1000))
        session.save(tmp_path / "turn")
    engine = closing(
        make_engine(model, selection=selection, host_bytes=0, pool_tokens=192, summary_bytes="1MiB")
    )
    chunk, summary = (engine.stats()[name] for name in ("chunk_bytes", "summary_bytes_per_chunk"))
    again = engine.restore(tmp_path / "turn")
    assert engine.stats()["snapshot_bytes_read"] <= chunk
    again.logits  # noqa: B018
    layout = engine.layout
    # Sinks, the recent window with the tail's chunk, and one chunk for each layer and kv head.
    most = 1 + 4 + layout.layers * layout.kv_heads
    assert engine.stats()["snapshot_bytes_read"] <= (most + 1) * chunk + 62 * summary
    assert most < 20 < 62


def test_a_refused_restore_leaves_engine_and_sessions_as_they_were(model, saved, copy, closing):
    engine = closing(make_engine(model, summary_bytes=20 * 3072))  # of 20 chunks
    session = engine.session()
    session.prefill(prompt(90, seed=3))
    other = engine.session()
    other.prefill(prompt(40, seed=4))

    refusals = {
        "metadata": (lambda: flip(copy, sections(copy)[6][0]), CorruptSnapshotError),
        "tail": (lambda: damage_chunk(copy, engine, 6), CorruptSnapshotError),
        "header": (lambda: flip(copy, 20), CorruptSnapshotError),
        "cut": (lambda: copy.write_bytes(saved.read_bytes()[:-1]), CorruptSnapshotError),
        "missing": (copy.unlink, kvpager.StorageError),
        "another model": (lambda: write(build("qwen3"), copy, 20), FingerprintMismatchError),
        "no room": (lambda: write(model, copy, 400), CapacityError),
    }
    # Where chunks are may change, what there is may not.
    moving = {"chunks_evicted", "eviction_orders_made", "free_blocks", "resident_bytes"}
    before = {name: value for name, value in engine.stats().items() if name not in moving}
    tokens = [each.tokens.tolist() for each in (session, other)]
    for name, (change, error) in refusals.items():
        copy.write_bytes(saved.read_bytes())
        change()
        with pytest.raises(error):
            engine.restore(copy)
        after = engine.stats()
        assert {name: after[name] for name in before} == before, name
        engine.pager.check_invariants()
    assert [each.tokens.tolist() for each in (session, other)] == tokens
    session.append([5])
    whole = engine.session()
    whole.prefill(session.tokens)
    assert_same_session(session, whole, "after refusals")


def write(model, path, length):
    with make_engine(model) as engine, engine.session() as session:
        session.prefill(prompt(length))
        session.save(path)


def test_equal_sizes_with_another_meaning_are_refused_by_name(model, saved, closing):
    """bfloat16 and float16 rows have equal sizes, and so have other RoPE bases and salts."""
    half = closing(make_engine(model, kv_dtype="float16"))
    session = half.session()
    session.prefill(prompt(40))
    path = saved.parent / "half"
    session.save(path)
    for options, field in (
        ({"kv_dtype": "bfloat16"}, "k_dtype"),
        ({"kv_dtype": "float16", "salt": "x"}, "salt"),
    ):
        with pytest.raises(FingerprintMismatchError) as refused:
            closing(make_engine(model, **options)).restore(path)
        assert refused.value.field == field
    turned = build("llama", rope_parameters={"rope_type": "default", "rope_theta": 2e4})
    with pytest.raises(FingerprintMismatchError):
        closing(make_engine(turned)).restore(saved)


@pytest.mark.parametrize(
    "options",
    [
        {"pool_tokens": 64},
        {"pool_tokens": 4096},
        {"host_bytes": 0, "pool_tokens": 256},
        {"policy": "lru", "recall_chunks": 0},
        {"debug_shuffle_seed": 3, "debug_poison": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["file", "store"])
def test_a_snapshot_is_whole_under_any_pool_tiers_and_policy(
    model, saved, tmp_path, closing, options, kind
):
    whole = closing(make_engine(model, pool_tokens=512)).session()
    whole.prefill(prompt(130))
    engine = closing(make_engine(model, **options))
    if kind == "file":
        again = engine.restore(saved)
    else:
        store = DirectoryStore(tmp_path / "store")
        session = engine.session()
        session.prefill(prompt(100))
        session.save("turn", store=store)
        session.close()
        again = closing(make_engine(model, **options)).restore("turn", store=store)
    again.prefill(prompt(130)[:100])
    again.append(whole.tokens[100:])
    assert_same_session(again, whole, "restored")


def test_a_suffix_alone_is_refused_and_a_fallback_prefills_the_whole_prompt(
    model, saved, tmp_path, closing
):
    engine = closing(make_engine(model))
    again = engine.restore(saved)
    with pytest.raises(PrefixMismatchError):
        again.prefill(prompt(130)[100:])
    assert again.length == 100
    # Where the store fails, the whole prompt is computed, from position 0.
    store = DirectoryStore(tmp_path / "store")
    again.save("turn", store=store)
    for pack in Path(store.path).glob("packs/*"):
        pack.write_bytes(b"")
    session = closing(make_engine(model, store=store)).session()
    ids = np.concatenate([prompt(100), prompt(30, seed=1)])
    session.prefill(ids)
    whole = closing(make_engine(model)).session()
    whole.prefill(ids)
    assert_same_session(session, whole, "fallback")


def test_a_flipped_bit_is_an_error_that_names_its_place_and_costs_nothing_else(
    model, copy, closing
):
    engine = closing(make_engine(model))
    damage_chunk(copy, engine, 4, layer=2)
    again = engine.restore(copy)
    with pytest.raises(CorruptSnapshotError, match=r"tokens \[64, 80\).*layer 2"):
        again.append([5])
    for layer in range(engine.layout.layers):  # other chunks are usable
        again.sequence.read_kv(layer, 0, 64)
        again.sequence.read_kv(layer, 80, 100)
    again.trim(64)
    again.append([5])
    whole = closing(make_engine(model)).session()
    whole.prefill([*prompt(100)[:64], 5])
    assert_same_session(again, whole, "without the damaged chunk")


def test_an_adapter_that_changes_one_element_or_adds_a_parameter_is_another_model(
    saved, tmp_path, closing
):
    def restored(change):
        model = build("llama")
        with torch.no_grad():
            change(model)
        store = DirectoryStore(tmp_path / "store")
        with make_engine(model, store=store) as engine:
            fresh = engine.session()
            fresh.prefill(prompt(100))
            assert fresh.restored_tokens == 0
            return engine.restore(saved)

    with make_engine(build("llama")) as engine:
        engine.restore(saved).save("turn", store=DirectoryStore(tmp_path / "store"))

    def merged(model):  # what a merged low-rank adapter does, at its smallest
        model.model.layers[1].self_attn.v_proj.weight[3, 5] += 2**-12

    def attached(model):
        layer = model.model.layers[0].mlp.down_proj
        layer.register_parameter("lora_A", torch.nn.Parameter(torch.zeros(4, 512)))

    for change in (merged, attached):
        with pytest.raises(FingerprintMismatchError, match="adapters") as refused:
            restored(change)
        assert refused.value.field == "weights"


@pytest.mark.parametrize("way", ["prefill", "generate", "logits", "repaired", "prefix"])
def test_what_was_restored_is_consumed_or_the_prefill_is_refused(
    model, copy, tmp_path, closing, way
):
    store = DirectoryStore(tmp_path / "store")
    engine = closing(make_engine(model, store=store))
    if way == "repaired":
        damage_chunk(copy, engine, 2)
    again = engine.restore(copy, on_corrupt="recompute")
    if way == "prefix":
        again.save("turn", store=store)
        again.close()
        engine = closing(make_engine(model, store=store))
        again = engine.session()
        again.prefill(prompt(100))
        assert again.restored_tokens == again.restored_tokens_consumed == 96
        return
    assert (again.restored_tokens, again.restored_tokens_consumed) == (100, 0)
    with pytest.raises(kvpager.RestoreNotConsumedError):
        again.prefill(prompt(99))
    if way == "generate":
        next(again.generate(1, eos=None, stream="tokens"))
    elif way == "logits":
        again.logits  # noqa: B018
    else:
        again.prefill([*prompt(100), 5])
    assert again.restored_tokens_consumed == 100
    assert again.recomputed_tokens == CHUNK * (way == "repaired")


def test_a_day_of_turns_stays_within_the_stores_budget(engine, tmp_path):
    budget = 40 * engine.layout.chunk_bytes
    store = DirectoryStore(tmp_path / "store", byte_budget=budget)
    session = engine.session()
    for turn in range(25):
        session.append(prompt(40, seed=turn))
        if session.length > 400:
            session.trim(0)
            session.append(prompt(40, seed=100 + turn))
        session.save(f"turn-{turn}", store=store)
        used = sum(file.stat().st_size for file in Path(store.path).rglob("*.kvsnap"))
        assert used <= budget
    assert 0 < len(store.entries()) < 25
    assert engine.restore("turn-24", store=store).tokens.tolist() == session.tokens.tolist()
