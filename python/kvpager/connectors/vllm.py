"""A checked, budgeted disk tier for vLLM 0.32 and 0.33.

`KvpagerConnector` is vLLM's `OffloadingConnector` with a `ChunkStore` behind its tier of host
memory. It finds out what the K/V depend on, and nothing that was stored under anything else is ever
found. What is loaded is verified first: a damaged chunk is refused, and computed again.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import vllm
from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    RequestOffloadingContext,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from kvpager._support.arguments import refusal
from kvpager._support.option_table import parse_bytes
from kvpager.connectors.identity import (
    adapter_digest,
    digest_of,
    key_of_adapter,
    log_identity,
    message_of,
)
from kvpager.connectors.lookups import Lookups
from kvpager.connectors.vllm_identity import identity_of
from kvpager.stores.chunks import ChunkQueue, ChunkStore, JobDone, ReadResult

logger = logging.getLogger(__name__)

TIER = "kvpager"
_HOST_BYTES = 4 << 30  # of vLLM's tier of host memory, in /dev/shm
_OPTIONS = (
    *("path", "byte_budget", "ttl", "threads", "depth", "deadline_seconds", "after_reset"),
    "locality",
)
_AFTER_RESET = ("stop", "keep")
_MEASURE_SECONDS = 5.0

LOADED = "vllm:kvpager_loaded_chunks"
STORED = "vllm:kvpager_stored_chunks"
EVICTED = "vllm:kvpager_evicted_chunks"
STORE_BYTES = "vllm:kvpager_store_bytes"
BUDGET_BYTES = "vllm:kvpager_budget_bytes"


class KvpagerConnector(OffloadingConnector):  # type: ignore[misc]
    """vLLM's connector for offloading, with kvpager's tier behind host memory.

    Options (`kv_connector_extra_config`), besides those of vLLM's `TieringOffloadingSpec`:

    - path: folder of the store. byte_budget: bytes, "50GiB" or "unlimited".
    - cpu_bytes_to_use: bytes of host memory, 4 GiB if left out.
    - ttl: time to live of chunks, from their last use. threads, depth: of the queue to the store.
      deadline_seconds: after which a load is given up, and computed instead.
    - weights: any text that identifies the weights, where they are not files on this machine.
    - after_reset: "stop" (default) uses the store no more after vLLM reset its caches, since other
      weights may be in memory; "keep" promises that a reset changes none.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        config = _with_tier(vllm_config)
        if role == KVConnectorRole.SCHEDULER:  # the only one with tiers
            extra = config.kv_transfer_config.kv_connector_extra_config
            _tier_of(extra)["identity"] = _identity(config, kv_cache_config, extra.get("weights"))
        super().__init__(config, role, kv_cache_config)

    @override
    def on_new_request(self, request: Any) -> None:
        if request.lora_request is not None:
            for tier in self._tiers():
                tier.use_adapter(request.request_id, request.lora_request)
        super().on_new_request(request)

    @override
    def reset_cache(self) -> bool | None:
        for tier in self._tiers():
            tier.on_reset()
        found: bool | None = super().reset_cache()
        return found

    @classmethod
    @override
    def build_prom_metrics(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        return super().build_prom_metrics(_with_tier(vllm_config), *args, **kwargs)

    def _tiers(self) -> Iterator[KvpagerTier]:
        manager = self.scheduler.manager
        return (tier for tier in manager.secondary_tiers if isinstance(tier, KvpagerTier))


def _with_tier(config: Any) -> Any:
    """A copy of vLLM's configuration that names the tier; the original stays as it is."""
    config = copy.copy(config)
    config.kv_transfer_config = transfer = copy.copy(config.kv_transfer_config)
    extra = dict(transfer.kv_connector_extra_config)
    tiers = [dict(tier) for tier in extra.get("secondary_tiers", ())]
    if not any(tier.get("type") == TIER for tier in tiers):
        for name in ("path", "byte_budget"):
            if name not in extra:
                raise refusal(name, None, "a value in kv_connector_extra_config")
        options = {name: extra.pop(name) for name in _OPTIONS if name in extra}
        tiers.insert(0, {"type": TIER, **options})
    host = parse_bytes("cpu_bytes_to_use", extra.get("cpu_bytes_to_use", _HOST_BYTES))
    extra |= {"secondary_tiers": tiers, "cpu_bytes_to_use": host}
    extra.setdefault("spec_name", "TieringOffloadingSpec")
    transfer.kv_connector_extra_config = extra
    return config


def _tier_of(extra: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(t for t in extra["secondary_tiers"] if t.get("type") == TIER)
    return found


def _identity(config: Any, kv_cache_config: Any, weights: str | None) -> dict[str, Any]:
    start = time.monotonic()
    found = identity_of(
        config,
        kv_cache_config,
        build_offloading_config(config, kv_cache_config),
        version=vllm.__version__,
        device=current_platform.get_device_name(),
        weights=weights,
    )
    logger.info("kvpager: identified the K/V in %.1f s", time.monotonic() - start)
    return found


class _Adapter:
    """A LoRA adapter. digest: None before it was read, empty where it cannot be."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.digest: bytes | None = None

    def identify(self) -> None:
        """Reads the adapter's files, once."""
        if self.digest is None:
            try:
                self.digest = adapter_digest(self.path)
            except Exception as error:  # whatever is wrong with it
                logger.warning("kvpager: requests of this adapter bypass the store: %s", error)
                self.digest = b""


_Chunk = tuple[_Adapter | None, Any]  # a chunk's adapter and vLLM's key


@dataclass
class _Load:
    """A load of vLLM's: one read of the queue for each group. parts: those not finished."""

    keys: dict[int, list[_Chunk]] = field(default_factory=dict)
    parts: set[int] = field(default_factory=set)
    loaded: list[Any] = field(default_factory=list)
    missed: list[_Chunk] = field(default_factory=list)
    seconds: float = 0.0
    bytes: int = 0


class KvpagerTier(SecondaryTierManager):  # type: ignore[misc]
    """A tier of chunks on disk, which `KvpagerConnector` configures.

    No method waits for a disk but `drain_jobs` and `shutdown`.
    """

    medium: ClassVar[Any] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        path: str,
        byte_budget: int | str,
        identity: Mapping[str, Any] | None = None,
        ttl: float | str | None = None,
        threads: int = 2,
        depth: int = 64,
        deadline_seconds: float = 30.0,
        after_reset: str = "stop",
        locality: str | None = None,
        **_later: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        if identity is None:
            raise refusal("identity", None, 'one from "kv_connector": "KvpagerConnector"')
        if after_reset not in _AFTER_RESET:
            raise refusal("after_reset", after_reset, " or ".join(_AFTER_RESET))
        self.locality = None if locality is None else Locality(locality)
        self._stops = after_reset == "stop"
        self._stopped = False
        self._rows = primary_kv_view.cast("B")
        self._adapters: dict[str, _Adapter] = {}  # of requests
        self._adapter_names: dict[str, _Adapter] = {}
        self._loads: dict[int, _Load] = {}
        self._stores: dict[int, int] = {}  # chunks of each
        self._finished: list[JobResult] = []
        self._counts: Counter[tuple[str, str]] = Counter()
        self._usage: Mapping[str, Any] | None = None  # not reported yet
        self._evicted = 0  # reported
        self._measured = 0.0
        self._name = digest_of(identity)
        self._store = ChunkStore(path, identity, byte_budget=byte_budget, ttl=ttl)
        self._queue = ChunkQueue(
            self._store, threads=threads, depth=depth, deadline_seconds=deadline_seconds
        )
        self._lookups: Lookups[_Chunk] = Lookups(self._stored)
        log_identity(logger, self._store, identity)

    @override
    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def use_adapter(self, request: str, adapter: Any) -> None:
        """Keeps a request's chunks apart by its adapter's weights, which vLLM's keys only name."""
        known = self._adapter_names.get(adapter.lora_name)
        if known is None or known.path != adapter.lora_path or adapter.load_inplace:
            known = self._adapter_names[adapter.lora_name] = _Adapter(adapter.lora_path)
            self._lookups.do(known.identify)
        self._adapters[request] = known

    @override
    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        if self._stopped:
            return LookupResult.MISS
        request = req_context.req_id
        stored = self._lookups.ask((self._adapters.get(request), key), request)
        if stored is None:
            return LookupResult.RETRY
        return LookupResult.HIT if stored else LookupResult.MISS

    @override
    def touch(self, keys: Collection[Any], req_context: Any) -> None:
        adapter = self._adapters.get(req_context.req_id)
        chunks = [(adapter, key) for key in keys]
        if not self._stopped:
            self._lookups.do(lambda: self._touch(chunks))

    @override
    def submit_store(self, job_metadata: Any) -> None:
        adapter = self._adapters.get(job_metadata.req_context.req_id)
        keys = list(job_metadata.keys)
        blocks = [
            (_key(adapter, key), get_offload_group_idx(key), self._row(chunk))
            for key, chunk in zip(keys, job_metadata.chunk_ids)
            if _known(adapter)
        ]
        job = job_metadata.job_id
        if self._stopped or not blocks or not self._queue.put((job, None), blocks):
            self._counts[STORED, "skipped"] += len(keys)
            self._finished.append(JobResult(job_id=job, success=False))
        else:
            self._stores[job] = len(keys)

    @override
    def submit_load(self, job_metadata: Any) -> None:
        adapter = self._adapters.get(job_metadata.req_context.req_id)
        load = _Load()
        rows: dict[int, list[memoryview]] = {}
        for key, chunk in zip(job_metadata.keys, job_metadata.chunk_ids):
            group = get_offload_group_idx(key)
            load.keys.setdefault(group, []).append((adapter, key))
            rows.setdefault(group, []).append(self._row(chunk))
        job = job_metadata.job_id
        for group, chunks in load.keys.items():
            keys = [_key(*chunk) for chunk in chunks]
            if not self._stopped and self._queue.read((job, group), keys, group, rows[group]):
                load.parts.add(group)
            else:
                load.missed += chunks
                self._counts[LOADED, "skipped"] += len(chunks)
        self._loads[job] = load
        self._end(job)

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        for done in self._queue.finished():
            job, group = cast("tuple[int, int | None]", done.job_id)
            if group is None:
                self._finished.append(self._after_store(job, done))
            else:
                self._after_read(self._loads[job], group, done)
                self._end(job)
        finished, self._finished = self._finished, []
        return finished

    @override
    def on_request_finished(self, req_context: Any) -> None:
        self._lookups.forget(req_context.req_id)
        self._adapters.pop(req_context.req_id, None)

    @override
    def on_schedule_end(self, context: Any) -> None:
        self._lookups.send()
        now = time.monotonic()
        if now - self._measured > _MEASURE_SECONDS:
            self._measured = now
            self._lookups.do(self._measure)

    def on_reset(self) -> None:
        """Stops: the weights in memory may be others from now on, as after an update of weights."""
        if self._stops and not self._stopped:
            self._stopped = True
            logger.warning(
                "kvpager: vLLM has reset its caches, as it does when weights are exchanged; the "
                "store is no longer used (after_reset is stop)"
            )

    @override
    def drain_jobs(self) -> None:
        self._queue.drain(None)

    @override
    def shutdown(self) -> None:
        self._lookups.close()
        self._queue.drain(None)
        self._queue.close()
        self._store.close()
        self._rows.release()

    @classmethod
    @override
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return {
            LOADED: OffloadingCounterMetadata(
                "Chunks read from kvpager's store, by result: hit, miss, refused (damaged) or "
                "skipped (queue full).",
                labelnames=("result",),
            ),
            STORED: OffloadingCounterMetadata(
                "Chunks given to kvpager's store, by result: stored (or there already), failed "
                "or skipped (queue full).",
                labelnames=("result",),
            ),
            EVICTED: OffloadingCounterMetadata("Chunks evicted to keep the store's budget."),
            STORE_BYTES: OffloadingGaugeMetadata("Bytes of the store's files, of all identities."),
            BUDGET_BYTES: OffloadingGaugeMetadata("The store's budget in bytes."),
        }

    @override
    def get_stats(self) -> OffloadingConnectorStats | None:
        usage, self._usage = self._usage, None
        if not self._counts and usage is None:
            return None
        stats = OffloadingConnectorStats()
        for (name, result), count in self._counts.items():
            stats.increase_counter(name, count, (result,))
        self._counts.clear()
        if usage is not None:
            stats.increase_counter(EVICTED, usage["evicted"] - self._evicted)
            self._evicted = usage["evicted"]
            stats.set_gauge(STORE_BYTES, usage["bytes"])
            if usage["byte_budget"] is not None:
                stats.set_gauge(BUDGET_BYTES, usage["byte_budget"])
        return stats

    @classmethod
    def config_info_keys(cls, tier_config: dict[str, Any]) -> tuple[str, ...]:
        """Labels of vLLM's metric of configurations, from 0.33 on."""
        return ("kvpager_identity",)

    def config_info(self) -> Mapping[str, str]:
        """Values of these labels."""
        return {"kvpager_identity": self._name}

    def _row(self, chunk: Any) -> memoryview:
        size = self.block_size_bytes
        return self._rows[int(chunk) * size : (int(chunk) + 1) * size]

    def _stored(self, chunks: Sequence[_Chunk]) -> list[bool]:
        """Which chunks are stored; on the thread of lookups."""
        found = [False] * len(chunks)
        groups: dict[int, list[int]] = {}
        for number, (adapter, key) in enumerate(chunks):
            if adapter is not None:
                adapter.identify()
            if _known(adapter):
                groups.setdefault(get_offload_group_idx(key), []).append(number)
        for group, numbers in groups.items():
            answers = self._store.has([_key(*chunks[n]) for n in numbers], group)
            for number, stored in zip(numbers, answers):
                found[number] = stored
        return found

    def _touch(self, chunks: Sequence[_Chunk]) -> None:
        groups: dict[int, list[bytes]] = {}
        for chunk in chunks:
            if _known(chunk[0]):
                groups.setdefault(get_offload_group_idx(chunk[1]), []).append(_key(*chunk))
        for group, keys in groups.items():
            self._store.touch(keys, group)

    def _measure(self) -> None:
        self._usage = self._store.stats()

    def _after_store(self, job: int, done: JobDone) -> JobResult:
        chunks = self._stores.pop(job)
        self._counts[STORED, "stored"] += len(done.stored)
        self._counts[STORED, "failed"] += chunks - len(done.stored)
        if done.error is not None:
            logger.warning("kvpager: %d chunks were not stored: %s", chunks, message_of(done.error))
        return JobResult(
            job_id=job,
            success=bool(done.stored),
            transfer_time=done.seconds,
            transfer_bytes=done.bytes,
        )

    def _after_read(self, load: _Load, group: int, done: JobDone) -> None:
        load.parts.discard(group)
        load.seconds += done.seconds
        load.bytes += done.bytes
        for chunk, result in zip(load.keys[group], done.results):
            self._counts[LOADED, result.value] += 1
            if result is ReadResult.HIT:
                load.loaded.append(chunk[1])
            else:
                load.missed.append(chunk)
        if done.error is not None:
            logger.warning("kvpager: not all chunks were loaded: %s", message_of(done.error))
        if refused := done.results.count(ReadResult.REFUSED):
            logger.warning(
                "kvpager: refused %d of %d chunks, which are not what was stored; they are "
                "computed again",
                *(refused, len(done.results)),
            )

    def _end(self, job: int) -> None:
        """Reports a load whose parts are finished; what it could not load is a miss from now on."""
        load = self._loads[job]
        if load.parts:
            return
        del self._loads[job]
        self._lookups.missed(load.missed)
        self._finished.append(
            JobResult(
                job_id=job,
                success=not load.missed,
                successful_keys=tuple(load.loaded) or None,
                transfer_time=load.seconds,
                transfer_bytes=load.bytes,
            )
        )


def _known(adapter: _Adapter | None) -> bool:
    return adapter is None or bool(adapter.digest)


def _key(adapter: _Adapter | None, key: Any) -> bytes:
    """The store's key of a chunk: vLLM's hash, bound to the adapter's weights."""
    block = bytes(get_offload_block_hash(key))
    if adapter is None:
        return block
    return key_of_adapter(adapter.digest or b"", block)


def _set_up() -> None:
    """Registers the tier, and has kvpager's log records go where vLLM's go."""
    with contextlib.suppress(ValueError):  # this module was loaded a second time
        SecondaryTierFactory.register_tier(TIER, __name__, KvpagerTier.__name__)
    engine, own = logging.getLogger("vllm"), logging.getLogger("kvpager")
    own.setLevel(engine.getEffectiveLevel())
    for handler in engine.handlers:
        own.addHandler(handler)


_set_up()
