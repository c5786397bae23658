"""Attention of the rows of one forward, with the gradients of queries, keys, values and sinks.

Values come from the pager, as in any forward. For the gradients each branch keeps its own keys and
values in host memory, as rows attended to them: those of a pool of codes are the numbers that the
codes stand for, and their gradients pass to the keys and values before rounding unchanged
(straight-through, Bengio et al. 2013).

With p = softmax(s), s = cap(scaling q k), D = sum of p dp, dp = dout v (FlashAttention, Dao et al.
2022, appendix B.2):  dv = p dout,  ds = p (dp - D) cap'(s),  dq = scaling ds k,  dk = scaling ds q.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kvpager._model.layout import Layout
from kvpager._runtime.gradients.branches import Branch, Part
from kvpager.pager import Forward

_SCORE_BYTES = 64 << 20  # most of a block's scores


class Call(NamedTuple):
    """How a layer attends; see `Forward.attend`."""

    layer: int
    scaling: float
    window: int | None
    softcap: float | None


class Kept:
    """Keys and values of one branch at every layer, and the sums of their gradients."""

    def __init__(self, tokens: int, layout: Layout) -> None:
        self._tokens = tokens
        self._layout = layout
        self._rows: list[tuple[Tensor, Tensor] | None] = [None] * layout.layers
        self._sums: list[tuple[Tensor, Tensor] | None] = [None] * layout.layers

    def keep(self, layer: int, first: int, k: Tensor, v: Tensor) -> None:
        """Takes k [n, kv_heads, k_dim] and v of tokens first, first + 1, ..., on the CPU."""
        rows = self._rows[layer]
        if rows is None:
            rows = (
                k.new_empty((self._tokens, *k.shape[1:])),
                v.new_empty((self._tokens, *v.shape[1:])),
            )
            self._rows[layer] = rows
        for mine, given in zip(rows, (k, v)):
            mine[first : first + len(given)] = given

    def rows(self, layer: int, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values of tokens [first, stop) at a layer."""
        rows = self._rows[layer]
        assert rows is not None
        return rows[0][first:stop], rows[1][first:stop]

    def add(self, layer: int, first: int, k: Tensor, v: Tensor) -> None:
        """Adds gradients of tokens first, first + 1, ..., float32."""
        sums = self._sums[layer]
        if sums is None:
            heads, layout = self._layout.kv_heads, self._layout
            sums = (
                k.new_zeros((self._tokens, heads, layout.k_dim)),
                v.new_zeros((self._tokens, heads, layout.v_dim)),
            )
            self._sums[layer] = sums
        for mine, given in zip(sums, (k, v)):
            mine[first : first + len(given)] += given

    def gradients(self, layer: int, first: int, stop: int) -> tuple[Tensor, Tensor] | None:
        """Sums of tokens [first, stop); None: nothing was added at this layer."""
        sums = self._sums[layer]
        return None if sums is None else (sums[0][first:stop], sums[1][first:stop])


@dataclass
class Group:
    """Rows of a piece whose texts begin with the same branch, and all keys before them.

    Attributes:
        rows: [r] int64, places in the piece.
        positions: [r] int64.
        spans: the tokens [first, stop) of branches that are keys.
        key_positions: [n] int64.
        earlier: [r, n] bool, whether a key is the row's own or before it in its text.
    """

    rows: Tensor
    positions: Tensor
    spans: list[tuple[Branch, int, int]]
    key_positions: Tensor
    earlier: Tensor

    def keys(self, used: Tensor) -> list[tuple[Branch, int, int, slice]]:
        """Returns each span's tokens from the first to the last one used, and their places."""
        found = []
        start = 0
        for branch, first, stop in self.spans:
            inside = torch.nonzero(used[start : start + stop - first])
            if len(inside):
                lo, hi = int(inside[0]), int(inside[-1]) + 1
                found.append((branch, first + lo, first + hi, slice(start + lo, start + hi)))
            start += stop - first
        return found


def groups_of(parts: Sequence[Part], device: torch.device) -> list[Group]:
    """The groups of a piece."""
    trees: dict[int, list[tuple[Part, int]]] = {}
    start = 0
    for part in parts:
        trees.setdefault(id(part.branch.path()[0]), []).append((part, start))
        start += part.rows
    return [_group(members, device) for members in trees.values()]


def _group(members: list[tuple[Part, int]], device: torch.device) -> Group:
    paths = [part.branch.path() for part, _ in members]
    stops = {id(part.branch): part.stop for part, _ in members}
    branches = {id(branch): branch for path in paths for branch in path}
    spans = [(each, 0, stops.get(key, len(each.tokens))) for key, each in branches.items()]
    positions = torch.cat(
        [torch.arange(p.branch.start + p.first, p.branch.start + p.stop) for p, _ in members]
    )
    key_positions = torch.cat([torch.arange(b.start, b.start + stop) for b, _, stop in spans])
    earlier = key_positions <= positions.unsqueeze(1)
    row = 0
    for (part, _), path in zip(members, paths):
        own = {id(branch) for branch in path}
        column = 0
        for branch, _, stop in spans:
            if id(branch) not in own:
                earlier[row : row + part.rows, column : column + stop] = False
            column += stop
        row += part.rows
    rows = torch.cat([torch.arange(start, start + part.rows) for part, start in members])
    return Group(
        rows.to(device), positions.to(device), spans, key_positions.to(device), earlier.to(device)
    )


class PieceAttention:
    """Attention of the rows of one piece.

    Attributes:
        parts: the rows.
    """

    def __init__(
        self, parts: Sequence[Part], kept: dict[int, Kept], layout: Layout, device: torch.device
    ) -> None:
        """`kept`: of all branches so far, by id."""
        self.parts = parts
        self._marks: list[Tensor] = []
        self._kept = kept
        self._layout = layout
        self._device = device
        self._forward: Forward | None = None
        self._selected: list[Any] = [None] * layout.layers

    def begin(self, forward: Forward) -> None:
        """Attends by a forward of the pager, until `end`."""
        self._forward = forward

    def end(self) -> list[Tensor]:
        """Attends by what is kept from here on, where a layer is computed again.

        Returns:
            A tensor of each layer's attention, from which its backward pass starts even where no
            output of the layer has a gradient. Kept here they would keep themselves: their graph
            refers to this object.
        """
        marks, self._marks, self._forward = self._marks, [], None
        return marks

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `Forward.attend`."""
        call = Call(layer, scaling, window, softcap or None)
        out: Tensor
        out, mark = _Attend.apply(self, call, q, k, v, sinks)  # type: ignore[no-untyped-call]
        if self._forward is not None and mark.requires_grad:
            self._marks.append(mark)
        return out

    def values(self, call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """The attention, [rows, q_heads, v_dim]."""
        if self._forward is None:
            return self._again(call, q, v, sinks)
        out: Tensor = self._forward.attend(
            call.layer,
            q,
            k,
            v,
            scaling=call.scaling,
            window=call.window,
            softcap=call.softcap,
            sinks=sinks,
        )
        self._selected[call.layer] = self._forward.selected()
        return out

    @cached_property
    def _groups(self) -> list[Group]:
        return groups_of(self.parts, self._device)

    def _again(self, call: Call, q: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        out = q.new_zeros((*q.shape[:2], v.shape[2]))
        for block in self._blocks(call, q.shape[1]):
            p, _, _ = block.weights(q, sinks)
            out[block.rows] = block.by_row(p @ block.v).to(out.dtype)
        return out

    def gradients(
        self, call: Call, q: Tensor, out: Tensor | None, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Gradients of q, k and v of the rows and of the sinks, float32, from those of `out`.

        Adds those of keys and values of earlier rows to what is kept.
        """
        of_q = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        of_sinks = None if sinks is None else torch.zeros_like(sinks, dtype=torch.float32)
        if out is not None:
            for block in self._blocks(call, q.shape[1]):
                block.backward(q, out, sinks, of_q, of_sinks)
        of_k = of_q.new_zeros((len(q), self._layout.kv_heads, self._layout.k_dim))
        of_v = of_q.new_zeros((len(q), self._layout.kv_heads, self._layout.v_dim))
        start = 0
        for part in self.parts:
            found = self._kept[id(part.branch)].gradients(call.layer, part.first, part.stop)
            if found is not None:
                of_k[start : start + part.rows] = found[0]
                of_v[start : start + part.rows] = found[1]
            start += part.rows
        return of_q, of_k, of_v, of_sinks

    def _blocks(self, call: Call, q_heads: int) -> list[_Block]:
        """Rows of one group each, few enough for their scores to be small."""
        blocks = []
        chosen = self._chosen(call.layer)
        for group in self._groups:
            most = max(1, _SCORE_BYTES // (4 * q_heads * len(group.key_positions)))
            for start in range(0, len(group.rows), most):
                some = slice(start, start + most)
                visible = self._visible(group, some, call.window, chosen)
                blocks.append(_Block(self, group.rows[some], group, visible, call, q_heads))
        return blocks

    def _chosen(self, layer: int) -> Tensor | None:
        """[kv_heads, rows, chunks] bool, what the rows selected; None: everything."""
        if self._selected[layer] is None:
            return None
        offsets, chunks = self._selected[layer]
        last = max(int(group.key_positions.max()) for group in self._groups)
        count = last // self._layout.chunk_tokens + 1
        chosen = np.zeros((len(offsets) - 1, count), dtype=bool)
        of_row = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        inside = chunks < count
        chosen[of_row[inside], chunks[inside]] = True
        heads = self._layout.kv_heads
        return torch.from_numpy(chosen).view(-1, heads, count).transpose(0, 1).to(self._device)

    def _visible(
        self, group: Group, some: slice, window: int | None, chosen: Tensor | None
    ) -> Tensor:
        """[1 or kv_heads, r, n] bool, which keys rows of a group see."""
        seen = group.earlier[some]
        if window is not None:
            limits = group.positions[some].unsqueeze(1) - window
            seen = seen & (group.key_positions > limits)
        seen = seen.unsqueeze(0)
        if chosen is None:
            return seen
        places = group.key_positions // self._layout.chunk_tokens
        return seen & chosen[:, group.rows[some]].index_select(2, places)

    def kept(self, branch: Branch) -> Kept:
        """Returns what is kept of a branch."""
        return self._kept[id(branch)]


class _Block:
    """Some rows of a group at one layer, and the keys that any of them sees.

    Attributes:
        rows: [r] int64, places in the piece.
        k: [kv_heads, n, k_dim] float32. v: [kv_heads, n, v_dim].
    """

    def __init__(
        self,
        piece: PieceAttention,
        rows: Tensor,
        group: Group,
        visible: Tensor,
        call: Call,
        q_heads: int,
    ) -> None:
        self.rows = rows
        self._piece = piece
        self._call = call
        self._keys = group.keys(visible.any(0).any(0))
        self._hidden = ~torch.cat([visible[:, :, each[3]] for each in self._keys], 2)
        pairs = [piece.kept(b).rows(call.layer, lo, hi) for b, lo, hi, _ in self._keys]
        self.k, self.v = (
            torch.cat([pair[i] for pair in pairs])
            .to(self.rows.device, torch.float32)
            .transpose(0, 1)
            for i in (0, 1)
        )
        self._heads, self._per = len(self.k), q_heads // len(self.k)

    def by_head(self, x: Tensor) -> Tensor:
        """Rows [rows, q_heads, d] of a piece as [kv_heads, q_heads / kv_heads * r, d] float32."""
        some = x[self.rows].float().view(len(self.rows), self._heads, self._per, -1)
        return some.permute(1, 2, 0, 3).reshape(self._heads, self._per * len(self.rows), -1)

    def by_row(self, x: Tensor) -> Tensor:
        """The inverse, [r, q_heads, d]."""
        some = x.view(self._heads, self._per, len(self.rows), -1).permute(2, 0, 1, 3)
        return some.reshape(len(self.rows), self._heads * self._per, -1)

    def weights(
        self, q: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Weights of keys [kv_heads, q_heads / kv_heads * r, n], capped / cap, and the sinks'."""
        call = self._call
        s = torch.matmul(self.by_head(q), self.k.transpose(1, 2)).mul_(call.scaling)
        capped = None
        if call.softcap is not None:
            capped = s.div_(call.softcap).tanh_()
            s = capped * call.softcap
        shape = (self._heads, self._per, *self._hidden.shape[1:])
        s.view(shape).masked_fill_(self._hidden.unsqueeze(1), -torch.inf)
        if sinks is None:
            return torch.softmax(s, -1), capped, None
        sink = sinks.float().view(self._heads, self._per, 1, 1)
        sink = sink.expand(-1, -1, len(self.rows), 1).reshape(*s.shape[:2], 1)
        p = torch.softmax(torch.cat([s, sink], -1), -1)
        return p[..., :-1], capped, p[..., -1:]

    def backward(
        self,
        q: Tensor,
        out: Tensor,
        sinks: Tensor | None,
        of_q: Tensor,
        of_sinks: Tensor | None,
    ) -> None:
        """Writes the rows of of_q, adds to of_sinks and to what is kept of the keys."""
        p, capped, of_sink = self.weights(q, sinks)
        gradient = self.by_head(out)
        v = torch.matmul(p.transpose(1, 2), gradient)
        ds = torch.matmul(gradient, self.v.transpose(1, 2))
        mean = (p * ds).sum(-1, keepdim=True)
        ds.sub_(mean).mul_(p)
        if capped is not None:
            ds.mul_(1 - capped.square())
        ds.mul_(self._call.scaling)
        of_q[self.rows] = self.by_row(torch.matmul(ds, self.k))
        k = torch.matmul(ds.transpose(1, 2), self.by_head(q))
        if of_sink is not None and of_sinks is not None:
            each = (of_sink * mean).view(self._heads * self._per, len(self.rows))
            of_sinks.sub_(each.sum(-1).view_as(of_sinks))
        start = 0
        for branch, first, stop, _ in self._keys:
            some = slice(start, start + stop - first)
            self._piece.kept(branch).add(
                self._call.layer,
                first,
                k[:, some].transpose(0, 1),
                v[:, some].transpose(0, 1),
            )
            start += stop - first


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        piece: PieceAttention,
        call: Call,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, *([] if sinks is None else [sinks]))
        ctx.piece, ctx.call = piece, call
        ctx.dtypes = k.dtype, v.dtype
        ctx.set_materialize_grads(False)
        q, k, v = q.detach(), k.detach(), v.detach()
        return piece.values(call, q, k, v, sinks), q.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out: Tensor | None, mark: Tensor | None) -> tuple[Any, ...]:
        q, *sinks = ctx.saved_tensors
        sink = sinks[0] if sinks else None
        of_q, of_k, of_v, of_sinks = ctx.piece.gradients(ctx.call, q, out, sink)
        k_dtype, v_dtype = ctx.dtypes
        if sink is not None and of_sinks is not None:
            of_sinks = of_sinks.to(sink.dtype)
        return None, None, of_q.to(q.dtype), of_k.to(k_dtype), of_v.to(v_dtype), of_sinks
