"""The texts of a cache, one per batch entry, and the columns of one call.

A column is padding, a token that the cache already has, or a new token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvpager.errors import InvalidArgumentError
from kvpager.pager import ROW_COMMIT, ROW_PADDING, ROW_READ, Pager, Sequence, Span


@dataclass(frozen=True)
class TextBatch:
    """The texts of a cache at one moment.

    transformers counts columns, the same number for all entries; shorter texts begin with padding.

    Attributes:
        sequences: the K/V of each entry; none before the first call.
        pads: columns of padding before each text.
        offsets: of each text, the `position_ids` of its first token.
        columns: of all entries.
    """

    sequences: tuple[Sequence, ...] = ()
    pads: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    columns: int = 0

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each text."""
        return tuple(sequence.length for sequence in self.sequences)

    def of(self, sequences: tuple[Sequence, ...], indices: tuple[int, ...]) -> TextBatch:
        """The entries `indices`, in this order, with these sequences."""
        return replace(
            self,
            sequences=sequences,
            pads=tuple(self.pads[index] for index in indices),
            offsets=tuple(self.offsets[index] for index in indices),
        )

    def first(self, columns: int, sequences: tuple[Sequence, ...] | None = None) -> TextBatch:
        """Its first columns; sequences: already cut."""
        return replace(
            self,
            sequences=self.sequences if sequences is None else sequences,
            pads=tuple(min(pad, columns) for pad in self.pads),
            columns=columns,
        )

    def close(self) -> None:
        """Closes its sequences."""
        for sequence in self.sequences:
            sequence.close()


class Texts:
    """The current texts of one cache; its layers and calls share this object.

    Attributes:
        batch: replaced as a whole whenever a text changes.
    """

    def __init__(self, batch: TextBatch) -> None:
        self.batch = batch


Columns = npt.NDArray[np.integer[Any]]  # [batch, columns]


@dataclass(frozen=True)
class Entry:
    """The part of one batch entry in a call.

    Attributes:
        sequence: its K/V.
        length: tokens that it held before the call.
        padding: columns of the call before its first token.
        pads: columns before its text in all.
        start: position in its text of its first token in the call.
        offset: what `position_ids` says of the text's first token.
    """

    sequence: Any
    length: int
    padding: int
    pads: int
    start: int
    offset: int


@dataclass(frozen=True)
class Rows:
    """The columns of one call.

    Attributes:
        before: the cache's texts; with empty sequences where it had none.
        first: which column of the cache is the first of the call.
        tokens: [batch, columns] int32.
        entries: one per row of the batch.
        known: columns at the beginning of the call whose K/V exist in every entry.
    """

    before: TextBatch
    first: int
    tokens: npt.NDArray[np.int32]
    entries: tuple[Entry, ...]
    known: int

    @property
    def columns(self) -> int:
        """Of the call."""
        return int(self.tokens.shape[1])

    @property
    def added(self) -> int:
        """The most tokens that any text gets."""
        return max(
            entry.start + self.columns - entry.padding - entry.length for entry in self.entries
        )

    @property
    def padding(self) -> int:
        """Columns at the left that are padding in every text."""
        return min(entry.padding for entry in self.entries)

    def spans(self, start: int, stop: int) -> tuple[list[Span], npt.NDArray[np.int32]]:
        """Rows of a pager's forward for columns [start, stop), and their tokens."""
        if self.padding >= stop:
            raise InvalidArgumentError(
                f"attention_mask is 0 in columns {self.first + start} to {self.first + stop - 1} "
                f"of every text; leave the first {self.padding} columns out, or ask for the last "
                "logits alone (logits_to_keep)"
            )
        spans: list[Span] = []
        for entry in self.entries:
            padding = min(max(entry.padding - start, 0), stop - start)
            position = entry.start + start + padding - entry.padding
            rows = stop - start - padding
            read = min(max(entry.length - position, 0), rows)
            parts = (
                (None, 0, padding, ROW_PADDING),
                (entry.sequence, position, read, ROW_READ),
                (entry.sequence, position + read, rows - read, ROW_COMMIT),
            )
            spans += [part for part in parts if part[2]]
        return spans, self.tokens[:, start:stop].reshape(-1)

    def after(self, stop: int) -> TextBatch:
        """The cache's texts once its first `stop` columns are committed."""
        columns = max(self.before.columns, self.first + stop)
        return replace(
            self.before,
            pads=tuple(min(entry.pads, columns) for entry in self.entries),
            offsets=tuple(entry.offset for entry in self.entries),
            columns=columns,
        )


def rows_of(
    before: TextBatch,
    pager: Pager,
    ids: torch.Tensor | None,
    mask: torch.Tensor | None,
    positions: torch.Tensor | None,
) -> Rows:
    """Reads the arguments of a call.

    Args:
        before: the cache's texts.
        pager: makes sequences for a cache that has none.
        ids: `input_ids`.
        mask: `attention_mask`.
        positions: `position_ids`.

    Raises:
        InvalidArgumentError: the call cannot be expressed: names the argument and what to do.
    """
    tokens = _tokens(before, ids)
    batch, columns = tokens.shape
    first, paddings = _places(before, batch, columns, mask, positions)
    if not before.sequences:
        before = TextBatch(
            tuple(pager.sequence() for _ in range(batch)), (0,) * batch, (0,) * batch
        )
    given = None if positions is None else positions.detach().cpu().numpy()
    entries = []
    for at, (sequence, pads) in enumerate(zip(before.sequences, paddings)):
        length = sequence.length
        if length and pads != before.pads[at]:
            raise InvalidArgumentError(
                f"attention_mask has {pads} columns of padding before text {at}, which began with "
                f"{before.pads[at]}; pass the mask of all columns, the earlier ones as they were"
            )
        padding = min(max(pads - first, 0), columns)
        start = first + padding - pads
        offset = _offset(before, at, given, padding, start, length, pads)
        entries.append(Entry(sequence, length, padding, pads, start, offset))
        _require_same_text(tokens[at], entries[-1], at)
    known = min(
        max(min(entry.length - entry.start, columns - entry.padding), 0) + entry.padding
        for entry in entries
    )
    return Rows(before, first, tokens, tuple(entries), known if first < before.columns else 0)


def _tokens(before: TextBatch, ids: torch.Tensor | None) -> npt.NDArray[np.int32]:
    if ids is None:
        raise InvalidArgumentError(
            "input_ids is missing; a kvpager cache keeps the token ids beside their K/V, so it "
            "takes no inputs_embeds: pass input_ids"
        )
    if ids.ndim != 2 or ids.shape[1] == 0:
        raise InvalidArgumentError(
            f"input_ids has shape {list(ids.shape)}; expected [batch, tokens], 1 token or more"
        )
    if before.sequences and ids.shape[0] != len(before.sequences):
        raise InvalidArgumentError(
            f"input_ids has a batch of {ids.shape[0]}, but the cache holds "
            f"{len(before.sequences)} texts; call batch_repeat_interleave or batch_select_indices, "
            "or use another cache"
        )
    tokens = ids.detach().cpu().numpy()
    if tokens.dtype.kind not in "iu" or tokens.min() < 0 or tokens.max() > np.iinfo(np.int32).max:
        raise InvalidArgumentError(
            f"input_ids has {tokens.dtype} values from {tokens.min()} to {tokens.max()}; expected "
            "token ids"
        )
    return np.ascontiguousarray(tokens, dtype=np.int32)


def _places(
    before: TextBatch,
    batch: int,
    columns: int,
    mask: torch.Tensor | None,
    positions: torch.Tensor | None,
) -> tuple[int, list[int]]:
    """The cache's column of the call's first one, and the padding before each text in all."""
    if mask is not None:
        if mask.ndim != 2 or mask.shape[0] != batch or mask.shape[1] < columns:
            raise InvalidArgumentError(
                f"attention_mask has shape {list(mask.shape)}; expected [batch, columns], here "
                f"[{batch}, {before.columns + columns}]: a kvpager cache takes causal attention "
                "alone, and padding at the left"
            )
        seen = mask.detach().cpu().numpy() != 0
        paddings = [int(entry.argmax()) if entry.any() else len(entry) for entry in seen]
        for at, (entry, padding) in enumerate(zip(seen, paddings)):
            if not entry[padding:].all():
                raise InvalidArgumentError(
                    f"attention_mask of text {at} has zeros after its first token; expected "
                    'padding at the left alone: set tokenizer.padding_side = "left"'
                )
        first = mask.shape[1] - columns
    else:
        if any(before.pads):
            raise InvalidArgumentError(
                "attention_mask is missing, but texts of this cache begin with padding, which "
                "would be attended to; pass the mask of all columns"
            )
        paddings = [0] * batch
        first = before.columns
        if positions is not None and before.columns:
            first = int(positions[0, 0]) - before.offsets[0]
    if not 0 <= first <= before.columns or (first < before.columns and positions is None):
        what = "attention_mask covers" if mask is not None else "position_ids begin at"
        raise InvalidArgumentError(
            f"{what} {first + columns if mask is not None else first} columns, with {columns} new "
            f"ones in input_ids, but the cache holds {before.columns}; expected "
            f"{before.columns + columns if mask is not None else before.columns}: pass the tokens "
            "after those in the cache, or leave the argument out"
        )
    return first, paddings


def _offset(
    before: TextBatch,
    at: int,
    positions: npt.NDArray[Any] | None,
    padding: int,
    start: int,
    length: int,
    pads: int,
) -> int:
    """The first token's `position_ids`; checks that later ones count on from it."""
    if positions is None:
        return before.offsets[at] if length else pads
    own = positions[min(at, len(positions) - 1)][padding:]
    if not len(own):
        return before.offsets[at]
    offset = int(own[0]) - start
    if length and offset != before.offsets[at]:
        raise InvalidArgumentError(
            f"position_ids of text {at} begin at {int(own[0])}; expected "
            f"{before.offsets[at] + start}, because the cache holds {length} tokens of it; crop "
            "the cache, or pass the tokens that follow"
        )
    if len(own) > 1 and (np.diff(own) != 1).any():
        raise InvalidArgumentError(
            f"position_ids of text {at} do not count up by one; expected "
            f"{int(own[0])} to {int(own[0]) + len(own) - 1}"
        )
    return offset


def _require_same_text(tokens: npt.NDArray[np.int32], entry: Entry, at: int) -> None:
    """Tokens that are fed again have to be those that the cache holds."""
    again = min(entry.length - entry.start, len(tokens) - entry.padding)
    if again <= 0:
        return
    held = entry.sequence.tokens[entry.start : entry.start + again]
    differing = np.flatnonzero(tokens[entry.padding : entry.padding + again] != held)
    if differing.size:
        position = entry.start + int(differing[0])
        raise InvalidArgumentError(
            f"input_ids of text {at} have another token at position {position} than the cache, "
            f"which holds {entry.length} tokens; call cache.keep_prefix(ids) with the whole "
            "prompt first, which keeps what the two have in common, or cache.reset()"
        )
