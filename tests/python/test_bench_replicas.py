"""The bench of replicas: its router, its comparison of answers, and the simulation of more."""

from __future__ import annotations

import time

import pytest

from kvpager_bench.conversations import HASH, HELD, RANDOM, ROUTINGS, Answer, Router, trace
from kvpager_bench.questions.replicas import by_turn, compared
from kvpager_bench.questions.simulation import (
    COMMON,
    OWN,
    Cluster,
    Rates,
    Turn,
    Workload,
    arrivals,
    simulate,
    summary,
)

RATES = Rates(prefill=1000.0, restore=10_000.0, decode=100.0, token_bytes=1024.0)
WORK = Workload(turns=6.0, first=500, more=100, answer=20, pause=5.0)


def answer(conversation, turn, bits="a", tokens=10):
    return Answer(conversation, turn, "url", tokens, 0, 0.1, bits, 0)


def test_a_trace_has_all_turns_of_all_conversations_and_is_always_the_same():
    made = trace(3, 4, 100, 200, 50)
    assert made == trace(3, 4, 100, 200, 50)
    assert [made.order.count(number) for number in range(3)] == [4, 4, 4]
    assert [[len(text) for text in said] for said in made.said] == [[200, 50, 50, 50]] * 3


@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_server_that_failed_or_is_excluded_is_not_chosen(routing):
    router = Router(["one", "two"], routing)
    router.servers[0].down_until = time.monotonic() + 60
    assert {router.choose(number, ()).url for number in range(8)} == {"two"}
    router.servers[1].down_until = time.monotonic() + 60  # if all failed, any is tried again
    router.elsewhere(dict.fromkeys(range(8), "two"))
    assert {router.choose(number, ()).url for number in range(8)} == {"one"}


def test_conversations_are_spread_by_hash_and_stay_where_they_are():
    router = Router(["one", "two"], HASH)
    chosen = [router.choose(number, ()).url for number in range(20)]
    assert set(chosen) == {"one", "two"}
    assert chosen == [router.choose(number, ()).url for number in range(20)]


def test_answers_differ_unless_their_conversation_had_other_tokens_before():
    expected = by_turn([answer(n, turn) for n in range(3) for turn in range(3)])
    found = [answer(n, turn) for n in range(3) for turn in range(3)]
    found[1] = answer(0, 1, bits="b")
    found[4] = answer(1, 1, bits="b", tokens=11)
    found[5] = answer(1, 2, bits="b")
    assert compared(found, expected) == {"differing": 1, "other_tokens": 2}


def test_a_replica_computes_what_neither_its_memory_nor_its_store_has():
    cluster = Cluster(1, HASH, OWN, RATES, room=10_000)
    assert cluster.answer(Turn(0, 500, 500, 10), now=0.0) == pytest.approx(0.5 + 0.1)
    # In memory: only the new tokens. It waits for nothing, as the first turn has ended.
    assert cluster.answer(Turn(0, 610, 100, 10), now=5.0) == pytest.approx(5.0 + 0.1 + 0.1)
    cluster.replicas[0].keep(1, 9_999, 10_000)  # takes the room
    ends = cluster.answer(Turn(0, 720, 100, 10), now=10.0)
    assert ends == pytest.approx(10.0 + 620 / 10_000 + 0.1 + 0.1)
    found = cluster.outcome
    assert (found.prompt, found.computed, found.restored) == (1830, 700, 620)


def test_a_turn_waits_for_those_before_it():
    cluster = Cluster(1, RANDOM, OWN, RATES, room=10_000)
    cluster.answer(Turn(0, 500, 500, 10), now=0.0)
    cluster.answer(Turn(1, 500, 500, 10), now=0.1)
    assert cluster.outcome.first == pytest.approx([0.5, 0.6 - 0.1 + 0.5])


def run(store, routing, count=4):
    cluster = Cluster(count, routing, store, RATES, room=4_000)
    begun = arrivals(WORK, count, 40 * count, 0.5, RATES)
    return summary(cluster, simulate(cluster, begun, WORK.pause), RATES)


def test_with_a_common_store_no_routing_computes_a_token_twice():
    cached = {run(COMMON, routing)["cached"] for routing in ROUTINGS}
    assert len(cached) == 1
    assert cached.pop() > run(OWN, RANDOM)["cached"] + 5


def test_routing_by_what_is_held_reads_less_from_a_common_store_than_chance():
    assert run(COMMON, HELD)["store_mib_s"] < run(COMMON, RANDOM)["store_mib_s"]


def test_a_simulation_is_always_the_same():
    assert run(COMMON, HELD) == run(COMMON, HELD)
