"""Requests that wait: by priority, and past those that have no room."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpager.requests.request import Job

# How often a request without room may be overtaken by later ones that have some. Then nothing else
# is admitted before it: short requests pass a long one, which does not wait for ever.
MOST_OVERTAKEN = 64
# How many requests without room a step tries; each try looks for the prompt's chunks.
MOST_TRIES = 8


class WaitingJobs:
    """Jobs by priority and index.

    Adding, removing and taking one costs the logarithm of their number. The caller holds a lock.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Job]] = []
        self._known: set[int] = set()  # indices; a job of the heap that is not here was removed
        self._passed: dict[int, Job] = {}  # without room since some was last given back

    def __len__(self) -> int:
        return len(self._known)

    def add(self, job: Job) -> None:
        """Adds a job."""
        self._known.add(job.index)
        heapq.heappush(self._heap, (job.priority, job.index, job))

    def remove(self, job: Job) -> bool:
        """Removes a job; False if it does not wait."""
        if job.index not in self._known:
            return False
        self._known.remove(job.index)
        self._passed.pop(job.index, None)
        return True

    def next(self) -> Job | None:
        """The job that is to be admitted next; None if none is worth a try.

        It stays until it is removed, or passed over because it has no room.
        """
        if len(self._passed) >= MOST_TRIES:
            return None
        if any(job.overtaken >= MOST_OVERTAKEN for job in self._passed.values()):
            return None
        while self._heap:
            _, index, job = self._heap[0]
            if index in self._known:
                return job
            heapq.heappop(self._heap)
        return None

    def pass_over(self, job: Job) -> None:
        """Leaves out the next job, which has no room, until some is given back."""
        heapq.heappop(self._heap)
        self._passed[job.index] = job

    def admitted(self, job: Job) -> None:
        """Removes the next job, which overtakes those that were passed over."""
        self.remove(job)
        for other in self._passed.values():
            other.overtaken += 1

    def retry(self) -> None:
        """Every job is worth a try again."""
        for job in self._passed.values():
            heapq.heappush(self._heap, (job.priority, job.index, job))
        self._passed.clear()

    def __iter__(self) -> Iterator[Job]:
        waiting = [job for _, index, job in self._heap if index in self._known]
        return iter([*self._passed.values(), *waiting])


class Deadlines:
    """When requests have to be finished. The caller holds a lock."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Job]] = []

    def add(self, job: Job, deadline: float) -> None:
        """Adds a job's."""
        heapq.heappush(self._heap, (deadline, job.index, job))

    def over(self, now: float) -> list[Job]:
        """Takes the jobs whose time is over."""
        jobs = []
        while self._heap and self._heap[0][0] <= now:
            jobs.append(heapq.heappop(self._heap)[2])
        return jobs
