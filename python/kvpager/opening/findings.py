"""Runs a model to find out its row counts, layout and attention."""

from __future__ import annotations

from kvpager.execution.core import EngineCore, Numerics
from kvpager.hf import Observation, RowProof, layout_of, settle_rows
from kvpager.hf.aligned import settle_states
from kvpager.hf.behaviour import behave
from kvpager.hf.own_attention import require_own_attention
from kvpager.hf.recurrent import is_recurrent
from kvpager.opening.choices import attention, common_window, sized


def find_out(core: EngineCore, small_rows: str | tuple[int, ...]) -> None:
    """Finds row counts, layout and what depends on them. `small_rows`: as in `PagerConfig`.

    Raises UnsupportedModelError.
    """
    exact = core.config.exact is not False
    core.recurrence = core.row_proof = None
    recurrent = is_recurrent(core.model)
    require_own_attention(core.model, core.config.chunk_tokens, packed=not recurrent)
    if recurrent:
        seen, core.row_counts, core.recurrence = settle_states(core.model, core.row_choices[0])
    else:
        seen, core.row_counts, core.row_proof = settle_rows(
            core.model, core.row_choices, small_rows=small_rows, exact=exact
        )
    _conclude(core, seen)


def find_out_with(core: EngineCore, proof: RowProof) -> None:
    """The same for a model without recurrent layers, with counts that are known to be so."""
    core.recurrence = None
    core.row_proof, core.row_counts = proof, proof.counts
    found = behave(core.model, proof.counts)
    _conclude(core, found.seen, found.digest)


def _conclude(core: EngineCore, seen: Observation, behaviour: str = "") -> None:
    core.layout = layout_of(core.model, seen, core.config, recurrent=core.recurrence is not None)
    core.config, core.plan = sized(core.config, core.model, core.layout, core.rows, core.place)
    q_heads, kernel_version = attention(seen, core.layout, core.config, core.place)
    core.numerics = Numerics(q_heads, kernel_version, common_window(seen), behaviour)
