"""Which tokens of moved segments are computed again, so that they see what comes before them.

A segment's K/V were computed as if nothing came before it. Moved behind other text they are wrong
where a full prefill's rows would have looked back beyond the segment. A repair policy says which of
these tokens are worth a row of the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvpager.errors import InvalidArgumentError
from kvpager.segments.pieces import Piece

Mask: TypeAlias = npt.NDArray[np.bool_]
Scores: TypeAlias = npt.NDArray[np.float32]

KEY, VALUE = "key", "value"


class Stitched(Protocol):
    """A text put together from moved segments, none of them repaired, as a policy sees it.

    What it measures is computed when first asked for, in rows that change nothing and are counted.

    Attributes:
        tokens: how many there are, the question included.
        moved: [tokens] those a policy may choose.
        layers: of the model.
    """

    @property
    def pieces(self) -> Sequence[Piece]:
        """The text's parts, in order."""
        ...

    tokens: int
    moved: Mask
    layers: int

    def deviation(self, among: Mask, layer: int, of: str) -> Scores:
        """How far the keys or values of tokens are from what they would be here.

        Args:
            among: [tokens] moved ones to look at, each a row through the layers before `layer`.
            layer: 1 .. layers - 1; at layer 0 nothing deviates.
            of: "key" or "value".

        Returns:
            [tokens] squared differences, summed over heads and dimensions; 0 for all others.
        """
        ...

    def question_attention(self, rows: int) -> Scores:
        """How much the question looks at each token, before any repair.

        Args:
            rows: the last rows of the text that are asked, at most.

        Returns:
            [tokens] attention probabilities, summed over rows, layers and heads.
        """
        ...


@runtime_checkable
class RepairPolicy(Protocol):
    """Chooses the tokens that are computed again. A function of what it is shown, and no more."""

    def choose(self, text: Stitched) -> Mask:
        """[tokens] those to compute again; only moved ones count."""
        ...


@dataclass(frozen=True)
class NoRepair:
    """Nothing is computed again: the cheapest, and the furthest from a full prefill."""

    def choose(self, text: Stitched) -> Mask:
        """None of them."""
        return np.zeros(text.tokens, dtype=np.bool_)


@dataclass(frozen=True)
class FullRepair:
    """Everything is computed again, which is a full prefill, and as exact."""

    def choose(self, text: Stitched) -> Mask:
        """All of them."""
        return np.array(text.moved)


@dataclass(frozen=True)
class SegmentHead:
    """The first tokens of every moved segment, where attention to what lies before is strongest.

    Source: EPIC (Hu et al., 2024), "LegoLink".

    Args:
        tokens: per segment.
    """

    tokens: int = 16

    def __post_init__(self) -> None:
        _check_count("tokens", self.tokens)

    def choose(self, text: Stitched) -> Mask:
        """The first of each segment."""
        chosen = np.zeros(text.tokens, dtype=np.bool_)
        for piece in text.pieces:
            if piece.moved:
                chosen[piece.start : min(piece.start + self.tokens, piece.stop)] = True
        return chosen


@dataclass(frozen=True)
class SeamTail:
    """The last tokens before every seam between segments, as the first systems did.

    A segment's tail sees the segment itself, which is right already, so that it repairs little; it
    is here to be compared with.

    Args:
        tokens: per segment.
    """

    tokens: int = 16

    def __post_init__(self) -> None:
        _check_count("tokens", self.tokens)

    def choose(self, text: Stitched) -> Mask:
        """The last of each segment."""
        chosen = np.zeros(text.tokens, dtype=np.bool_)
        for piece in text.pieces:
            if piece.moved:
                chosen[max(piece.stop - self.tokens, piece.start) : piece.stop] = True
        return chosen


@dataclass(frozen=True)
class Deviation:
    """The tokens of each segment whose keys or values deviate most in the first layers.

    All moved tokens run through the layers before the first that is looked at; with more `layers`
    fewer of them through each further one. Which tokens of a segment are chosen does not depend on
    what comes after it.

    Source: CacheBlend (Yao et al., 2024), gradual filtering.

    Args:
        fraction: of each segment's tokens, 0 .. 1.
        of: "value" or "key".
        layers: how many layers are looked at, from layer 1 on.
        widen: how many times `fraction` is kept after the first of several layers.
    """

    fraction: float = 0.15
    of: str = VALUE
    layers: int = 1
    widen: float = 2.0

    def __post_init__(self) -> None:
        _check_fraction(self.fraction)
        if self.of not in (KEY, VALUE):
            raise InvalidArgumentError(f'of is {self.of!r}; expected "key" or "value"')
        _check_count("layers", self.layers, least=1)
        if not isinstance(self.widen, (int, float)) or not 1 <= self.widen < np.inf:
            raise InvalidArgumentError(f"widen is {self.widen!r}; expected a number, 1 or more")

    def choose(self, text: Stitched) -> Mask:
        """What is left after the last layer."""
        chosen: Mask = np.array(text.moved)
        last = min(self.layers, text.layers - 1)
        if not self.fraction or not last:  # a model of one layer deviates nowhere
            return np.zeros(text.tokens, dtype=np.bool_)
        for layer in range(1, last + 1):
            left = (last - layer) / max(1, last - 1)
            share = min(1.0, self.fraction * (1 + (self.widen - 1) * left))
            scores = text.deviation(chosen, layer, self.of)
            for piece in text.pieces:
                if piece.moved:
                    part = slice(piece.start, piece.stop)
                    count = _share(share, piece.stop - piece.start)
                    chosen[part] = _best(scores[part], count, chosen[part])
        return chosen


@dataclass(frozen=True)
class QueryGuided:
    """The tokens that the question looks at most.

    Its rows run once over the stitched text, and their attention is summed over layers and heads.

    Source: ProphetKV (2025), which ranks by the user's query.

    Args:
        fraction: of all moved tokens, 0 .. 1.
        rows: of the question's last rows, how many are asked.
    """

    fraction: float = 0.15
    rows: int = 16

    def __post_init__(self) -> None:
        _check_fraction(self.fraction)
        _check_count("rows", self.rows, least=1)

    def choose(self, text: Stitched) -> Mask:
        """The most looked at."""
        if not self.fraction or not text.moved.any():
            return np.zeros(text.tokens, dtype=np.bool_)
        count = _share(self.fraction, int(text.moved.sum()))
        return _best(text.question_attention(self.rows), count, text.moved)


@dataclass(frozen=True, init=False)
class Combined:
    """What any of several policies chooses."""

    policies: tuple[RepairPolicy, ...]

    def __init__(self, *policies: RepairPolicy) -> None:
        for policy in policies:
            check_policy(policy)
        object.__setattr__(self, "policies", policies)

    def choose(self, text: Stitched) -> Mask:
        """The union."""
        chosen = np.zeros(text.tokens, dtype=np.bool_)
        for policy in self.policies:
            chosen |= policy.choose(text)
        return chosen


def check_policy(policy: object) -> None:
    """Raises InvalidArgumentError for what is no repair policy."""
    if isinstance(policy, type) or not isinstance(policy, RepairPolicy):
        raise InvalidArgumentError(
            f"repair is {policy!r}; expected a policy, such as SegmentHead(16), or None for the "
            "default"
        )


def _best(scores: Scores, count: int, among: Mask) -> Mask:
    """The `count` highest of those among which is chosen; of equals the earlier."""
    candidates = np.flatnonzero(among)
    order = np.argsort(-scores[candidates], kind="stable")[:count]
    chosen = np.zeros(len(scores), dtype=np.bool_)
    chosen[candidates[order]] = True
    return chosen


def _share(fraction: float, tokens: int) -> int:
    """So many tokens, rounded up."""
    return math.ceil(round(fraction * tokens, 6))


def _check_count(name: str, value: object, least: int = 0) -> None:
    if type(value) is not int or value < least:
        raise InvalidArgumentError(f"{name} is {value!r}; expected an integer, {least} or more")


def _check_fraction(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise InvalidArgumentError(f"fraction is {value!r}; expected a number from 0 to 1")


DEFAULT_REPAIR: RepairPolicy = Combined(SegmentHead(4), QueryGuided(0.1))
