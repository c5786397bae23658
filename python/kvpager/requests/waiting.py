"""The requests of a scheduler that wait: who is next, and who may overtake whom."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvpager._support.arguments import Integer, as_integer, is_finite, refusal
from kvpager._support.salts import checked_salt, stretched
from kvpager.errors import InvalidArgumentError

if TYPE_CHECKING:
    from kvpager.requests.request import Request

# How many later requests may overtake one that has no room. After that, room that is released is
# kept for it. As many as run at once by default: fewer would drain the pool for each long prompt.
MOST_OVERTAKING = 64
# Requests tried at a step, after one that has no room. A try reads the whole prompt.
_TRIES = 4
_SLACK = 16  # a heap's entries of requests that left, in addition to as many as it holds


@dataclass(frozen=True)
class Queueing:
    """The options of `Scheduler.submit` that decide when a request is served.

    Attributes:
        priority: lower ones are admitted earlier.
        timeout_s: seconds from its submission to its end at the latest; None: no limit.
        salt: of the session that is made for it, stretched; None: the engine's.
        tenant: whose it is.
    """

    priority: int = 0
    timeout_s: float | None = None
    salt: str | None = None
    tenant: str = ""

    @classmethod
    def checked(
        cls,
        priority: Integer,
        timeout_s: float | None,
        salt: str | None = None,
        *,
        tenant: str = "",
        session_given: bool = True,
    ) -> Queueing:
        """Raises InvalidArgumentError for a value out of range, or a salt with a session."""
        if not isinstance(tenant, str):
            raise refusal("tenant", tenant, "text")
        if timeout_s is not None and not (is_finite(timeout_s) and timeout_s > 0):
            raise refusal("timeout_s", timeout_s, "seconds, more than 0, or None")
        if salt is not None and session_given:
            raise InvalidArgumentError(
                "salt is given with a session, which has its own; expected None"
            )
        return cls(
            as_integer(priority, "priority", -(1 << 31)),
            None if timeout_s is None else float(timeout_s),
            None if salt is None else stretched(checked_salt(salt)),
            tenant,
        )


class RequestHeap:
    """A heap of requests by key. All operations take O(log n) on average, `discard` included.

    `discard` only forgets a request. Its entry is removed when it comes to the top, or together
    with all other such entries once these outnumber the requests.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Any, int, Request]] = []
        self._keys: dict[int, Any] = {}  # of each request in the heap, by its index

    def push(self, request: Request, key: Any) -> None:
        """Adds a request. REQUIRES: it is not in the heap."""
        self._keys[request.index] = key
        heapq.heappush(self._heap, (key, request.index, request))

    def discard(self, request: Request) -> bool:
        """Removes a request; False if it is not in the heap."""
        if self._keys.pop(request.index, None) is None:
            return False
        if len(self._heap) > 2 * len(self._keys) + _SLACK:
            self._heap = [entry for entry in self._heap if self._holds(entry)]
            heapq.heapify(self._heap)
        return True

    def first(self) -> Request | None:
        """The request with the smallest key; None if the heap is empty."""
        while self._heap and not self._holds(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def __contains__(self, request: Request) -> bool:
        return request.index in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Request]:
        """The requests, in no order."""
        return (entry[2] for entry in list(self._heap) if self._holds(entry))

    def _holds(self, entry: tuple[Any, int, Request]) -> bool:
        key, index, _ = entry
        return index in self._keys and self._keys[index] == key


@dataclass
class _Flow:
    """A tenant's waiting requests of one priority.

    Attributes:
        requests: those that were not passed over, by their age.
        head: the oldest of them, while it takes part in the choice of the next one.
        finish: virtual time at which what was admitted of it has had its share.
        held: whether the tenant may run no further request at this step.
    """

    requests: RequestHeap = field(default_factory=RequestHeap)
    head: Request | None = None
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
        self._heads = RequestHeap()  # of all flows
        self._passed = RequestHeap()
        self._of_tenant: Counter[str] = Counter()
        self._held: list[_Flow] = []
        self._blocking: Request | None = None
        self._overtaken = 0  # how often, of the one that blocks
        self._tries = 0  # at this step

    def __len__(self) -> int:
        return self._of_tenant.total()

    def __contains__(self, request: Request) -> bool:
        level = self._levels.get(request.queueing.priority)
        flow = None if level is None else level.flows.get(request.queueing.tenant)
        return request in self._passed or (flow is not None and request in flow.requests)

    def of(self, tenant: str) -> int:
        """How many of a tenant's wait."""
        return self._of_tenant[tenant]

    def add(self, request: Request) -> None:
        """Adds a request."""
        level = self._levels.setdefault(request.queueing.priority, _Level())
        level.waiting += 1
        self._of_tenant[request.queueing.tenant] += 1
        self._enter(request)

    def discard(self, request: Request) -> bool:
        """Removes a request; False if it does not wait."""
        if request not in self:
            return False
        level = self._levels[request.queueing.priority]
        flow = level.flows[request.queueing.tenant]
        if not self._passed.discard(request):
            flow.requests.discard(request)
            self._lead(flow, level)
        level.waiting -= 1
        if not level.waiting:  # no other request to be fair to
            del self._levels[request.queueing.priority]
        self._of_tenant[request.queueing.tenant] -= 1
        if not self._of_tenant[request.queueing.tenant]:
            del self._of_tenant[request.queueing.tenant]
        return True

    def begin(self) -> None:
        """Call once at each step, before `next`."""
        self._tries = 0
        held, self._held = self._held, []
        for flow in held:
            flow.held = False
            first = flow.requests.first()
            if first is not None:
                self._lead(flow, self._levels[first.queueing.priority])

    def next(self, full: Container[str] = ()) -> Request | None:
        """The request to try now; None: no other one may be admitted at this step.

        full: tenants that may run no further request.
        """
        untried, blocking = self._first(full), self._passed.first()
        if blocking is None or blocking.queueing.tenant in full:
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

    def pass_over(self, request: Request) -> None:
        """Call for the request from `next` if it has no room."""
        self._tries += 1
        level = self._levels[request.queueing.priority]
        flow = level.flows[request.queueing.tenant]
        if flow.requests.discard(request):
            self._passed.push(request, request.rank)
            self._lead(flow, level)

    def admitted(self, request: Request) -> None:
        """Call for the request from `next` if it runs now."""
        if request in self:
            level = self._levels[request.queueing.priority]
            flow = level.flows[request.queueing.tenant]
            _, start, _ = request.rank
            level.now = max(level.now, start)
            flow.finish = max(flow.finish, start) + request.planned
            self.discard(request)
        blocking = self._passed.first()
        if blocking is not self._blocking:
            self._blocking, self._overtaken = blocking, 0
        if blocking is not None and blocking.rank < request.rank:
            self._overtaken += 1

    def room_released(self) -> None:
        """Call when a request has ended: those that were passed over are tried again."""
        blocking = self._passed.first()
        for request in list(self._passed):
            if request is not blocking:
                self._passed.discard(request)
                self._enter(request)

    def _enter(self, request: Request) -> None:
        level = self._levels[request.queueing.priority]
        flow = level.flows.setdefault(request.queueing.tenant, _Flow(finish=level.now))
        flow.requests.push(request, request.index)
        self._lead(flow, level)

    def _lead(self, flow: _Flow, level: _Level) -> None:
        """Puts the oldest request of a flow among the heads, with its turn."""
        first = None if flow.held else flow.requests.first()
        if first is flow.head:
            return
        if flow.head is not None:
            self._heads.discard(flow.head)
        flow.head = first
        if first is not None:
            first.rank = (first.queueing.priority, max(level.now, flow.finish), first.index)
            self._heads.push(first, first.rank)

    def _first(self, full: Container[str]) -> Request | None:
        while (head := self._heads.first()) is not None and head.queueing.tenant in full:
            level = self._levels[head.queueing.priority]
            flow = level.flows[head.queueing.tenant]
            flow.held = True
            self._held.append(flow)
            self._lead(flow, level)
        return head
