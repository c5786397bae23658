"""Which lengths, boundaries and numbers of sessions are tried: all that matter, or all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from kvpager.config import PagerConfig, TopK

Effort: TypeAlias = Literal["start", "short", "full"]
EFFORTS: tuple[Effort, ...] = ("start", "short", "full")
# Options of every generation: nothing of the model's own decides what is compared.
PLAIN: dict[str, Any] = {"eos": None, "generation_config": None}
_LONGEST = 4096  # tokens a selection may make the prompt longer by
_HEADROOM = 48  # tokens that relations add to the prompt


@dataclass(frozen=True)
class Sweep:
    """Lengths and numbers tried, with forwards of M = `rows` rows and chunks of C = `chunk` tokens.

    Attributes:
        rows, chunk: M and C.
        ladder: row counts a forward may have, ascending.
        length: tokens of the long prompt; over at least one boundary of both kinds.
        effort: "start" (a second), "short" (a minute) or "full".
        candidates: chunks that the prompt's last row chooses among; 0 if it sees all.
    """

    rows: int
    chunk: int
    ladder: tuple[int, ...]
    length: int
    effort: Effort
    candidates: int = 0

    @classmethod
    def of(
        cls,
        config: PagerConfig,
        ladder: tuple[int, ...],
        effort: Effort,
        longest: int | None,
    ) -> Sweep:
        """The sweep for an engine; `longest` is what the model takes."""
        rows, chunk = ladder[-1], config.chunk_tokens
        length = {
            "start": rows + chunk + 3,
            "short": rows + 4 * chunk + 5,
            "full": 2 * rows + 9 * chunk + 5,  # past a split of 8 chunks
        }[effort]
        selection = config.selection
        if isinstance(selection, TopK) and effort != "start":
            seen = selection.sinks + selection.recent + (selection.chunks + 2) * chunk + 5
            length = max(length, min(seen, length + _LONGEST))  # so that there is a choice
        if longest is not None:
            length = min(length, longest - _HEADROOM)
        length = max(length, 8)
        candidates = 0
        if isinstance(selection, TopK):
            before = (length - selection.recent) // chunk  # full chunks before the recent window
            candidates = max(0, before - selection.sinks // chunk)
        return cls(rows, chunk, ladder, length, effort, candidates)

    @property
    def least_pool(self) -> int:
        """A pool, in tokens, that holds a running sequence's open chunks, an idle one's, a pin."""
        frontier = -(-(self.chunk - 1 + self.rows) // self.chunk)
        return (frontier + 3) * self.chunk

    @property
    def prefixes(self) -> list[int]:
        """Lengths at which a prompt is cut: around chunk and row boundaries, or every one."""
        chunk, rows, length = self.chunk, self.rows, self.length
        if self.effort == "start":
            return _within([chunk - 1, chunk, rows + 1], length)
        near = {1, 2, length - 1}
        for boundary in (chunk, 2 * chunk, rows, 2 * rows, (length - 1) // chunk * chunk):
            near |= {boundary - 1, boundary, boundary + 1}
        if self.effort == "full":
            near |= set(range(1, rows + chunk + 2))
            near |= set(range(chunk, length, chunk)) | set(range(rows, length, rows))
        return _within(sorted(near), length)

    @property
    def windows(self) -> list[tuple[int, int]]:
        """Stretches [start, stop) of the prompt that are fed token by token."""
        chunk, rows, length = self.chunk, self.rows, self.length
        if self.effort == "start":
            wanted = [(chunk - 1, chunk + 2)]
        else:
            wanted = [
                (1, 4),  # short
                (chunk - 1, chunk + 1),  # last row of a chunk, first of the next
                (2 * chunk - 2, 2 * chunk + 2),
                (rows - 2, rows + 2),  # across M
                (length - 3, length),
                (chunk // 2, 2 * chunk + 1),  # long: a whole chunk, from within another
            ]
        if self.effort == "full":
            wanted += [(1, rows + 2), (2 * rows - 2, 2 * rows + 2), (rows, length)]
        return [(start, stop) for start, stop in wanted if 1 <= start < stop <= length]

    @property
    def batches(self) -> list[int]:
        """Numbers of sessions decoded together: one; a row count filled, and one row more."""
        if self.effort == "start":
            return [2]
        counts = {1, 3}
        for rows in self.ladder if self.effort == "full" else self.ladder[:1]:
            counts |= {rows, rows + 1}
        most = self.rows + 1 if self.effort == "full" else 17
        return sorted(count for count in counts if count <= most)

    def lengths(self, count: int) -> list[int]:
        """Lengths of the prompts of `count` sessions: first, last and middle rows of chunks."""
        chunk, rows = self.chunk, self.rows
        some = [chunk - 2, chunk, 1, chunk - 1, min(rows - 2, 2 * chunk), chunk + chunk // 2, 3]
        return [_within([some[i % len(some)]], self.length)[0] for i in range(count)]

    @property
    def new_tokens(self) -> int:
        """Tokens generated where a few will do; more than the row counts' rounding hides."""
        return {"start": 4, "short": 6, "full": 24}[self.effort]

    @property
    def cuts(self) -> list[int]:
        """Where sessions are saved, forked and trimmed: at chunk boundaries and between."""
        chunk, rows, length = self.chunk, self.rows, self.length
        wanted = [chunk + chunk // 2, 2 * chunk]
        if self.effort != "start":
            wanted += [chunk - 1, rows + 1]
        if self.effort == "full":
            wanted += [1, chunk, chunk + 1, rows, 2 * rows - 1, length - 1]
        return _within(wanted, length)


def _within(lengths: list[int], length: int) -> list[int]:
    """Keeps the lengths that leave something to compute; the longest possible if none does."""
    return list(_distinct(lengths, length)) or [length - 1]


def _distinct(lengths: list[int], length: int) -> Iterator[int]:
    seen: set[int] = set()
    for value in lengths:
        if 1 <= value < length and value not in seen:
            seen.add(value)
            yield value
