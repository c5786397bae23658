"""The requests of a scheduler that wait: who is next, and who may overtake whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvpager.requests.job_heap import JobHeap

if TYPE_CHECKING:
    from kvpager.requests.request import Job

# How many later requests may overtake one that has no room. After that, room that is released is
# kept for it. As many as run at once by default: fewer would drain the pool for each long prompt.
MOST_OVERTAKING = 64
# Requests tried at a step, after one that has no room. A try reads the whole prompt.
_TRIES = 4


@dataclass
class _Flow:
    """A tenant's waiting requests of one priority.

    Attributes:
        jobs: those that were not passed over, by their age.
        head: the oldest of them, while it takes part in the choice of the next one.
        finish: virtual time at which what was admitted of it has had its share.
        held: whether the tenant may run no further request at this step.
    """

    jobs: JobHeap = field(default_factory=JobHeap)
    head: Job | None = None
    finish: int = 0
    held: bool = False


@dataclass
class _Level:
    """The waiting requests of one priority.

    Attributes:
        now: virtual time, in tokens: where the request that was admitted last began.
        waiting: number of requests, those that were passed over included.
        flows: by tenant.
    """

    now: int = 0
    waiting: int = 0
    flows: dict[str, _Flow] = field(default_factory=dict)


class WaitingRequests:
    """Waiting requests: by priority, then in turns of their tenants, then by age.

    The turns are start-time fair queueing: a tenant whose request of n tokens is admitted comes
    again when each other one that waits has had n tokens. The order depends on nothing but what is
    submitted, admitted and removed. The caller holds a lock.

    The first one without room *blocks*: those behind it may overtake it, `MOST_OVERTAKING` times.
    A request that was tried in vain is *passed over*: it is not tried again before a request has
    ended, except for the first, so that a step costs the same however many wait.
    """

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}
        self._heads = JobHeap()  # of all flows
        self._passed = JobHeap()
        self._of_tenant: Counter[str] = Counter()
        self._held: list[_Flow] = []
        self._blocking: Job | None = None
        self._overtaken = 0  # how often, of the one that blocks
        self._tries = 0  # at this step

    def __len__(self) -> int:
        return self._of_tenant.total()

    def __contains__(self, job: Job) -> bool:
        level = self._levels.get(job.priority)
        flow = None if level is None else level.flows.get(job.tenant)
        return job in self._passed or (flow is not None and job in flow.jobs)

    def of(self, tenant: str) -> int:
        """How many of a tenant's wait."""
        return self._of_tenant[tenant]

    def add(self, job: Job) -> None:
        """Adds a request."""
        level = self._levels.setdefault(job.priority, _Level())
        level.waiting += 1
        self._of_tenant[job.tenant] += 1
        self._enter(job)

    def discard(self, job: Job) -> bool:
        """Removes a request; False if it does not wait."""
        if job not in self:
            return False
        level = self._levels[job.priority]
        flow = level.flows[job.tenant]
        if not self._passed.discard(job):
            flow.jobs.discard(job)
            self._lead(flow, level)
        level.waiting -= 1
        if not level.waiting:  # nobody is there to be fair to
            del self._levels[job.priority]
        self._of_tenant[job.tenant] -= 1
        if not self._of_tenant[job.tenant]:
            del self._of_tenant[job.tenant]
        return True

    def begin(self) -> None:
        """Call once at each step, before `next`."""
        self._tries = 0
        held, self._held = self._held, []
        for flow in held:
            flow.held = False
            first = flow.jobs.first()
            if first is not None:
                self._lead(flow, self._levels[first.priority])

    def next(self, full: Container[str] = ()) -> Job | None:
        """The request to try now; None: nobody else may be admitted at this step.

        full: tenants that may run no further request.
        """
        untried, blocking = self._first(full), self._passed.first()
        if blocking is None or blocking.tenant in full:
            return untried
        if untried is not None and untried.rank < blocking.rank:
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
        level = self._levels[job.priority]
        flow = level.flows[job.tenant]
        if flow.jobs.discard(job):
            self._passed.push(job, job.rank)
            self._lead(flow, level)

    def admitted(self, job: Job) -> None:
        """Call for the request from `next` if it runs now."""
        if job in self:
            level = self._levels[job.priority]
            flow = level.flows[job.tenant]
            _, start, _ = job.rank
            level.now = max(level.now, start)
            flow.finish = max(flow.finish, start) + job.planned
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
                self._enter(job)

    def _enter(self, job: Job) -> None:
        level = self._levels[job.priority]
        flow = level.flows.setdefault(job.tenant, _Flow(finish=level.now))
        flow.jobs.push(job, job.index)
        self._lead(flow, level)

    def _lead(self, flow: _Flow, level: _Level) -> None:
        """Puts the oldest request of a flow among the heads, with its turn."""
        first = None if flow.held else flow.jobs.first()
        if first is flow.head:
            return
        if flow.head is not None:
            self._heads.discard(flow.head)
        flow.head = first
        if first is not None:
            first.rank = (first.priority, max(level.now, flow.finish), first.index)
            self._heads.push(first, first.rank)

    def _first(self, full: Container[str]) -> Job | None:
        while (head := self._heads.first()) is not None and head.tenant in full:
            level = self._levels[head.priority]
            flow = level.flows[head.tenant]
            flow.held = True
            self._held.append(flow)
            self._lead(flow, level)
        return head
