"""What a transcript does about chunks of its snapshot that are damaged."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field

from kvpager import _core
from kvpager.errors import PagerError
from kvpager.stores import SnapshotStore

FAIL = "fail"
RECOMPUTE = "recompute"
ON_CORRUPT = (FAIL, RECOMPUTE)

_log = logging.getLogger(__name__)


@dataclass
class DamageHandling:
    """What is done about damaged chunks, and how much of it was done. Thread-safe."""

    on_corrupt: str = RECOMPUTE  # who restored nothing must not fail for another's file
    store: SnapshotStore | None = None  # it was restored from, and
    reader: _core.SnapshotReader | None = None  # what of it
    first: int = 0  # chunk of the text that is the first there
    tokens: int = 0  # computed again
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def for_fork(self) -> DamageHandling:
        """That of a fork, which has computed nothing again yet."""
        return DamageHandling(self.on_corrupt, self.store, self.reader, self.first)

    def count(self, tokens: int) -> None:
        """Adds tokens that were computed again."""
        with self._lock:
            self.tokens += tokens

    def report(self, chunk: int) -> None:
        """Tells the store, which must not share this chunk any more, nor take it for saved."""
        report_damage = getattr(self.store, "report_damage", None)
        if report_damage is None:
            return
        try:
            report_damage(self.reader, chunk - self.first)
        except (PagerError, OSError) as error:
            _log.warning("the store cannot be told that chunk %d is damaged: %s", chunk, error)
