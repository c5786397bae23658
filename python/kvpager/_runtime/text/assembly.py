"""The report of a session that was put together from segments."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Assembly:
    """How `Engine.assemble` has filled a session, and what it cost.

    Every token of the text is exact, moved, recomputed or fresh; these four add up to `tokens`.

    Attributes:
        tokens: number of tokens of the text.
        exact: tokens at the beginning whose K/V are those of a full prefill: the prefix that was
            found, and what was computed right after it; the whole text if everything was
            recomputed.
        moved: tokens with K/V of a segment, keys rotated to their new positions; approximate.
        recomputed: tokens of a segment whose K/V were computed again in place; approximate.
        fresh: tokens of no segment that follow an approximate one.
        shared: exact tokens whose K/V the pager or a store had already.
        rows: rows that the model computed, without padding: one for each exact token that was not
            shared, each recomputed and each fresh token.
        probe_rows: rows that the policy needed to choose, in forwards of the whole model; a forward
            that stops after some layers counts with their share.
        forwards: forwards run, probes included.
        policy: the policy that chose the tokens to recompute.
        seconds: from the call of `assemble` to its return.
    """

    tokens: int
    exact: int
    moved: int
    recomputed: int
    fresh: int
    shared: int
    rows: int
    probe_rows: float
    forwards: int
    policy: str
    seconds: float
