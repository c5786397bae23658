"""Caches small enough to see through: dense, windowed and recurrent, of a model that is a hash.

What a fake keeps of a position is a function of the tokens up to it, computed from what it holds
and from nothing else. So what survives a trim can be compared byte for byte, a state that was not
rewound gives other bytes from there on, and a row that a window has let go is missed where it is
needed.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence

from kvpager.companions import NeedsCheckpoint, Ok, Refused, TrimAnswer

CHUNK = 4
WINDOW = 6


def fold(*parts: bytes) -> bytes:
    """One value [8 bytes] of several."""
    return hashlib.blake2b(b"|".join(parts), digest_size=8).digest()


class FakeCache(ABC):
    """A `Cache` that computes.

    Attributes:
        refusal: if set, every trim that would take something away is refused for this reason.
        failure: if set, a trim raises it, after it has spoilt what it holds.
        calls: what it was asked, in order; no part of what it holds.
    """

    def __init__(self) -> None:
        self.refusal: str | None = None
        self.failure: BaseException | None = None
        self.calls: list[str] = []

    @property
    @abstractmethod
    def length(self) -> int: ...

    @abstractmethod
    def next_logits(self) -> bytes:
        """What the model says after the tokens held."""

    @abstractmethod
    def held(self) -> dict[str, bytes]:
        """All it holds, by the name of the place: of a row, a state, a checkpoint."""

    @abstractmethod
    def _take(self, token: int) -> None: ...

    @abstractmethod
    def _trim(self, position: int) -> TrimAnswer: ...

    @abstractmethod
    def _rewind(self, position: int) -> None: ...

    @abstractmethod
    def _spoil(self) -> None: ...

    def feed(self, text: Sequence[int], upto: int | None = None) -> None:
        """Computes what it does not hold of the first `upto` tokens of a text."""
        for token in text[self.length : upto]:
            self._take(token)

    def digest(self) -> bytes:
        """Of all it holds."""
        parts = [name.encode() + value for name, value in sorted(self.held().items())]
        return fold(str(self.length).encode(), *parts)

    def trim(self, position: int) -> TrimAnswer:
        self.calls.append(f"trim {position}")
        if self.failure is not None:
            self._spoil()
            raise self.failure
        if position >= self.length:
            return Ok()
        if self.refusal is not None:
            return Refused(self.refusal)
        return self._trim(position)

    def rewind(self, position: int) -> None:
        self.calls.append(f"rewind {position}")
        self._rewind(position)

    def reset(self) -> None:
        self.calls.append("reset")
        self._rewind(0)


class DenseCache(FakeCache):
    """A row of every position; the next one sees them all."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[bytes] = []

    @property
    def length(self) -> int:
        return len(self.rows)

    def next_logits(self) -> bytes:
        return fold(b"logits", *self.rows)

    def held(self) -> dict[str, bytes]:
        return {f"row {p}": row for p, row in enumerate(self.rows)}

    def _take(self, token: int) -> None:
        self.rows.append(fold(str(token).encode(), *self.rows))

    def _trim(self, position: int) -> TrimAnswer:
        del self.rows[position:]
        return Ok()

    def _rewind(self, position: int) -> None:
        del self.rows[position:]

    def _spoil(self) -> None:
        if self.rows:
            self.rows[0] = b"spoilt"


class WindowedCache(FakeCache):
    """The next row sees the last WINDOW - 1 ones; whole chunks behind are let go.

    rewind: positions further back that are kept, so that trims by so much succeed.
    """

    def __init__(self, rewind: int = CHUNK) -> None:
        super().__init__()
        self.back = rewind
        self.released = 0
        self.rows: dict[int, bytes] = {}
        self._length = 0

    @property
    def length(self) -> int:
        return self._length

    @property
    def earliest(self) -> int:
        """The first position but 0 that it can be cut at."""
        return self.released + WINDOW - 1 if self.released else 0

    def next_logits(self) -> bytes:
        return fold(b"logits", *self._seen())

    def held(self) -> dict[str, bytes]:
        return {f"row {p}": row for p, row in self.rows.items()}

    def _seen(self) -> list[bytes]:
        """KeyError where one of them was let go."""
        return [self.rows[p] for p in range(max(0, self._length - WINDOW + 1), self._length)]

    def _take(self, token: int) -> None:
        self.rows[self._length] = fold(str(token).encode(), *self._seen())
        self._length += 1
        while self.released + CHUNK <= self._length - self.back - WINDOW + 1:
            for p in range(self.released, self.released + CHUNK):
                del self.rows[p]
            self.released += CHUNK

    def _trim(self, position: int) -> TrimAnswer:
        if 0 < position < self.earliest:
            return Refused(f"{self.released} positions were let go")
        self._rewind(position)
        return Ok()

    def _rewind(self, position: int) -> None:
        self.rows = {p: row for p, row in self.rows.items() if p < position}
        self._length = position
        if not position:
            self.released = 0

    def _spoil(self) -> None:
        self.rows.clear()


class RecurrentCache(FakeCache):
    """One state, of all tokens so far, and those of earlier positions that were kept.

    every: tokens from one checkpoint to the next.
    """

    START = b"start"

    def __init__(self, every: int = 2 * CHUNK) -> None:
        super().__init__()
        self.every = every
        self.state = self.START
        self.checkpoints: dict[int, bytes] = {}
        self._length = 0

    @property
    def length(self) -> int:
        return self._length

    def next_logits(self) -> bytes:
        return fold(b"logits", self.state)

    def held(self) -> dict[str, bytes]:
        kept = {f"checkpoint {p}": state for p, state in self.checkpoints.items()}
        return {"state": self.state, **kept}

    def lose(self, position: int) -> None:
        """A checkpoint had to make room for others."""
        self.checkpoints.pop(position, None)

    def _take(self, token: int) -> None:
        self.state = fold(self.state, str(token).encode())
        self._length += 1
        if self._length % self.every == 0:
            self.checkpoints[self._length] = self.state

    def _trim(self, position: int) -> TrimAnswer:
        nearest = max((p for p in self.checkpoints if p <= position), default=0)
        if nearest != position:
            return NeedsCheckpoint(nearest)
        self._rewind(position)
        return Ok()

    def _rewind(self, position: int) -> None:
        self.state = self.checkpoints[position] if position else self.START
        self._length = position
        self.checkpoints = {p: s for p, s in self.checkpoints.items() if p <= position}

    def _spoil(self) -> None:
        self.state = b"spoilt"


KINDS = {"dense": DenseCache, "windowed": WindowedCache, "recurrent": RecurrentCache}


def able(kind: str) -> FakeCache:
    """An empty cache that can be cut anywhere."""
    return {
        "dense": DenseCache,
        "windowed": lambda: WindowedCache(rewind=1000),
        "recurrent": lambda: RecurrentCache(every=1),
    }[kind]()


def refusing(kind: str) -> FakeCache:
    """An empty cache that cannot be cut far back; the window for a reason of its own."""
    cache = KINDS[kind]()
    if kind != "windowed":
        cache.refusal = "told to"
    return cache


def assert_of(cache: FakeCache, text: Sequence[int]) -> None:
    """What it holds is of a text's beginning, as a cold one has it, and it goes on as that does."""
    fresh = able(next(kind for kind, made in KINDS.items() if isinstance(cache, made)))
    fresh.feed(text, cache.length)
    whole = fresh.held()
    for name, value in cache.held().items():
        assert whole[name] == value, name
    assert cache.next_logits() == fresh.next_logits()
