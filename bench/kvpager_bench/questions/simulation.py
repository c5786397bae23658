"""What 4 to 64 replicas would do: a simulation, with rates that were measured.

    kvpager bench simulation
    kvpager bench simulation -- --replicas 16 --bandwidths 1,0.1

Nothing here runs a model. Rates of prefill and of restoring from a bucket are those of `kvpager
bench object_store` (its longest context, in the results), decode and everything else the options.

Sessions of agents arrive at random. A session has a first prompt, turns that add to it, an answer
to each, and pauses between them, with random lengths. A replica answers one turn after another. A
turn reads what its replica has not in memory from the store, computes what the store has not, and
decodes; memory keeps the sessions that were used last. With a store of its own a replica knows what
it has answered itself, with a common one what all have. Routings are those of `kvpager bench
replicas`. The load is the share of the time that replicas would be busy if nothing were ever
computed twice.

"bandwidth" is that of restores, as a share of what was measured, for the common store alone: what a
slower network or larger K/V would leave. A replica reads all that is saved, also where it would
compute it sooner. "store" is what all replicas read from it on average.
"cost" is the time that replicas are busy for 1,000 turns.
"""

from __future__ import annotations

import heapq
import math
import random
import statistics
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kvpager.server.routing import preference
from kvpager_bench.conversations import HASH, HELD, RANDOM, ROUTINGS
from kvpager_bench.harness import Column
from kvpager_bench.places import results_dir
from kvpager_bench.report import MissingNumberError, load_report
from kvpager_bench.study import Asked, Option, Study, Table

OWN, COMMON = "own", "common"
MEASURED = "object_store_turns"

COLUMNS = (
    Column("replicas"),
    Column("store", text=True),
    Column("routing", text=True),
    Column("bandwidth", optional=True),
    Column("turns"),
    Column("cached", "%"),
    Column("first_token_s", "s, median"),
    Column("first_token_p95_s", "s"),
    Column("busy", "%"),
    Column("store_mib_s", "MiB/s"),
    Column("cost_s", "s"),
)


@dataclass(frozen=True)
class Rates:
    """Of one replica. prefill, restore, decode: tokens/s. token_bytes: K/V of a token."""

    prefill: float
    restore: float
    decode: float
    token_bytes: float

    @classmethod
    def measured(cls, decode: float) -> Rates:
        """From the results. Raises MissingNumberError where there are none."""
        path = results_dir() / f"{MEASURED}.json"
        if not path.is_file():
            raise MissingNumberError(f"{path.name} is missing: run `kvpager bench object_store`")
        report = load_report(path)
        row = max(report.rows, key=lambda row: report.number(row, "context"))
        context = report.number(row, "context")
        return cls(
            prefill=context / report.number(row, "prefill_s"),
            restore=context / report.number(row, "first_token_s"),
            decode=decode,
            token_bytes=report.number(row, "needed_mib") * 2**20 / context,
        )


@dataclass(frozen=True)
class Turn:
    """One turn of a session. prompt: its tokens; new: those that no earlier turn had."""

    session: int
    prompt: int
    new: int
    answer: int


@dataclass(frozen=True)
class Workload:
    """Lengths in tokens (medians of log-normal ones), and seconds between turns (mean)."""

    turns: float
    first: int
    more: int
    answer: int
    pause: float

    def session(self, number: int, draw: random.Random) -> list[Turn]:
        made, held = [], 0
        for turn in range(1 + int(draw.expovariate(1 / (self.turns - 1)))):
            median = self.more if turn else self.first
            new = max(1, int(draw.lognormvariate(math.log(median), 0.8)))
            answer = max(1, int(draw.lognormvariate(math.log(self.answer), 0.5)))
            made.append(Turn(number, held + new, new, answer))
            held += new + answer
        return made


@dataclass
class Replica:
    """held: tokens in memory by session, the least recently used first. saved: in its own store."""

    held: OrderedDict[int, int] = field(default_factory=OrderedDict)
    saved: dict[int, int] = field(default_factory=dict)
    free_at: float = 0.0
    busy: float = 0.0
    ends: list[float] = field(default_factory=list)  # of turns that wait or run
    kept: int = 0  # tokens in memory

    def waiting(self, now: float) -> int:
        while self.ends and self.ends[0] <= now:
            heapq.heappop(self.ends)
        return len(self.ends)

    def keep(self, session: int, tokens: int, room: int) -> None:
        self.kept += tokens - self.held.get(session, 0)
        self.held[session] = self.saved[session] = tokens
        self.held.move_to_end(session)
        while self.kept > room and len(self.held) > 1:
            self.kept -= self.held.popitem(last=False)[1]


@dataclass
class Outcome:
    """What happened: sums of tokens, and the seconds to each first token."""

    prompt: int = 0
    computed: int = 0
    restored: int = 0
    first: list[float] = field(default_factory=list)


class Cluster:
    """Replicas with a routing and a kind of store."""

    def __init__(self, count: int, routing: str, store: str, rates: Rates, room: int) -> None:
        self.replicas = [Replica() for _ in range(count)]
        self.outcome = Outcome()
        self._routing, self._store, self._rates, self._room = routing, store, rates, room
        self._saved: dict[int, int] = {}
        self._draw = random.Random(2)

    def answer(self, turn: Turn, now: float) -> float:
        """Answers a turn that arrives now; returns when it ends."""
        replica, outcome = self._choose(turn, now), self.outcome
        known = turn.prompt - turn.new
        held = min(known, replica.held.get(turn.session, 0))
        saved = (self._saved if self._store == COMMON else replica.saved).get(turn.session, 0)
        restored = max(0, min(known, saved) - held)
        computed = turn.prompt - held - restored
        begins = max(now, replica.free_at)
        first = begins + restored / self._rates.restore + computed / self._rates.prefill
        ends = first + turn.answer / self._rates.decode
        replica.busy += ends - begins
        replica.free_at = ends
        heapq.heappush(replica.ends, ends)
        replica.keep(turn.session, turn.prompt + turn.answer, self._room)
        self._saved[turn.session] = turn.prompt + turn.answer
        outcome.prompt += turn.prompt
        outcome.computed += computed
        outcome.restored += restored
        outcome.first.append(first - now)
        return ends

    def _choose(self, turn: Turn, now: float) -> Replica:
        if self._routing == RANDOM:
            return self._draw.choice(self.replicas)
        if self._routing == HASH:
            return self.replicas[zlib.crc32(b"%d" % turn.session) % len(self.replicas)]
        return max(self.replicas, key=lambda one: self._preference(one, turn, now))

    def _preference(self, replica: Replica, turn: Turn, now: float) -> float:
        share = min(1.0, replica.held.get(turn.session, 0) / turn.prompt)
        return preference([("", share)], {""}, replica.waiting(now), most=4)


def arrivals(work: Workload, count: int, sessions: int, load: float, rates: Rates) -> Iterator[Any]:
    """Sessions with the times at which they begin."""
    draw = random.Random(3)
    made = [work.session(number, draw) for number in range(sessions)]
    seconds = sum(
        turn.new / rates.prefill + turn.answer / rates.decode for turns in made for turn in turns
    )
    now, between = 0.0, seconds / sessions / count / load
    for turns in made:
        now += draw.expovariate(1 / between)
        yield now, turns


def simulate(cluster: Cluster, begun: Iterator[Any], pause: float) -> float:
    """Answers all turns; returns the seconds from the first to the last."""
    draw = random.Random(4)
    events = [(at, turns[0].session, 0, turns) for at, turns in begun]
    heapq.heapify(events)
    last = 0.0
    while events:
        now, session, number, turns = heapq.heappop(events)
        ends = cluster.answer(turns[number], now)
        last = max(last, ends)
        if number + 1 < len(turns):
            again = ends + draw.expovariate(1 / pause)
            heapq.heappush(events, (again, session, number + 1, turns))
    return last


def measure(asked: Asked) -> None:
    o, report = asked.options, asked.report()
    measured = Rates.measured(o.decode)
    asked.settings |= {
        "prefill_tokens_s": round(measured.prefill),
        "restore_tokens_s": round(measured.restore),
        "token_bytes": round(measured.token_bytes),
    }
    work = Workload(o.turns, o.first, o.more, o.answer, o.pause)
    for count in o.replicas:
        found: dict[tuple[str, str, float], dict[str, Any]] = {}
        for store, routing, bandwidth in cases(o.bandwidths):
            scale = bandwidth if store == COMMON else 1.0
            rates = Rates(
                measured.prefill, measured.restore * scale, measured.decode, measured.token_bytes
            )
            cluster = Cluster(count, routing, store, rates, o.memory)
            sessions = o.sessions * count
            begun = arrivals(work, count, sessions, o.load, measured)
            seconds = simulate(cluster, begun, o.pause)
            found[store, routing, bandwidth] = row = summary(cluster, seconds, rates)
            shown = bandwidth if store == COMMON else "n/a"
            report.add(replicas=count, store=store, routing=routing, bandwidth=shown, **row)
        _judge(asked, count, found)


def cases(bandwidths: list[float]) -> Iterator[tuple[str, str, float]]:
    for routing in ROUTINGS:
        yield OWN, routing, 1.0
    for bandwidth in bandwidths:
        for routing in ROUTINGS:
            yield COMMON, routing, bandwidth


def summary(cluster: Cluster, seconds: float, rates: Rates) -> dict[str, Any]:
    found, first = cluster.outcome, sorted(cluster.outcome.first)
    busy = sum(one.busy for one in cluster.replicas)
    return {
        "turns": len(first),
        "cached": 100 * (1 - found.computed / found.prompt),
        "first_token_s": statistics.median(first),
        "first_token_p95_s": first[len(first) * 95 // 100],
        "busy": 100 * busy / seconds / len(cluster.replicas),
        "store_mib_s": found.restored * rates.token_bytes / 2**20 / seconds,
        "cost_s": 1000 * busy / len(first),
    }


def _judge(asked: Asked, count: int, found: dict[tuple[str, str, float], dict[str, Any]]) -> None:
    own = found[OWN, HASH, 1.0]["first_token_p95_s"]
    better = [
        bandwidth
        for (store, routing, bandwidth), row in found.items()
        if store == COMMON and routing == HELD and row["first_token_p95_s"] < own
    ]
    least = f"down to {min(better):g} of the measured bandwidth" if better else "at none of these"
    asked.report().judge(
        f"{count} replicas: a common store and routing by what is held beat affinity alone (p95)",
        bool(better),
        least,
    )


STUDY = Study(
    measure,
    (Table("simulation", "Simulated replicas, by store, routing and bandwidth", COLUMNS),),
    (
        Option("replicas", [4, 16, 64], [4]),
        Option(
            "bandwidths", [1.0, 0.5, 0.2], kind=lambda text: [float(x) for x in text.split(",")]
        ),
        Option("sessions", 100, 10, help="of each replica"),
        Option("turns", 12.0, help="of a session, mean"),
        Option("first", 4000, help="tokens of a first prompt, median"),
        Option("more", 800, help="tokens that a turn adds, median"),
        Option("answer", 200, help="tokens, median"),
        Option("pause", 20.0, help="seconds between turns, mean"),
        Option("decode", 200.0, help="tokens per second"),
        Option("memory", 200_000, help="tokens of K/V that a replica keeps in memory"),
        Option("load", 0.6),
    ),
)

if __name__ == "__main__":
    STUDY.main()
