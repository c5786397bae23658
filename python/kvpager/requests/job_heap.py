"""Requests in the order of a key, any of which may leave at any time."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpager.requests.request import Job

_SLACK = 16  # entries of jobs that left, beside as many as are in the heap


class JobHeap:
    """A heap of jobs by key. All operations take O(log n) on average, `discard` included.

    A job that leaves is only forgotten; its entry goes when it comes to the top, or with all others
    once they outnumber the jobs.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Any, int, Job]] = []
        self._keys: dict[int, Any] = {}  # of each job in the heap, by its index

    def push(self, job: Job, key: Any) -> None:
        """Adds a job. REQUIRES: it is not in the heap."""
        self._keys[job.index] = key
        heapq.heappush(self._heap, (key, job.index, job))

    def discard(self, job: Job) -> bool:
        """Removes a job; False if it is not in the heap."""
        if self._keys.pop(job.index, None) is None:
            return False
        if len(self._heap) > 2 * len(self._keys) + _SLACK:
            self._heap = [entry for entry in self._heap if self._holds(entry)]
            heapq.heapify(self._heap)
        return True

    def first(self) -> Job | None:
        """The job with the smallest key; None if the heap is empty."""
        while self._heap and not self._holds(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def __contains__(self, job: Job) -> bool:
        return job.index in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Job]:
        """The jobs, in no order."""
        return (entry[2] for entry in list(self._heap) if self._holds(entry))

    def _holds(self, entry: tuple[Any, int, Job]) -> bool:
        key, index, _ = entry
        return index in self._keys and self._keys[index] == key
