"""Puts and reads of a chunk store off the caller's threads, in bounded queues."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvpager import _core
from kvpager._support.arguments import as_integer, is_number
from kvpager._support.process import MadeIn
from kvpager.errors import InvalidArgumentError
from kvpager.stores.chunks.reports import ReadResult
from kvpager.stores.chunks.store import (
    Block,
    ChunkStore,
    checked_blocks,
    checked_destinations,
    checked_group,
    checked_keys,
)

if TYPE_CHECKING:
    from typing_extensions import Self

JobId = Hashable


@dataclass(frozen=True)
class JobDone:
    """A job that has ended.

    Attributes:
        job_id: as it was given.
        results: of a read, for each key; empty for a put. Blocks that were not read before an error
            or the deadline are misses.
        stored: of a put, the keys that the store has now; empty for a read and after an error.
        seconds: from the call until the end.
        bytes: written by a put, or copied by a read.
        error: what ended it early: TimeoutError for its deadline, CancelledError (of
            concurrent.futures) for `abandon` or `close`, or what the store raised; None: nothing.
    """

    job_id: JobId
    results: tuple[ReadResult, ...] = ()
    stored: tuple[bytes, ...] = ()
    seconds: float = 0.0
    bytes: int = 0
    error: Exception | None = None


@dataclass(eq=False)
class _Job:
    job_id: JobId
    gate: _core.ReadGate
    blocks: Sequence[Block] = ()
    keys: Sequence[bytes] = ()
    group: int = 0
    into: Sequence[memoryview] = ()
    is_put: bool = False
    started: float = field(default_factory=time.monotonic)


class ChunkQueue:
    """Runs puts and reads of a store in threads. `put` and `read` never wait.

    Args:
        store: which stays open as long as the queue.
        threads: that work, 1 to 64.
        depth: most jobs that wait or run.
        deadline_seconds: after which a job that has not ended does no more; None: never. A put that
            has begun ends all the same.
        on_done: called after each job, on the thread that ran it, when `finished` returns its end;
            must return soon and not raise.

    Raises:
        InvalidArgumentError: an argument is out of range.
    """

    def __init__(
        self,
        store: ChunkStore,
        *,
        threads: int = 2,
        depth: int = 64,
        deadline_seconds: float | None = None,
        on_done: Callable[[], object] | None = None,
    ) -> None:
        if not isinstance(store, ChunkStore):
            raise InvalidArgumentError(f"store is {store!r}; expected a ChunkStore")
        threads = as_integer(threads, "threads", 1, 64)
        self._depth = as_integer(depth, "depth", 1)
        if deadline_seconds is not None and not (
            is_number(deadline_seconds) and deadline_seconds > 0
        ):
            raise InvalidArgumentError(
                f"deadline_seconds is {deadline_seconds!r}; expected a number above 0, or None"
            )
        self._deadline_seconds = deadline_seconds
        self._store = store
        self._on_done = on_done
        self._made_in = MadeIn()
        self._changed = threading.Condition()
        self._waiting: collections.deque[_Job] = collections.deque()
        self._jobs: dict[JobId, _Job] = {}  # that wait or run
        self._done: list[JobDone] = []
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"kvpager-chunks-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, job_id: JobId, blocks: Iterable[tuple[bytes, int, Any]]) -> bool:
        """Queues a put. False: the queue is full, and nothing was queued.

        Args:
            job_id: of the job, until it has ended; anything hashable.
            blocks: as `ChunkStore.put` takes them; their bytes must not change until the job has
                ended.

        Raises:
            InvalidArgumentError: a block is not as it should be, the id is in use, or the queue is
                closed.
        """
        gate = _core.ReadGate(self._deadline_seconds)
        return self._add(_Job(job_id, gate, blocks=checked_blocks(blocks), is_put=True))

    def read(self, job_id: JobId, keys: Sequence[bytes], group: int, into: Sequence[Any]) -> bool:
        """Queues a read. False: the queue is full, and nothing was queued.

        Args:
            job_id: of the job, until it has ended; anything hashable.
            keys: of the blocks.
            group: of all of them.
            into: destinations as `ChunkStore.read` takes them, which stay the job's until it has
                ended or `abandon` has returned.

        Raises:
            InvalidArgumentError: an argument is not as it should be, the id is in use, or the queue
                is closed.
        """
        keys, group = checked_keys(keys), checked_group(group)
        views = checked_destinations(into, len(keys))
        gate = _core.ReadGate(self._deadline_seconds)
        return self._add(_Job(job_id, gate, keys=keys, group=group, into=views))

    def _add(self, job: _Job) -> bool:
        if self._made_in.forked:
            raise InvalidArgumentError(
                "the queue was made before this process was forked, which has none of its threads; "
                "make another one"
            )
        with self._changed:
            if self._is_closed:
                raise InvalidArgumentError("the queue is closed; make another one")
            if job.job_id in self._jobs:
                raise InvalidArgumentError(
                    f"job_id is {job.job_id!r}, which another job has; expected one of its own"
                )
            if len(self._jobs) >= self._depth:
                return False
            self._jobs[job.job_id] = job
            self._waiting.append(job)
            self._changed.notify_all()
            return True

    def abandon(self, job_id: JobId) -> bool:
        """Ends a job early. Nothing is written to a read's destination after this returns.

        Waits for at most the copy of one block. A put that has begun ends all the same. The job
        ends as any other, with the blocks that were read before.

        Returns:
            Whether the job was waiting or running.
        """
        with self._changed:
            job = self._jobs.get(job_id)
        if job is None:
            return False
        job.gate.close()
        return True

    def finished(self) -> list[JobDone]:
        """Jobs that have ended since the last call, in the order in which they did."""
        with self._changed:
            done, self._done = self._done, []
            return done

    @property
    def pending(self) -> int:
        """Number of jobs that wait or run."""
        with self._changed:
            return len(self._jobs)

    def drain(self, timeout: float | None = None) -> bool:
        """Waits until all jobs have ended; False if some have not after `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs, timeout)

    def close(self) -> None:
        """Ends waiting jobs unrun, and running ones early; waits for the threads.

        `finished` still returns their ends.
        """
        with self._changed:
            self._is_closed = True
            jobs = list(self._jobs.values())
            self._changed.notify_all()
        for job in jobs:
            job.gate.close()
        if not self._made_in.forked:
            for thread in self._threads:
                thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if not self._waiting:
                    return
                job = self._waiting.popleft()
            done = self._run(job)
            with self._changed:
                del self._jobs[job.job_id]
                self._done.append(done)
                self._changed.notify_all()
            if self._on_done is not None:
                self._on_done()

    def _run(self, job: _Job) -> JobDone:
        results: Sequence[ReadResult] = [ReadResult.MISS] * len(job.keys)
        stored: tuple[bytes, ...] = ()
        size = 0
        error: Exception | None = None
        try:
            if not job.gate.is_open():
                pass
            elif job.is_put:
                size = self._store.put(job.blocks).bytes_written
                stored = tuple(key for key, _, _ in job.blocks)
            else:
                results = self._store.read(job.keys, job.group, job.into, gate=job.gate)
                hits = zip(results, job.into)
                size = sum(len(into) for result, into in hits if result is ReadResult.HIT)
        except Exception as failed:  # whoever waits for the job is told
            error = failed
        seconds = time.monotonic() - job.started
        error = error or _ended_by(job.gate)
        return JobDone(job.job_id, tuple(results), stored, seconds, size, error)


def _ended_by(gate: _core.ReadGate) -> Exception | None:
    if gate.state == "abandoned":
        return CancelledError("the job was abandoned")
    if gate.state == "late":
        return TimeoutError("the job did not end within its deadline")
    return None
