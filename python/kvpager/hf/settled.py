"""Whether a model does the same each time, once its first forward has set it up."""

from __future__ import annotations

import hashlib
from typing import Any

from kvpager.errors import ModelChangedError, UnsupportedModelError
from kvpager.hf.behaviour import behave
from kvpager.hf.description import state_digest
from kvpager.hf.recurrent import Recurrence
from kvpager.hf.rows import RowCounts
from kvpager.hf.watch import ModelWatch


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
        UnsupportedModelError: each forward changes what later ones may read, or has other results.
    """
    digest = found or behave(model, counts, recurrence).digest
    if not watch.learn():
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


def _with_state(digest: str, model: Any, watch: ModelWatch) -> str:
    both = digest + state_digest(model, watch.reach)
    return hashlib.blake2b(both.encode(), digest_size=32).hexdigest()
