"""A pack of a store after every byte of it was read, and whose its damage is."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpager.cli.snapshot import damage as damages
from kvpager.cli.snapshot.damage import Damage
from kvpager.cli.snapshot.opened import Opened
from kvpager.errors import CorruptSnapshotError
from kvpager.stores.base import ProgressCallback

Wrong = tuple["int | None", str]  # layer (None: the summary), message


class CheckedPack:
    """What is wrong with each chunk, and which of it some snapshot has claimed.

    Attributes:
        path: the file.
        corrupt: why it cannot be opened at all; its chunks may be sound all the same.
    """

    def __init__(
        self,
        path: Path,
        opened: Opened | CorruptSnapshotError,
        threads: int,
        progress: ProgressCallback | None,
    ) -> None:
        """Reads the pack whole."""
        self.path = path
        self.corrupt = opened if isinstance(opened, CorruptSnapshotError) else None
        self._wrong: dict[int, list[Wrong]] = defaultdict(list)
        self._claimed: set[int] = set()
        self._opened: Opened | None = None
        if isinstance(opened, Opened):
            self._opened = opened
            self._slices: npt.NDArray[Any] = opened.reader.slice_checksums
            self._summaries: npt.NDArray[Any] = opened.reader.summary_checksums
            for chunk, layer, message in opened.reader.verify(threads, progress):
                self._wrong[chunk].append((layer if layer >= 0 else None, message))

    def damaged_chunks(self) -> list[tuple[Opened, int]]:
        """Chunks whose bytes are not what was written, in order, with whom to read them from."""
        return [(self._opened, chunk) for chunk in sorted(self._wrong) if self._opened is not None]

    def claim(self, chunk: int, slices: npt.NDArray[Any], summary: int) -> list[Wrong]:
        """What is wrong with a chunk for a snapshot that was saved with these checksums."""
        self._claimed.add(chunk)
        if chunk in self._wrong:
            return self._wrong[chunk]
        other: list[int | None] = [
            int(layer) for layer in np.flatnonzero(self._slices[chunk] != slices)
        ]
        if int(self._summaries[chunk]) != summary:
            other.append(None)
        message = f"pack {self.path.name} holds other bytes than the snapshot was saved with"
        return [(layer, message) for layer in other]

    def unclaimed(self) -> list[Damage]:
        """Damage that is no snapshot's: of the file's own tables, and of chunks nobody needs."""
        if self.corrupt is not None:
            return [damages.whole_file(str(self.path), None, self.corrupt)]
        return [
            damages.of_chunk(opened, None, chunk, layer, message)
            for opened, chunk in self.damaged_chunks()
            if chunk not in self._claimed
            for layer, message in self._wrong[chunk]
        ]
