"""One forward of a model as a transaction, and the kinds of its rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from kvpager import _core
from kvpager._support.arguments import as_int64, as_integer, refusal

if TYPE_CHECKING:
    from collections.abc import Sequence as SequenceOf


Tensor: TypeAlias = "torch.Tensor | np.ndarray[Any, Any]"

ROW_COMMIT = 0  # writes its K/V at its position, may be committed
ROW_READ = 1  # its K/V exist already; only attends
ROW_PADDING = 2  # output is zeros
ROW_GIVEN = 3  # commits K/V from `Forward.give`, without a row of the model; only in spans

# Rows of one sequence at positions position, position + 1, ...: (sequence, position, count, kind);
# sequence None: padding.
Span: TypeAlias = "tuple[Any, int, int, int]"


class Forward(_core.OwnedForward):
    """One forward of the model as a transaction; made by `Pager.begin`.

    Use it in a `with` block: an exception inside, or leaving without `commit`, aborts it and leaves
    every sequence unchanged. A forward without references is aborted, too.

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
        """Writes the rows' K/V at this layer, then computes their attention.

        Args:
            layer: 0-based layer.
            q: [rows, q_heads, k_dim], float32, float16 or bfloat16, last dimension contiguous.
            k: [rows, kv_heads, k_dim]; rotary embedding already applied.
            v: [rows, kv_heads, v_dim].
            scaling: multiplies every dot product.
            window: keys at positions > position - window only; None: all. In a pager with a
                window: at most that one.
            softcap: scores become softcap * tanh(score / softcap); None: unchanged.
            sinks: [q_heads] attention-sink logits, where q is.
            out: [rows, q_heads, v_dim] to write to; made when None.

        Returns:
            `out`, in q's dtype; zeros in padding rows.

        Raises:
            InvalidArgumentError: a tensor of another shape, dtype or device than expected.
            NonFiniteError: a query, key or value of a row (padding apart) is not finite; the
                forward was aborted. On a GPU `commit` raises it. Keys and values of ROW_READ rows
                are ignored.
            StorageError: a chunk could not be read; the forward was aborted.
            CorruptSnapshotError: a chunk is damaged; the forward was aborted. The error has
                `.chunk`, `.layer` and the token range [`.start`, `.stop`).
        """
        pager = self.pager
        if out is None:
            shape = (q.shape[0], q.shape[1], pager.layout.v_dim)
            out = (
                torch.empty(shape, dtype=q.dtype, device=q.device)
                if isinstance(q, torch.Tensor)
                else np.empty(shape, dtype=q.dtype)
            )
        logits = None if sinks is None else _float32_column(sinks)
        self.attend_rows(
            layer,
            q,
            k,
            v,
            out,
            scaling,
            float(softcap or 0.0),
            0 if window is None else as_integer(window, "window", 0),
            logits,
            pager.place.stream,
        )
        return out

    def give(self, k: Tensor | SequenceOf[Tensor], v: Tensor | SequenceOf[Tensor]) -> None:
        """Takes the K/V of all ROW_GIVEN positions, at all layers. Call it before the first attend.

        Each row of this forward attends to those at its own position and before it, as if they had
        been committed earlier.

        Args:
            k: [layers, given, kv_heads, k_dim], or a tensor [given, kv_heads, k_dim] of each layer;
                in the order of the given spans, rotary embedding already applied.
            v: [layers, given, kv_heads, v_dim], likewise.

        Raises:
            InvalidArgumentError: the forward has no ROW_GIVEN positions, or their K/V were passed
                already; or a tensor of another shape, dtype or device than expected. The forward
                goes on.
            NonFiniteError: a key or value is not finite; the forward was aborted. On a GPU `commit`
                raises it.
        """
        self.give_rows(list(k), list(v), self.pager.place.stream)

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Writes the rows' K/V at this layer without attending.

        k [M, kv_heads, k_dim] and v [M, kv_heads, v_dim] are as `attend` takes them.
        """
        self.write_rows(layer, k, v, self.pager.place.stream)

    def replayed(self, generation: int) -> None:
        """Call it after replaying a CUDA graph that has every layer of a forward.

        Call it on the stream of the replay, between `Pager.begin` and `commit`.

        Args:
            generation: `Pager.generation` at the time of the capture.

        Raises:
            InvalidArgumentError: memory that the graph writes to has been allocated again; abort
                this forward, or capture it again.
        """
        self.mark_replayed(generation, self.pager.place.stream)

    def commit(
        self,
        accepted: Mapping[Any, int] | None = None,
        *,
        provenance: str = "exact",
    ) -> None:
        """Makes rows part of their sequences; chunks that fill up are sealed.

        Args:
            accepted: how many of each sequence's commit rows, from the first; None: all rows of
                all sequences. Given positions count like rows.
            provenance: the best provenance these rows may have: "exact" (in a forward of M rows, or
                of a count proven equal), "decode" or "approximate". In a forward of given positions
                alone they have exactly this one, except that with `config.exact` False nothing is
                exact.

        Raises:
            InvalidArgumentError: a layer was not written, or `give` was not called.
            NonFiniteError: on a GPU, a query, key or value is not finite; the forward was aborted.
        """
        if accepted is None:
            self.commit_rows(None, (), provenance)
        else:
            if not isinstance(accepted, Mapping):
                raise refusal("accepted", accepted, "a mapping {sequence: rows}")
            counts = [as_int64(rows, "accepted") for rows in accepted.values()]
            self.commit_rows(accepted, counts, provenance)


def _float32_column(values: Tensor) -> Tensor:
    """[n] numbers as float32 [1, n, 1], on the same device."""
    if isinstance(values, torch.Tensor):
        return values.detach().float().contiguous().view(1, -1, 1)
    return np.ascontiguousarray(values, dtype=np.float32).reshape(1, -1, 1)
