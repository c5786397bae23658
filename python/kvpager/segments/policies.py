"""Repair policies: which tokens of moved segments are computed again, after the text before them.

A segment's K/V were computed as if nothing came before it. Moved behind other text, they differ
from a full prefill's wherever a row would attend beyond the segment. A repair policy chooses the
tokens that the model computes again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvpager._support.arguments import is_number
from kvpager.errors import InvalidArgumentError
from kvpager.segments.pieces import Piece

Mask: TypeAlias = npt.NDArray[np.bool_]
Scores: TypeAlias = npt.NDArray[np.float32]

KEY, VALUE = "key", "value"


class Stitched(Protocol):
    """A text with moved segments before any repair, as a policy sees it.

    Measurements are computed at their first use, in rows that are counted and not committed.

    Attributes:
        tokens: number of tokens, the question included.
        moved: [tokens] bool, the tokens that a policy may choose.
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
        """How much the keys or values of moved tokens differ from those computed in this text.

        Args:
            among: [tokens] moved tokens to compare; each costs a row up to `layer`.
            layer: 1 .. layers - 1; at layer 0 nothing deviates.
            of: "key" or "value".

        Returns:
            [tokens] squared differences, summed over heads and dimensions; 0 for all others.
        """
        ...

    def question_attention(self, rows: int) -> Scores:
        """How much the question attends to each token, before any repair.

        Args:
            rows: use at most this many of the text's last rows.

        Returns:
            [tokens] attention probabilities, summed over rows, layers and heads.
        """
        ...


@runtime_checkable
class RepairPolicy(Protocol):
    """Chooses the tokens to compute again. A pure function of the `Stitched` text."""

    def choose(self, text: Stitched) -> Mask:
        """Returns [tokens] bool, those to compute again; tokens that are not moved are ignored."""
        ...


@dataclass(frozen=True)
class NoRepair:
    """Computes nothing again: the cheapest policy, and the furthest from a full prefill."""

    def choose(self, text: Stitched) -> Mask:
        """None of them."""
        return np.zeros(text.tokens, dtype=np.bool_)


@dataclass(frozen=True)
class FullRepair:
    """Computes everything again: a full prefill, and as exact."""

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
    """The last tokens of every moved segment, as the first systems did.

    A segment's tail mostly attends to its own segment, so this repairs little; it is a baseline for
    comparisons.

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

    All moved tokens run through the layers before the first compared one; with more `layers`, fewer
    tokens run through each further one. The choice within a segment does not depend on the text
    after it.

    Source: CacheBlend (Yao et al., 2024), gradual filtering.

    Args:
        fraction: of each segment's tokens, 0 .. 1.
        of: "value" or "key".
        layers: how many layers are compared, from layer 1 on.
        widen: with several layers, keep `widen` times `fraction` after the first.
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
        """Chooses the tokens left after the last layer."""
        chosen: Mask = np.array(text.moved)
        last = min(self.layers, text.layers - 1)
        if not self.fraction or not last:  # layer 0 never deviates
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
    """The tokens that the question attends to most.

    The question's rows run once over the stitched text; their attention is summed over layers and
    heads.

    Source: ProphetKV (2025), which ranks by the user's query.

    Args:
        fraction: of all moved tokens, 0 .. 1.
        rows: how many of the question's last rows are used.
    """

    fraction: float = 0.15
    rows: int = 16

    def __post_init__(self) -> None:
        _check_fraction(self.fraction)
        _check_count("rows", self.rows, least=1)

    def choose(self, text: Stitched) -> Mask:
        """Chooses the tokens with the most attention."""
        if not self.fraction or not text.moved.any():
            return np.zeros(text.tokens, dtype=np.bool_)
        count = _share(self.fraction, int(text.moved.sum()))
        return _best(text.question_attention(self.rows), count, text.moved)


@dataclass(frozen=True, init=False)
class Combined:
    """The union of what several policies choose."""

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
    """Raises InvalidArgumentError unless `policy` is a repair policy."""
    arrays = (type, np.ndarray, np.generic)  # which have a `choose` of their own
    if isinstance(policy, arrays) or not isinstance(policy, RepairPolicy):
        raise InvalidArgumentError(
            f"repair is {policy!r}; expected a policy, such as SegmentHead(16), or None for the "
            "default"
        )


def _best(scores: Scores, count: int, among: Mask) -> Mask:
    """The `count` highest scores of `among`; of equal ones the earlier."""
    candidates = np.flatnonzero(among)
    order = np.argsort(-scores[candidates], kind="stable")[:count]
    chosen = np.zeros(len(scores), dtype=np.bool_)
    chosen[candidates[order]] = True
    return chosen


def _share(fraction: float, tokens: int) -> int:
    """`fraction` of `tokens`, rounded up."""
    return math.ceil(round(fraction * tokens, 6))


def _check_count(name: str, value: object, least: int = 0) -> None:
    if type(value) is not int or value < least:
        raise InvalidArgumentError(f"{name} is {value!r}; expected an integer, {least} or more")


def _check_fraction(value: object) -> None:
    if not is_number(value) or not 0 <= value <= 1:
        raise InvalidArgumentError(f"fraction is {value!r}; expected a number from 0 to 1")


DEFAULT_REPAIR: RepairPolicy = Combined(SegmentHead(4), QueryGuided(0.1))
