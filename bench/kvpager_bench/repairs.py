"""Ways to repair stitched text that are compared, the result of each prompt, and statistics.

Prompts come in sets: those of one set share their documents, in another order each, so that they
are no independent draws. A set is therefore the unit of every standard error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from kvpager.segments import (
    DEFAULT_REPAIR,
    Assembly,
    Combined,
    Deviation,
    FullRepair,
    NoRepair,
    QueryGuided,
    RepairPolicy,
    SeamTail,
    SegmentHead,
)
from kvpager_bench.divergence import Numbers, kl_divergences
from kvpager_bench.labels import NO_REPAIR

NONE, FULL, DEFAULT = NO_REPAIR, "full", "default"
HEAD, TAIL, QUESTION = "segment head", "seam tail", "question"
DEVIATION, DEVIATION_2 = "deviation, layer 1", "deviation, layer 2"
HEAD_AND_QUESTION = "head of 4 + question"
DEVIATION_AND_QUESTION = "deviation, layer 2, 5% + question, 5%"
HEAD_16, TAIL_16 = "segment head of 16", "seam tail of 16"
TAIL_TOKENS = "seam tail, as many tokens as the default"
TAIL_ROWS = "seam tail, as many rows as the default"

# A policy that takes a share of the moved tokens: of that share, and the segments' lengths.
Family: TypeAlias = Callable[[float, Sequence[int]], RepairPolicy]


def _per_segment(share: float, lengths: Sequence[int]) -> int:
    """Tokens of each segment, so that it is this share of all; at 1 all of the longest."""
    if share >= 1:
        return max(lengths)
    return math.ceil(round(share * sum(lengths) / len(lengths), 6))


def _second_layer(share: float) -> RepairPolicy:
    """Ranked by the second layer alone, before which nothing is filtered out."""
    return Deviation(share, layers=2, widen=1 / share)


FAMILIES: dict[str, Family] = {
    HEAD: lambda share, lengths: SegmentHead(_per_segment(share, lengths)),
    TAIL: lambda share, lengths: SeamTail(_per_segment(share, lengths)),
    DEVIATION: lambda share, _: Deviation(share),
    DEVIATION_2: lambda share, _: _second_layer(share),
    QUESTION: lambda share, _: QueryGuided(share),
    HEAD_AND_QUESTION: lambda share, _: Combined(SegmentHead(4), QueryGuided(share)),
}
FIXED: dict[str, RepairPolicy] = {
    NONE: NoRepair(),
    FULL: FullRepair(),
    DEFAULT: DEFAULT_REPAIR,
    HEAD_16: SegmentHead(16),
    TAIL_16: SeamTail(16),
    DEVIATION_AND_QUESTION: Combined(_second_layer(0.05), QueryGuided(0.05)),
}


@dataclass(frozen=True)
class Way:
    """A policy under a name; `share` is the part of the moved tokens it was asked for, if any."""

    policy: str
    share: float | None = None

    def repair(self, lengths: Sequence[int], default: Outcome | None = None) -> RepairPolicy:
        """The policy for a text with segments of these lengths.

        default: the default policy's result on it, for a way that spends as much.
        """
        if self.share is not None:
            return FAMILIES[self.policy](self.share, lengths)
        if self.policy in FIXED:
            return FIXED[self.policy]
        if default is None:
            raise ValueError(f"{self.policy} needs what the default came to")
        spent = default.recomputed + (default.probe_rows if self.policy == TAIL_ROWS else 0)
        return SeamTail(math.ceil(spent / len(lengths)))


def ways(shares: Sequence[float]) -> list[Way]:
    """All that are compared, the default before those that spend as much as it did."""
    fixed = (NONE, FULL, DEFAULT, TAIL_TOKENS, TAIL_ROWS, HEAD_16, TAIL_16, DEVIATION_AND_QUESTION)
    return [*map(Way, fixed), *(Way(family, share) for family in FAMILIES for share in shares)]


@dataclass(frozen=True)
class Outcome:
    """One prompt under one policy, beside a full prefill of it.

    right: whether the greedy answer is the expected one. kl: of the first answer token's
    distribution from the full prefill's, in nats. mean_error, max_error: of its logits, absolute,
    over the vocabulary. recomputed, moved: tokens of segments; those that became exact count as
    recomputed. rows: of whole forwards, as if the beginning were not cached. probe_rows:
    spent on the choice. same_bits: whether the logits are the full prefill's.
    """

    right: bool
    kl: float
    mean_error: float
    max_error: float
    recomputed: int
    moved: int
    rows: int
    probe_rows: float
    same_bits: bool


def outcome(
    full: torch.Tensor,
    logits: torch.Tensor,
    right: bool,
    assembly: Assembly,
    segment_tokens: int,
) -> Outcome:
    """full, logits: [vocab], after the question."""
    apart = (full.double() - logits.double()).abs()
    return Outcome(
        right=right,
        kl=kl_divergence(full, logits),
        mean_error=float(apart.mean()),
        max_error=float(apart.max()),
        recomputed=segment_tokens - assembly.moved,
        moved=assembly.moved,
        rows=assembly.rows + assembly.shared,
        probe_rows=float(assembly.probe_rows),
        same_bits=same_bits(full, logits),
    )


def kl_divergence(full: torch.Tensor, logits: torch.Tensor) -> float:
    """KL(softmax(full) || softmax(logits)) in nats, of [vocab] each."""
    return float(kl_divergences(full[None], logits[None])[0])


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Of two tensors of a dtype."""
    raw = (x.contiguous().view(torch.uint8) for x in (one, other))
    return torch.equal(*raw)


def column(outcomes: Sequence[Outcome], name: str) -> Numbers:
    """One number of every prompt."""
    return np.array([getattr(one, name) for one in outcomes], dtype=np.float64)


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts and its standard error."""

    mean: float
    error: float

    def __str__(self) -> str:
        return f"{self.mean:.3g} ± {self.error:.2g}"


def estimate(values: Numbers, per_set: int) -> Estimate:
    """values: [prompts], those of a set beside each other, `per_set` of each."""
    means = _set_means(values, per_set)
    return Estimate(float(means.mean()), float(means.std(ddof=1) / math.sqrt(len(means))))


def recovered(ours: Numbers, none: Numbers, full: Numbers, per_set: int) -> Estimate | None:
    """What part of the gap between no repair and a full prefill is closed; None without a gap.

    All [prompts], of one measure. The error is a jackknife's over sets, as it is a ratio.
    """
    sets = [_set_means(values, per_set) for values in (ours, none, full)]

    def ratio(kept: Any) -> float:
        o, n, f = (values[kept].mean() for values in sets)
        return float((o - n) / (f - n)) if f != n else math.nan

    count = len(sets[0])
    whole = ratio(np.ones(count, dtype=np.bool_))
    left_out = np.array([ratio(np.arange(count) != i) for i in range(count)])
    if not math.isfinite(whole) or not np.isfinite(left_out).all():
        return None
    spread = ((left_out - left_out.mean()) ** 2).sum() * (count - 1) / count
    return Estimate(whole, math.sqrt(float(spread)))


def step(before: Sequence[Outcome], after: Sequence[Outcome], per_set: int) -> Estimate:
    """How much the mean error changes from one share to the next, prompt by prompt."""
    return estimate(column(after, "mean_error") - column(before, "mean_error"), per_set)


def _set_means(values: Numbers, per_set: int) -> Numbers:
    if len(values) % per_set or len(values) < 2 * per_set:
        raise ValueError(f"{len(values)} prompts are not two or more sets of {per_set}")
    means: Numbers = values.reshape(-1, per_set).mean(axis=1)
    return means
