"""kvpager's adapter as LMCache calls it: with LMCache where it is installed, else with stubs."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import multiprocessing
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from connectors import lmcache_stubs
from connectors.stores import damage, held_back, swap
from kvpager.connectors import lmcache_models
from kvpager.errors import InvalidArgumentError
from kvpager.stores.chunks import ChunkStore

SIZE = 8192
MODULE = "kvpager.connectors.lmcache"
INSTALLED = importlib.util.find_spec("lmcache") is not None


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    if not INSTALLED:
        lmcache_stubs.install(monkeypatch)
        monkeypatch.delitem(sys.modules, MODULE, raising=False)
    found = importlib.import_module(MODULE)
    monkeypatch.setattr(found.logger, "propagate", True)  # to caplog
    monkeypatch.setattr(found.logger, "level", logging.INFO)
    found.logger.manager._clear_cache()  # type: ignore[attr-defined]
    yield found
    if not INSTALLED:
        sys.modules.pop(MODULE, None)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's folder."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights" * 100)
    (folder / "config.json").write_text('{"rope_theta": 10000.0, "transformers_version": "5"}')
    return folder


@dataclass(frozen=True)
class Key:
    chunk_hash: bytes
    model_name: str
    kv_rank: int = 1
    object_group_id: int = 0
    cache_salt: str = ""


class Object:
    """A memory object: `SIZE` bytes in a layout."""

    def __init__(self, seed: int | None = None, dtype: str = "bfloat16", size: int = SIZE) -> None:
        values = np.zeros(size, np.uint8)
        if seed is not None:
            values = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
        self.values = values
        shapes = [(2, size // 4)]
        self.metadata = SimpleNamespace(shapes=shapes, dtypes=[f"torch.{dtype}"])

    @property
    def byte_array(self) -> memoryview:
        return memoryview(self.values)

    def layout(self) -> dict[int, Any]:
        return {0: SimpleNamespace(shapes=self.metadata.shapes, dtypes=self.metadata.dtypes)}


class Driver:
    """An adapter, driven as LMCache's controllers do: they wait for event descriptors."""

    def __init__(self, module: ModuleType, path: Path, name: str, **params: Any) -> None:
        self.name = name
        self.adapter = module.KvpagerL2Adapter(
            {"path": str(path), "byte_budget": "64MiB", "models": {name: {}}, **params}
        )
        self.stored: dict[int, Any] = {}

    def key(self, number: int, **fields: Any) -> Key:
        return Key(number.to_bytes(32, "big"), **{"model_name": self.name, **fields})

    def keys(self, *numbers: int, **fields: Any) -> list[Key]:
        return [self.key(number, **fields) for number in numbers]

    def submit(self, keys: Sequence[Key], objects: Sequence[Object]) -> int:
        return self.adapter.submit_store_task(list(keys), list(objects))

    def finished(self, task: int) -> Any:
        """The result of a store, once its descriptor was signalled."""

        def popped() -> Any:
            self.stored |= self.adapter.pop_completed_store_tasks()
            return self.stored.get(task)

        return signalled(self.adapter.get_store_event_fd(), popped)

    def store(self, keys: Sequence[Key], objects: Sequence[Object]) -> bool:
        return bool(self.finished(self.submit(keys, objects)).is_successful())

    def found(self, keys: Sequence[Key], layout: dict[int, Any] | None = None) -> list[bool]:
        task = self.adapter.submit_lookup_and_lock_task(list(keys), layout or {})
        descriptor = self.adapter.get_lookup_and_lock_event_fd()
        query = self.adapter.query_lookup_and_lock_result
        return bits(signalled(descriptor, lambda: query(task)))

    def load(self, keys: Sequence[Key], objects: Sequence[Object]) -> list[bool]:
        return self.loaded(self.adapter.submit_load_task(list(keys), list(objects)))

    def loaded(self, task: int) -> list[bool]:
        descriptor = self.adapter.get_load_event_fd()
        return bits(signalled(descriptor, lambda: self.adapter.query_load_result(task)))

    def chunks(self) -> dict[str, int]:
        return {name: n for name, n in self.adapter.report_status()["chunks"].items() if n}


def bits(bitmap: Any) -> list[bool]:
    return [bitmap.test(i) for i in range(len(bitmap))]


def signalled(descriptor: int, query: Callable[[], Any]) -> Any:
    """What a query returns in the end; it is asked when the descriptor becomes readable."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    for _ in range(60):
        found = query()
        if found is not None:
            return found
        assert poll.poll(10_000), "the descriptor was never signalled"
        os.eventfd_read(descriptor)
    raise AssertionError("no result, though the descriptor was signalled")


@pytest.fixture
def make(module: ModuleType, model: Path, tmp_path: Path) -> Iterator[Callable[..., Driver]]:
    made: list[Driver] = []

    def new(path: Path = tmp_path / "store", name: str = str(model), **params: Any) -> Driver:
        made.append(Driver(module, path, name, **params))
        return made[-1]

    yield new
    for driver in made:
        driver.adapter.close()


@pytest.fixture
def driver(make: Callable[..., Driver]) -> Driver:
    return make()


def until(holds: Callable[[], bool]) -> None:
    for _ in range(6000):
        if holds():
            return
        time.sleep(0.01)
    raise AssertionError("it never held")


def test_chunks_that_were_stored_are_found_and_loaded(driver):
    keys, objects = driver.keys(1, 2), [Object(1), Object(2)]
    assert driver.store(keys, objects)
    assert driver.found(driver.keys(2, 3, 1)) == [True, False, True]
    into = [Object(), Object(), Object()]
    assert driver.load(driver.keys(2, 3, 1), into) == [True, False, True]
    assert (into[0].values == objects[1].values).all()
    assert not into[1].values.any()
    assert driver.chunks() == {"stored": 2, "hit": 2, "miss": 1}


def test_an_adapter_made_again_finds_and_loads_what_was_stored(make):
    first = make()
    first.store(first.keys(1), [Object(1)])
    second = make()
    assert second.found(second.keys(1), Object().layout()) == [True]
    assert second.load(second.keys(1), [Object()]) == [True]


def test_a_result_is_returned_once(driver):
    assert driver.store(driver.keys(1), [Object(1)])
    task = driver.adapter.submit_load_task(driver.keys(1), [Object()])
    driver.loaded(task)
    assert driver.adapter.query_load_result(task) is None
    assert driver.adapter.pop_completed_store_tasks() == {}


def test_the_three_descriptors_differ(driver):
    adapter = driver.adapter
    assert len({
        adapter.get_store_event_fd(),
        adapter.get_lookup_and_lock_event_fd(),
        adapter.get_load_event_fd(),
    }) == 3  # fmt: skip


@pytest.mark.parametrize(
    "fields", [{"kv_rank": 2}, {"object_group_id": 1}, {"cache_salt": "other"}], ids=str
)
def test_every_field_of_a_key_counts(driver, fields):
    driver.store(driver.keys(1), [Object(1)])
    into = Object()
    assert driver.found(driver.keys(1, **fields)) == [False]
    assert driver.load(driver.keys(1, **fields), [into]) == [False]
    assert not into.values.any()


def test_a_damaged_chunk_is_refused_and_leaves_its_object_as_it_was(driver, tmp_path, caplog):
    driver.store(driver.keys(1, 2), [Object(1), Object(2)])
    damage(tmp_path / "store")
    into = [Object(), Object()]
    assert driver.load(driver.keys(1, 2), into) == [True, False]
    assert not into[1].values.any()
    assert "refused 1 of 2 chunks" in caplog.text
    assert driver.chunks() == {"stored": 2, "hit": 1, "refused": 1}
    assert driver.found(driver.keys(1, 2)) == [True, False]
    assert driver.store(driver.keys(2), [Object(2)])
    assert driver.load(driver.keys(2), into[1:]) == [True]


def test_a_file_that_was_swapped_is_refused(driver, tmp_path):
    driver.store(driver.keys(1), [Object(1)])
    driver.store(driver.keys(2), [Object(2)])
    swap(tmp_path / "store")
    into = [Object(), Object()]
    assert driver.load(driver.keys(1, 2), into) == [False, False]
    assert not any(one.values.any() for one in into)
    assert driver.chunks()["refused"] == 2


def test_chunks_of_another_dtype_are_not_found_though_they_have_the_same_size(make, caplog):
    first = make()
    first.store(first.keys(1), [Object(1)])
    second, other = make(), Object(dtype="float16")
    assert second.found(second.keys(1), other.layout()) == [False]
    assert second.load(second.keys(1), [other]) == [False]
    assert not other.values.any()
    assert 'layout.dtypes.0: "bfloat16", now "float16"' in caplog.text


def test_chunks_of_other_weights_under_the_same_name_are_not_found(make, model, caplog):
    first = make()
    first.store(first.keys(1), [Object(1)])
    weights = model / "model.safetensors"
    weights.write_bytes(b"WEIGHTS" * 100)
    second = make()
    assert second.found(second.keys(1), Object().layout()) == [False]
    assert second.load(second.keys(1), [Object()]) == [False]
    assert "weights.model.safetensors" in caplog.text
    weights.write_bytes(b"weights" * 100)
    third = make()
    assert third.found(third.keys(1)) == [True]


def test_weights_that_are_exchanged_while_the_server_runs_are_noticed(driver, model, monkeypatch):
    monkeypatch.setattr(lmcache_models, "_CHECK_SECONDS", 0.0)
    driver.store(driver.keys(1), [Object(1)])
    (model / "model.safetensors").write_bytes(b"WEIGHTS" * 100)
    into = Object()
    assert driver.found(driver.keys(1)) == [False]
    assert driver.load(driver.keys(1), [into]) == [False]
    until(lambda: driver.store(driver.keys(2), [Object(2)]))
    assert driver.found(driver.keys(1, 2)) == [False, True]
    assert driver.load(driver.keys(1), [into]) == [False]
    assert not into.values.any()


@pytest.mark.parametrize(
    "config", ['{"rope_theta": 1e6}', '{"rope_theta": 10000.0, "head_dim": 2}'], ids=str
)
def test_chunks_of_another_configuration_are_not_found(make, model, config):
    first = make()
    first.store(first.keys(1), [Object(1)])
    (model / "config.json").write_text(config)
    second = make()
    assert second.found(second.keys(1)) == [False]


def test_which_transformers_wrote_a_configuration_does_not_count(make, model):
    first = make()
    first.store(first.keys(1), [Object(1)])
    (model / "config.json").write_text('{"rope_theta": 10000.0, "transformers_version": "6"}')
    second = make()
    assert second.found(second.keys(1)) == [True]


@pytest.mark.parametrize("about", [{"rope_theta": 1e6}, {"weights": "revision 2"}], ids=str)
def test_what_the_parameters_say_of_a_model_counts(make, model, about):
    first = make()
    first.store(first.keys(1), [Object(1)])
    second = make(models={str(model): about})
    assert second.found(second.keys(1)) == [False]


def test_a_name_may_lead_to_a_folder_and_has_a_layout_behind_it(make, model):
    models = {"served": {"folder": str(model)}}
    first = make(name="served", models=models)
    first.store(first.keys(1), [Object(1)])
    assert first.found(first.keys(1)) == [True]
    assert first.found(first.keys(1, model_name="served##lmcache-dcp-layout-v1-d2")) == [False]
    second = make()  # the folder's own name
    assert second.found(second.keys(1)) == [True]


def test_a_name_that_is_not_in_the_parameters_is_identified_meanwhile(make, monkeypatch):
    identity, may_begin = lmcache_models.model_identity, threading.Event()

    def later(folder: Path) -> Any:
        assert may_begin.wait(60)
        return identity(folder)

    monkeypatch.setattr(lmcache_models, "model_identity", later)
    driver = make(models={})
    assert not driver.store(driver.keys(1), [Object(1)])  # it did not wait
    may_begin.set()
    until(lambda: driver.store(driver.keys(1), [Object(1)]))
    assert driver.found(driver.keys(1)) == [True]
    assert driver.chunks()["failed"] >= 1


def test_a_model_without_files_bypasses_the_store(make, caplog):
    driver = make(name="nowhere/nothing", models={})
    assert not driver.store(driver.keys(1), [Object(1)])
    until(lambda: "chunks of nowhere/nothing bypass the store" in caplog.text)
    assert driver.found(driver.keys(1)) == [False]
    assert driver.load(driver.keys(1), [Object()]) == [False]
    assert driver.adapter.report_status()["identified"] == {"nowhere/nothing": False}


def test_a_task_of_several_models_and_layouts_is_one_task(make, model, tmp_path):
    driver = make(models={str(model): {}, "other": {"weights": "2"}})
    keys = [driver.key(1), driver.key(2, model_name="other"), driver.key(3)]
    objects = [Object(1), Object(2), Object(3, size=2 * SIZE)]
    assert driver.store(keys, objects)
    into = [Object(), Object(), Object(size=2 * SIZE)]
    assert driver.found(keys) == [True, True, True]
    assert driver.load(keys, into) == [True, True, True]
    assert all((a.values == b.values).all() for a, b in zip(objects, into))


def test_serialised_chunks_are_found_though_lmcache_names_the_layout_before(make):
    def flat(seed: int | None = None) -> Object:
        found = Object(seed, "uint8")
        found.metadata.shapes = [(SIZE,)]
        return found

    first = make()
    first.store(first.keys(1), [flat(1)])
    second = make()
    assert second.found(second.keys(1), Object().layout()) == [True]
    assert second.load(second.keys(1), [flat()]) == [True]


def test_the_least_recently_used_chunks_go_at_the_budget(make, tmp_path):
    driver = make(byte_budget=8 * SIZE)
    for number in range(12):
        assert driver.store(driver.keys(number), [Object(number)])
        assert driver.adapter.get_usage().total_bytes_used <= 8 * SIZE
        assert driver.found(driver.keys(0)) == [True]  # a lookup is a use
    found = driver.found(driver.keys(*range(12)))
    assert found[0]
    assert found[11]
    assert not all(found)
    assert driver.adapter.get_usage().total_capacity_bytes == 8 * SIZE
    into = [Object() for _ in range(12)]
    assert driver.load(driver.keys(*range(12)), into) == found


def test_a_chunk_that_is_evicted_after_its_lookup_is_a_miss(driver):
    driver.store(driver.keys(1), [Object(1)])
    assert driver.found(driver.keys(1)) == [True]
    driver.adapter.delete(driver.keys(1))
    into = Object()
    assert driver.load(driver.keys(1), [into]) == [False]
    assert not into.values.any()


def test_a_full_queue_fails_tasks_at_once_and_loses_nothing_else(make, monkeypatch):
    driver = make(depth=1, threads=1)
    event = held_back(monkeypatch, "put")
    first = driver.submit(driver.keys(1), [Object(1)])
    assert not driver.store(driver.keys(2), [Object(2)])
    assert driver.load(driver.keys(1), [Object()]) == [False]
    event.set()
    assert driver.finished(first).is_successful()
    assert driver.found(driver.keys(1, 2)) == [True, False]


def test_a_late_load_is_a_miss_and_never_touches_its_object(make, monkeypatch):
    driver = make(deadline_seconds=0.05)
    driver.store(driver.keys(1), [Object(1)])
    event = held_back(monkeypatch, "read")
    into = Object()
    task = driver.adapter.submit_load_task(driver.keys(1), [into])
    time.sleep(0.1)
    event.set()
    assert driver.loaded(task) == [False]
    assert not into.values.any()


def test_after_close_with_work_under_way_nothing_is_written(make, monkeypatch, module, model):
    driver = Driver(module, model.parent / "store", str(model))
    driver.store(driver.keys(1), [Object(1)])
    event = held_back(monkeypatch, "_wanted")
    into = Object()
    driver.adapter.submit_load_task(driver.keys(1), [into])
    until(lambda: event.waiting.is_set())
    closing = threading.Thread(target=driver.adapter.close)
    closing.start()
    until(lambda: driver.adapter._worker._shutdown)
    until(lambda: all(q._is_closed for _, q in driver.adapter._models._chunks.values()))
    event.set()
    closing.join(60)
    assert not closing.is_alive()
    assert not into.values.any()


def test_a_store_that_raises_fails_and_the_next_one_succeeds(driver, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        patch.setattr(ChunkStore, "put", broken)
        assert not driver.store(driver.keys(1), [Object(1)])
    assert "a store ended early: the disk is gone" in caplog.text
    assert driver.store(driver.keys(1), [Object(1)])


def test_a_lookup_that_raises_finds_nothing(driver, monkeypatch, caplog):
    driver.store(driver.keys(1), [Object(1)])
    with monkeypatch.context() as patch:
        patch.setattr(ChunkStore, "has", broken)
        assert driver.found(driver.keys(1)) == [False]
    assert "the disk is gone" in caplog.text
    assert driver.found(driver.keys(1)) == [True]


def broken(*_: Any, **__: Any) -> Any:
    raise OSError("the disk is gone")


def test_a_listener_hears_of_what_was_stored_once_used_and_deleted(driver):
    heard: list[Any] = []
    driver.adapter.register_listener(
        SimpleNamespace(
            on_l2_keys_stored=lambda keys, sizes: heard.append(("stored", keys, sizes)),
            on_l2_keys_accessed=lambda keys: heard.append(("used", keys)),
            on_l2_keys_deleted=lambda keys: heard.append(("deleted", keys)),
        )
    )
    one, two = driver.keys(1, 2)
    driver.store([one], [Object(1)])
    driver.store([one, two], [Object(1), Object(2)])
    driver.load([one], [Object()])
    driver.adapter.submit_touch([two])
    driver.adapter.delete([one])
    assert heard == [
        ("stored", [one], [SIZE]),
        ("stored", [two], [SIZE]),
        ("used", [one]),
        ("used", [two]),
        ("deleted", [one]),
    ]
    assert driver.found([one, two]) == [False, True]


def store_some(path: str, model: str, first: int) -> None:
    """In another process."""
    lmcache_stubs.install(pytest.MonkeyPatch())
    driver = Driver(importlib.import_module(MODULE), Path(path), model)
    for number in range(first, first + 10):
        assert driver.store(driver.keys(number), [Object(number)])
    driver.adapter.close()


@pytest.mark.skipif(INSTALLED, reason="once is enough")
def test_two_processes_share_a_folder(driver, model, tmp_path):
    context = multiprocessing.get_context("spawn")
    others = [
        context.Process(target=store_some, args=(str(tmp_path / "store"), str(model), first))
        for first in (0, 5)
    ]
    for other in others:
        other.start()
    assert driver.store(driver.keys(99), [Object(99)])
    for other in others:
        other.join(120)
        assert other.exitcode == 0
    keys = driver.keys(*range(15), 99)
    assert all(driver.found(keys))
    into = [Object() for _ in keys]
    assert all(driver.load(keys, into))
    numbers = [int.from_bytes(key.chunk_hash, "big") for key in keys]
    assert all((one.values == Object(n).values).all() for one, n in zip(into, numbers))


def test_chunks_are_on_this_host_unless_lmcache_shares_the_adapter(driver):
    if not hasattr(importlib.import_module("lmcache.v1.distributed.api"), "MemoryTags"):
        pytest.skip("LMCache 0.5.6 does not ask")
    tags = driver.adapter.get_memory_tags()
    assert (tags.segment.value, tags.residency.value) == ("storage", "local")
    driver.adapter.set_backend_identity("plugin", shared=True)
    assert driver.adapter.get_memory_tags().residency.value == "remote"


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"byte_budget": None, "pth": "x"}, "pth"),
        ({"byte_budget": "many"}, "byte_budget"),
        ({"threads": 0}, "threads"),
        ({"models": ["a"]}, "models"),
        ({"models": {"nowhere/nothing": {}}}, "nowhere/nothing"),
    ],
    ids=str,
)
def test_parameters_that_are_wrong_are_named_at_start(make, params, words):
    with pytest.raises(InvalidArgumentError, match=words):
        make(**params)


def test_a_missing_parameter_is_named(module):
    with pytest.raises(InvalidArgumentError, match="path"):
        module.KvpagerL2Adapter({"byte_budget": 1})


def test_records_say_what_is_found_and_what_differs(make, caplog):
    first = make()
    first.store(first.keys(1), [Object(1)])
    make().found(first.keys(1))
    assert "kvpager: identified" in caplog.text
    assert "kvpager: 0 chunks of identity" in caplog.text
    assert "kvpager: 1 chunks of identity" in caplog.text
