"""The ledger of a sequence: an entry for each chunk."""

from __future__ import annotations

from kvpager import _core
from kvpager._support.notebook import card, strip
from kvpager._support.words import counted

ChunkInfo = _core.ChunkInfo

_MOST_CELLS = 600
_COLOURS = {
    "in the pool": "#2a9d8f",
    "in host memory": "#e9c46a",
    "on disk": "#f4a261",
    "in a snapshot": "#7b8fd4",
    "damaged": "#c1121f",
    "released": "#9a9a9a",
}


class Ledger(list[ChunkInfo]):
    """One `ChunkInfo` per chunk, in logical order; a notebook shows them as a strip."""

    def _repr_html_(self) -> str:
        cells = [(place_of(one), _told(one)) for one in self]
        tokens = self[-1].stop if self else 0
        title = f"{counted(len(self), 'chunk')}, {counted(tokens, 'token')}"
        return card(title, (), strip(cells, _COLOURS, most=_MOST_CELLS))


def place_of(chunk: ChunkInfo) -> str:
    """The fastest tier that has a chunk, in words."""
    if chunk.damaged:
        return "damaged"
    if chunk.resident:
        return "in the pool"
    if chunk.on_host:
        return "in host memory"
    if chunk.on_disk:
        return "on disk"
    return "in a snapshot" if chunk.in_snapshot else "released"


def _told(chunk: ChunkInfo) -> str:
    state = "sealed" if chunk.sealed else "open"
    return (
        f"chunk {chunk.chunk}: tokens {chunk.start} to {chunk.stop - 1}, {place_of(chunk)}, "
        f"{state}, {chunk.provenance}, score {chunk.qk_score:.3g}"
    )
