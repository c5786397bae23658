"""As much of LMCache as `kvpager.connectors.lmcache` imports, for environments without it.

`test_lmcache_signatures.py` compares it with the real one.
"""

from __future__ import annotations

import enum
import logging
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest


class Bitmap:
    def __init__(self, size: int) -> None:
        self._bits = [False] * size

    def set(self, index: int) -> None:
        self._bits[index] = True

    def test(self, index: int) -> bool:
        return self._bits[index]

    def __len__(self) -> int:
        return len(self._bits)


def init_logger(name: str) -> logging.Logger:
    return logging.getLogger(name)


class EventNotifier:
    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._fd

    def notify(self) -> None:
        os.eventfd_write(self._fd, 1)

    def close(self) -> None:
        os.close(self._fd)
        self._fd = -1


def create_event_notifier() -> EventNotifier:
    return EventNotifier()


class L2StoreResult(int):
    def __new__(cls, success: bool, bytes_transferred: int) -> L2StoreResult:
        return super().__new__(cls, (bytes_transferred << 1) | int(success))

    def is_successful(self) -> bool:
        return bool(self & 1)

    def bytes_transferred(self) -> int:
        return self >> 1


class MemorySegment(str, enum.Enum):
    STORAGE = "storage"


class MemoryResidency(str, enum.Enum):
    LOCAL = "local"
    REMOTE = "remote"


@dataclass(frozen=True)
class MemoryTags:
    segment: MemorySegment
    residency: MemoryResidency


@dataclass(frozen=True)
class AdapterUsage:
    total_bytes_used: int
    total_capacity_bytes: int
    bytes_by_cache_salt: Mapping[str, int] = field(default_factory=dict)


class L2AdapterInterface(ABC):
    def __init__(self, max_capacity_bytes: int = 0) -> None:
        self._listeners: list[Any] = []
        self._shared = False

    @abstractmethod
    def get_store_event_fd(self) -> int: ...

    @abstractmethod
    def get_lookup_and_lock_event_fd(self) -> int: ...

    @abstractmethod
    def get_load_event_fd(self) -> int: ...

    @abstractmethod
    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int: ...

    @abstractmethod
    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]: ...

    @abstractmethod
    def submit_lookup_and_lock_task(
        self, keys: list[Any], group_layout_descs: dict[int, Any]
    ) -> int: ...

    @abstractmethod
    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None: ...

    @abstractmethod
    def submit_unlock(self, keys: list[Any]) -> None: ...

    @abstractmethod
    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int: ...

    @abstractmethod
    def query_load_result(self, task_id: int) -> Bitmap | None: ...

    @abstractmethod
    def get_memory_tags(self) -> MemoryTags: ...

    def register_listener(self, listener: Any) -> None:
        self._listeners.append(listener)

    def set_backend_identity(self, name: str, shared: bool = False) -> None:
        self._shared = shared

    def _notify_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
        for listener in self._listeners:
            listener.on_l2_keys_stored(keys, sizes)

    def _notify_keys_accessed(self, keys: list[Any]) -> None:
        for listener in self._listeners:
            listener.on_l2_keys_accessed(keys)

    def _notify_keys_deleted(self, keys: list[Any], sizes: list[int]) -> None:
        for listener in self._listeners:
            listener.on_l2_keys_deleted(keys)

    def delete(self, keys: list[Any]) -> None:
        raise NotImplementedError

    def submit_touch(self, keys: list[Any]) -> None:
        raise NotImplementedError

    def get_usage(self) -> AdapterUsage:
        raise NotImplementedError

    @abstractmethod
    def close(self) -> None: ...

    def report_status(self) -> dict:
        raise NotImplementedError


MODULES: dict[str, tuple[Any, ...]] = {
    "lmcache.lmcache_native": (Bitmap,),
    "lmcache.logging": (init_logger,),
    "lmcache.v1.platform": (create_event_notifier,),
    "lmcache.v1.distributed.api": (MemoryResidency, MemorySegment, MemoryTags),
    "lmcache.v1.distributed.internal_api": (L2StoreResult,),
    "lmcache.v1.distributed.l2_adapters.base": (AdapterUsage, L2AdapterInterface),
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
    found["lmcache"].__version__ = "0.5.7"  # type: ignore[attr-defined]
    for name, module in found.items():
        module.__path__ = []  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
