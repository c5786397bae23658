"""As much of SGLang as `kvpager.connectors.sglang` imports, and a pool of host memory.

`test_sglang_signatures.py` compares both with the real ones.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch


class PoolName(str, Enum):
    KV = "kv"
    MAMBA = "mamba"
    SWA = "swa"
    INDEXER = "indexer"

    def __str__(self) -> str:
        return self.value


class PoolHitPolicy(str, Enum):
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


@dataclass
class PoolTransfer:
    name: PoolName
    host_indices: torch.Tensor | None = None
    device_indices: torch.Tensor | None = None
    keys: list[str] | None = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES


@dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None


@dataclass
class StorageMetrics:
    prefetch_pgs: list[int] = field(default_factory=list)
    backup_pgs: list[int] = field(default_factory=list)
    prefetch_bandwidth: list[float] = field(default_factory=list)
    backup_bandwidth: list[float] = field(default_factory=list)


class HiCacheStorage(ABC):
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        self.registered_pools = {host_pool_name: host_pool}

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> PoolTransferResult:
        raise NotImplementedError

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        raise NotImplementedError

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        raise NotImplementedError

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> Any:
        raise NotImplementedError

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> Any:
        raise NotImplementedError

    @abstractmethod
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any: ...

    @abstractmethod
    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> Any: ...

    @abstractmethod
    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool: ...

    @abstractmethod
    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool: ...

    @abstractmethod
    def exists(self, key: str) -> bool: ...

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        raise NotImplementedError

    def clear(self) -> None:
        raise NotImplementedError

    def get_stats(self) -> Any:
        raise NotImplementedError


class HostPool:
    """Host memory as SGLang's `MHATokenToKVPoolHost` has it, layer by layer."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, size: int = 64, heads: int = 2) -> None:
        self.layout = "layer_first"
        self.page_size = 4
        self.layer_num, self.head_num, self.head_dim = 3, heads, 8
        self.dtype = dtype
        self.storage_format_tag = None
        shape = (2, self.layer_num, size, self.head_num, self.head_dim)
        self.kv_buffer = torch.zeros(shape, dtype=dtype)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        page = self.kv_buffer[:, :, index : index + self.page_size, :, :]
        return page.flatten() if flat else page

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros_like(self.get_data_page(0))

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        shape = (2, self.layer_num, self.page_size, self.head_num, self.head_dim)
        self.kv_buffer[:, :, index : index + self.page_size, :, :] = data_page.reshape(shape)


class ServerArguments(SimpleNamespace):
    """What `get_server_args` returns; None before a server has set it."""

    current: Any = None


def get_server_args() -> Any:
    if ServerArguments.current is None:
        raise ValueError("Global server args is not set yet!")
    return ServerArguments.current


MODULES: dict[str, tuple[Any, ...]] = {
    "sglang.srt.mem_cache.hicache_storage": (
        HiCacheStorage,
        PoolHitPolicy,
        PoolName,
        PoolTransfer,
        PoolTransferResult,
    ),
    "sglang.srt.observability.metrics_collector": (StorageMetrics,),
    "sglang.srt.runtime_context": (get_server_args,),
}


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the modules where they are imported from, until the test ends."""
    found: dict[str, ModuleType] = {}
    for name, members in MODULES.items():
        found[name] = ModuleType(name)
        for member in members:
            setattr(found[name], member.__name__, member)
        for end in (i for i, letter in enumerate(name) if letter == "."):
            found.setdefault(name[:end], ModuleType(name[:end]))
    found["sglang"].__version__ = "0.5.23"  # type: ignore[attr-defined]
    for name, module in found.items():
        module.__path__ = []  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
