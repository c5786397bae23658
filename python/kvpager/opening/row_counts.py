"""Finds a model's row counts, and for a mixture of experts checks them end to end."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from kvpager.errors import NonFiniteError, UnsupportedModelError
from kvpager.execution.core import EngineCore
from kvpager.hf import HEAD_ROWS, Dropped
from kvpager.hf.support import has_experts
from kvpager.hf.watch import ModelWatch
from kvpager.opening.count_trial import CountTrial
from kvpager.opening.findings import find_out
from kvpager.opening.proven_before import ProvenBefore

_log = logging.getLogger(__name__)


def settle_row_counts(core: EngineCore, watch: ModelWatch, weights: str) -> bool:
    """`find_row_counts`, unless they were found of the same model before; whether they were.

    `weights`: the digest of the model's.
    """
    before = ProvenBefore(core, weights)
    config = core.config
    if before.take():
        return True
    core.config = config  # a proof that was taken and thrown away has sized the pool
    find_row_counts(core, watch)
    before.remember()
    return False


def find_row_counts(core: EngineCore, watch: ModelWatch) -> None:
    """Finds row counts and what depends on them, without counts that fail a check.

    The proof of row counts tries the parts of a model one by one. A mixture of experts does much
    between its parts, and routes rows differently: so this also computes a short text with each
    count and compares the bits. If one count differs, the proof has missed something, and M alone
    is used.

    Args:
        core: has its model and configuration already.
        watch: of the model.

    Raises:
        UnsupportedModelError: as `settle_rows`; or a count that the configuration requires gives
            other bits; or forwards of M rows do.
    """
    config = core.config
    find_out(core, config.small_rows)
    if not _to_be_checked(core):
        return
    proof = core.row_proof
    assert proof is not None
    watch.learn()
    found = _differing(core, watch)
    if not found:
        return
    if not isinstance(config.small_rows, str):
        raise _refused(core, config.small_rows, found[0])
    _log.warning(
        "%s: a short text has other bits in row counts that were proven: %s; forwards have M alone",
        type(core.model).__name__,
        "; ".join(f"{one.rows} rows, {one.where}" for one in found),
    )
    core.config = config  # the pool may depend on M
    find_out(core, "fixed")
    _require_one_way(core, watch)
    assert core.row_proof is not None
    core.row_proof = replace(core.row_proof, dropped=(*proof.dropped, *found))


def _to_be_checked(core: EngineCore) -> bool:
    counts = core.row_counts
    return (
        core.row_proof is not None
        and (counts.smaller, counts.head) != ((), (HEAD_ROWS,))
        and has_experts(core.model)
    )


def _differing(core: EngineCore, watch: ModelWatch) -> Sequence[Dropped]:
    with CountTrial(core, watch) as trial:
        try:
            return trial.differing()
        except NonFiniteError as error:  # nothing can be compared
            where = f"the short check at start, which could not be made: {error}"
            counts = core.row_counts
            others = sorted({*counts.smaller, *counts.head} - {HEAD_ROWS})
            return [Dropped(count, where) for count in others]


def _require_one_way(core: EngineCore, watch: ModelWatch) -> None:
    with CountTrial(core, watch) as trial:
        try:
            what = trial.difference_of_all_rows()
        except NonFiniteError:  # a forward refuses such a text anyway
            return
    if what is not None:
        raise UnsupportedModelError(
            f"{type(core.model).__name__}: {what} of a short text depend on which tokens share a "
            f"forward, also where all forwards have {core.rows} rows, so no saved K/V could be "
            "trusted; use another architecture or dtype, or exact=False"
        )


def _refused(
    core: EngineCore, small_rows: tuple[int, ...], found: Dropped
) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"PagerConfig.small_rows is {small_rows}, but {found.rows} rows give "
        f"{type(core.model).__name__} other bits than {core.rows} ({found.where}), which no "
        'trial of its parts has shown; set small_rows to "fixed", or to "proven", which then '
        "leaves all counts below M out"
    )
