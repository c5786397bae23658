"""Whether a model does the same each time, once its first forward has set it up."""

from __future__ import annotations

import hashlib
import logging
from typing import Any

import torch

from kvpager.errors import InvalidArgumentError, ModelChangedError, UnsupportedModelError
from kvpager.hf.attention import running
from kvpager.hf.behaviour import TOKENS, behave
from kvpager.hf.decoder import decoder_of
from kvpager.hf.description import state_digest
from kvpager.hf.observe import Recorder, packed_inputs
from kvpager.hf.reading import require_no_reading
from kvpager.hf.recurrent import Recurrence, is_recurrent
from kvpager.hf.rows import RowCounts
from kvpager.hf.watch import ModelWatch

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
    if not watch.learn() and not watch.reach.foreign:
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
        "that is marked by kvpager.hf.only_looks, or outside the model"
    )


def require_known_reading(model: Any, watch: ModelWatch) -> None:
    """Runs a few tokens, before anything is tried whose failure would say less.

    Raises:
        UnsupportedModelError: code of no library reads numbers of a tensor, or chance.
    """
    if not watch.reach.foreign or is_recurrent(model):
        return
    try:
        require_no_reading(model, lambda: behave(model, RowCounts(TOKENS)))
    except (InvalidArgumentError, UnsupportedModelError):
        raise
    except Exception as error:  # of any kind; what follows names what a model has to take
        _log.info("%s does not run on a few tokens: %s", type(model).__name__, error)


def _run_all(model: Any, counts: RowCounts, recurrence: Recurrence | None) -> None:
    """Runs forwards of every count: code may do other things with other numbers of rows."""
    behave(model, counts, recurrence)
    for rows in () if recurrence is not None else counts.ladder:
        tokens = torch.zeros(rows, dtype=torch.int64, device=model.device)
        with torch.inference_mode(), running(Recorder()):
            decoder_of(model)(**packed_inputs(tokens, tokens.clone()))


def _with_state(digest: str, model: Any, watch: ModelWatch) -> str:
    both = digest + state_digest(model, watch.reach)
    return hashlib.blake2b(both.encode(), digest_size=32).hexdigest()
