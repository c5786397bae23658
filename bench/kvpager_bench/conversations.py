"""Conversations of agents with servers of one model, and the router between them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from kvpager.server.routing import beginnings_of, preference
from kvpager_bench import library_text

RANDOM, HASH, HELD = "random", "hash", "held"
ROUTINGS = (RANDOM, HASH, HELD)
_MOST_RUNNING = 16  # of a server, for the routing by what is held
_DOWN_SECONDS = 1.0  # a server that failed is not asked before
_TRIES = 60
_TIMEOUT = 300.0


@dataclass(frozen=True)
class Trace:
    """What is said in conversations, and in which order requests come.

    Attributes:
        said: texts of each conversation's user: a document and a question, then shorter ones.
        common: the system message of all.
        order: conversations in the order of their turns.
    """

    said: tuple[tuple[str, ...], ...]
    common: str
    order: tuple[int, ...]


def trace(conversations: int, turns: int, common: int, document: int, more: int) -> Trace:
    """Conversations whose turns are interleaved at random, always in the same way.

    common, document, more: characters of what all have, of first turns and of later ones.
    """
    text = "".join(source for _, source in library_text.held_out_texts())
    draw = random.Random(0)

    def piece(size: int) -> str:
        at = draw.randrange(len(text) - size)
        return text[at : at + size]

    said = tuple(
        tuple(piece(more if turn else document) for turn in range(turns))
        for _ in range(conversations)
    )
    order = [number for number in range(conversations) for _ in range(turns)]
    draw.shuffle(order)
    return Trace(said, piece(common), tuple(order))


@dataclass
class Server:
    """A server as the router sees it.

    Attributes:
        held: digests of beginnings of prompts that it answered.
        down_until: it failed, and is asked again from then on.
    """

    url: str
    held: set[str] = field(default_factory=set)
    running: int = 0
    down_until: float = 0.0


@dataclass(frozen=True)
class Answer:
    """One turn as the client saw it.

    Attributes:
        bits: digest of its text and log-probabilities.
        asked_again: requests that failed before.
    """

    conversation: int
    turn: int
    server: str
    prompt_tokens: int
    cached_tokens: int
    first_token_s: float
    bits: str
    asked_again: int


class Router:
    """Sends each request to one of several servers, and to another one if that fails."""

    def __init__(self, urls: Sequence[str], routing: str) -> None:
        self.servers = [Server(url) for url in urls]
        self._routing, self._draw = routing, random.Random(1)
        self._avoided: dict[int, str] = {}

    def elsewhere(self, servers: Mapping[int, str]) -> None:
        """From now on a conversation is not answered by the server that is given for it."""
        self._avoided = dict(servers)

    def choose(self, conversation: int, beginnings: Sequence[tuple[str, float]]) -> Server:
        """The server for a request; one that failed just now only if all have."""
        now = time.monotonic()
        allowed = [one for one in self.servers if one.url != self._avoided.get(conversation)]
        up = [one for one in allowed if one.down_until <= now] or allowed
        if self._routing == RANDOM:
            return self._draw.choice(up)
        if self._routing == HASH:  # rendezvous: what one server leaves is spread over the others
            return max(
                up, key=lambda one: hashlib.sha256(f"{conversation}{one.url}".encode()).digest()
            )
        return max(up, key=lambda one: preference(beginnings, one.held, one.running, _MOST_RUNNING))


class Client:
    """Holds the conversations of a trace."""

    def __init__(self, router: Router, model: str, trace: Trace, tokens: int) -> None:
        self.answers: list[Answer] = []
        self._router, self._model, self._trace, self._tokens = router, model, trace, tokens
        self._messages: list[list[dict[str, str]]] = [
            [{"role": "system", "content": trace.common}] for _ in trace.said
        ]

    def go_on(self, trace: Trace) -> None:
        """Further turns of the same conversations are what `hold` does next."""
        self._trace = trace

    def hold(self, streams: int, before: Callable[[int], None] = lambda done: None) -> float:
        """Has all turns of the trace, `streams` at a time; returns the seconds that took.

        before: called before each request with the number of those before it.
        """
        start = time.perf_counter()
        asyncio.run(self._hold(streams, before))
        return time.perf_counter() - start

    async def _hold(self, streams: int, before: Callable[[int], None]) -> None:
        waiting = iter(enumerate(self._trace.order))
        turns = [asyncio.Lock() for _ in self._trace.said]  # of one conversation, in their order
        async with httpx.AsyncClient(timeout=_TIMEOUT) as http:

            async def work() -> None:
                for number, conversation in waiting:
                    before(number)
                    async with turns[conversation]:
                        await self._turn(http, conversation)

            await asyncio.gather(*(work() for _ in range(streams)))

    async def _turn(self, http: httpx.AsyncClient, conversation: int) -> None:
        messages = self._messages[conversation]
        turn = (len(messages) - 1) // 2
        question = {"role": "user", "content": self._trace.said[conversation][turn]}
        body = {
            "model": self._model,
            "messages": [*messages, question],
            "max_tokens": self._tokens,
            "temperature": 0.8,
            "seed": turn,
            "logprobs": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        content = json.dumps(body).encode()
        beginnings = beginnings_of(content, "")
        start = time.perf_counter()
        for failed in range(_TRIES):
            server = self._router.choose(conversation, beginnings)
            server.running += 1
            try:
                text, answer = await self._ask(http, server.url, content, start)
            except (httpx.HTTPError, OSError, ValueError):
                server.down_until = time.monotonic() + _DOWN_SECONDS
                await asyncio.sleep(0.2)
                continue
            finally:
                server.running -= 1
            server.held.update(digest for digest, _ in beginnings)
            messages += [question, {"role": "assistant", "content": text}]
            self.answers.append(
                Answer(conversation, turn, server.url, asked_again=failed, **answer)
            )
            return
        raise RuntimeError(f"no server answered turn {turn} of conversation {conversation}")

    async def _ask(
        self, http: httpx.AsyncClient, url: str, content: bytes, start: float
    ) -> tuple[str, dict[str, Any]]:
        """A streamed answer. Raises httpx.HTTPError, or ValueError where it is no whole answer."""
        text, first, usage, numbers = "", None, None, []
        headers = {"content-type": "application/json"}
        path = f"{url}/v1/chat/completions"
        async with http.stream("POST", path, content=content, headers=headers) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                usage = chunk.get("usage") or usage
                for choice in chunk["choices"]:
                    said = choice["delta"].get("content") or ""
                    if said and first is None:
                        first = time.perf_counter() - start
                    text += said
                    with contextlib.suppress(TypeError, KeyError):
                        numbers += [one["logprob"] for one in choice["logprobs"]["content"]]
        if usage is None:
            raise ValueError("the stream ended before its usage")
        return text, {
            "prompt_tokens": usage["prompt_tokens"],
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "first_token_s": time.perf_counter() - start if first is None else first,
            "bits": hashlib.sha256(json.dumps([text, numbers]).encode()).hexdigest(),
        }
