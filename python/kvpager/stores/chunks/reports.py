"""What calls of a chunk store return."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class ReadResult(enum.Enum):
    """What became of one block of a read. Its destination was written only if it is HIT."""

    HIT = "hit"  # verified and copied
    MISS = "miss"  # the store has no such block, or it was evicted meanwhile
    REFUSED = "refused"  # it is damaged, is another block's, has another size, or cannot be read


@dataclass(frozen=True)
class PutReport:
    """The report of a put. Numbers count blocks.

    Attributes:
        stored: written, durable and visible.
        already_there: not written, because the store had them or an earlier block of the call has
            the same key and group.
        bytes_written: size of the new pack, 0 without one.
        evicted: removed from the store to make room.
    """

    stored: int = 0
    already_there: int = 0
    bytes_written: int = 0
    evicted: int = 0


@dataclass(frozen=True)
class ChunkGcReport:
    """The report of a chunk store's garbage collection.

    Attributes:
        bytes_freed: by how much the store's files shrank.
        expired: number of blocks removed because their time to live was over.
        evicted: number of blocks removed because the store was over its budget.
        temporaries: number of removed files of writers that died.
        damaged_packs: number of removed packs whose tables are damaged.
    """

    bytes_freed: int = 0
    expired: int = 0
    evicted: int = 0
    temporaries: int = 0
    damaged_packs: int = 0


@dataclass(frozen=True)
class DamagedBlock:
    """A block, or a whole pack, that is not what was written.

    Attributes:
        file: path of the pack.
        key: of the block; None: the pack's table is damaged.
        group: of the block, 0 without one.
        message: what was found.
    """

    file: str
    key: bytes | None
    group: int
    message: str
