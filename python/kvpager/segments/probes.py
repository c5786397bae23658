"""Measurements of a stitched text for repair policies, in rows that are not committed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvpager import pager
from kvpager._runtime.execution.batch import Batch
from kvpager._runtime.execution.core import EngineCore
from kvpager._runtime.scheduling.recompute import recomputing_damage, run
from kvpager._support.tokens import TokenIds
from kvpager.errors import InvalidArgumentError
from kvpager.segments.pieces import Piece
from kvpager.segments.policies import KEY, VALUE, Mask, Scores
from kvpager.segments.stitching import Stitcher

KEY_BLOCK = 8192  # keys that queries are multiplied with at a time


@dataclass(frozen=True)
class _Asked:
    """Queries and keys of one layer. q: [T, q_heads, k_dim]; k: [T, kv_heads, k_dim]."""

    q: torch.Tensor
    k: torch.Tensor
    call: Mapping[str, Any]


class StitchedText:
    """A `Stitched` over an engine: the text with moved K/V and no repair, made at its first use.

    Attributes:
        rows: rows computed so far; a forward that stops early counts by its share of layers.
        forwards: forwards run so far.
    """

    def __init__(
        self,
        core: EngineCore,
        pieces: Sequence[Piece],
        text: TokenIds,
        *,
        prefix: pager.Sequence,
        question: int,
    ) -> None:
        """prefix: holds the exact beginning of the text. question: position of the question."""
        self.pieces = tuple(pieces)
        self.tokens = len(text)
        self.layers = core.facts.layout.layers
        self.moved = np.zeros(len(text), dtype=np.bool_)
        for piece in pieces:
            self.moved[piece.start : piece.stop] = piece.moved
        self.rows = 0.0
        self.forwards = 0
        self._core = core
        self._text = text
        self._prefix = prefix
        self._question = question
        self._sequence: pager.Sequence | None = None
        self._asked: list[_Asked] | None = None

    def deviation(self, among: Mask, layer: int, of: str) -> Scores:
        """See `Stitched.deviation`."""
        if of not in (KEY, VALUE):
            raise InvalidArgumentError(f'of is {of!r}; expected "key" or "value"')
        if type(layer) is not int or not 1 <= layer < self.layers:
            raise InvalidArgumentError(
                f"layer is {layer!r}; expected 1 to {self.layers - 1}: the first layer's K/V do "
                "not depend on other tokens"
            )
        sequence = self._stitched()
        scores = np.zeros(self.tokens, dtype=np.float32)
        chosen = np.flatnonzero(among & self.moved)
        for first in range(0, len(chosen), self._core.rows):
            at = chosen[first : first + self._core.rows]
            fresh: list[torch.Tensor] = []

            def hear(
                now: int,
                q: torch.Tensor,
                k: torch.Tensor,
                v: torch.Tensor,
                call: Mapping[str, Any],
                fresh: list[torch.Tensor] = fresh,
            ) -> bool:
                if now == layer:
                    fresh.append((k if of == KEY else v).cpu())
                return now == layer

            batch = self._reading(sequence, at)
            self._look(sequence, batch, hear)
            held = self._kept(sequence, layer, at, of)
            # In the pager's dtype, so that rounding does not count as a deviation.
            computed = fresh[0][: len(at)].to(held.dtype).float()
            scores[at] = (computed - held.float()).square().sum(dim=(1, 2)).numpy()
        return scores

    def question_attention(self, rows: int) -> Scores:
        """See `Stitched.question_attention`."""
        asked = self._ask()
        sequence = self._stitched()
        mass = torch.zeros(self.tokens)
        for layer, one in enumerate(asked):
            with torch.inference_mode():
                mass += self._attention(sequence, layer, one, rows)
        return np.asarray(mass.numpy(), dtype=np.float32)

    def close(self) -> None:
        """Releases its chunks."""
        if self._sequence is not None:
            self._sequence.close()

    def _stitched(self) -> pager.Sequence:
        if self._sequence is None:
            sequence = self._prefix.fork()
            try:
                sequence.reserve(self.tokens)
                stitcher = Stitcher(self._core, self.pieces, self._text)
                stitcher.extend(sequence, self._question, ~self.moved)
            except BaseException:
                sequence.close()
                raise
            self.rows += stitcher.rows
            self.forwards += stitcher.forwards
            self._sequence = sequence
        return self._sequence

    def _ask(self) -> list[_Asked]:
        """Each layer's queries of the question's last rows, or of the text's without a question."""
        if self._asked is not None:
            return self._asked
        core, sequence = self._core, self._stitched()
        last = max(self._question, self.tokens - core.rows)
        while sequence.length < last:
            start = sequence.length
            batch = self._batch()
            batch.commit(sequence, start, self._text[start : min(last, start + core.rows)])
            run(core, batch)
            self._count(batch, self.layers)
        if last < self.tokens:
            batch = self._batch()
            batch.commit(sequence, last, self._text[last:])
        else:
            batch = self._reading(sequence, np.arange(max(0, last - core.rows), last))
        asked: dict[int, _Asked] = {}

        def hear(
            layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Mapping[str, Any]
        ) -> bool:
            asked[layer] = _Asked(q[: batch.used].cpu(), k[: batch.used].cpu(), dict(call))
            return False

        self._look(sequence, batch, hear)
        self._asked = [asked[layer] for layer in range(self.layers)]
        return self._asked

    def _attention(
        self, sequence: pager.Sequence, layer: int, asked: _Asked, rows: int
    ) -> torch.Tensor:
        """[tokens] attention probabilities of the last `rows` rows, summed over rows and heads."""
        rows = min(rows, len(asked.q))
        q = asked.q[-rows:].float() * float(asked.call["scaling"])
        kv_heads = asked.k.shape[1]
        grouped = q.view(rows, kv_heads, -1, q.shape[-1])
        scores = torch.empty(*grouped.shape[:3], self.tokens)
        held = min(sequence.length, self.tokens - len(asked.k))
        for start in range(0, held, KEY_BLOCK):
            stop = min(start + KEY_BLOCK, held)
            keys = self._kept(sequence, layer, np.arange(start, stop), KEY).float()
            scores[..., start:stop] = torch.einsum("thgd,nhd->thgn", grouped, keys)
        scores[..., held:] = torch.einsum("thgd,nhd->thgn", grouped, asked.k.float())
        if asked.call.get("softcap"):
            cap = float(asked.call["softcap"])
            scores = cap * torch.tanh(scores / cap)
        at = torch.arange(self.tokens)
        own = at[-rows:].view(rows, 1)
        hidden = at > own
        if asked.call.get("window"):
            hidden |= at <= own - int(asked.call["window"])
        scores.masked_fill_(hidden.view(rows, 1, 1, -1), -torch.inf)
        if asked.call.get("sinks") is not None:
            sinks = asked.call["sinks"].detach().float().cpu().view(1, kv_heads, -1, 1)
            scores = torch.cat([scores, sinks.expand(rows, -1, -1, 1)], dim=-1)
        return torch.softmax(scores, dim=-1)[..., : self.tokens].sum(dim=(0, 1, 2))

    def _kept(self, sequence: pager.Sequence, layer: int, at: np.ndarray, of: str) -> torch.Tensor:
        """Keys or values of a sequence at ascending positions of one layer: [n, kv_heads, dim]."""
        start, stop = int(at[0]), int(at[-1]) + 1
        kept = recomputing_damage(
            self._core, [sequence], lambda: sequence.read_kv(layer, start, stop)
        )
        return kept[0 if of == KEY else 1][torch.from_numpy(at - start)]

    def _batch(self) -> Batch:
        batch = Batch(self._core.rows, exact=self._core.config.exact is not False)
        batch.dense, batch.provenance = True, "approximate"
        return batch

    def _reading(self, sequence: pager.Sequence, at: np.ndarray) -> Batch:
        batch = self._batch()
        for position in at:
            batch.read(sequence, int(position), int(self._text[position]))
        return batch

    def _look(self, sequence: pager.Sequence, batch: Batch, hear: Any) -> None:
        runner = self._core.runner
        layers = recomputing_damage(self._core, [sequence], lambda: runner.look(batch, hear))
        self._count(batch, layers)

    def _count(self, batch: Batch, layers: int) -> None:
        self.rows += batch.used * layers / self.layers
        self.forwards += 1
