"""The lower level: a pager for a serving stack that runs its own model.

    pager = Pager(Layout(layers=2, kv_heads=2, k_dim=64, v_dim=64), config, rows=64)
    sequence = pager.sequence()
    with pager.begin(sequences, positions, tokens, kinds) as forward:
        for layer in range(2):
            out = forward.attend(layer, q, k, v, scaling=0.125)
        forward.commit()

Tensors are torch tensors on the pager's device, or numpy arrays on the CPU, and are read in place;
outputs are of the same kind. On a GPU all work goes to torch's current stream, and only `commit`
waits for it. Several threads may use a pager; calls take turns, and one forward runs at a time.
"""

from __future__ import annotations

from kvpager._model.layout import Layout
from kvpager.pager.device import READ_DTYPES
from kvpager.pager.forward import (
    ROW_COMMIT,
    ROW_GIVEN,
    ROW_PADDING,
    ROW_READ,
    Forward,
    Span,
    Tensor,
)
from kvpager.pager.ledger import ChunkInfo, Ledger
from kvpager.pager.pager import (
    TIER_DISK,
    TIER_HOST,
    TIER_RESIDENT,
    TIER_SNAPSHOT,
    Pager,
    Pin,
    Sequence,
    attention_version,
)
from kvpager.pager.snapshot import SALT_FIELD, SnapshotInfo, open_snapshot

__all__ = [
    "READ_DTYPES",
    "ROW_COMMIT",
    "ROW_GIVEN",
    "ROW_PADDING",
    "ROW_READ",
    "SALT_FIELD",
    "TIER_DISK",
    "TIER_HOST",
    "TIER_RESIDENT",
    "TIER_SNAPSHOT",
    "ChunkInfo",
    "Forward",
    "Layout",
    "Ledger",
    "Pager",
    "Pin",
    "Sequence",
    "SnapshotInfo",
    "Span",
    "Tensor",
    "attention_version",
    "open_snapshot",
]
