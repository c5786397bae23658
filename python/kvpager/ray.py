"""Replicas of `kvpager serve` on a Ray cluster: `serve run kvpager.ray:app model=... store=...`.

Each replica is a whole server at a Unix socket of its own. The ingress reads a request, asks the
router for the replica that holds most of its prompt, and passes the answer on. A stream of
`/v1/responses` whose replica dies goes on at another one, with the same bits: replicas share the
store, and the ingress asks for the events behind the last one that it passed on.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse

from kvpager.errors import InvalidArgumentError
from kvpager.server.routing import beginnings_of, preference

_MOST_HELD = 8192  # beginnings of prompts that a replica says it holds
_STATS_SECONDS = 1.0
_MOST_RUNNING = 256  # requests of a replica; the server queues what it cannot run at once
_DRAIN_SECONDS = 60.0  # for running requests when a replica is replaced
_RESUMES = 20  # tries to go on with a stream, half a second apart
_EVENT_END = b"\n\n"
_NUMBER = re.compile(rb'"sequence_number":\s*(\d+)')
_RESPONSE = re.compile(rb'"id":\s*"(resp_[0-9A-Za-z_-]+)"')
_OF_THE_HOP = {"connection", "content-length", "host", "keep-alive", "transfer-encoding"}
_OF_THE_PROXY = _OF_THE_HOP | {"date", "server", "x-request-id"}  # Ray's adds its own


@dataclass(frozen=True)
class Call:
    """One HTTP request.

    Attributes:
        path: with the query.
        beginnings: digests of the beginnings of its prompt, each with the share of the prompt.
    """

    method: str
    path: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    beginnings: tuple[tuple[str, float], ...] = ()


class HeldRouter(FIFOMixin, RequestRouter):  # type: ignore[misc]
    """Prefers the replica that holds the largest share of a prompt, less the share it is busy."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Returns each replica by itself, the best first."""
        call = pending_request.args[0] if pending_request and pending_request.args else None
        beginnings = call.beginnings if isinstance(call, Call) else ()

        def score(replica: RunningReplica) -> float:
            stats, most = replica.routing_stats, replica.max_ongoing_requests
            held = set(stats.get("held", ()))
            return preference(beginnings, held, stats.get("running", 0), most)

        return [[replica] for replica in sorted(candidate_replicas, key=score, reverse=True)]


class Replica:
    """A server of one engine.

    words: arguments of `kvpager serve`.
    """

    def __init__(self, words: list[str]) -> None:
        from kvpager.cli.commands import parse
        from kvpager.cli.models import chosen_model
        from kvpager.cli.serve import opened
        from kvpager.server.run import Server

        self._stack = ExitStack()
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpager-"))
        self._socket = f"{folder}/socket"
        arguments = parse(["serve", *words, "--uds", self._socket])
        service = self._stack.enter_context(opened(arguments, chosen_model(arguments)))
        ready = threading.Event()
        self._server = Server(service, lambda _: ready.set())
        self._thread = threading.Thread(target=self._server.run, name="kvpager serve")
        self._thread.start()
        ready.wait()
        self._held: OrderedDict[str, None] = OrderedDict()
        self._running = 0

    async def stream(self, call: Call) -> AsyncIterator[Any]:
        """Answers a request: its status and headers, then the body in parts."""
        self._running += 1
        try:
            connector = aiohttp.UnixConnector(self._socket)
            timeout = aiohttp.ClientTimeout(total=None)
            async with (
                aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
                session.request(
                    call.method,
                    f"http://127.0.0.1{call.path}",
                    headers=call.headers,
                    data=call.body or None,
                    allow_redirects=False,
                    auto_decompress=False,
                ) as answer,
            ):
                yield answer.status, tuple(answer.headers.items())
                async for part in answer.content.iter_any():
                    yield part
                if answer.status < 300:
                    self._note(digest for digest, _ in call.beginnings)
        finally:
            self._running -= 1

    def _note(self, digests: Iterable[str]) -> None:
        for digest in digests:
            self._held[digest] = None
            self._held.move_to_end(digest)
        while len(self._held) > _MOST_HELD:
            self._held.popitem(last=False)

    def record_routing_stats(self) -> dict[str, Any]:
        """What the router needs to know."""
        return {"held": list(self._held), "running": self._running}

    def check_health(self) -> None:
        """Raises RuntimeError once the server has ended."""
        if not self._thread.is_alive():
            raise RuntimeError("kvpager serve has ended")

    def __del__(self) -> None:
        """Lets running requests end, and saves what has a name."""
        self._server.stop()
        self._thread.join()
        self._stack.close()


class Ingress:
    """Passes requests to replicas, and streams back."""

    def __init__(self, replicas: Any) -> None:
        self._replicas = replicas.options(stream=True)

    async def __call__(self, request: Request) -> StreamingResponse | PlainTextResponse:
        """Answers one HTTP request."""
        body, path = await request.body(), request.url.path
        query = f"?{request.url.query}" if request.url.query else ""
        headers = [(name, value) for name, value in request.headers.items()]
        given = tuple((name, value) for name, value in headers if name not in _OF_THE_HOP)
        tenant = request.headers.get("authorization") or request.headers.get("x-api-key", "")
        call = Call(request.method, path + query, given, body, beginnings_of(body, tenant))
        parts = self._parts(call)
        try:
            status, answered = await anext(parts)
        except RayError as error:
            return PlainTextResponse(f"no replica answers: {error}", 503)
        kept = [(name, value) for name, value in answered if name.lower() not in _OF_THE_PROXY]
        is_stream = any(
            name.lower() == "content-type" and value.startswith("text/event-stream")
            for name, value in kept
        )
        goes_on = is_stream and request.method == "POST" and path == "/v1/responses"
        answer = StreamingResponse(self._resumed(call, parts) if goes_on else parts, status)
        answer.raw_headers = [(name.encode(), value.encode("latin-1")) for name, value in kept]
        return answer

    async def _parts(self, call: Call) -> AsyncIterator[Any]:
        answer = self._replicas.stream.remote(call)
        try:
            async for part in answer:
                yield part
        finally:
            answer.cancel()

    async def _resumed(self, call: Call, parts: AsyncIterator[Any]) -> AsyncIterator[bytes]:
        """The events of a stream, whole ones alone; those of another replica if the first dies."""
        name, last, left = b"", b"", b""
        for attempt in range(_RESUMES):
            try:
                if attempt:
                    await asyncio.sleep(0.5)
                    query = (
                        f"?stream=true&starting_after={last.decode()}" if last else "?stream=true"
                    )
                    again = Call("GET", f"/v1/responses/{name.decode()}{query}", call.headers)
                    parts, left = self._parts(again), b""
                    status, _ = await anext(parts)
                    if status != 200:
                        continue
                async for part in parts:
                    *events, left = (left + part).split(_EVENT_END)
                    for event in events:
                        yield event + _EVENT_END
                        last = found[1] if (found := _NUMBER.search(event)) else last
                        name = name or (found[1] if (found := _RESPONSE.search(event)) else b"")
            except RayError:
                if not name:  # nothing was passed on: the client may send it again
                    raise
            else:
                yield left
                return
        raise ConnectionError(f"no replica goes on with {name.decode()}")


def app(args: Mapping[str, str]) -> serve.Application:
    """The application: arguments are options of `kvpager serve` by name, and these.

        serve run kvpager.ray:app model=Qwen/Qwen3-0.6B store=/shared/folder replicas=2 gpus=1

    Args:
        args: `replicas` (1), `gpus` of each (0), `cpus` of each (1); the others go to
            `kvpager serve`. `shared_store` is set where there is a store.

    Raises:
        InvalidArgumentError: a number is none.
    """
    given = dict(args)
    replicas = _number(given, "replicas", "1", int)
    gpus, cpus = _number(given, "gpus", "0", float), _number(given, "cpus", "1", float)
    if given.get("store", "off") != "off":
        given.setdefault("shared_store", "true")
    words = [word for name, value in given.items() for word in _words(name, value)]
    replica: Any = serve.deployment(
        Replica,
        num_replicas=replicas,
        ray_actor_options={"num_gpus": gpus, "num_cpus": cpus},
        max_ongoing_requests=_MOST_RUNNING,
        graceful_shutdown_timeout_s=_DRAIN_SECONDS,
        request_router_config=RequestRouterConfig(
            request_router_class=HeldRouter, request_routing_stats_period_s=_STATS_SECONDS
        ),
    )
    ingress: Any = serve.deployment(
        Ingress,
        max_ongoing_requests=16 * _MOST_RUNNING,
        ray_actor_options={"num_cpus": 0.1},  # it waits for replicas
    )
    return ingress.bind(replica.bind(words))


def _words(name: str, value: str) -> list[str]:
    option = f"--{name.replace('_', '-')}"
    return [option] if value in ("true", "True", True) else [option, str(value)]


def _number(given: dict[str, str], name: str, default: str, kind: Any) -> Any:
    value = given.pop(name, default)
    try:
        return kind(value)
    except ValueError:
        raise InvalidArgumentError(f"{name} is {value!r}; expected a number") from None
