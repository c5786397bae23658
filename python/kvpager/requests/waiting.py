"""The requests of a scheduler that wait: who is next, and who may overtake whom."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpager.requests.job_heap import JobHeap

if TYPE_CHECKING:
    from kvpager.requests.request import Job

# How many later requests may overtake one that has no room. After that, room that is released is
# kept for it. As many as run at once by default: fewer would drain the pool for each long prompt.
MOST_OVERTAKING = 64
# Requests tried at a step, after one that has no room. A try reads the whole prompt.
_TRIES = 4


class WaitingRequests:
    """Waiting requests, by priority and then age. The caller holds a lock.

    The first one without room *blocks*: those behind it may overtake it, `MOST_OVERTAKING` times.
    A request that was tried in vain is *passed over*: it is not tried again before a request has
    ended, except for the first, so that a step costs the same however many wait.
    """

    def __init__(self) -> None:
        self._untried = JobHeap()
        self._passed = JobHeap()
        self._blocking: Job | None = None
        self._overtaken = 0  # how often, of the one that blocks
        self._tries = 0  # at this step

    def __len__(self) -> int:
        return len(self._untried) + len(self._passed)

    def __contains__(self, job: Job) -> bool:
        return job in self._untried or job in self._passed

    def add(self, job: Job) -> None:
        """Adds a request."""
        self._untried.push(job, job.rank)

    def discard(self, job: Job) -> bool:
        """Removes a request; False if it does not wait."""
        return self._untried.discard(job) or self._passed.discard(job)

    def begin(self) -> None:
        """Call once at each step, before `next`."""
        self._tries = 0

    def next(self) -> Job | None:
        """The request to try now; None: nobody else may be admitted at this step."""
        untried, blocking = self._untried.first(), self._passed.first()
        if blocking is None or (untried is not None and untried.rank < blocking.rank):
            return untried
        if self._tries == 0:
            return blocking
        if self._tries > _TRIES:
            return None
        if blocking is self._blocking and self._overtaken >= MOST_OVERTAKING:
            return None
        return untried

    def pass_over(self, job: Job) -> None:
        """Call for the request from `next` if it has no room."""
        self._tries += 1
        if self._untried.discard(job):
            self._passed.push(job, job.rank)

    def admitted(self, job: Job) -> None:
        """Call for the request from `next` if it runs now."""
        self.discard(job)
        blocking = self._passed.first()
        if blocking is not self._blocking:
            self._blocking, self._overtaken = blocking, 0
        if blocking is not None and blocking.rank < job.rank:
            self._overtaken += 1

    def room_released(self) -> None:
        """Call when a request has ended: those that were passed over are tried again."""
        blocking = self._passed.first()
        for job in list(self._passed):
            if job is not blocking:
                self._passed.discard(job)
                self._untried.push(job, job.rank)
