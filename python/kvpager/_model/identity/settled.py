"""Whether a model does the same each time, once its first forward has set it up."""

from __future__ import annotations

import hashlib
import logging
from typing import Any

import torch

from kvpager._model.identity.behaviour import TOKENS, behave
from kvpager._model.identity.description import state_digest
from kvpager._model.identity.reading import require_no_reading
from kvpager._model.seam.attention import running
from kvpager._model.seam.causal_lm import decoder_of, requiring
from kvpager._model.seam.observe import Recorder, packed_inputs
from kvpager._model.seam.recurrent import Recurrence, is_recurrent
from kvpager._model.seam.rows import RowCounts
from kvpager._model.watch.model_watch import ModelWatch
from kvpager._model.weights.held import is_quantised
from kvpager.errors import InvalidArgumentError, ModelChangedError, UnsupportedModelError

_COUNTS = (64, 1)  # rows: a kernel for one row may want its weights in another order


def settle_weights(model: Any) -> None:
    """Runs a model with quantised weights on a few rows; others are left alone.

    The digest of its weights and the watch over them then concern what forwards compute with, and
    not what was loaded.

    Raises:
        UnsupportedModelError: it does not run.
    """
    if not any(map(is_quantised, model.modules())):
        return
    for count in _COUNTS:
        with requiring(
            f"{type(model).__name__} has quantised weights and does not run on {count} rows under "
            "torch.inference_mode()",
            "load it as the library asks for this device, or without quantising its weights",
        ):
            _run(model, count)


def _run(model: Any, rows: int) -> None:
    """Runs rows of token 0 at position 0."""
    tokens = torch.zeros(rows, dtype=torch.int64, device=model.device)
    with torch.inference_mode(), running(Recorder()):
        decoder_of(model)(**packed_inputs(tokens, tokens.clone()))


_log = logging.getLogger(__name__)


def settled_behaviour(
    model: Any,
    watch: ModelWatch,
    counts: RowCounts,
    recurrence: Recurrence | None = None,
    *,
    found: str = "",
) -> str:
    """A digest of what a model does, as `behave` finds it, and of what its code reads.

    Of a model that no longer changes itself.

    Args:
        model: as in `behave`.
        watch: made before its first forward; it learns what that has set up.
        counts: as in `behave`.
        recurrence: as in `behave`.
        found: the digest, where it is known.

    Raises:
        UnsupportedModelError: each forward changes what later ones may read, or has other results;
            or code of no library reads numbers of a tensor, or chance.
    """
    if watch.reach.foreign:
        require_no_reading(model, lambda: _run_all(model, counts, recurrence))
    digest = found or behave(model, counts, recurrence).digest
    learned = watch.learn()
    _refuse_iterators(model, watch)
    if not learned and not watch.reach.foreign:
        return _with_state(digest, model, watch)
    again = behave(model, counts, recurrence).digest
    what = "what it computes"
    try:
        watch.check()
    except ModelChangedError as error:
        what = error.what
    else:
        if again == digest:
            return _with_state(digest, model, watch)
    raise UnsupportedModelError(
        f"{type(model).__name__}: each forward changes the model ({what}), so that a text's bits "
        "may depend on how many forwards there were before; keep such counts and notes in a hook "
        "that is marked by kvpager.only_looks, or outside the model"
    )


def require_known_reading(model: Any, watch: ModelWatch) -> None:
    """Runs a few tokens, before anything is tried whose failure would say less.

    Raises:
        UnsupportedModelError: code of no library reads numbers of a tensor, or chance, or holds an
            iterator.
    """
    _refuse_iterators(model, watch)
    if not watch.reach.foreign or is_recurrent(model):
        return
    try:
        require_no_reading(model, lambda: behave(model, RowCounts(TOKENS)))
    except (InvalidArgumentError, UnsupportedModelError):
        raise
    except Exception as error:  # of any kind; what follows names what a model has to take
        _log.info("%s does not run on a few tokens: %s", type(model).__name__, error)


def _refuse_iterators(model: Any, watch: ModelWatch) -> None:
    for name, kind in watch.reach.iterators:
        raise UnsupportedModelError(
            f"{type(model).__name__}: {name} is an iterator ({kind}), whose state cannot be read, "
            "so that a text's bits may depend on how many forwards there were before; "
            "expected a list or a tuple, or an object marked by kvpager.only_looks that holds it"
        )


def _run_all(model: Any, counts: RowCounts, recurrence: Recurrence | None) -> None:
    """Runs forwards of every count: code may do other things with other numbers of rows."""
    behave(model, counts, recurrence)
    for rows in () if recurrence is not None else counts.ladder:
        _run(model, rows)


def _with_state(digest: str, model: Any, watch: ModelWatch) -> str:
    both = digest + state_digest(model, watch.reach)
    return hashlib.blake2b(both.encode(), digest_size=32).hexdigest()
