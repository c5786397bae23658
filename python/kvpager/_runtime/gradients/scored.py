"""Log-probabilities of given texts, attached to autograd.

The values are those of a rollout: the same forwards of at most M rows, whose keys and values the
pager keeps. Each forward records a graph of its own. The backward pass goes through them from the
last to the first; between them, gradients pass through what attention keeps of each branch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from kvpager._model.seam.attention import RowAttention
from kvpager._model.seam.linear import LinearLayers
from kvpager._runtime.execution.batch import Batch
from kvpager._runtime.execution.core import EngineCore
from kvpager._runtime.gradients.attention import Kept, PieceAttention
from kvpager._runtime.gradients.branches import Branch, Part, Wanted, pieces
from kvpager._runtime.gradients.sums import Sums, summing
from kvpager._runtime.scheduling.recompute import run
from kvpager.pager import Forward
from kvpager.pager import Sequence as PagerSequence
from kvpager.sampling import Distribution

_LOGIT_BYTES = 128 << 20  # most of the logits that are differentiated at once
_LEAST = -1e30


@dataclass(frozen=True)
class Options:
    """How texts are scored.

    temperature: divides the logits. entropies: whether entropies are computed. top: how many of the
    most likely tokens are listed. grad: whether gradients are recorded.
    """

    temperature: float = 1.0
    entropies: bool = False
    top: int = 0
    grad: bool = True


class Outputs(NamedTuple):
    """Values of all counted tokens, text after text; float32, [0] where not requested.

    logprobs: [n]. entropies: [n]. top: [n, k], and the tokens top_ids [n, k] int64.
    """

    logprobs: Tensor
    entropies: Tensor
    top: Tensor
    top_ids: Tensor

    @classmethod
    def empty(cls, count: int, options: Options) -> Outputs:
        """To be filled."""
        most = count if options.top else 0
        return cls(
            torch.empty(count, device="cpu"),
            torch.empty(count if options.entropies else 0, device="cpu"),
            torch.empty((most, options.top), device="cpu"),
            torch.empty((most, options.top), dtype=torch.int64, device="cpu"),
        )


class _Piece:
    """A forward and its graph.

    Attributes:
        attention_of_rows: its attention.
        checkpoints: see `Trace`.
        hidden: the decoder's output [rows, hidden_size]; None before the forward.
        logits: of its wanted rows; None: they are computed again.
        marks: see `PieceAttention.end`.
        wanted: (row, its log-probabilities), by row.
    """

    def __init__(
        self,
        attention: PieceAttention,
        sums: Sums,
        wanted: list[tuple[int, list[Wanted]]],
        again: frozenset[Checkpoint],
    ) -> None:
        self.attention_of_rows = attention
        self.checkpoints = again
        self.wanted = wanted
        self.hidden: Tensor | None = None
        self.logits: Tensor | None = None
        self.marks: list[Tensor] = []
        self._sums = sums

    def products(self, layers: LinearLayers | None) -> AbstractContextManager[object]:
        """See `Trace.products`."""
        return summing(layers, self._sums)

    def attention(self, forward: Forward | None) -> RowAttention:
        """See `Trace.attention`."""
        if forward is not None:
            self.attention_of_rows.begin(forward)
        return self.attention_of_rows

    def outputs(self, of_hidden: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Where its backward pass starts, and the gradients there."""
        outputs, given = [*self.marks], [torch.zeros_like(mark) for mark in self.marks]
        if self.wanted and self.hidden is not None and self.hidden.requires_grad:
            outputs.append(self.hidden)
            given.append(of_hidden)
        return outputs, given


class Checkpoint(NamedTuple):
    """A function that computes a layer again in the backward pass, and its keyword arguments."""

    function: Callable[..., object]
    keywords: frozenset[tuple[str, Any]]


class ScoredTexts:
    """One call: its forwards, the values they gave, and their gradients."""

    def __init__(self, core: EngineCore, options: Options) -> None:
        self._core = core
        self._options = options
        self._parameters = [p for p in core.model.parameters() if p.requires_grad]
        self._versions = _versions(self._parameters)
        self._sums = Sums(self._parameters)
        self._kept: dict[int, Kept] = {}
        self._pieces: list[_Piece] = []
        self._checkpoints = checkpoints(core.model)
        self._keeps_logits = (
            core.runner.head.plain_weight is not None
            and core.model.device.type == "cpu"
            and not self._checkpoints
        )
        self._top_ids = torch.empty(0, dtype=torch.int64, device="cpu")
        self._differentiated = False

    def score(
        self, roots: Sequence[Branch], count: int, report: Callable[[int], object]
    ) -> Outputs:
        """Computes trees of texts; the result is attached to autograd if gradients are recorded.

        count: number of log-probabilities. report: called with the rows done.
        """
        values = Outputs.empty(count, self._options)
        sequences = _Sequences(self._core)
        done = 0
        try:
            for parts in self._packed(roots):
                batch = Batch(self._core.rows)
                for part in parts:
                    tokens = part.branch.tokens[part.first : part.stop]
                    batch.commit(sequences.of(part), part.branch.start + part.first, tokens)
                wanted = _wanted_of(parts)
                batch.wanted.extend(row for row, _ in wanted)
                for logits, (row, given) in zip(self._logits(batch, parts, wanted), wanted):
                    distribution = Distribution(logits, self._options.temperature)
                    distribution.check(int(batch.positions[row]) + 1)
                    self._note(distribution, given, values)
                if self._options.grad:
                    self._keep(parts, sequences)
                sequences.end(parts)
                done += batch.used
                report(done)
        finally:
            sequences.close()
        if not self._options.grad:
            return values
        self._top_ids = values.top_ids
        logprobs, entropies, top = _Scored.apply(  # type: ignore[no-untyped-call]
            self, values[:3], *self._parameters
        )
        return Outputs(logprobs, entropies, top, values.top_ids)

    def _packed(self, roots: Sequence[Branch]) -> Iterator[list[Part]]:
        stats = self._core.pager.stats()
        blocks = int(stats["pool_blocks"] - stats["pinned_blocks"])
        return pieces(roots, self._core.rows, self._core.config.chunk_tokens, blocks)

    def _logits(
        self, batch: Batch, parts: list[Part], wanted: list[tuple[int, list[Wanted]]]
    ) -> Tensor:
        if not self._options.grad:
            return run(self._core, batch)
        for part in parts:
            if id(part.branch) not in self._kept:
                kept = Kept(len(part.branch.tokens), self._core.facts.layout)
                self._kept[id(part.branch)] = kept
        layout, device = self._core.facts.layout, self._core.model.device
        attention = PieceAttention(parts, self._kept, layout, device)
        piece = _Piece(attention, self._sums, wanted, self._checkpoints)
        try:
            piece.hidden, logits = self._core.runner.traced(batch, piece)
        finally:
            piece.marks = attention.end()
        if self._keeps_logits:
            piece.logits = logits
        self._pieces.append(piece)
        return logits

    def _note(self, distribution: Distribution, wanted: list[Wanted], values: Outputs) -> None:
        places = [each.place for each in wanted]
        for each in wanted:
            values.logprobs[each.place] = distribution.log_probability(each.token)
        if self._options.entropies:
            values.entropies[places] = distribution.entropy()
        if self._options.top:
            ids, logprobs = map(list, zip(*distribution.top(self._options.top)))
            values.top[places] = torch.tensor(logprobs, device="cpu")
            values.top_ids[places] = torch.tensor(ids, device="cpu")

    def _keep(self, parts: list[Part], sequences: _Sequences) -> None:
        """Keeps what the rows' keys and values are in the pool, for the gradients."""
        for part in parts:
            first = part.branch.start + part.first
            for layer in range(self._core.facts.layout.layers):
                k, v = sequences.of(part).read_kv(layer, first, first + part.rows)
                self._kept[id(part.branch)].keep(layer, part.first, k, v)

    def gradients(self, outputs: Sequence[Tensor]) -> list[Tensor | None]:
        """Returns gradients of all parameters, from those of the outputs. May be called once."""
        if self._differentiated:
            raise RuntimeError(
                "backward: these log-probabilities were differentiated already, and their graph is "
                "freed; add up what is to be differentiated, or call engine.logprobs again"
            )
        self._require_unchanged()
        self._differentiated = True
        of_hidden = self._through_head(outputs)
        while self._pieces:
            starts, given = self._pieces[-1].outputs(of_hidden.pop())
            if starts:
                with self._core.runner.around(self._pieces[-1]):
                    self._add(
                        torch.autograd.grad(starts, self._parameters, given, allow_unused=True)
                    )
            del starts
            self._pieces.pop()
        self._kept.clear()
        return self._sums.taken(self._parameters)

    def _through_head(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of each piece's hidden states; adds those of the head's parameters."""
        found = []
        most = max(1, _LOGIT_BYTES // (4 * self._core.facts.vocab_size))
        for piece in self._pieces:
            assert piece.hidden is not None
            of_hidden = torch.zeros_like(piece.hidden)
            for start in range(0, len(piece.wanted), most):
                some = slice(start, start + most)
                rows = [row for row, _ in piece.wanted[some]]
                logits = None if piece.logits is None else piece.logits[some]
                of_logits = _OfLogits([each for _, each in piece.wanted[some]], outputs)
                of_hidden[rows] = self._of_head(piece.hidden.detach()[rows], logits, of_logits)
            piece.logits = None
            found.append(of_hidden)
        return found

    def _of_head(self, hidden: Tensor, logits: Tensor | None, of_logits: _OfLogits) -> Tensor:
        """Returns gradients of hidden states [n, hidden_size]."""
        head = self._core.runner.head
        if logits is not None and (weight := head.plain_weight) is not None:
            given = self._of(of_logits, logits).to(hidden)
            if self._sums.takes(weight):
                self._sums.add_product(id(weight), hidden, given)
            return given @ weight.detach()
        with torch.enable_grad(), summing(self._core.facts.linear, self._sums):
            logits = head.logits(hidden.requires_grad_())
            given = self._of(of_logits, logits.detach()).to(logits.dtype)
            inputs = [hidden, *self._parameters]
            own, *found = torch.autograd.grad(logits, inputs, given, allow_unused=True)
        self._add(found)
        return own

    def _of(self, of_logits: _OfLogits, logits: Tensor) -> Tensor:
        temperature, wide = self._options.temperature, logits.float()
        if temperature == 1:
            return of_logits(wide, self._top_ids)
        return of_logits(wide / temperature, self._top_ids).div_(temperature)

    def _add(self, gradients: Iterable[Tensor | None]) -> None:
        for parameter, gradient in zip(self._parameters, gradients):
            if gradient is not None:
                self._sums.add(parameter, gradient)

    def _require_unchanged(self) -> None:
        """Raises RuntimeError if a parameter was changed in place since the forward."""
        now = _versions(self._parameters)
        for parameter, version, changed in zip(self._parameters, self._versions, now):
            if changed != version:
                raise RuntimeError(
                    f"backward: a parameter of shape {list(parameter.shape)} was changed in place "
                    "since its log-probabilities were computed; call backward before the "
                    "optimiser's step"
                )


def checkpoints(model: torch.nn.Module) -> frozenset[Checkpoint]:
    """What computes the layers of a model again in the backward pass; none: nothing does."""
    functions = [
        getattr(module, "_gradient_checkpointing_func", checkpoint)
        for module in model.modules()
        if module.training and getattr(module, "gradient_checkpointing", False)
    ]
    return frozenset(
        Checkpoint(getattr(one, "func", one), frozenset(getattr(one, "keywords", {}).items()))
        for one in functions
    )


class _OfLogits:
    """Gradients of some rows' logits, from those of their log-probabilities, entropies and top."""

    def __init__(self, wanted: list[list[Wanted]], outputs: Sequence[Tensor]) -> None:
        """`wanted`: of each row. `outputs`: gradients of all outputs."""
        pairs = [(row, each) for row, one in enumerate(wanted) for each in one]
        self._rows = torch.tensor([row for row, _ in pairs], device="cpu")
        self._tokens = torch.tensor([each.token for _, each in pairs], device="cpu")
        self._places = torch.tensor([each.place for _, each in pairs], device="cpu")
        self._given = [one[self._places] if len(one) else None for one in outputs]

    def __call__(self, logits: Tensor, top_ids: Tensor) -> Tensor:
        """Maps float32 logits [n, vocab] to gradients of that shape."""
        rows, tokens = self._rows.to(logits.device), self._tokens.to(logits.device)
        logprobs, entropies, top = (
            None if one is None else one.to(logits.device) for one in self._given
        )
        log_p = torch.log_softmax(logits, -1)
        p = log_p.exp()
        totals = p.new_zeros(len(p))
        found = torch.zeros_like(p)
        if logprobs is not None:
            totals.index_add_(0, rows, logprobs)
            found.index_put_((rows, tokens), logprobs, accumulate=True)
        if top is not None:
            totals.index_add_(0, rows, top.sum(-1))
            ids = top_ids[self._places].to(logits.device)
            found.index_put_((rows.unsqueeze(1), ids), top, accumulate=True)
        found.addcmul_(p, totals.unsqueeze(1), value=-1)
        if entropies is not None:
            weights = p.new_zeros(len(p)).index_add_(0, rows, entropies).unsqueeze(1)
            log_p = log_p.clamp(min=_LEAST)  # of a probability of 0
            entropy = -(p * log_p).sum(-1, keepdim=True)
            found.addcmul_(p * (log_p + entropy), weights, value=-1)
        return found


class _Sequences:
    """The pager's sequences of branches that are being computed, or have children to come."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._open: dict[int, PagerSequence] = {}
        self._children: dict[int, int] = {}

    def of(self, part: Part) -> PagerSequence:
        """The sequence of a part's branch, which ends before the part or holds it."""
        branch = part.branch
        found = self._open.get(id(branch))
        if found is None:
            found = self._begin(branch)
            self._open[id(branch)] = found
            found.reserve(branch.start + len(branch.tokens))
        return found

    def _begin(self, branch: Branch) -> PagerSequence:
        if branch.parent is None:
            return self._core.pager.sequence(salt=self._core.tenant.namespace)
        parent = id(branch.parent)
        found = self._open[parent].fork()
        self._children[parent] -= 1
        if not self._children[parent]:
            self._open.pop(parent).close()
        return found

    def end(self, parts: list[Part]) -> None:
        """Closes what nothing follows."""
        for branch in (part.branch for part in parts if part.stop == len(part.branch.tokens)):
            self._children[id(branch)] = len(branch.children)
            if not branch.children:
                self._open.pop(id(branch)).close()

    def close(self) -> None:
        """Closes all."""
        for sequence in self._open.values():
            sequence.close()


def _versions(tensors: Iterable[Tensor]) -> list[int]:
    """How often each was changed in place."""
    return [tensor._version for tensor in tensors]  # noqa: SLF001  # no public name


def _wanted_of(parts: list[Part]) -> list[tuple[int, list[Wanted]]]:
    """Rows of a piece with the log-probabilities that they give."""
    by_row: dict[int, list[Wanted]] = {}
    start = 0
    for part in parts:
        for each in part.branch.wanted:
            if part.first <= each.offset < part.stop:
                by_row.setdefault(start + each.offset - part.first, []).append(each)
        start += part.rows
    return sorted(by_row.items())


class _Scored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scored: ScoredTexts, values: Sequence[Tensor], *_: Tensor) -> Any:
        ctx.scored = scored
        return tuple(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.scored.gradients(outputs)
