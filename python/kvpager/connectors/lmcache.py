"""A checked, budgeted L2 adapter for LMCache 0.5.6 and 0.5.7.

`KvpagerL2Adapter` keeps LMCache's chunks in `ChunkStore`s. LMCache's keys have the name of a model;
the adapter finds chunks only under the files that the name leads to, and under the same layout.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import lmcache
from lmcache.lmcache_native import Bitmap
from lmcache.logging import init_logger
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
from lmcache.v1.platform import create_event_notifier
from typing_extensions import override

from kvpager.connectors.identity import message_of
from kvpager.connectors.lmcache_models import Models, Options
from kvpager.stores.chunks import JobDone, ReadResult

logger = init_logger(__name__)

STORE, LOOKUP, LOAD = "store", "lookup", "load"


@dataclass(eq=False)
class _Task:
    """A task of LMCache.

    Attributes:
        parts: how many pieces of its work have not ended.
        done: indices of keys that were stored, found or loaded.
        new: sizes of what was not stored before, by index.
        bytes: written or loaded.
    """

    number: int
    kind: str
    keys: list[Any]
    parts: int = 1
    done: list[int] = field(default_factory=list)
    new: dict[int, int] = field(default_factory=dict)
    bytes: int = 0


@dataclass(eq=False)
class _Part:
    """A put or read: the id of its job."""

    task: _Task
    indices: list[int]
    new: dict[int, int] = field(default_factory=dict)


class KvpagerL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """An L2 adapter for LMCache's type `plugin`; `Options` describes its `adapter_params`.

    No method waits for a disk but `delete` and `close`. Nothing is locked: a chunk that is evicted
    between its lookup and its load is a miss.
    """

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: Any = None) -> None:
        super().__init__()  # without a capacity: the store itself evicts
        self._lock = threading.Lock()
        self._tasks = 0
        self._completed: dict[str, dict[int, Any]] = {STORE: {}, LOOKUP: {}, LOAD: {}}
        self._counts = Counter[str]()
        self._models = Models(Options.read(params), lmcache.__version__, logger, self._collect)
        self._worker = ThreadPoolExecutor(1, "kvpager-lmcache")
        self._notifiers = {kind: create_event_notifier() for kind in self._completed}

    @override
    def get_store_event_fd(self) -> int:
        return int(self._notifiers[STORE].fileno())

    @override
    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._notifiers[LOOKUP].fileno())

    @override
    def get_load_event_fd(self) -> int:
        return int(self._notifiers[LOAD].fileno())

    @override
    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        return self._submit(STORE, keys, lambda task: self._store(task, objects))

    @override
    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        with self._lock:
            found, self._completed[STORE] = self._completed[STORE], {}
        return found

    @override
    def submit_lookup_and_lock_task(
        self, keys: list[Any], group_layout_descs: dict[int, Any]
    ) -> int:
        return self._submit(LOOKUP, keys, lambda task: self._look_up(task, group_layout_descs))

    @override
    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        with self._lock:
            return self._completed[LOOKUP].pop(task_id, None)

    @override
    def submit_unlock(self, keys: list[Any]) -> None: ...

    @override
    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        return self._submit(LOAD, keys, lambda task: self._load(task, objects))

    @override
    def query_load_result(self, task_id: int) -> Bitmap | None:
        with self._lock:
            return self._completed[LOAD].pop(task_id, None)

    def submit_touch(self, keys: list[Any]) -> None:
        """Marks a use of each key; LMCache calls it from 0.5.7 on."""
        self._worker.submit(_logged, self._touch, keys)
        self._notify_keys_accessed(keys)

    @override
    def delete(self, keys: list[Any]) -> None:
        self._worker.submit(_logged, self._delete, keys).result()
        # LMCache's own sums, which sizes are for, are not used: `get_usage` has the store's.
        self._notify_keys_deleted(keys, [0] * len(keys))

    def get_memory_tags(self) -> Any:
        """Where chunks are; LMCache asks for it from 0.5.7 on."""
        from lmcache.v1.distributed.api import MemoryResidency, MemorySegment, MemoryTags

        residency = MemoryResidency.REMOTE if self._shared else MemoryResidency.LOCAL
        return MemoryTags(MemorySegment.STORAGE, residency)

    @override
    def get_usage(self) -> AdapterUsage:
        stats = self._models.folder.stats()
        return AdapterUsage(stats["bytes"], stats["byte_budget"] or 0)

    @override
    def report_status(self) -> dict[str, Any]:
        """Chunks by result: hit, miss, refused, stored, and failed, which is also: skipped."""
        stats = self._models.folder.stats()
        with self._lock:
            chunks = {
                name: self._counts[name] for name in ("hit", "miss", "refused", "stored", "failed")
            }
        return {
            "is_healthy": True,
            "type": type(self).__name__,
            "path": self._models.folder.path,
            "bytes": stats["bytes"],
            "byte_budget": stats["byte_budget"],
            "identified": self._models.identified(),
            "chunks": chunks,
        }

    @override
    def close(self) -> None:
        """Ends what is under way. Nothing is written to an object after it returns."""
        self._worker.shutdown(cancel_futures=True)
        self._models.close()
        for notifier in self._notifiers.values():
            notifier.close()

    # On the worker's thread, in the order of LMCache's calls.

    def _submit(self, kind: str, keys: list[Any], work: Callable[[_Task], None]) -> int:
        """On LMCache's threads."""
        with self._lock:
            self._tasks += 1
            task = _Task(self._tasks, kind, list(keys))

        def run() -> None:
            _logged(work, task)
            self._end_part(task)

        self._worker.submit(run)
        return task.number

    def _store(self, task: _Task, objects: Sequence[Any]) -> None:
        layouts = [_layout_of(one) for one in objects]
        for chunks, indices in self._models.places(task.keys, layouts):
            blocks = [(_label(task.keys[i]), 0, objects[i].byte_array) for i in indices]
            there = chunks.store.has([label for label, _, _ in blocks])
            sizes = zip(indices, there, blocks)
            part = _Part(task, indices, {i: len(block[2]) for i, old, block in sizes if not old})
            self._begin(part, chunks.queue.put, blocks)

    def _load(self, task: _Task, objects: Sequence[Any]) -> None:
        layouts = [_layout_of(one) for one in objects]
        for chunks, indices in self._models.places(task.keys, layouts):
            labels = [_label(task.keys[i]) for i in indices]
            into = [objects[i].byte_array for i in indices]
            self._begin(_Part(task, indices), chunks.queue.read, labels, 0, into)

    def _look_up(self, task: _Task, layouts: Mapping[int, Any]) -> None:
        """LMCache names the layout of K/V, which those of its serde do not have."""
        expected = {group: _layout(one.shapes, one.dtypes) for group, one in layouts.items()}
        found = set()
        for chunks, layout, indices in self._models.known(task.keys):
            asked = [
                i
                for i in indices
                if expected.get(task.keys[i].object_group_id, layout) == layout or _is_flat(layout)
            ]
            there = chunks.store.has([_label(task.keys[i]) for i in asked])
            hits = [i for i, stored in zip(asked, there) if stored]
            chunks.store.touch([_label(task.keys[i]) for i in hits])
            found.update(hits)
        task.done += sorted(found)

    def _touch(self, keys: Sequence[Any]) -> None:
        for chunks, _, indices in self._models.known(keys):
            chunks.store.touch([_label(keys[i]) for i in indices])

    def _delete(self, keys: Sequence[Any]) -> None:
        for chunks, _, indices in self._models.known(keys):
            chunks.store.delete([_label(keys[i]) for i in indices])

    # On any thread.

    def _begin(self, part: _Part, submit: Callable[..., bool], *args: Any) -> None:
        with self._lock:
            part.task.parts += 1
        begun = False
        try:
            begun = submit(part, *args)
        finally:
            if not begun:  # the queue is full
                self._end_part(part.task)

    def _collect(self) -> None:
        """Takes the jobs that have ended."""
        for done in self._models.finished():
            part: _Part = done.job_id  # type: ignore[assignment]
            self._after(part, done)
            self._end_part(part.task)

    def _after(self, part: _Part, done: JobDone) -> None:
        task = part.task
        if done.error is not None:
            logger.warning("kvpager: a %s ended early: %s", task.kind, message_of(done.error))
        if refused := done.results.count(ReadResult.REFUSED):
            logger.warning(
                "kvpager: refused %d of %d chunks, which are not what was stored; they are "
                "computed again",
                *(refused, len(done.results)),
            )
        with self._lock:
            task.bytes += done.bytes
            if task.kind == STORE and done.stored:
                task.done += part.indices
                task.new |= part.new
            for i, result in zip(part.indices, done.results):
                self._counts[result.value] += 1
                if result is ReadResult.HIT:
                    task.done.append(i)

    def _end_part(self, task: _Task) -> None:
        with self._lock:
            task.parts -= 1
            if task.parts:
                return
        keys = [task.keys[i] for i in task.done]
        result: Any = Bitmap(len(task.keys))
        for i in task.done:
            result.set(i)
        if task.kind == STORE:
            result = L2StoreResult(len(keys) == len(task.keys), task.bytes)
            if task.new:
                self._notify_keys_stored([task.keys[i] for i in task.new], [*task.new.values()])
        elif task.kind == LOAD and keys:
            self._notify_keys_accessed(keys)
        with self._lock:
            if task.kind == STORE:
                self._counts.update(stored=len(keys), failed=len(task.keys) - len(keys))
            self._completed[task.kind][task.number] = result
        self._notifiers[task.kind].notify()


def _logged(work: Callable[..., None], *args: Any) -> None:
    try:
        work(*args)
    except Exception as error:  # what it did not do is a miss, or not stored
        logger.warning("kvpager: chunks are skipped: %s", message_of(error))


def _label(key: Any) -> bytes:
    """The store's key of LMCache's key: 32 bytes, in which the salt cannot be read."""
    fields = [key.chunk_hash.hex(), key.kv_rank, key.object_group_id, key.cache_salt]
    return hashlib.blake2b(json.dumps(fields).encode(), digest_size=32).digest()


def _layout(shapes: Iterable[Sequence[int]], dtypes: Iterable[Any]) -> str:
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    found = {"shapes": [[int(size) for size in shape] for shape in shapes], "dtypes": names}
    return json.dumps(found, sort_keys=True)


def _layout_of(one: Any) -> str:
    """The layout of a memory object."""
    about = one.metadata
    return _layout(about.shapes or [about.shape], about.dtypes or [about.dtype])


def _is_flat(layout: str) -> bool:
    """Whether chunks are bytes in a row, as LMCache's serde makes of K/V."""
    found = json.loads(layout)
    return found["dtypes"] == ["uint8"] and len(found["shapes"][0]) == 1
