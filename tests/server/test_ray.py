"""Replicas on a Ray cluster of two nodes: routing, a node that dies in mid-stream, an update.

`make test-ray` installs Ray and runs them.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'kvpager[ray]'")
import httpx  # noqa: E402
from ray import serve  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402
from ray.util.state import list_actors  # noqa: E402

from kvpager import InvalidArgumentError  # noqa: E402
from kvpager.ray import Call, HeldRouter, app  # noqa: E402
from kvpager.server.routing import beginnings_of  # noqa: E402
from server.test_routing import chat  # noqa: E402

PORT = 8231
URL = f"http://127.0.0.1:{PORT}"
SMALL = {"threads": "1", "pool_tokens": "2048", "rows": "16", "small_rows": "fixed"}
QUESTION = {
    "input": "Write a class that keeps a list of names and a method that sorts them.",
    "max_output_tokens": 300,
    "temperature": 0.8,
    "seed": 5,
    "top_logprobs": 2,
    "include": ["message.output_text.logprobs"],
}


def replica(name, held=(), running=0):
    stats = {"held": list(held), "running": running}
    return SimpleNamespace(name=name, routing_stats=stats, max_ongoing_requests=10)


def chosen(replicas, body):
    call = Call("POST", "/v1/chat/completions", body=body, beginnings=beginnings_of(body, ""))
    choose = HeldRouter.choose_replicas(None, replicas, SimpleNamespace(args=[call]))
    return [one.name for (one,) in asyncio.run(choose)]


def test_the_replica_with_most_of_the_prompt_comes_first_unless_it_is_busy():
    held = [digest for digest, _ in beginnings_of(chat("a" * 50, "b"), "")]
    body = chat("a" * 50, "b", "c")
    a, b = replica("a"), replica("b", held)
    assert chosen([a, b], body) == ["b", "a"]
    assert chosen([b, a], chat("z")) == ["b", "a"]  # as they were given
    assert chosen([a, replica("b", held, running=10)], body) == ["a", "b"]
    assert chosen([a, replica("b", held, running=5)], body) == ["b", "a"]
    fresh = SimpleNamespace(name="new", routing_stats={}, max_ongoing_requests=10)
    assert chosen([fresh, b], body) == ["b", "new"]


@pytest.mark.parametrize("name", ["replicas", "gpus", "cpus"])
def test_a_number_that_is_none_is_refused_by_name(name):
    with pytest.raises(InvalidArgumentError, match=f"{name} is 'two'; expected a number"):
        app({name: "two"})


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A head node without replicas, and two nodes with one each."""
    # Connected while there is only the head, which no test kills.
    head = {"num_cpus": 1}
    cluster = Cluster(initialize_head=True, connect=True, head_node_args=head)
    for _ in range(2):
        cluster.add_node(num_cpus=2)
    serve.start(http_options={"port": PORT, "location": "HeadOnly"})
    store = str(tmp_path_factory.mktemp("store"))
    given = {"store": store, "replicas": "2", "cpus": "2", **SMALL}
    serve.run(app(given), name="kvpager", route_prefix="/")
    yield SimpleNamespace(cluster=cluster, given=given)
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()


def replicas_there():
    actors = list_actors(filters=[("class_name", "=", "ServeReplica:kvpager:Replica")], detail=True)
    return [one for one in actors if one.state == "ALIVE"]


def processor_seconds(pid):
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def wait_until(condition):
    """Waits until the replicas' process ids are as a condition says."""
    until = time.monotonic() + 120
    while not condition({one.pid for one in replicas_there()}):
        assert time.monotonic() < until
        time.sleep(0.5)


def events_of(text):
    """Events of a stream without what differs from run to run."""
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    for event in events:
        event.pop("response", None)
        event.pop("item_id", None)
        event.get("item", {}).pop("id", None)
    return events


def streamed(after=None, call=None):
    """The events of a streamed response. call: made once `after` parts have come."""
    text, parts = "", 0
    body = {**QUESTION, "stream": True}
    with httpx.stream("POST", f"{URL}/v1/responses", json=body, timeout=120) as answer:
        assert answer.status_code == 200
        for part in answer.iter_text():
            text, parts = text + part, parts + 1
            if parts == after:
                threading.Thread(target=call).start()
    return events_of(text)


@pytest.mark.deep
def test_a_stream_goes_on_bit_for_bit_when_its_node_dies(cluster):
    whole = streamed()
    assert whole[-1]["type"] == "response.completed"
    before = {one.pid: processor_seconds(one.pid) for one in replicas_there()}
    assert len(before) == 2
    killed = []

    def kill():
        busy = max(replicas_there(), key=lambda one: processor_seconds(one.pid) - before[one.pid])
        nodes = cluster.cluster.worker_nodes
        (node,) = [node for node in nodes if node.node_id == busy.node_id]
        killed.append(busy.pid)
        cluster.cluster.remove_node(node, allow_graceful=False)

    assert streamed(after=3, call=kill) == whole
    assert killed
    cluster.cluster.add_node(num_cpus=2)
    wait_until(lambda there: killed[0] not in there and len(there) == 2)


@pytest.mark.deep
def test_a_rolling_update_lets_streams_end(cluster):
    whole = streamed()

    def update():
        serve.run(app({**cluster.given, "max_tokens": "77"}), name="kvpager", route_prefix="/")

    before = {one.pid for one in replicas_there()}
    assert streamed(after=3, call=update) == whole
    wait_until(lambda there: not before & there)
    assert streamed() == whole
