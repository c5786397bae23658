"""kvpager's tier in real vLLM engines on a CPU: right answers after restarts, damage and changes.

Run by `make test-vllm`, which makes an environment with vLLM.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from connectors.engines import (
    WHOLE,
    Answer,
    Engines,
    kvpager_tier,
    prompt,
    save_adapter,
    save_model,
    save_windowed_model,
)
from kvpager.stores.chunks.pack import PackFile

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed; make test-vllm"
)

PROMPT = prompt(7)
CHUNKS = WHOLE // 64
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with Engines(tmp_path_factory.mktemp("engines")) as found:
        yield found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "model", 1)


@pytest.fixture(scope="module")
def cold(engines: Engines, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Answer:
    """The answer that nothing was loaded for."""
    answer = engines.ask(model, kvpager_tier(tmp_path_factory.mktemp("cold")), PROMPT).answer
    assert answer.cached == 0
    assert answer.is_finite
    return answer


@pytest.fixture(scope="module")
def filled(engines: Engines, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with two prompts, in packs of their own."""
    store = tmp_path_factory.mktemp("filled") / "store"
    for ids in (PROMPT, prompt(8)):
        assert engines.ask(model, kvpager_tier(store), ids).count("stored_chunks.stored") == CHUNKS
    assert len(packs(store)) == 2
    return store


@pytest.fixture
def store(filled: Path, tmp_path: Path) -> Path:
    return shutil.copytree(filled, tmp_path / "store")


def packs(store: Path) -> list[Path]:
    """The oldest first."""
    return sorted((store / "packs").iterdir(), key=lambda path: path.stat().st_mtime_ns)


def test_a_restarted_engine_loads_what_was_stored_and_answers_the_same(engines, model, store, cold):
    run = engines.ask(model, kvpager_tier(store), PROMPT)
    assert run.answer.cached == WHOLE
    assert run.answer.is_as(cold)
    assert run.count("loaded_chunks.hit") == CHUNKS
    assert run.count("loaded_chunks.refused") == 0


def test_a_model_with_sliding_windows_loads_what_its_windows_need(engines, tmp_path):
    windowed = save_windowed_model(tmp_path / "model", 3)
    tier = kvpager_tier(tmp_path / "store")
    first, again = (engines.ask(windowed, tier, PROMPT) for _ in range(2))
    assert first.answer.cached == 0
    assert again.answer.cached == WHOLE
    assert again.answer.is_as(first.answer)
    assert CHUNKS < again.count("loaded_chunks.hit") < 2 * CHUNKS


def test_vllms_metrics_have_the_stores_size_and_budget(engines, model, store):
    run = engines.ask(model, kvpager_tier(store), PROMPT)
    assert run.count("budget_bytes") == 1 << 30
    assert run.count("store_bytes") > 2 * CHUNKS * 65536


# Damage. Of the first pack, which has the prompt's blocks.


def flipped(offset, bit=3):
    def damage(store: Path) -> None:
        path = packs(store)[0]
        data = bytearray(path.read_bytes())
        data[offset(path) if callable(offset) else offset] ^= 1 << bit
        path.write_bytes(data)

    return damage


def block(number: int, place: int):
    """Where a byte of a block is."""

    def offset(path: Path) -> int:
        entry = PackFile(str(path), path.stem, None).table().entries[number]
        return entry.start + (place if place >= 0 else entry.size + place)

    return offset


def cut(share: float):
    def damage(store: Path) -> None:
        path = packs(store)[0]
        size = int(path.stat().st_size * share)
        path.write_bytes(path.read_bytes()[:size])

    return damage


def exchanged_packs(store: Path) -> None:
    one, other = packs(store)
    one.rename(store / "aside")
    other.rename(one)
    (store / "aside").rename(other)


def exchanged_blocks(store: Path) -> None:
    path = packs(store)[0]
    entries = PackFile(str(path), path.stem, None).table().entries
    data = bytearray(path.read_bytes())
    one, other = (slice(entry.start, entry.start + entry.size) for entry in entries[2:4])
    data[one], data[other] = data[other], data[one]
    path.write_bytes(data)


def another_prompts_blocks(store: Path) -> None:
    one, other = packs(store)
    shutil.copyfile(other, one)


def file_flipped(name: str, place: float):
    def damage(store: Path) -> None:
        path = store / name
        data = bytearray(path.read_bytes())
        data[int(place * (len(data) - 1))] ^= 4
        path.write_bytes(data)

    return damage


def removed(name: str):
    return lambda store: (store / name).unlink()


# By what is damaged: what does it, and how many chunks at least are refused. The others may be
# misses, or found again where the store reads its packs anew.
DAMAGE = {
    "the first byte of a chunk": (flipped(block(0, 0)), 1),
    "a byte in the middle of one": (flipped(block(4, 30_000)), 1),
    "the last byte of one": (flipped(block(8, -1), bit=7), 1),
    "two chunks in each other's place": (exchanged_blocks, 2),
    "another prompt's chunks": (another_prompts_blocks, 0),
    "two packs in each other's place": (exchanged_packs, 0),
    "a pack without its second half": (cut(0.5), 0),
    "a pack without its last bytes": (cut(0.99999), 0),
    "an empty pack": (cut(0.0), 0),
    "the pack's magic": (flipped(0), 0),
    "its version": (flipped(8), 0),
    "its size": (flipped(24), 0),
    "its number of blocks": (flipped(40), 0),
    "its check": (flipped(80), 0),
    "the identity in it": (flipped(200), 0),
    "the index": (file_flipped("index.sqlite3", 0.5), 0),
    "the index's head": (file_flipped("index.sqlite3", 0.0), 0),
    "no index": (removed("index.sqlite3"), 0),
}


@pytest.mark.parametrize(("damage", "refused"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_refused_and_computed_again(engines, model, store, cold, damage, refused):
    damage(store)
    run = engines.ask(model, kvpager_tier(store), PROMPT)
    assert run.answer.is_as(cold)
    assert run.count("loaded_chunks.refused") >= refused
    if refused:
        assert run.answer.cached < WHOLE
        assert "kvpager: refused" in run.log


def test_bits_that_flip_anywhere_while_an_engine_runs_change_no_answer(engines, model, store, cold):
    tier = kvpager_tier(store, after_reset="keep")
    ask = {"prompts": [PROMPT]}
    steps = [ask]
    for seed in range(60):
        steps += [{"damage": str(store / "packs"), "seed": seed}, {"reset": True}, ask]
    run = engines.run(model, tier, steps)
    assert len(run.answers) == 61
    assert all(answer.is_as(cold) for (answer,) in run.answers)
    assert run.count("loaded_chunks.refused") > 10
    assert run.count("loaded_chunks.hit") > 100


# Identity.


def rotated(**rope):
    return {
        "hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, **rope}}
    }


CHANGES = {
    "dtype": ({"dtype": "float32"}, {}, "model.dtype"),
    "RoPE theta": (rotated(rope_theta=5e5), {}, "config.rope_parameters.rope_theta"),
    "RoPE scaling": (rotated(**YARN), {}, "config.rope_parameters.rope_type"),
    "revision": ({"revision": "another"}, {}, "model.revision"),
    "layout of a block": ({"block_size": 32}, {}, "cache.block_size"),
    "blocks of a chunk": ({}, {"blocks_per_chunk": 3}, "chunk.blocks"),
    "hash": ({"prefix_caching_hash_algo": "sha256_cbor"}, {}, "hash.algorithm"),
}


@pytest.mark.parametrize(("options", "extra", "field"), CHANGES.values(), ids=CHANGES.keys())
def test_another_configuration_finds_nothing_and_the_log_says_why(
    engines, model, store, tmp_path, options, extra, field
):
    cold = engines.ask(model, kvpager_tier(tmp_path / "cold", **extra), PROMPT, **options)
    run = engines.ask(model, kvpager_tier(store, **extra), PROMPT, **options)
    assert run.answer.cached == 0
    assert run.answer.is_as(cold.answer)
    assert f"kvpager:   {field}: " in run.log


def test_other_weights_under_the_same_path_find_nothing(engines, tmp_path, store, model, cold):
    moved = shutil.copytree(model, tmp_path / "model")
    assert engines.ask(moved, kvpager_tier(store), PROMPT).answer.cached == WHOLE
    save_model(moved, 2)
    fresh = engines.ask(moved, kvpager_tier(tmp_path / "fresh"), PROMPT)
    run = engines.ask(moved, kvpager_tier(store), PROMPT)
    assert run.answer.cached == 0
    assert run.answer.is_as(fresh.answer)
    assert not run.answer.is_as(cold)
    assert "kvpager:   weights.model.safetensors: " in run.log


def test_another_adapter_under_the_same_name_and_path_finds_nothing(
    engines, model, store, tmp_path
):
    adapter = tmp_path / "adapter"
    step = [{"prompts": [PROMPT], "adapter": str(adapter)}]
    options = {"enable_lora": True, "max_lora_rank": 8}
    tier = kvpager_tier(store)

    def run(where=tier):
        return engines.run(model, where, step, **options).answer

    save_adapter(adapter, 1)
    first = run()
    assert first.cached == 0
    again = run()
    assert again.cached == WHOLE
    assert again.is_as(first)
    save_adapter(adapter, 2)
    other = run()
    assert other.cached == 0
    assert other.is_as(run(kvpager_tier(tmp_path / "fresh")))
    assert not other.is_as(first)


def test_requests_without_an_adapter_do_not_find_an_adapters_chunks(engines, model, tmp_path):
    adapter = str(save_adapter(tmp_path / "adapter", 1))
    steps = [{"prompts": [PROMPT], "adapter": adapter}, {"reset": True}, {"prompts": [PROMPT]}]
    tier = kvpager_tier(tmp_path / "store", after_reset="keep")
    with_it, without = engines.run(model, tier, steps, enable_lora=True, max_lora_rank=8).answers
    assert without[0].cached == 0
    assert not without[0].is_as(with_it[0])


# Budgets and resets.


def test_the_budget_holds_and_answers_stay_right(engines, model, tmp_path, cold):
    store = tmp_path / "store"
    budget = 2 << 20
    steps = [{"prompts": [prompt(seed)]} for seed in range(20, 32)]
    run = engines.run(model, kvpager_tier(store, budget), [*steps, {"prompts": [PROMPT]}])
    assert run.answers[-1][0].tokens == cold.tokens
    assert sum(file.stat().st_blocks * 512 for file in packs(store)) <= budget
    late = engines.ask(model, kvpager_tier(store, budget), PROMPT)
    assert late.answer.is_as(cold)
    assert late.answer.cached == WHOLE
    early = engines.ask(model, kvpager_tier(store, budget), prompt(20))
    assert early.answer.cached == 0


def test_after_a_reset_of_vllms_caches_the_store_is_not_used(engines, model, store, cold):
    ask = {"prompts": [PROMPT]}
    run = engines.run(model, kvpager_tier(store), [ask, {"reset": True}, ask])
    assert [answer.cached for (answer,) in run.answers] == [WHOLE, 0]
    assert all(answer.is_as(cold) for (answer,) in run.answers)
    assert "the store is no longer used" in run.log


def test_a_store_that_cannot_be_opened_is_named_at_start(engines, model, tmp_path):
    place = tmp_path / "store"
    place.mkdir()
    (place / "notes.txt").write_text("not a store")
    with pytest.raises(AssertionError, match=r"notes\.txt"):
        engines.ask(model, kvpager_tier(place), PROMPT)


@pytest.mark.parametrize("name", ["path", "byte_budget"])
def test_a_missing_option_is_named(engines, model, tmp_path, name):
    tier = kvpager_tier(tmp_path / "store")
    del tier["extra"][name]
    with pytest.raises(AssertionError, match=f"{name} is None; expected a value"):
        engines.ask(model, tier, PROMPT)
