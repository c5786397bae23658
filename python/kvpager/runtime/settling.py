"""What an engine finds out about its model, checked from end to end where experts are chosen."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvpager.errors import NonFiniteError, UnsupportedModelError
from kvpager.hf import HEAD_ROWS, Dropped
from kvpager.hf.support import has_experts
from kvpager.hf.watch import ModelWatch
from kvpager.runtime.count_trial import CountTrial

if TYPE_CHECKING:
    from kvpager.runtime.engine import Engine

_log = logging.getLogger(__name__)


def settle(engine: Engine, watch: ModelWatch) -> None:
    """Lets an engine settle on row counts and all that follows; without those that fail a check.

    The proof of row counts tries the parts of a model. A mixture of experts has most between them,
    and its rows go different ways: so a short text is computed in each count as well, and compared
    bit by bit. Where one differs the proof has missed something, and M alone is used.

    Args:
        engine: that knows its model and its configuration.
        watch: of the model.

    Raises:
        UnsupportedModelError: as `settle_rows`; or a count that was asked for gives other bits, or
            M alone does.
    """
    config = engine.config
    engine.settle(config.small_rows)
    if not _to_be_checked(engine):
        return
    proof = engine.row_proof
    assert proof is not None
    watch.learn()
    found = _differing(engine, watch)
    if not found:
        return
    if not isinstance(config.small_rows, str):
        raise _refused(engine, config.small_rows, found[0])
    _log.warning(
        "%s: a short text has other bits in row counts that were proven: %s; forwards have M alone",
        type(engine.model).__name__,
        "; ".join(f"{one.rows} rows, {one.where}" for one in found),
    )
    engine.config = config  # its pool may follow from M
    engine.settle("fixed")
    _require_one_way(engine, watch)
    assert engine.row_proof is not None
    engine.row_proof = replace(engine.row_proof, dropped=(*proof.dropped, *found))


def _to_be_checked(engine: Engine) -> bool:
    counts = engine.row_counts
    return (
        engine.row_proof is not None
        and (counts.smaller, counts.head) != ((), (HEAD_ROWS,))
        and has_experts(engine.model)
    )


def _differing(engine: Engine, watch: ModelWatch) -> Sequence[Dropped]:
    with CountTrial(engine, watch) as trial:
        try:
            return trial.differing()
        except NonFiniteError as error:  # nothing to compare, so nothing to rely on
            where = f"the short check at start, which could not be made: {error}"
            counts = engine.row_counts
            others = sorted({*counts.smaller, *counts.head} - {HEAD_ROWS})
            return [Dropped(count, where) for count in others]


def _require_one_way(engine: Engine, watch: ModelWatch) -> None:
    with CountTrial(engine, watch) as trial:
        try:
            what = trial.difference_of_all_rows()
        except NonFiniteError:  # a text that comes to this is refused by itself
            return
    if what is not None:
        raise UnsupportedModelError(
            f"{type(engine.model).__name__}: {what} of a short text depend on which tokens share a "
            f"forward, also where all forwards have {engine.rows} rows, so no saved K/V could be "
            "trusted; use another architecture or dtype, or exact=False"
        )


def _refused(engine: Engine, small_rows: tuple[int, ...], found: Dropped) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"PagerConfig.small_rows is {small_rows}, but {found.rows} rows give "
        f"{type(engine.model).__name__} other bits than {engine.rows} ({found.where}), which no "
        'trial of its parts has shown; set small_rows to "fixed", or to "proven", which then '
        "leaves all counts below M out"
    )
