"""A model with a pager for its caches."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

from kvpager._model.seam.causal_lm import cache_argument
from kvpager._model.watch.model_watch import ModelWatch
from kvpager._support.process import MadeIn
from kvpager.config import PagerConfig, frontier_blocks
from kvpager.errors import CapacityError, InvalidArgumentError
from kvpager.pager import Pager
from kvpager.transformers_cache.call import CacheCall
from kvpager.transformers_cache.rows import Texts

_POLL_SECONDS = 0.001


@dataclass(frozen=True)
class Known:
    """Facts about a model.

    Attributes:
        windows: of each layer, in tokens; None: it has none.
        configs: ids of its configurations.
        fingerprint: for snapshots.
        watch: whether it is still the same.
    """

    model: Any
    config: PagerConfig
    windows: tuple[int | None, ...]
    configs: frozenset[int]
    fingerprint: Mapping[str, Any]
    watch: ModelWatch


class Host:
    """The model, its hooks and a pager, which a cache and its forks share.

    One call runs at a time.
    """

    def __init__(self, known: Known, pager: Pager, hooks: object) -> None:
        """`hooks`: on the model; they go with the last reference to them."""
        self.known = known
        self.pager = pager
        self._hooks: object | None = hooks
        self.made_in = MadeIn()
        self.caches = 0  # open ones
        self._call: CacheCall | None = None
        self._lock = threading.Lock()

    @property
    def call(self) -> CacheCall | None:
        """The call that goes on in this thread; one that an interrupt has ended is undone."""
        call = self._call
        if call is None:
            return None
        if not call.runs():
            self.end(call, undo=True)
            return None
        return call if call.thread == threading.get_ident() else None

    def columns(self, texts: Texts) -> int:
        """The number of committed columns of the texts, also while a call runs."""
        if self._call is not None and not self._call.runs():
            self.end(self._call, undo=True)
        return texts.batch.columns

    def require_running(self, texts: Texts) -> None:
        """Raises InvalidArgumentError unless this thread runs a forward with these texts.

        Then the hooks saw the call, and attention is answered with what the texts hold.
        """
        call = self._call
        if call is None or call.texts is not texts or not call.answers():
            raise InvalidArgumentError(
                "a layer handed its keys to a kvpager cache outside of a call of "
                f"{type(self.known.model).__name__} that its hooks have seen; call the very model "
                "that the cache was made for, not compiled, with "
                f"{cache_argument(self.known.model)}=cache"
            )

    def require_idle(self, texts: Texts, what: str) -> None:
        """Raises InvalidArgumentError while a call with these texts runs. `what` asks."""
        self.made_in.require("this cache")
        call = self._call
        if call is None:
            return
        if not call.runs():
            self.end(call, undo=True)
        elif call.texts is texts:
            raise InvalidArgumentError(
                f"{what}: a forward of the model with this cache is running; wait until it ends"
            )

    def begin(self, texts: Texts, owner: Any, keep: int | None, frame: FrameType) -> CacheCall:
        """Begins a call, after those with other caches of this pager in other threads."""
        self.made_in.require("this cache")
        while True:
            with self._lock:
                call = self._call
                if call is not None and not call.runs():
                    self.end(call, undo=True)
                    call = None
                if call is None:
                    self._call = CacheCall(
                        self.pager,
                        texts,
                        configs=self.known.configs,
                        owner=owner,
                        keep=keep,
                        frame=frame,
                    )
                    return self._call
                if call.thread == threading.get_ident():
                    raise InvalidArgumentError(
                        "the model was called with a kvpager cache inside another such call, which "
                        "shares its pager; use a cache of its own: kvpager.Cache(model)"
                    )
                if call.texts is texts:
                    raise InvalidArgumentError(
                        "another thread is running the model with this cache; use one cache per "
                        "thread: cache.fork() or kvpager.Cache(model)"
                    )
            time.sleep(_POLL_SECONDS)

    def end(self, call: CacheCall, *, undo: bool = False) -> None:
        """Ends a call."""
        if undo:
            call.undo()
        if self._call is call:
            self._call = None
        call.end()

    def most_columns(self, batch: int) -> int:
        """How many columns of a batch one forward can have.

        Raises:
            InvalidArgumentError, CapacityError: none; names the option to raise.
        """
        config, rows = self.pager.config, self.pager.rows
        size = config.chunk_tokens
        if batch > rows:
            raise InvalidArgumentError(
                f"rows is {rows}, and a batch of {batch} needs at least {batch}; make the cache "
                f"with Cache(model, rows={batch}) or more"
            )
        blocks = (config.pool_blocks - 1) // batch  # unsealed chunks of each text
        most = min(rows // batch, blocks * size - size + 1)
        if most < 1:
            needed = (batch * frontier_blocks(size, 1) + 1) * size
            raise CapacityError(
                f"pool_tokens is {config.pool_size}, and a batch of {batch} needs at least "
                f"{needed}: one unsealed chunk for each text, and one more"
            )
        return most

    def close(self) -> None:
        """Frees the pool and leaves the model."""
        call = self._call
        if call is not None:
            if call.runs():
                raise InvalidArgumentError(
                    "close: a forward of the model with this cache is running; close it afterwards"
                )
            self.end(call, undo=True)
        self._hooks = None
        self.pager.close()
