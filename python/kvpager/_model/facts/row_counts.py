"""Finds a model's row counts, layout and attention by running it; checks mixtures of experts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvpager._model.facts.checked_model import CheckedModel, attention, common_window, sized
from kvpager._model.facts.count_trial import CountTrial
from kvpager._model.identity.behaviour import behave
from kvpager._model.model_facts import Findings
from kvpager._model.proof.aligned import settle_states
from kvpager._model.proof.own_attention import require_own_attention
from kvpager._model.proof.prove import Dropped, RowProof, settle_rows
from kvpager._model.seam.causal_lm import HEAD_ROWS
from kvpager._model.seam.layout import layout_of
from kvpager._model.seam.observe import Observation
from kvpager._model.seam.recurrent import Recurrence, is_recurrent
from kvpager._model.seam.rows import RowCounts
from kvpager._model.seam.support import has_experts
from kvpager._model.watch.model_watch import ModelWatch
from kvpager.config import PagerConfig
from kvpager.errors import NonFiniteError, UnsupportedModelError
from kvpager.pager.device import PoolDevice

_log = logging.getLogger(__name__)


def find_row_counts(checked: CheckedModel, watch: ModelWatch) -> Findings:
    """Finds row counts and what depends on them, without counts that fail a check.

    The proof of row counts tries the parts of a model one by one. A mixture of experts does much
    between its parts, and routes rows differently: so this also computes a short text with each
    count and compares the bits. If one count differs, the proof has missed something, and M alone
    is used.

    Args:
        checked: the model.
        watch: of the model.

    Raises:
        UnsupportedModelError: as `settle_rows`; or a count that the configuration requires gives
            other bits; or forwards of M rows do.
    """
    small_rows = checked.config.small_rows
    found = find_out(checked, small_rows)
    if not _to_be_checked(checked, found):
        return found
    watch.learn()
    differing = _differing(checked, found, watch)
    if not differing:
        return found
    if not isinstance(small_rows, str):
        raise _refused(checked, found, small_rows, differing[0])
    _log.warning(
        "%s: a short text has other bits in row counts that were proven: %s; forwards have M alone",
        type(checked.model).__name__,
        "; ".join(f"{one.rows} rows, {one.where}" for one in differing),
    )
    fixed = find_out(checked, "fixed")
    _require_one_way(checked, fixed, watch)
    assert found.row_proof is not None
    assert fixed.row_proof is not None
    dropped = (*found.row_proof.dropped, *differing)
    return replace(fixed, row_proof=replace(fixed.row_proof, dropped=dropped))


def _to_be_checked(checked: CheckedModel, found: Findings) -> bool:
    counts = found.row_counts
    return (
        found.row_proof is not None
        and (counts.smaller, counts.head) != ((), (HEAD_ROWS,))
        and has_experts(checked.model)
    )


def _differing(checked: CheckedModel, found: Findings, watch: ModelWatch) -> Sequence[Dropped]:
    with CountTrial(checked, found, watch) as trial:
        try:
            return trial.differing()
        except NonFiniteError as error:  # nothing can be compared
            where = f"the short check at start, which could not be made: {error}"
            counts = found.row_counts
            others = sorted({*counts.smaller, *counts.head} - {HEAD_ROWS})
            return [Dropped(count, where) for count in others]


def _require_one_way(checked: CheckedModel, found: Findings, watch: ModelWatch) -> None:
    with CountTrial(checked, found, watch) as trial:
        try:
            what = trial.difference_of_all_rows()
        except NonFiniteError:  # a forward refuses such a text anyway
            return
    if what is not None:
        raise UnsupportedModelError(
            f"{type(checked.model).__name__}: {what} of a short text depend on which tokens share "
            f"a forward, also where all forwards have {found.rows} rows, so no saved K/V could be "
            "trusted; use another architecture or dtype, or exact=False"
        )


def _refused(
    checked: CheckedModel, found: Findings, small_rows: tuple[int, ...], differing: Dropped
) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"PagerConfig.small_rows is {small_rows}, but {differing.rows} rows give "
        f"{type(checked.model).__name__} other bits than {found.rows} ({differing.where}), which "
        'no trial of its parts has shown; set small_rows to "fixed", or to "proven", which then '
        "leaves all counts below M out"
    )


def find_out(checked: CheckedModel, small_rows: str | tuple[int, ...]) -> Findings:
    """Finds row counts, layout and what depends on them. `small_rows`: as in `PagerConfig`.

    Raises UnsupportedModelError.
    """
    model, config, place = checked.model, checked.config, checked.place
    recurrent = is_recurrent(model)
    require_own_attention(model, config.chunk_tokens, packed=not recurrent)
    if recurrent:
        seen, counts, recurrence = settle_states(model, checked.row_choices[0])
        return conclude(model, config, place, seen, counts, recurrence=recurrence)
    seen, counts, proof = settle_rows(
        model, checked.row_choices, small_rows=small_rows, exact=config.exact is not False
    )
    return conclude(model, config, place, seen, counts, proof=proof)


def find_out_with(checked: CheckedModel, proof: RowProof) -> Findings:
    """The same for a model without recurrent layers, with counts that are known to be so."""
    model, config, place = checked.model, checked.config, checked.place
    done = behave(model, proof.counts)
    return conclude(
        model, config, place, done.seen, proof.counts, proof=proof, behaviour=done.digest
    )


def conclude(
    model: Any,
    config: PagerConfig,
    place: PoolDevice,
    seen: Observation,
    counts: RowCounts,
    *,
    proof: RowProof | None = None,
    recurrence: Recurrence | None = None,
    behaviour: str = "",
) -> Findings:
    """The findings that follow from a forward of a model and from its row counts.

    Raises UnsupportedModelError, InvalidArgumentError: a pager cannot keep its K/V so.
    """
    layout = layout_of(model, seen, config, recurrent=recurrence is not None)
    config, plan = sized(config, model, layout, counts.rows, place)
    q_heads, kernel_version = attention(seen, layout, config, place)
    return Findings(
        config,
        plan,
        layout,
        counts,
        proof,
        recurrence,
        q_heads,
        kernel_version,
        common_window(seen),
        behaviour,
    )
