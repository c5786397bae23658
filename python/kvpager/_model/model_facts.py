"""`ModelFacts`: everything an engine knows of its model, found out before the engine exists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from kvpager._model.layout import Layout
from kvpager._model.proof.prove import RowProof
from kvpager._model.seam.linear import LinearLayers
from kvpager._model.seam.recurrent import Recurrence
from kvpager._model.seam.rows import RowCounts
from kvpager._model.watch.model_watch import ModelWatch
from kvpager.config import PagerConfig
from kvpager.plan import PoolChoice

# What computes linear layers: torch, or kvpager on the processor or on its device.
Products: TypeAlias = Literal["torch", "processor", "device"]


@dataclass(frozen=True)
class Findings:
    """Properties that a model shows when it runs.

    Attributes:
        config: the engine's configuration, with a number as `pool_tokens`.
        plan: how that number was chosen, if it was "auto".
        layout: layers, heads and dtypes of the K/V.
        row_counts: the row counts of forwards.
        row_proof: why these; None for a model with recurrent layers.
        recurrence: the recurrent layers; None without any.
        q_heads: query heads of each layer.
        kernel_version: identifies the arithmetic of its attention.
        window: the largest window of any layer, in tokens; 0: one has no window.
        behaviour: digest of the forward that they were found with, where it is the fingerprint's
            (identity/behaviour.py); else empty.
    """

    config: PagerConfig
    plan: PoolChoice | None
    layout: Layout
    row_counts: RowCounts
    row_proof: RowProof | None
    recurrence: Recurrence | None
    q_heads: int
    kernel_version: int | str
    window: int
    behaviour: str

    @property
    def rows(self) -> int:
        """M, the most rows of a forward."""
        return self.row_counts.rows


@dataclass(frozen=True)
class ModelFacts(Findings):
    """Findings, and what identifies the model.

    Attributes:
        vocab_size: number of token ids the model accepts.
        linear: the linear layers that kvpager computes; None: torch computes all.
        fingerprint: everything the bits depend on, by name.
        watch: notices changes of the model.
    """

    vocab_size: int
    linear: LinearLayers | None
    fingerprint: Mapping[str, Any]
    watch: ModelWatch
