"""kvpager's tier as vLLM calls it: with vLLM where it is installed, with stubs of it elsewhere."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import mmap
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from connectors import vllm_stubs
from connectors.engines import save_adapter
from connectors.stores import held_back
from kvpager.errors import InvalidArgumentError

SIZE, SLOTS = 8192, 16
IDENTITY = {
    "engine": "vllm 0.32",
    "weights": {"model.safetensors": "1234"},
    "config": {"layers": 4},
}


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module."""
    own = logging.getLogger("kvpager")
    before = list(own.handlers), own.level
    if importlib.util.find_spec("vllm") is None:
        vllm_stubs.install(monkeypatch)
        monkeypatch.delitem(sys.modules, "kvpager.connectors.vllm", raising=False)
    yield importlib.import_module("kvpager.connectors.vllm")
    if importlib.util.find_spec("vllm.config") is None:
        sys.modules.pop("kvpager.connectors.vllm", None)
    own.handlers[:] = before[0]
    own.setLevel(before[1])


class Driver:
    """A tier, and the host memory that it copies from and to, driven as vLLM does."""

    def __init__(self, connector: ModuleType, path: Path, **options: Any) -> None:
        self.connector = connector
        self.memory = mmap.mmap(-1, SIZE * SLOTS)
        self.view = memoryview(self.memory).cast("B", (SLOTS, SIZE))
        settings = {"byte_budget": "64MiB", "identity": IDENTITY, **options}
        self.tier = connector.KvpagerTier(
            offloading_spec=None,
            primary_kv_view=self.view,
            tier_type="kvpager",
            backpressure_detector=None,
            path=str(path),
            **settings,
        )
        self.jobs = 0
        self.results: dict[int, Any] = {}

    def slots(self) -> np.ndarray:
        return np.frombuffer(self.memory, np.uint8).reshape(SLOTS, SIZE)

    def fill(self, *slots: int) -> None:
        rows = self.slots()
        for slot in slots:
            rows[slot] = np.random.default_rng(slot).integers(0, 256, SIZE, np.uint8)

    def job(self, keys: dict[bytes, int], request: str, load: bool) -> Any:
        self.jobs += 1
        context = SimpleNamespace(req_id=request)
        chunks = np.array(list(keys.values()), np.int32)
        return vllm_stubs.TransferJob(self.jobs, list(keys), chunks, load, context)

    def store(self, keys: dict[bytes, int], request: str = "a") -> Any:
        job = self.job(keys, request, load=False)
        self.tier.submit_store(job)
        return self.ended(job.job_id)

    def load(self, keys: dict[bytes, int], request: str = "a") -> Any:
        job = self.job(keys, request, load=True)
        self.tier.submit_load(job)
        return self.ended(job.job_id)

    def ended(self, job: int) -> Any:
        self.until(lambda: job in self.results)
        return self.results[job]

    def poll(self) -> None:
        self.results |= {result.job_id: result for result in self.tier.get_finished_jobs()}

    def until(self, holds: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not holds():
            assert time.monotonic() < end
            self.poll()
            time.sleep(0.001)

    def step(self) -> None:
        self.tier.on_schedule_end(None)

    def ask(self, key: bytes, request: str = "a") -> str:
        return str(self.tier.lookup(key, SimpleNamespace(req_id=request)).name)

    def found(self, key: bytes, request: str = "a") -> bool:
        """What a lookup says in the end."""
        answer = self.ask(key, request)
        for _ in range(60_000):
            if answer != "RETRY":
                break
            self.step()
            time.sleep(0.001)
            answer = self.ask(key, request)
        assert answer in ("HIT", "MISS")
        return answer == "HIT"

    def forget(self, request: str = "a") -> None:
        self.tier.on_request_finished(SimpleNamespace(req_id=request))

    def counts(self) -> dict[str, int]:
        stats = self.tier.get_stats()
        if stats is None:
            return {}
        names = self.connector
        return {
            f"{short}.{labels[0]}": value
            for short, name in (("loaded", names.LOADED), ("stored", names.STORED))
            for labels, value in stats.data["data"].get(name, {}).items()
            if value
        }

    def close(self) -> None:
        self.tier.shutdown()
        self.view.release()
        self.memory.close()  # BufferError: the tier has kept a view


@pytest.fixture
def make(connector: ModuleType, tmp_path: Path) -> Iterator[Callable[..., Driver]]:
    made: list[Driver] = []

    def new(path: Path = tmp_path / "store", **options: Any) -> Driver:
        made.append(Driver(connector, path, **options))
        return made[-1]

    yield new
    for driver in made:
        driver.close()


@pytest.fixture
def driver(make: Callable[..., Driver]) -> Driver:
    return make()


def key(number: int, group: int = 0) -> bytes:
    return number.to_bytes(32, "big") + group.to_bytes(4, "big")


def test_a_chunk_that_was_stored_is_found_and_loaded(driver):
    driver.fill(0, 1)
    result = driver.store({key(1): 0, key(2): 1})
    assert result.success
    assert result.transfer_bytes >= 2 * SIZE
    assert driver.found(key(2))
    assert not driver.found(key(3))
    result = driver.load({key(2): 5, key(1): 4})
    assert result.success
    rows = driver.slots()
    assert (rows[4:6] == rows[0:2]).all()
    assert driver.counts() == {"stored.stored": 2, "loaded.hit": 2}
    del rows


def test_a_tier_made_again_finds_what_was_stored(make):
    first = make()
    first.fill(0)
    first.store({key(1): 0})
    assert make().found(key(1))


def test_a_lookup_returns_at_once_while_the_disk_does_not_answer(driver, monkeypatch):
    driver.fill(0)
    driver.store({key(1): 0})
    event = held_back(monkeypatch, "has")
    for _ in range(3):
        assert driver.ask(key(1)) == "RETRY"
        driver.step()
    event.set()
    assert driver.found(key(1))


def test_chunks_that_were_loaded_are_kept_and_the_others_are_misses(driver):
    driver.fill(0, 1, 2)
    driver.store({key(n): n for n in range(3)})
    assert all(driver.found(key(n)) for n in range(3))
    store = driver.tier._store
    store.delete([key(1)[:-4]])
    result = driver.load({key(n): 5 + n for n in range(3)})
    assert not result.success
    assert set(result.successful_keys) == {key(0), key(2)}
    assert driver.ask(key(1)) == "MISS"
    assert driver.ask(key(2)) == "HIT"


def test_a_damaged_chunk_is_refused_and_leaves_its_destination_as_it_was(driver, tmp_path, caplog):
    driver.fill(0, 5)
    before = driver.slots()[5].copy()
    driver.store({key(1): 0})
    assert driver.found(key(1))
    (pack,) = (tmp_path / "store" / "packs").iterdir()
    data = bytearray(pack.read_bytes())
    data[-1] ^= 1
    pack.write_bytes(data)
    result = driver.load({key(1): 5})
    assert not result.success
    assert result.successful_keys is None
    assert (driver.slots()[5] == before).all()
    assert driver.ask(key(1)) == "MISS"
    assert "refused 1 of 1 chunks" in caplog.text
    assert driver.counts()["loaded.refused"] == 1


def test_a_load_that_fails_is_not_tried_again_by_the_same_request(driver):
    driver.fill(0)
    driver.store({key(1): 0})
    assert driver.found(key(1))
    driver.tier._store.delete([key(1)[:-4]])
    driver.load({key(1): 5})
    for _ in range(3):
        driver.step()
        assert driver.ask(key(1)) == "MISS"
    driver.forget()
    driver.store({key(1): 0}, "b")
    assert driver.found(key(1), "b")


def test_a_full_queue_fails_jobs_at_once_and_loses_nothing_else(make, monkeypatch):
    driver = make(depth=1, threads=1)
    driver.fill(0, 1)
    event = held_back(monkeypatch, "put")
    first = driver.job({key(1): 0}, "a", load=False)
    driver.tier.submit_store(first)
    assert not driver.store({key(2): 1}).success
    assert not driver.load({key(1): 5}).success
    event.set()
    assert driver.ended(first.job_id).success
    assert driver.counts() == {"stored.skipped": 1, "loaded.skipped": 1, "stored.stored": 1}
    driver.forget()
    assert driver.found(key(1))
    assert not driver.found(key(2))


def test_a_store_without_room_fails_its_job_and_the_next_one_is_tried(make, caplog):
    driver = make(byte_budget=SIZE * 4)
    driver.fill(0, 1, 2, 3)
    result = driver.store({key(n): n for n in range(4)})
    assert not result.success
    assert "4 chunks were not stored: byte_budget is" in caplog.text
    assert driver.store({key(7): 0}).success
    assert driver.counts() == {"stored.failed": 4, "stored.stored": 1}


def test_groups_are_apart_and_one_job_may_have_several(driver):
    driver.fill(0, 1)
    assert driver.store({key(1, 0): 0, key(1, 3): 1}).success
    assert driver.found(key(1, 3))
    assert not driver.found(key(1, 2))
    result = driver.load({key(1, 3): 4, key(1, 0): 5, key(1, 2): 6})
    assert set(result.successful_keys) == {key(1, 3), key(1, 0)}
    rows = driver.slots()
    assert (rows[4] == rows[1]).all()
    assert (rows[5] == rows[0]).all()
    del rows


def test_a_reset_stops_the_use_of_the_store(driver, caplog):
    driver.fill(0)
    driver.store({key(1): 0})
    assert driver.found(key(1))
    driver.tier.on_reset()
    assert driver.ask(key(1)) == "MISS"
    assert not driver.store({key(2): 0}).success
    assert not driver.load({key(1): 5}).success
    assert "no longer used" in caplog.text


def test_a_reset_that_is_promised_to_change_no_weights_stops_nothing(make):
    driver = make(after_reset="keep")
    driver.fill(0)
    driver.store({key(1): 0})
    driver.tier.on_reset()
    assert driver.found(key(1))


def adapter(path: Path, *, name: str = "sql", inplace: bool = False) -> Any:
    return SimpleNamespace(lora_name=name, lora_path=str(path), load_inplace=inplace)


def test_chunks_of_adapters_are_found_by_the_same_weights_alone(driver, tmp_path):
    one, other = (save_adapter(tmp_path / str(seed), seed) for seed in (1, 2))
    driver.fill(0)
    driver.tier.use_adapter("a", adapter(one))
    assert not driver.found(key(1), "a")
    assert driver.store({key(1): 0}, "a").success
    driver.tier.use_adapter("b", adapter(other))
    assert not driver.found(key(1), "b")
    assert not driver.found(key(1), "c")  # without an adapter
    driver.tier.use_adapter("d", adapter(one, name="renamed"))
    assert driver.found(key(1), "d")
    assert driver.load({key(1): 5}, "d").success
    assert not driver.load({key(1): 5}, "b").success


def test_an_adapter_that_is_loaded_in_place_is_read_again(driver, tmp_path):
    path = save_adapter(tmp_path / "adapter", 1)
    driver.fill(0)
    driver.tier.use_adapter("a", adapter(path))
    driver.found(key(1), "a")
    driver.store({key(1): 0}, "a")
    save_adapter(path, 2)
    driver.tier.use_adapter("b", adapter(path, inplace=True))
    assert not driver.found(key(1), "b")


def test_requests_of_an_adapter_that_cannot_be_read_bypass_the_store(driver, tmp_path, caplog):
    driver.fill(0)
    driver.tier.use_adapter("a", adapter(tmp_path / "missing"))
    assert not driver.found(key(1), "a")
    assert not driver.store({key(1): 0}, "a").success
    assert "bypass the store" in caplog.text
    assert not driver.found(key(1), "b")


def test_draining_waits_for_all_jobs(driver, monkeypatch):
    driver.fill(0)
    event = held_back(monkeypatch, "put")
    job = driver.job({key(1): 0}, "a", load=False)
    driver.tier.submit_store(job)
    threading.Timer(0.05, event.set).start()
    driver.tier.drain_jobs()
    driver.poll()
    assert driver.results[job.job_id].success


def test_shutting_down_keeps_what_was_submitted(make):
    first = make()
    first.fill(0)
    first.tier.submit_store(first.job({key(1): 0}, "a", load=False))
    first.tier.shutdown()
    assert make().found(key(1))


def test_every_metric_is_defined_with_its_labels(make):
    driver = make(byte_budget=SIZE * 8)
    driver.fill(*range(8))
    for number in range(8):
        driver.store({key(number): number})
    driver.found(key(7))
    driver.load({key(7): 0})
    defined = driver.tier.build_metric_definitions({})
    found: dict[str, float] = {}

    def has_all() -> bool:
        driver.tier._measured = 0.0
        driver.step()
        stats = driver.tier.get_stats()
        for name, values in ({} if stats is None else stats.data["data"]).items():
            for labels, value in values.items():
                assert len(labels) == len(defined[name].labelnames)
                found[name] = found.get(name, 0) + value
        return set(found) == set(defined)

    driver.until(has_all)
    names = driver.connector
    assert found[names.BUDGET_BYTES] == SIZE * 8
    assert found[names.EVICTED] > 0
    assert found[names.LOADED] == 1


def test_the_log_says_how_other_chunks_here_differ(make, caplog):
    caplog.set_level(logging.INFO, logger="kvpager")
    first = make()
    first.fill(0)
    first.store({key(1): 0})
    caplog.clear()
    other = make(identity={**IDENTITY, "config": {"layers": 5}})
    assert not other.found(key(1))
    assert "1 chunks there are not used, which differ in:" in caplog.text
    assert "config.layers: 4, now 5" in caplog.text


def test_arguments_of_later_versions_are_ignored(make):
    assert make(expedited=True, something_new={}).tier is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"identity": None}, "identity is None"),
        ({"after_reset": "maybe"}, "after_reset is 'maybe'; expected stop or keep"),
        ({"byte_budget": "many"}, "byte_budget is 'many'"),
        ({"threads": 0}, "threads"),
    ],
)
def test_options_that_are_not_as_they_should_be_are_named(make, options, message):
    with pytest.raises(InvalidArgumentError, match=message):
        make(**options)


# The connector's configuration.


def settings(**extra: Any) -> Any:
    transfer = SimpleNamespace(kv_connector_extra_config=extra)
    return SimpleNamespace(kv_transfer_config=transfer)


def test_a_name_a_path_and_a_budget_are_all_that_has_to_be_said(connector):
    given = settings(path="/kv", byte_budget="1GiB", blocks_per_chunk=2)
    extra = connector._with_tier(given).kv_transfer_config.kv_connector_extra_config
    assert extra == {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": 4 << 30,
        "blocks_per_chunk": 2,
        "secondary_tiers": [{"type": "kvpager", "path": "/kv", "byte_budget": "1GiB"}],
    }
    assert given.kv_transfer_config.kv_connector_extra_config == {
        "path": "/kv",
        "byte_budget": "1GiB",
        "blocks_per_chunk": 2,
    }


def test_sizes_may_be_text_and_other_tiers_stay_behind_kvpagers(connector):
    given = settings(
        path="/kv", byte_budget=1, cpu_bytes_to_use="2GiB", secondary_tiers=[{"type": "p2p"}]
    )
    extra = connector._with_tier(given).kv_transfer_config.kv_connector_extra_config
    assert extra["cpu_bytes_to_use"] == 2 << 30
    assert [tier["type"] for tier in extra["secondary_tiers"]] == ["kvpager", "p2p"]


@pytest.mark.parametrize("name", ["path", "byte_budget"])
def test_a_missing_path_or_budget_is_named(connector, name):
    extra = {"path": "/kv", "byte_budget": 1}
    del extra[name]
    with pytest.raises(InvalidArgumentError, match=f"{name} is None"):
        connector._with_tier(settings(**extra))
