"""Attention as a call's keywords describe it: causal, a window, a soft cap, sinks; nothing else.

Plain sums in the dtype they are given, to compare with; forwards of an engine run kvpager's own.
"""

from __future__ import annotations

import torch


def attend_dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every row over the rows whose positions it sees.

    Args:
        q: [n, q_heads, k_dim] of one sequence, its rows in any order.
        k: [n, kv_heads, k_dim].
        v: [n, kv_heads, v_dim].
        positions: [n] int64, each once.
        scaling: of scores.
        window: positions that a row sees, itself among them; None: all up to its own.
        softcap: scores become softcap * tanh(score / softcap).
        sinks: [q_heads], a score each that takes weight and has no value.

    Returns:
        [n, q_heads, v_dim], and the largest size of a score [], as q's dtype.
    """
    group = q.shape[1] // k.shape[1]
    keys = k.repeat_interleave(group, dim=1)
    scores = torch.einsum("ihd,jhd->hij", q, keys) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    back = positions[:, None] - positions[None, :]
    seen = back >= 0 if window is None else (back >= 0) & (back < window)
    largest = scores.abs().amax()
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(-1, 1, 1).expand(-1, len(q), 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    out = torch.einsum("hij,jhd->ihd", weights, v.repeat_interleave(group, dim=1))
    return out.contiguous(), largest
