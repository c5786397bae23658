"""A checked, budgeted storage for HiCache of SGLang 0.5.23.

`KvpagerHiCache` keeps pages of SGLang's host memory in `ChunkStore`s: one for each pool, under an
identity of the served weights, their configuration and the pool's dtype and layout.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import sglang
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolHitPolicy,
    PoolName,
    PoolTransferResult,
)
from typing_extensions import override

from kvpager._support.arguments import refusal
from kvpager.connectors.identity import as_json, log_identity, message_of, model_identity
from kvpager.errors import PagerError
from kvpager.stores.chunks import ChunkStore, ReadResult

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

FORMAT = 1  # another one where what is hashed, or how pages are stored, changes

# Of SGLang's arguments: what K/V depend on.
_ARGUMENTS = (
    *("revision", "dtype", "quantization", "quantization_param_path", "kv_cache_dtype"),
    *("json_model_override_args", "context_length", "model_impl", "load_format"),
    *("attention_backend", "prefill_attention_backend", "decode_attention_backend"),
    *("speculative_algorithm", "speculative_num_steps", "speculative_draft_model_quantization"),
    *("speculative_draft_kv_cache_dtype", "enable_deterministic_inference"),
)
_RANKS = ("tp_size", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size", "dcp_rank", "dcp_size")
_SPLIT = ("tp_lcm_size", "should_split_heads", "is_mla_model")
# Of a pool of host memory.
_POOL = (
    *("dtype", "layout", "page_size", "layer_num", "head_num", "head_dim", "v_head_dim"),
    *("kv_lora_rank", "qk_rope_head_dim", "start_layer", "end_layer", "storage_format_tag"),
)


@dataclass
class _Pool:
    """A pool of host memory and its pages' store. page: one page, flat, in its dtype."""

    host: Any
    store: ChunkStore
    page: torch.Tensor

    def pages(self, count: int) -> list[torch.Tensor]:
        return list(torch.empty((count, self.page.numel()), dtype=self.page.dtype))


class KvpagerHiCache(HiCacheStorage):  # type: ignore[misc]
    """A storage for SGLang's backend `dynamic`.

    Options (`--hicache-storage-backend-extra-config`), besides SGLang's own:

    - path: folder of the store. byte_budget: bytes, "50GiB" or "unlimited".
    - ttl: time to live of pages, from their last use.
    - model: folder or name of the weights, if it is not that of SGLang's arguments.
    - weights: any text that identifies the weights, in place of digests of their files.

    All calls wait for the disk, as SGLang's threads for storage expect.
    """

    def __init__(self, storage_config: Any, kwargs: Mapping[str, Any] | None = None) -> None:
        self._config = storage_config
        self._options = options = dict(storage_config.extra_config or {})
        for name in ("path", "byte_budget"):
            if name not in options:
                raise refusal(name, None, "a value in the storage backend's extra config")
        self._identity: dict[str, Any] | None = None
        self._pools: dict[str, _Pool] = {}
        self._stats = _new_stats() if storage_config.enable_storage_metrics else None

    # Pools.

    @override
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._register(PoolName.KV, mem_pool_host)

    @override
    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(host_pool_name, host_pool)

    def _register(self, name: str, host: Any) -> None:
        before = self._pools.get(str(name))
        if before is not None and before.host is host:
            return
        if self._identity is None:
            start = time.monotonic()
            self._identity = _identity(self._config, self._options)
            logger.info("kvpager: identified the K/V in %.1f s", time.monotonic() - start)
        page = host.get_dummy_flat_data_page()
        # K/V of latent attention are the same on all ranks; states of recurrent layers never are.
        shared = self._config.is_mla_model and str(name) != str(PoolName.MAMBA)
        about = {field: getattr(host, field, None) for field in _POOL}
        identity = {
            **self._identity,
            "tp_rank": None if shared else self._config.tp_rank,
            "pool": as_json({"name": str(name), **about, "page": page.numel()}),
        }
        store = ChunkStore(
            self._options["path"],
            identity,
            byte_budget=self._options["byte_budget"],
            ttl=self._options.get("ttl"),
        )
        log_identity(logger, store, identity)
        self._pools[str(name)] = _Pool(host, store, page)
        if before is not None:
            before.store.close()

    # Pages of one pool. An error of the store is logged; its pages are not there, or not stored.

    def _found(self, pool: str, keys: Sequence[str]) -> list[bool]:
        there = self._pools.get(pool)
        names = [key.encode() for key in keys]
        found = None if there is None else _quietly(lambda: there.store.has(names))
        return found or [False] * len(keys)

    def _read(self, pool: _Pool, keys: Sequence[str], into: Sequence[torch.Tensor]) -> list[bool]:
        """Into tensors that are contiguous; those of pages that are not there stay as they were."""
        start, names = time.monotonic(), [key.encode() for key in keys]
        results = _quietly(lambda: pool.store.read(names, 0, [_bytes(page) for page in into])) or []
        if refused := results.count(ReadResult.REFUSED):
            logger.warning(
                "kvpager: refused %d of %d pages, which are not what was stored; they are "
                "computed again",
                *(refused, len(keys)),
            )
        hits = results.count(ReadResult.HIT)
        self._measure("prefetch", hits, pool.page, time.monotonic() - start)
        return [result is ReadResult.HIT for result in results] or [False] * len(keys)

    def _write(self, pool: _Pool, keys: Sequence[str], pages: Sequence[torch.Tensor]) -> bool:
        start = time.monotonic()
        blocks = [(key.encode(), 0, _bytes(page.contiguous())) for key, page in zip(keys, pages)]
        if _quietly(lambda: pool.store.put(blocks)) is None:
            return False
        self._measure("backup", len(keys), pool.page, time.monotonic() - start)
        return True

    def _load(self, name: str, keys: Sequence[str], indices: torch.Tensor | None) -> list[bool]:
        """From the store into host memory."""
        pool = self._pools.get(name)
        places = _places(pool, keys, indices)
        if pool is None or places is None:
            return [False] * len(keys)
        pages = pool.pages(len(keys))
        hits = self._read(pool, keys, pages)
        for hit, place, page in zip(hits, places, pages):
            if hit:
                pool.host.set_from_flat_data_page(place, page)
        return hits

    def _save(self, name: str, keys: Sequence[str], indices: torch.Tensor | None) -> list[bool]:
        """From host memory into the store."""
        pool = self._pools.get(name)
        places = _places(pool, keys, indices)
        if pool is None or places is None:
            return [False] * len(keys)
        pages = [pool.host.get_data_page(place, flat=True) for place in places]
        return [self._write(pool, keys, pages)] * len(keys)

    # SGLang's calls.

    @override
    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> PoolTransferResult:
        pages = _leading(self._found(PoolName.KV, keys))
        hits: dict[str, int] = {PoolName.KV: pages} if pages else {}
        usable = list(range(1, pages + 1))
        for transfer in pool_transfers or []:
            there = self._found(transfer.name, keys[:pages])
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                lengths = list(range(1, _leading(there) + 1))
            elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                tail = max(1, len(transfer.keys or ()))
                lengths = [n for n in range(1, pages + 1) if all(there[max(0, n - tail) : n])]
            else:  # a form of pages besides KV, which may be missing
                continue
            if lengths:
                hits[transfer.name] = lengths[-1]
            usable = [n for n in usable if n in set(lengths)]
        return PoolTransferResult(usable[-1] if usable else 0, hits, usable)

    @override
    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        return {t.name: self._load(t.name, t.keys or [], t.host_indices) for t in transfers}

    @override
    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        return {t.name: self._save(t.name, t.keys or [], t.host_indices) for t in transfers}

    @override
    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        return self._load(PoolName.KV, keys, host_indices)

    @override
    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        return self._save(PoolName.KV, keys, host_indices)

    @override
    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        pool = self._pools[PoolName.KV]
        targets = target_locations or pool.pages(len(keys))
        pages = [page if page.is_contiguous() else torch.empty_like(page) for page in targets]
        hits = self._read(pool, keys, pages)
        for hit, target, page in zip(hits, targets, pages):
            if hit and page is not target:
                target.copy_(page)
        return [target if hit else None for hit, target in zip(hits, targets)]

    @override
    def get(
        self, key: str, target_location: Any = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    @override
    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        return self._write(self._pools[PoolName.KV], keys, values or target_locations)

    @override
    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        return self.batch_set([key], [target_location if value is None else value])

    @override
    def exists(self, key: str) -> bool:
        return self._found(PoolName.KV, [key])[0]

    @override
    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return _leading(self._found(PoolName.KV, keys))

    @override
    def clear(self) -> None:
        """Removes the pages of these pools, and of no other identity in the folder."""
        for pool in self._pools.values():
            pool.store.clear()

    @override
    def get_stats(self) -> Any:
        if self._stats is None:
            return None
        found, self._stats = self._stats, _new_stats()
        return found

    def close(self) -> None:
        """Closes the stores; SGLang has stopped its threads before."""
        for pool in self._pools.values():
            pool.store.close()

    def _measure(self, kind: str, pages: int, page: torch.Tensor, seconds: float) -> None:
        """For SGLang's metrics: pages, and GB/s."""
        if self._stats is not None and pages:
            size = pages * page.numel() * page.element_size()
            getattr(self._stats, f"{kind}_pgs").append(pages)
            getattr(self._stats, f"{kind}_bandwidth").append(size / 1e9 / max(seconds, 1e-9))


def _identity(config: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """What pages of all pools depend on, as JSON.

    Raises:
        InvalidArgumentError: nothing can identify the weights.
    """
    arguments = _arguments()
    weights = options.get("weights")
    model = options.get("model") or getattr(arguments, "model_path", None) or config.model_name
    draft = getattr(arguments, "speculative_draft_model_path", None)
    revision = getattr(arguments, "revision", None)
    found: dict[str, Any] = as_json(
        {
            "format": FORMAT,
            "engine": f"sglang {sglang.__version__}",
            "model": (
                model_identity(str(model), revision) if weights is None else {"named": weights}
            ),
            "draft": None if draft is None or draft == model else model_identity(draft),
            "arguments": {name: getattr(arguments, name, None) for name in _ARGUMENTS},
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "ranks": {name: getattr(config, name) for name in (*_RANKS, *_SPLIT)},
        }
    )
    return found


def _arguments() -> Any:
    """Arguments of this process' server; None: there is no server."""
    try:
        from sglang.srt.runtime_context import get_server_args

        return get_server_args()
    except (ImportError, ValueError):
        return None


def _new_stats() -> Any:
    from sglang.srt.observability.metrics_collector import StorageMetrics

    return StorageMetrics()


def _places(
    pool: _Pool | None, keys: Sequence[str], indices: torch.Tensor | None
) -> list[int] | None:
    """Where each page begins in host memory; None, and a record: the indices do not fit."""
    size = 0 if pool is None else getattr(pool.host, "page_size", 1) or 1
    if pool is None or indices is None or indices.numel() != size * len(keys):
        count = None if indices is None else indices.numel()
        logger.error("kvpager: %d pages skipped: host indices are %s", len(keys), count)
        return None
    return [int(index) for index in indices.flatten()[::size]]


def _bytes(page: torch.Tensor) -> Any:
    """A contiguous tensor's bytes; of a page without any, as of pools that only count, one."""
    if not page.numel():
        return np.zeros(1, np.uint8)
    return page.reshape(-1).view(torch.uint8).numpy()


def _leading(found: Sequence[bool]) -> int:
    return found.index(False) if False in found else len(found)


def _quietly(work: Callable[[], _Result]) -> _Result | None:
    try:
        return work()
    except (PagerError, OSError) as error:
        logger.warning("kvpager: pages are skipped: %s", message_of(error))
        return None
