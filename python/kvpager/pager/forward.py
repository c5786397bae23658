"""One forward of a model as a transaction, and what its rows are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from kvpager import _core
from kvpager.errors import CorruptSnapshotError, locate_damage

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Sequence as SequenceOf


Tensor: TypeAlias = "torch.Tensor | np.ndarray[Any, Any]"

ROW_COMMIT = 0  # writes its K/V at its position, may be committed
ROW_READ = 1  # its K/V exist already; only attends
ROW_PADDING = 2  # output is zeros
ROW_GIVEN = 3  # commits K/V that are handed in: no row of the model's; in spans only

# Rows of one sequence at positions position, position + 1, ...: (sequence, position, count, kind);
# sequence None: padding.
Span: TypeAlias = "tuple[Any, int, int, int]"


class Forward(_core.OwnedForward):
    """One forward of the model as a transaction; made by `Pager.begin`.

    Use it in a `with` block: an exception inside, or leaving without `commit`, aborts it, and every
    sequence is as it was. One that nobody holds any more is aborted, too.

    On a GPU `attend` and `write` can be captured into a CUDA graph, in which every later forward of
    as many rows runs. `begin` and `commit` stay outside of it:

        graph = torch.cuda.CUDAGraph()
        with pager.begin(sequences, positions, tokens, kinds) as forward:
            with torch.cuda.graph(graph):
                for layer in range(layers):
                    out[layer] = forward.attend(layer, q[layer], k[layer], v[layer], scaling=0.125)
            captured = pager.generation
            graph.replay()
            forward.replayed(captured)
            forward.commit()
        with pager.begin(sequences, positions, tokens, kinds) as forward:
            if pager.generation == captured:  # else capture again
                graph.replay()
                forward.replayed(captured)
                forward.commit()
    """

    if TYPE_CHECKING:

        def __enter__(self) -> Forward: ...

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
        out: Tensor | None = None,
    ) -> Any:
        """Writes the rows' K/V at this layer and attends over everything they may see.

        Args:
            layer: 0-based layer.
            q: [rows, q_heads, k_dim], float32, float16 or bfloat16, last dimension contiguous.
            k: [rows, kv_heads, k_dim]; rotary embedding already applied.
            v: [rows, kv_heads, v_dim].
            scaling: multiplies every dot product.
            window: keys at positions > position - window only; None: all. Of a pager with a
                window: not more than that.
            softcap: scores become softcap * tanh(score / softcap); None: unchanged.
            sinks: [q_heads] attention-sink logits, where q is.
            out: [rows, q_heads, v_dim] to write to; made when None.

        Returns:
            `out`, in q's dtype; zeros in padding rows.

        Raises:
            InvalidArgumentError: a tensor of another shape, dtype or device than expected.
            NonFiniteError: a query, key or value of a row that is no padding is not finite; the
                forward was aborted. On a GPU `commit` raises it. A row that reads brings no keys
                and values.
            StorageError: a chunk could not be read; the forward was aborted.
            CorruptSnapshotError: a chunk's bytes are not what was saved; the forward was aborted.
                `.chunk`, `.layer` and the token range [`.start`, `.stop`) say which.
        """
        core, pager = self.core, self.pager
        if out is None:
            shape = (q.shape[0], q.shape[1], pager.layout.v_dim)
            out = (
                torch.empty(shape, dtype=q.dtype, device=q.device)
                if isinstance(q, torch.Tensor)
                else np.empty(shape, dtype=q.dtype)
            )
        logits = None if sinks is None else _float32_column(sinks)
        try:
            core.attend(
                layer,
                q,
                k,
                v,
                out,
                scaling,
                float(softcap or 0.0),
                int(window or 0),
                logits,
                pager.place.stream,
            )
        except CorruptSnapshotError as error:
            locate_damage(error, pager.layout.chunk_tokens)
            raise
        return out

    def give(self, k: Tensor | SequenceOf[Tensor], v: Tensor | SequenceOf[Tensor]) -> None:
        """The keys and values of all ROW_GIVEN positions, at all layers; before the first attend.

        Rows of this forward see them as if they had been committed before, each row those at its
        own position and before it.

        Args:
            k: [layers, given, kv_heads, k_dim], or a tensor [given, kv_heads, k_dim] of each layer;
                in the order of the given spans, rotary embedding already applied.
            v: [layers, given, kv_heads, v_dim], likewise.

        Raises:
            InvalidArgumentError: no position is given, or all were; or a tensor of another shape,
                dtype or device than expected. The forward goes on.
            NonFiniteError: a key or value is not finite; the forward was aborted. On a GPU `commit`
                raises it.
        """
        self.core.give(list(k), list(v), self.pager.place.stream)

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Writes the rows' K/V at this layer without attending."""
        self.core.write(layer, k, v, self.pager.place.stream)

    def replayed(self, generation: int) -> None:
        """Says that a CUDA graph was replayed, in which every layer of a forward was captured.

        Call it on the stream of the replay, between `Pager.begin` and `commit`.

        Args:
            generation: `Pager.generation` as it was when the graph was captured.

        Raises:
            InvalidArgumentError: memory that the graph writes to was made anew since; abort this
                forward, or capture it again.
        """
        self.core.mark_replayed(generation, self.pager.place.stream)

    def commit(
        self,
        accepted: Mapping[Any, int] | None = None,
        *,
        provenance: str = "exact",
    ) -> None:
        """Makes rows part of their sequences; chunks that fill up are sealed.

        Args:
            accepted: how many of each sequence's commit rows, from the first; None: all of all.
                Given positions count like rows.
            provenance: what these rows are worth at best: "exact" (in a forward of M rows, or of a
                count proven to be its equal), "decode" or "approximate". In a forward of given
                positions alone they are worth just that, except that with `config.exact` False
                nothing is exact.

        Raises:
            InvalidArgumentError: a layer was not written, or what is given was not handed in.
            NonFiniteError: on a GPU, a query, key or value is not finite; the forward was aborted.
        """
        if accepted is None:
            self.commit_rows(None, (), provenance)
        else:
            self.commit_rows(accepted, list(accepted.values()), provenance)


def _float32_column(values: Tensor) -> Tensor:
    """[n] numbers as float32 [1, n, 1], where they are."""
    if isinstance(values, torch.Tensor):
        return values.detach().float().contiguous().view(1, -1, 1)
    return np.ascontiguousarray(values, dtype=np.float32).reshape(1, -1, 1)
