"""How a transcript handles damaged chunks of its snapshot."""

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
    """What to do about damaged chunks, and how many tokens were computed again. Thread-safe."""

    on_corrupt: str = RECOMPUTE  # a session that shares another's damaged chunk must not fail
    store: SnapshotStore | None = None  # the store it was restored from
    reader: _core.SnapshotReader | None = None  # the snapshot there
    first: int = 0  # index in the text of the snapshot's first chunk
    tokens: int = 0  # tokens computed again
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def for_fork(self) -> DamageHandling:
        """The same settings for a fork, with its count at 0."""
        return DamageHandling(self.on_corrupt, self.store, self.reader, self.first)

    def count(self, tokens: int) -> None:
        """Adds to the tokens that were computed again."""
        with self._lock:
            self.tokens += tokens

    def report(self, chunk: int) -> None:
        """Reports a damaged chunk to the store, so that no later save relies on it."""
        report_damage = getattr(self.store, "report_damage", None)
        if report_damage is None:
            return
        try:
            report_damage(self.reader, chunk - self.first)
        except (PagerError, OSError) as error:
            _log.warning("damage of chunk %d could not be reported to the store: %s", chunk, error)
