"""What two servers of one store do for conversations of agents, by routing and store; and faults.

    kvpager bench replicas
    kvpager bench replicas -- --parts routing --stores folder

Conversations begin with one system message and a document of their own, and their turns come in
random order, two at a time for each server. The bench is the router. Routings: "random"; "hash" of
the conversation, as vllm-router's consistent hash; "held", the server that holds most of the
prompt, as `kvpager.ray` chooses. Stores: "local", each server its own folder; "folder", one that
both share; "bucket", of a server on this machine (SeaweedFS), each server with its own cache.

Every answer (text and log-probabilities, sampled with a seed) is compared with that of one server
alone; "differing" counts them. A server that has a conversation keeps the tokens that its answers
were sampled as; one that has it not reads their text, which may give other tokens: "other tokens"
counts the turns from there on. "cached" is the share of prompt tokens that were not computed.

Faults, with the bucket and "hash": "kill", SIGKILL of a server that starts again at once;
"rolling restart", SIGTERM of one after the other; "outage", the bucket answers 503 for half of the
requests. A request that fails is sent to the other server ("asked again"). Then each conversation
has one more turn at the server that did not answer its last one: "kept" is the cached share there.
"""

from __future__ import annotations

import contextlib
import shutil
import statistics
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvpager_bench import bucket_server, servers
from kvpager_bench.conversations import HASH, ROUTINGS, Answer, Client, Router, Trace, trace
from kvpager_bench.harness import Column
from kvpager_bench.places import scratch_folder
from kvpager_bench.questions.serving import CODER, log_of, saved_model
from kvpager_bench.study import Asked, Option, Study, Table

LOCAL, FOLDER, BUCKET = "local", "folder", "bucket"
STORES = (LOCAL, FOLDER, BUCKET)
PARTS = ("routing", "faults")
KILL, ROLLING, OUTAGE = "kill", "rolling restart", "outage"
REPLICAS = 2
STREAMS = 2 * REPLICAS

ROUTED = (
    Column("store", text=True),
    Column("routing", text=True),
    Column("servers"),
    Column("requests"),
    Column("prompt_tokens"),
    Column("cached", "%"),
    Column("first_token_s", "s, median"),
    Column("first_token_p90_s", "s"),
    Column("seconds", "s"),
    Column("differing"),
    Column("other_tokens"),
)
FAULTS = (
    Column("fault", text=True),
    Column("requests"),
    Column("asked_again"),
    Column("differing"),
    Column("other_tokens"),
    Column("cached", "%"),
    Column("kept", "%"),
    Column("first_token_s", "s, median"),
    Column("slowest_first_token_s", "s"),
)


@contextlib.contextmanager
def fleet(
    count: int, model: Path, folder: Path, store: str, port: int | None, name: str
) -> Iterator[list[servers.Server]]:
    """Servers of one model with a store, which run while the block does; their files go with them.

    Each has a cache of its own. port: of the server of buckets, where the store is one.
    """
    name = name.replace(" ", "-")
    place = folder / name
    place.mkdir()
    started: list[servers.Server] = []
    try:
        for number in range(count):
            address = {
                LOCAL: str(place / f"store-{number}"),
                FOLDER: str(place / "store"),
                BUCKET: f"s3://test/{name}",
            }[store]
            variables = {"KVPAGER_CACHE": str(place / f"cache-{number}")}
            if port is not None:
                given = bucket_server.options(port)
                variables |= {
                    "AWS_ENDPOINT_URL": given["endpoint"],
                    "AWS_ALLOW_HTTP": "true",
                    "AWS_REGION": given["region"],
                    "AWS_ACCESS_KEY_ID": given["access_key_id"],
                    "AWS_SECRET_ACCESS_KEY": given["secret_access_key"],
                }
            options = ["--store", address, "--drain-seconds", "5"]
            options += [] if store == LOCAL else ["--shared-store"]
            log = log_of(f"replicas-{name}-{number}")
            started.append(servers.Server(servers.KVPAGER, model, 1, log, options, variables))
        yield started
    finally:
        for one in started:
            one.kill()
        shutil.rmtree(place)


def router_of(started: list[servers.Server], routing: str) -> Router:
    return Router([one.url for one in started], routing)


def share(answers: list[Answer]) -> float:
    """Percent of prompt tokens that were cached."""
    cached = sum(one.cached_tokens for one in answers)
    return 100 * cached / sum(one.prompt_tokens for one in answers)


Expected = dict[tuple[int, int], Answer]


def by_turn(answers: list[Answer]) -> Expected:
    return {(one.conversation, one.turn): one for one in answers}


def compared(answers: list[Answer], expected: Expected) -> dict[str, int]:
    """Answers whose bits differ, and those of conversations whose texts gave other tokens."""
    other_tokens: set[int] = set()
    counts = {"differing": 0, "other_tokens": 0}
    for (conversation, turn), found in sorted(by_turn(answers).items()):
        wanted = expected[conversation, turn]
        if found.prompt_tokens != wanted.prompt_tokens:
            other_tokens.add(conversation)
        if conversation in other_tokens:
            counts["other_tokens"] += 1
        elif found.bits != wanted.bits:
            counts["differing"] += 1
    return counts


class Bench:
    """One run: the model's folder, the trace, and the answers of one server alone."""

    def __init__(self, asked: Asked, model: Path, folder: Path, port: int) -> None:
        o = asked.options
        self.asked, self.model, self.folder, self.port = asked, model, folder, port
        # The last turn of each conversation comes after the others: see `faults`.
        self.whole = trace(o.conversations, o.turns + 1, o.common, o.document, o.more)
        self.trace = self._without_last(self.whole)
        self.last = replace(self.whole, order=tuple(range(o.conversations)))
        self.expected: Expected = {}

    def _without_last(self, whole: Trace) -> Trace:
        turns = [len(said) - 1 for said in whole.said]
        order = []
        for number in whole.order:
            if turns[number]:
                turns[number] -= 1
                order.append(number)
        return replace(whole, order=tuple(order))

    def alone(self) -> None:
        """What one server without a store answers."""
        with fleet(1, self.model, self.folder, LOCAL, None, "alone") as one:
            client = self._client(router_of(one, HASH))
            seconds = client.hold(1)
            answers = list(client.answers)
            client.go_on(self.last)
            client.hold(1)
        self.expected = by_turn(client.answers)
        self._add(answers, LOCAL, "none", 1, seconds)

    def routing(self, store: str, routing: str) -> None:
        port = self.port if store == BUCKET else None
        with fleet(REPLICAS, self.model, self.folder, store, port, f"{store}-{routing}") as both:
            client = self._client(router_of(both, routing))
            seconds = client.hold(STREAMS)
        self._add(client.answers, store, routing, REPLICAS, seconds)

    def _add(self, answers: list[Answer], store: str, routing: str, count: int, s: float) -> None:
        first = sorted(one.first_token_s for one in answers)
        self.asked.report("replicas_routing").add(
            store=store,
            routing=routing,
            servers=count,
            requests=len(answers),
            prompt_tokens=sum(one.prompt_tokens for one in answers),
            cached=share(answers),
            first_token_s=statistics.median(first),
            first_token_p90_s=first[len(first) * 9 // 10],
            seconds=s,
            **compared(answers, self.expected),
        )

    def fault(self, what: str) -> None:
        proxy = bucket_server.FaultyProxy(self.port)
        threads: list[threading.Thread] = []
        requests = len(self.trace.order)
        with (
            contextlib.closing(proxy),
            fleet(REPLICAS, self.model, self.folder, BUCKET, proxy.port, what) as both,
        ):

            def restart(ended: Sequence[servers.Server]) -> None:
                for server in ended:
                    server.kill() if what == KILL else server.end()
                    server.start()

            def meanwhile(ended: Sequence[servers.Server]) -> None:
                threads.append(threading.Thread(target=restart, args=(ended,)))
                threads[-1].start()

            def before(number: int) -> None:
                quarter, rest = divmod(4 * number, requests)
                if rest >= 4:
                    return
                if what == OUTAGE:
                    proxy.fault = lambda *_: 503 if quarter in (1, 2) else None
                elif quarter == 1:
                    meanwhile(both if what == ROLLING else both[:1])

            router = router_of(both, HASH)
            client = self._client(router)
            client.hold(STREAMS, before)
            for thread in threads:
                thread.join()
            answers = list(client.answers)
            latest = {one.conversation: one.server for one in answers}
            client.go_on(self.last)
            router.elsewhere(latest)
            client.hold(STREAMS)
        first = [one.first_token_s for one in answers]
        self.asked.report("replicas_faults").add(
            fault=what,
            requests=len(client.answers),
            asked_again=sum(one.asked_again for one in client.answers),
            **compared(client.answers, self.expected),
            cached=share(answers),
            kept=share(client.answers[len(answers) :]),
            first_token_s=statistics.median(first),
            slowest_first_token_s=max(first),
        )

    def _client(self, router: Router) -> Client:
        return Client(router, self.model.name, self.trace, self.asked.options.tokens)


def measure(asked: Asked) -> None:
    o = asked.options
    with (
        saved_model(o.subject) as model,
        scratch_folder() as folder,
        bucket_server.running() as port,
    ):
        bench = Bench(asked, model, folder, port)
        bench.alone()
        if "routing" in o.parts:
            for store in o.stores:
                for routing in o.routings:
                    bench.routing(store, routing)
        if "faults" in o.parts:
            for fault in (KILL, ROLLING, OUTAGE):
                bench.fault(fault)
    _judge(asked)


def _judge(asked: Asked) -> None:
    for report in asked.reports.values():
        wrong = sum(report.number(row, "differing") for row in report.rows)
        report.judge("every answer is that of one server alone", wrong == 0, f"{wrong:.0f} differ")
    routed: dict[tuple[Any, Any], Any] = {
        (row["store"], row["routing"]): row for row in asked.report("replicas_routing").rows
    }
    for store in (FOLDER, BUCKET):
        for routing in ROUTINGS:
            shared, local = routed.get((store, routing)), routed.get((LOCAL, routing))
            if shared and local:
                asked.report("replicas_routing").compare(
                    f"first token, two servers, {routing} routing, a common {store}",
                    shared["first_token_s"],
                    local["first_token_s"],
                    "a store each",
                    "s",
                    None,
                    lower_is_better=True,
                )


STUDY = Study(
    measure,
    (
        Table("replicas_routing", "Two servers, by store and routing", ROUTED),
        Table("replicas_faults", "Two servers of one bucket while something fails", FAULTS),
    ),
    (
        Option("parts", PARTS, among=PARTS),
        Option("subject", CODER, full="gqa8-bf16", help="a model of subjects.py"),
        Option("stores", STORES, among=STORES),
        Option("routings", ROUTINGS, among=ROUTINGS),
        Option("conversations", 10, 4),
        Option("turns", 5, 2),
        Option("common", 3000, 600, help="characters of the system message"),
        Option("document", 6000, 600, help="characters of a first turn"),
        Option("more", 900, 100, help="characters of a later turn"),
        Option("tokens", 16, 4, help="of an answer"),
    ),
)

if __name__ == "__main__":
    STUDY.main()
