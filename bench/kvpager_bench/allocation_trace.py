"""A trace of requests on a pool of chunks, and a reference pool that replays it.

Requests arrive with a prompt that begins like an earlier one's (a template, or the whole of a
conversation that ended), compute the chunks they do not find, grow, fork and finish. Unused chunks
stay cached until their room is needed; those released first are evicted first. No two requests
compute the same chunk at the same time, and no prompt ends with a chunk, so that every pool of
equal size with the same rule has to find and evict exactly the same chunks.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

Tokens: TypeAlias = "np.ndarray[Any, np.dtype[np.int32]]"
VOCABULARY = 50_000


class Kind(IntEnum):
    """The kind of an event, with the columns it uses."""

    ARRIVE = 0  # session, first, count: the prompt is tokens[first : first + count]
    GROW = 1  # step, session, first, count: its next tokens; events of one step go together
    FORK = 2  # session, parent: a request whose prompt is all that the parent holds
    FINISH = 3  # session


@dataclass(frozen=True)
class Shape:
    """Size of a trace. Tokens count in chunks of `chunk_tokens`."""

    pool_chunks: int
    operations: int  # chunk operations, at least
    seed: int = 0
    chunk_tokens: int = 64
    templates: int = 64
    template_chunks: tuple[int, int] = (8, 128)
    own_chunks: tuple[int, int] = (1, 64)
    sessions: int = 32  # that grow in one step, at most
    used: float = 0.6  # of the pool by running sessions, at most


@dataclass
class Operations:
    """Chunk operations of a trace, by kind.

    found: shared after a look-up by name. taken: got room in the pool. sealed: full, named, to be
    found. released: one use less. forgotten: gave way.
    """

    found: int = 0
    taken: int = 0
    sealed: int = 0
    released: int = 0
    forgotten: int = 0

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


@dataclass(frozen=True)
class Trace:
    """events: int64 [n, 6] of (kind, step, session, first, count, parent); tokens: int32."""

    shape: Shape
    events: np.ndarray[Any, np.dtype[np.int64]]
    tokens: Tokens
    found: np.ndarray[Any, np.dtype[np.int64]]  # [n] tokens that the event's look-up finds
    operations: Operations

    def save(self, path: Path) -> None:
        """For other processes: numpy's own format, read by numpy alone."""
        np.savez(
            path,
            events=self.events,
            tokens=self.tokens,
            found=self.found,
            pool_chunks=self.shape.pool_chunks,
            chunk_tokens=self.shape.chunk_tokens,
        )


class ReferencePool:
    """The bookkeeping of a pool that evicts the chunks released first, as simple as possible."""

    def __init__(self, pool_chunks: int, chunk_tokens: int) -> None:
        self.capacity = pool_chunks
        self.chunk_tokens = chunk_tokens
        self.uses: dict[bytes, int] = {}  # name -> sessions that use it
        self.cached: OrderedDict[bytes, None] = OrderedDict()  # oldest first
        self.names: dict[int, list[bytes]] = {}  # session -> its full chunks
        self.tails: dict[int, bytes] = {}  # session -> tokens of its last, unfilled chunk
        self.counts = Operations()

    @property
    def in_use(self) -> int:
        return len(self.uses) + sum(1 for tail in self.tails.values() if tail)

    def arrive(self, session: int, prompt: bytes) -> int:
        """Returns the tokens found."""
        size = 4 * self.chunk_tokens
        names: list[bytes] = []
        for end in range(size, len(prompt) + 1, size):
            name = self._name(names, prompt[end - size : end])
            if name not in self.uses and name not in self.cached:
                break
            names.append(name)
            self.cached.pop(name, None)
            self.uses[name] = self.uses.get(name, 0) + 1
        self.counts.found += len(names)
        found = len(names) * self.chunk_tokens
        self.names[session], self.tails[session] = names, b""
        self.grow(session, prompt[4 * found :])
        return found

    def grow(self, session: int, tokens: bytes) -> None:
        size = 4 * self.chunk_tokens
        names, tail = self.names[session], self.tails[session]
        chunks_before = bool(tail)
        data = tail + tokens
        self._take(-(-len(data) // size) - chunks_before)
        for end in range(size, len(data) + 1, size):
            name = self._name(names, data[end - size : end])
            assert name not in self.uses, "computed twice"
            assert name not in self.cached, "not looked for"
            names.append(name)
            self.uses[name] = 1
            self.counts.sealed += 1
        self.tails[session] = data[len(data) // size * size :]

    def fork(self, session: int, parent: int) -> int:
        for name in self.names[parent]:
            self.uses[name] += 1
        self.names[session] = list(self.names[parent])
        self.tails[session] = b""
        self.counts.found += len(self.names[parent])
        self._take(1)
        self.tails[session] = self.tails[parent]
        return len(self.names[session]) * self.chunk_tokens

    def finish(self, session: int) -> None:
        names = self.names.pop(session)
        self.counts.released += len(names) + bool(self.tails.pop(session))
        for name in reversed(names):
            self.uses[name] -= 1
            if self.uses[name] == 0:
                del self.uses[name]
                self.cached[name] = None

    def _take(self, chunks: int) -> None:
        # Chunks being taken do not count as used yet.
        self.counts.taken += chunks
        while self.in_use + len(self.cached) + chunks > self.capacity:
            self.cached.popitem(last=False)
            self.counts.forgotten += 1

    @staticmethod
    def _name(names: list[bytes], chunk: bytes) -> bytes:
        return hash((names[-1] if names else b"", chunk)).to_bytes(8, "little", signed=True)


def make_trace(shape: Shape) -> Trace:
    """Seeded: equal shapes give equal traces."""
    random = np.random.default_rng(shape.seed)
    chunk = shape.chunk_tokens
    pool = ReferencePool(shape.pool_chunks, chunk)
    events: list[tuple[int, int, int, int, int, int]] = []
    found: list[int] = []
    pieces: list[Tokens] = []
    written = 0
    templates = [
        _ids(random, chunk * int(random.integers(*shape.template_chunks)))
        for _ in range(shape.templates)
    ]
    held: dict[int, list[Tokens]] = {}  # running sessions
    ended: list[list[Tokens]] = []
    room: dict[int, int] = {}  # chunks a running session may come to hold
    step = session = 0

    def note(kind: Kind, who: int, ids: Tokens | None = None, parent: int = -1) -> None:
        nonlocal written
        count = 0 if ids is None else len(ids)
        events.append((int(kind), step, who, written, count, parent))
        found.append(0)
        if ids is not None:
            pieces.append(ids)
            written += count

    def finish(who: int) -> None:
        note(Kind.FINISH, who)
        pool.finish(who)
        ended.append(held.pop(who))
        del room[who]
        del ended[: max(0, len(ended) - 4 * shape.sessions)]

    def fits(chunks: int) -> bool:
        return sum(room.values()) + chunks <= shape.used * shape.pool_chunks

    while pool.counts.total < shape.operations:
        step += 1
        own = chunk * int(random.integers(*shape.own_chunks))
        if ended and random.random() < 0.4:  # the next turn of a conversation
            before = ended[int(random.integers(len(ended)))]
        else:
            rank = int(random.zipf(1.3)) % shape.templates
            before = [templates[rank]]
        length = sum(len(part) for part in before)
        # Never ends with a chunk.
        own += (int(random.integers(1, chunk)) - length) % chunk or chunk - 1
        growth = int(random.integers(2, 24))
        wanted = (length + own) // chunk + 1 + growth
        longest = shape.pool_chunks // 8
        if wanted <= longest and fits(wanted) and len(held) < 2 * shape.sessions:
            prompt = np.concatenate([*before, _ids(random, own)])
            if len(prompt) % chunk == 0:
                prompt = prompt[:-1]
            note(Kind.ARRIVE, session, prompt)
            found[-1] = pool.arrive(session, prompt.tobytes())
            held[session], room[session] = [prompt], wanted
            session += 1
        elif held:
            finish(list(held)[int(random.integers(len(held)))])
        if held and random.random() < 0.1:
            parent = list(held)[int(random.integers(len(held)))]
            if fits(room[parent]):
                note(Kind.FORK, session, parent=parent)
                found[-1] = pool.fork(session, parent)
                held[session], room[session] = list(held[parent]), room[parent]
                session += 1
        growing = sorted(held, key=lambda _: random.random())[: shape.sessions]
        for who in growing:
            ids = _ids(random, chunk)
            if (sum(len(part) for part in held[who]) + chunk) // chunk + 1 > room[who]:
                continue
            note(Kind.GROW, who, ids)
            pool.grow(who, ids.tobytes())
            held[who].append(ids)
        for who in list(held):
            if sum(len(part) for part in held[who]) // chunk + 2 >= room[who]:
                finish(who)
    for who in list(held):
        finish(who)
    return Trace(
        shape,
        np.array(events, dtype=np.int64),
        np.concatenate(pieces),
        np.array(found, dtype=np.int64),
        pool.counts,
    )


def _ids(random: np.random.Generator, count: int) -> Tokens:
    return random.integers(1, VOCABULARY, count, dtype=np.int32)
