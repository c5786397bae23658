"""Which models, dtypes, shapes and thread counts the relations are shown for."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cache
from typing import Any

from reference_models import CHUNK, ROWS, build

from kvpager import Dense, PagerConfig, TopK
from kvpager.config import Selection

DIMENSIONS: Mapping[str, tuple[Any, ...]] = {
    "architecture": ("llama", "qwen3", "mistral", "smollm3", "qwen3_moe"),
    "dtype": ("float32", "bfloat16", "float16"),
    "hidden": (256, 1024),
    "tied": (False, True),
    "threads": (1, 2),
    "group": (1, 2, 4),  # query heads per kv head
    "selection": ("dense", "topk"),
    "kv_dtype": ("auto", "q8", "k8v4", "q4"),
}
SELECTIONS: Mapping[str, Selection] = {
    "dense": Dense(),
    "topk": TopK(chunks=2, sinks=CHUNK, recent=ROWS + CHUNK),
}
_ATTEMPTS = 8  # at a small and cheap selection


@dataclass(frozen=True)
class Case:
    """One cell of the matrix: a model with random weights, and torch's number of threads."""

    architecture: str
    dtype: str
    hidden: int
    tied: bool
    threads: int
    group: int
    selection: str
    kv_dtype: str

    def __str__(self) -> str:
        head = "tied" if self.tied else "untied"
        model = f"{self.architecture}-{self.dtype}-{self.hidden}-{head}-gqa{self.group}"
        kv = "" if self.kv_dtype == "auto" else f"-{self.kv_dtype}"
        return f"{model}-{self.selection}{kv}-{self.threads}t"

    def model(self) -> Any:
        return build(
            self.architecture, self.dtype, hidden=self.hidden, tied=self.tied, group=self.group
        )

    @property
    def config(self) -> PagerConfig:
        """A pool far smaller than the prompts, and chunks and rows of which many fit a prompt."""
        return PagerConfig(
            pool_tokens=6 * CHUNK,
            rows=ROWS,
            chunk_tokens=CHUNK,
            host_bytes="256MiB",
            selection=SELECTIONS[self.selection],
            kv_dtype=self.kv_dtype,
        )


def full() -> list[Case]:
    """Every combination; but numbers of kv heads and dtypes of K/V take turns, since the rest does
    not know them."""
    turns = ("group", "kv_dtype")
    dimensions = {name: values for name, values in DIMENSIONS.items() if name not in turns}
    groups, kv_dtypes = (DIMENSIONS[name] for name in turns)
    return [
        Case(
            **dict(zip(dimensions, values)),
            group=groups[(i + i // 2 + i // 8) % len(groups)],
            kv_dtype=kv_dtypes[(i + i // 2 + i // 4 + i // 12) % len(kv_dtypes)],
        )
        for i, values in enumerate(itertools.product(*dimensions.values()))
    ]


def pairwise() -> list[Case]:
    """Few combinations in which every pair of values of two dimensions occurs; cheap ones."""
    every = [Case(*values) for values in itertools.product(*DIMENSIONS.values())]
    covers = []
    for seed in range(_ATTEMPTS):
        random.Random(seed).shuffle(every)
        covers.append(cover(every))
    return min(covers, key=lambda cases: sum(map(_cost, cases)))


@cache
def pairs(case: Case) -> frozenset[tuple[int, Any, int, Any]]:
    """The pairs of values in a case, each with the dimensions they are of."""
    values = enumerate(astuple(case))
    return frozenset((i, a, j, b) for (i, a), (j, b) in itertools.combinations(values, 2))


def cover(cases: Iterable[Case]) -> list[Case]:
    """Greedy: always the case with the most new pairs, of equals the cheapest, then the first."""
    left = {case: pairs(case) for case in cases}
    missing = set[Any]().union(*left.values())
    chosen: list[Case] = []
    while missing:
        best = max(left, key=lambda case: (len(left[case] & missing), -_cost(case)))
        chosen.append(best)
        missing -= left.pop(best)
    return chosen


def _cost(case: Case) -> float:
    """About how long a case takes: experts copy weights for every row, float16 is emulated."""
    large = case.hidden == 1024
    cost = 2.0 if large else 1.0
    if case.architecture == "qwen3_moe":
        cost *= 3
    if case.dtype == "float16":
        cost *= 5 if large else 1.5
    return cost


def lacking(chosen: Sequence[Case], of: Iterable[Case]) -> set[tuple[int, Any, int, Any]]:
    """Pairs that occur in `of` but in no chosen case."""
    return set().union(*map(pairs, of)) - set().union(*map(pairs, chosen))
