"""The texts of a transformers cache, one per entry of its batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvpager.pager import Sequence


@dataclass(frozen=True)
class Batch:
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

    def of(self, sequences: tuple[Sequence, ...], indices: tuple[int, ...]) -> Batch:
        """The entries `indices`, in this order, with these sequences."""
        return replace(
            self,
            sequences=sequences,
            pads=tuple(self.pads[index] for index in indices),
            offsets=tuple(self.offsets[index] for index in indices),
        )

    def first(self, columns: int, sequences: tuple[Sequence, ...] | None = None) -> Batch:
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
    """What the texts of one cache are; its layers and calls share it.

    Attributes:
        batch: replaced as a whole whenever a text changes.
    """

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
