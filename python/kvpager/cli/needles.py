"""Synthetic documents with key -> value needles, the task the shipped tiny model was trained on.

A document is `<bos>` and filler over a small vocabulary, with needles `<K> k1 k2 <S> v1 v2 v3 <E>`
written into it. A question `<Q> k1 k2 <S>` asks for `v1 v2 v3 <E>`. Filler, keys and values share
their tokens, keys come in near misses and values share their beginnings, so an answer has to be
read from the right place. What a cache has lost cannot be guessed: retrieval is all or nothing.

Everything is a function of the seed and the order of calls, and needs numpy alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]

PAD, BOS, KEY, SEPARATOR, END, QUESTION = 0, 1, 2, 3, 4, 5
FIRST_CONTENT = 8  # ids below are markers or unused; filler, keys and values never take them
KEY_TOKENS = 2
VALUE_TOKENS = 3
VALUE_OFFSET = KEY_TOKENS + 2  # of the value from its needle's <K>
NEEDLE_TOKENS = VALUE_OFFSET + VALUE_TOKENS + 1
QUIET_TAIL = 128  # a document's last tokens, which never hold a needle

NEAR_MISS_SHARE = 0.35
SHARED_START_SHARE = 0.15
SUCCESSORS = 4
TABLE_SEED = 1234  # of the filler's tables: part of the task, not of a document


@dataclass(frozen=True)
class Document:
    """A document of T tokens with N needles, in ascending order of position.

    ids: [T] int64. positions: [N] int64, the index of each needle's `<K>`.
    keys: [N, KEY_TOKENS] int64. values: [N, VALUE_TOKENS] int64.
    """

    ids: Ids
    positions: Ids
    keys: Ids
    values: Ids

    def span(self, needle: int) -> tuple[int, int]:
        """The half-open token range [start, stop) that needle number `needle` occupies."""
        start = int(self.positions[needle])
        return start, start + NEEDLE_TOKENS


class NeedleTask:
    """Draws documents, keys, values and filler.

    Not thread-safe: every draw advances the one generator `rng`.
    """

    def __init__(self, vocab: int = 1024, seed: int = 0) -> None:
        """vocab: number of token ids, at least 64. Raises ValueError if smaller."""
        if vocab < 64:
            raise ValueError(f"vocab must be at least 64, got {vocab}")
        self.vocab = vocab
        self.rng = np.random.default_rng(seed)
        content = vocab - FIRST_CONTENT
        tables = np.random.default_rng(TABLE_SEED)
        self._successors = tables.integers(0, content, size=(content, SUCCESSORS))
        frequency = 1.0 / np.arange(1, content + 1) ** 0.8
        ranks = tables.permutation(content)
        self._zipf_cdf = np.cumsum(frequency[ranks] / frequency.sum())

    def document(
        self,
        tokens: int,
        needles: int,
        *,
        within: tuple[int, int] | None = None,
        avoid: Iterable[tuple[int, int]] = (),
    ) -> Document:
        """A document of exactly `tokens` tokens holding `needles` needles at random places.

        within: half-open range that must hold every needle; default the whole document.
        avoid: half-open ranges that no needle may touch, such as `(0, sinks)` or
        `(tokens - recent, tokens)`. The last QUIET_TAIL tokens are always avoided.
        Raises ValueError if the document is empty or the needles do not fit.
        """
        if tokens < 1 or needles < 0:
            raise ValueError(f"need tokens >= 1 and needles >= 0, got {tokens} and {needles}")
        start, stop = within if within is not None else (0, tokens)
        free = _subtract((max(start, 1), min(stop, tokens - QUIET_TAIL)), avoid)
        # One needle per slot of twice its length, jittered inside: no overlap, no regular grid.
        width = 2 * NEEDLE_TOKENS
        slots = np.concatenate(
            [a + width * np.arange((b - a) // width, dtype=np.int64) for a, b in free]
            or [np.empty(0, np.int64)]
        )
        if needles > len(slots):
            raise ValueError(
                f"{needles} needles do not fit: {len(slots)} places of {width} tokens are free in "
                f"a document of {tokens} tokens"
            )
        keys = self.keys(needles)
        values = np.array(self.values([VALUE_TOKENS] * needles), np.int64)
        chosen = self.rng.permutation(slots)[:needles]
        positions = np.sort(chosen + self.rng.integers(0, NEEDLE_TOKENS, size=needles))
        ids = np.concatenate([[BOS], self.filler(tokens - 1)])
        document = Document(ids, positions, keys, values.reshape(needles, VALUE_TOKENS))
        for needle in range(needles):
            start, stop = document.span(needle)
            ids[start:stop] = self.needle(document.keys[needle], document.values[needle])
        return document

    def needle(self, key: Ids, value: Ids) -> Ids:
        """`<K> key <S> value <E>`: [VALUE_OFFSET + len(value) + 1] int64."""
        return np.concatenate([[KEY], key, [SEPARATOR], self.answer(value)])

    def query(self, key: Ids) -> Ids:
        """`<Q> key <S>`, the question whose continuation is the answer: [4] int64."""
        return np.concatenate([[QUESTION], np.asarray(key, np.int64), [SEPARATOR]])

    def answer(self, value: Ids) -> Ids:
        """`value <E>`, what a model must generate after the question: [len(value) + 1] int64."""
        return np.concatenate([np.asarray(value, np.int64), [END]])

    def keys(self, count: int) -> Ids:
        """[count, KEY_TOKENS] distinct keys, 35% of them near misses of an earlier one.

        A near miss shares the first token (40%), the second (40%) or both in swapped order (20%).
        Raises ValueError if `count` is more than a quarter of all keys there are.
        """
        content = self.vocab - FIRST_CONTENT
        if count > content * content // 4:
            raise ValueError(f"vocab {self.vocab} has too few keys for {count} needles")
        keys: list[tuple[int, int]] = []
        seen: set[tuple[int, int]] = set()
        while len(keys) < count:
            key = self._random_key()
            if keys and self.rng.random() < NEAR_MISS_SHARE:
                key = self._near_miss(keys[int(self.rng.integers(len(keys)))], key)
            if key not in seen:
                seen.add(key)
                keys.append(key)
        return np.array(keys, np.int64).reshape(count, KEY_TOKENS)

    def values(self, lengths: Sequence[int]) -> list[Ids]:
        """One value per length; 15% begin with an earlier value's first token or two."""
        values = [self.rng.integers(FIRST_CONTENT, self.vocab, size=n) for n in lengths]
        for i in range(1, len(values)):
            if self.rng.random() < SHARED_START_SHARE:
                other = values[int(self.rng.integers(i))]
                shared = 2 if self.rng.random() < 0.3 else 1
                shared = min(shared, len(other), len(values[i]))
                values[i][:shared] = other[:shared]
        return values

    def filler(self, count: int) -> Ids:
        """[count] content ids: each a successor of the one before it or, as often, Zipf-drawn."""
        drawn = np.searchsorted(self._zipf_cdf, self.rng.random(count))
        ids: Ids = np.minimum(drawn, len(self._zipf_cdf) - 1).astype(np.int64)
        branch = self.rng.integers(0, SUCCESSORS, size=count)
        known = self.rng.random(count) < 0.5  # Zipf draws depend on nothing before them
        known[:1] = True
        # The rest form short chains behind known ids; each pass extends all chains by one link.
        waiting = np.flatnonzero(~known)
        while waiting.size:
            can = known[waiting - 1]
            now, waiting = waiting[can], waiting[~can]
            ids[now] = self._successors[ids[now - 1], branch[now]]
            known[now] = True
        return ids + FIRST_CONTENT

    def _random_key(self) -> tuple[int, int]:
        first, second = self.rng.integers(FIRST_CONTENT, self.vocab, size=KEY_TOKENS)
        return int(first), int(second)

    def _near_miss(self, of: tuple[int, int], fresh: tuple[int, int]) -> tuple[int, int]:
        kind = self.rng.random()
        if kind < 0.4:
            return of[0], fresh[1]
        if kind < 0.8:
            return fresh[0], of[1]
        return of[1], of[0]


def shipped_model_path(name: str = "tiny-retriever") -> Path:
    """The directory of a tiny trained model that comes with kvpager.

    name: "tiny-retriever", trained on this task, which a wheel has too. A checkout also has
        "tiny-retriever-plain", its sibling whose keys are not easy to select by, "tiny-two-hop",
        trained on texts of two hops, and "tiny-coder", a language model with a tokenizer that was
        trained on Python's sources.
    Looks in the installed package, then in the repository that this file lies in.
    Raises FileNotFoundError, naming both places, if neither holds it.
    """
    here = Path(__file__).resolve()
    places = (
        here.parents[1] / "_models" / name,
        here.parents[3] / "models" / name,
    )
    for place in places:
        if (place / "config.json").is_file() and (place / "model.safetensors").is_file():
            return place
    raise FileNotFoundError(
        f"the tiny model {name} is in neither "
        + " nor ".join(str(place) for place in places)
        + ": a wheel holds tiny-retriever, a checkout all, an sdist none"
    )


def _subtract(whole: tuple[int, int], holes: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The parts of the half-open range `whole` that lie in none of `holes`, ascending."""
    parts: list[tuple[int, int]] = []
    start, stop = whole
    for hole_start, hole_stop in sorted(holes):
        if hole_start >= hole_stop:
            continue
        if start < min(hole_start, stop):
            parts.append((start, min(hole_start, stop)))
        start = max(start, hole_stop)
    if start < stop:
        parts.append((start, stop))
    return parts
