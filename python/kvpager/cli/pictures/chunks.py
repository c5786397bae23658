"""A table of a snapshot's chunks: scores, last uses and provenance."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from kvpager._core import SnapshotContent

PROVENANCES = ("exact", "decode", "approximate")  # from best to worst

Scores = npt.NDArray[np.float64]
Ages = npt.NDArray[np.uint64]
Grades = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class ChunkTable:
    """One row per chunk, in logical order.

    scores: shares of attention mass, [chunks], or [0] where none were saved. ages: forwards since
    they were last read, when this was saved, likewise. grades: index into PROVENANCES, [chunks].
    """

    tokens: int
    chunk_tokens: int
    scores: Scores
    ages: Ages
    grades: Grades

    @property
    def chunks(self) -> int:
        """How many there are."""
        return len(self.grades)

    def bins(self, columns: int) -> ChunkTable:
        """The same in at most `columns` rows, each for a group of neighbours.

        A group has its best score, least age and worst provenance, so that no exceptional chunk is
        hidden.
        """
        if self.chunks <= columns:
            return self
        starts = np.arange(columns) * self.chunks // columns
        return replace(
            self,
            scores=np.maximum.reduceat(self.scores, starts) if len(self.scores) else self.scores,
            ages=np.minimum.reduceat(self.ages, starts) if len(self.ages) else self.ages,
            grades=np.maximum.reduceat(self.grades, starts),
        )

    def widened(self, columns: int) -> ChunkTable:
        """The same with every row repeated `columns` times, for a wider picture of few chunks."""
        columns = max(1, columns)
        wide = {name: getattr(self, name).repeat(columns) for name in ("scores", "ages", "grades")}
        return replace(self, **wide)


def chunk_table(content: SnapshotContent) -> ChunkTable:
    """Of a snapshot, or of a sequence that is about to become one."""
    grade = {name: number for number, name in enumerate(PROVENANCES)}
    return ChunkTable(
        tokens=len(content.tokens),
        chunk_tokens=content.layout.chunk_tokens,
        scores=np.asarray(content.qk_score, np.float64),
        ages=np.asarray(content.last_use, np.uint64),
        grades=np.array([grade[name] for name in content.provenance], np.uint8),
    )
