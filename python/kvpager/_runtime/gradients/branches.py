"""Texts as trees of branches: what several texts begin with is one branch, and computed once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvpager._support.tokens import TokenIds


class Text(NamedTuple):
    """A text, and which of its tokens have a log-probability in the result.

    ids: [n] int32. counted: [n] bool, False at 0.
    """

    ids: TokenIds
    counted: npt.NDArray[np.bool_]

    @property
    def fed(self) -> TokenIds:
        """The tokens whose rows are computed: all before the last one that counts."""
        return self.ids[: int(np.flatnonzero(self.counted)[-1])]


class Wanted(NamedTuple):
    """A log-probability.

    offset: of the row in its branch. token: after that row. place: in the result.
    """

    offset: int
    token: int
    place: int


@dataclass(eq=False)
class Branch:
    """Consecutive tokens that the same texts share, after those of its parent.

    Attributes:
        parent: None for the beginning of texts.
        start: position of its first token.
        tokens: [n] int32.
        children: branches that go on after its last token.
        wanted: log-probabilities that its rows give, by ascending offset.
    """

    parent: Branch | None
    start: int
    tokens: TokenIds
    children: list[Branch] = field(default_factory=list)
    wanted: list[Wanted] = field(default_factory=list)

    def path(self) -> list[Branch]:
        """The branches of its text, from the first to itself."""
        path = [self]
        while (parent := path[-1].parent) is not None:
            path.append(parent)
        return path[::-1]


def trees(texts: Sequence[Text]) -> list[Branch]:
    """The first branches of texts, which have no branch in common."""
    roots: list[Branch] = []
    places = np.cumsum([0, *(int(text.counted.sum()) for text in texts)])
    members = [(text.fed, text, int(place)) for text, place in zip(texts, places)]
    waiting: list[tuple[Branch | None, int, list[tuple[TokenIds, Text, int]]]] = [
        (None, 0, members)
    ]
    while waiting:
        parent, start, members = waiting.pop()
        groups = defaultdict(list)
        for member in members:
            if len(member[0]) > start:
                groups[int(member[0][start])].append(member)
        for group in groups.values():
            first = group[0][0]
            stop = min(_common(first, fed, start) for fed, _, _ in group)
            branch = Branch(parent, start, first[start:stop])
            for _, text, place in group:
                branch.wanted += _wanted(text, place, start, stop)
            branch.wanted.sort()
            (roots if parent is None else parent.children).append(branch)
            waiting.append((branch, stop, group))
    return roots


def _common(one: TokenIds, other: TokenIds, start: int) -> int:
    """The position up to which two texts that are equal before `start` are equal."""
    stop = min(len(one), len(other))
    different = np.flatnonzero(one[start:stop] != other[start:stop])
    return start + int(different[0]) if len(different) else stop


def _wanted(text: Text, place: int, start: int, stop: int) -> Iterator[Wanted]:
    """Yields the log-probabilities that the rows [start, stop) of a text give."""
    counted = np.flatnonzero(text.counted)
    first, last = np.searchsorted(counted, [start + 1, stop + 1])
    for i in range(first, last):
        index = int(counted[i])
        yield Wanted(index - 1 - start, int(text.ids[index]), place + i)


class Part(NamedTuple):
    """Rows of a piece: tokens [first, stop) of a branch."""

    branch: Branch
    first: int
    stop: int

    @property
    def rows(self) -> int:
        """How many."""
        return self.stop - self.first

    def chunks(self, chunk_tokens: int) -> int:
        """How many chunks it writes to."""
        first, last = self.branch.start + self.first, self.branch.start + self.stop - 1
        return last // chunk_tokens - first // chunk_tokens + 1


def pieces(
    roots: Sequence[Branch], rows: int, chunk_tokens: int, blocks: int
) -> Iterator[list[Part]]:
    """Packs all tokens into pieces of at most `rows` rows, each branch after its parent's piece.

    blocks: most chunks that the rows of a piece may write to, unless it has one part alone.
    """
    ready = [(branch, 0) for branch in reversed(roots)]
    while ready:
        parts: list[Part] = []
        ended: list[Branch] = []
        room, left = rows, blocks
        while room and ready:
            branch, first = ready[-1]
            stop = min(first + room, len(branch.tokens))
            part = Part(branch, first, stop)
            left -= part.chunks(chunk_tokens)
            if parts and left < 0:
                break
            ready.pop()
            parts.append(part)
            room -= part.rows
            if stop == len(branch.tokens):
                ended.append(branch)
            else:
                ready.append((branch, stop))
        ready += [(child, 0) for branch in reversed(ended) for child in reversed(branch.children)]
        yield parts
