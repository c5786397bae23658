"""A draft model's caches: of one text, and of all texts of an engine."""

from __future__ import annotations

import logging
import threading
import weakref

import numpy as np

from kvpager._model.identity import fingerprint as fingerprints
from kvpager._runtime.execution.core import EngineCore
from kvpager._runtime.scheduling.trim import PrimaryCache
from kvpager._runtime.text.damage import RECOMPUTE, DamageHandling
from kvpager._runtime.text.transcript import Transcript
from kvpager._support.salts import StretchedSalt
from kvpager._support.tokens import TokenIds
from kvpager.companions import Cache, NeedsCheckpoint, Ok, Refused, TrimAnswer, TrimCounters
from kvpager.errors import PagerError
from kvpager.pager import SnapshotInfo
from kvpager.stores import SnapshotStore
from kvpager.stores.companions import DRAFT, CompanionSnapshot

_log = logging.getLogger(__name__)

_VERSION = 1  # of its session section in a snapshot


class DraftCaches:
    """The draft model's companions of all texts of one engine.

    Attributes:
        core: the draft model's.
        lock: held while a companion changes.
        closed: companions that were closed.
    """

    def __init__(self, core: EngineCore, trims: TrimCounters) -> None:
        """`trims`: the target's counters, which also count refusals here."""
        self.core = core
        self.lock = threading.RLock()
        self.closed = 0
        self._trims = trims
        self._companions: weakref.WeakSet[DraftCompanion] = weakref.WeakSet()

    def register(self, companion: DraftCompanion) -> None:
        """Adds a companion, whose room others can then take."""
        with self.lock:
            self._companions.add(companion)

    def note_refusal(self, position: int) -> None:
        """Counts a companion that could not be cut at `position` and was emptied."""
        self._trims.trim_companion_refused += 1
        self._trims.tokens_reprefilled += position

    def of(self, transcript: Transcript) -> DraftCompanion:
        """The companion of a text; makes an empty one if there is none."""
        for companion in transcript.companions:
            if isinstance(companion, DraftCompanion):
                return companion
        companion = DraftCompanion(self, transcript.sequence.salt)
        transcript.companions.append(companion)
        return companion

    def restore(
        self,
        transcript: Transcript,
        snapshot: SnapshotInfo,
        source: SnapshotStore,
        tenant: StretchedSalt,
    ) -> None:
        """See `DraftCompanion.restore`."""
        self.of(transcript).restore(snapshot, source, tenant)


class DraftCompanion:
    """The draft model's cache of one text: a companion of its transcript.

    It may end before the text does, or hold guesses beyond it. `follow` compares its tokens with
    the text, so the text may change in any way without notice. The companion never changes the
    text's tokens, only how many guesses are right.
    """

    kind = DRAFT

    def __init__(self, caches: DraftCaches, salt: str) -> None:
        """Makes an empty companion. salt: of its chunks' names, the text's."""
        self._caches = caches
        self.transcript = caches.core.transcript(salt)
        self.used = 0  # when it last guessed, on its caches' clock
        self._refused: tuple[int, int] | None = None  # (length of a text, room given up by then)
        self._sound = 0  # number of its first tokens known to equal the text's
        caches.register(self)

    @property
    def length(self) -> int:
        """Number of the text's tokens it has, without guesses."""
        return min(self._sound, self.transcript.committed)

    @property
    def empty(self) -> bool:
        """Whether it holds no room that others could take."""
        return self.transcript.closed or not self.transcript.committed

    def trim(self, position: int) -> TrimAnswer:
        """See `Cache.trim`."""
        with self._caches.lock:
            if position >= self.length:
                return Ok()
            answer = self._cache.trim(position)
            if isinstance(answer, Ok):
                self._cut(position)
            return answer

    def rewind(self, position: int) -> None:
        """See `Cache.rewind`."""
        with self._caches.lock:
            self._cache.rewind(position)
            self._cut(position)

    def reset(self) -> None:
        """See `Cache.reset`."""
        with self._caches.lock:
            self._cache.reset()
            self._cut(0)

    def follow(self, text: TokenIds) -> None:
        """Keeps only the common prefix of its tokens and `text` [n] int32."""
        with self._caches.lock:
            held = self.transcript.tokens
            common = min(len(held), len(text))
            different = np.flatnonzero(held[:common] != text[:common])
            common = int(different[0]) if different.size else common
            self._sound = min(common, self.transcript.committed)
            if common < self.transcript.committed:
                self._keep(common)
            self._cut(common)
            self.transcript.drop_inexact()

    def _keep(self, position: int) -> None:
        """Cuts at `position`, mostly guesses; if that is impossible, empties itself."""
        answer = self._cache.trim(position)
        if isinstance(answer, NeedsCheckpoint):
            self._cache.rewind(answer.position)
        elif isinstance(answer, Refused):
            self._caches.note_refusal(position)
            self._cache.reset()

    def _cut(self, position: int) -> None:
        """Drops tokens from `position` on that have no K/V."""
        self.transcript.cut(position)
        self._sound = min(self._sound, self.transcript.committed)

    def give_up(self, text: TokenIds) -> None:
        """Refuses texts of this length or more until other companions have released room."""
        self.reset()
        self._refused = (len(text), self._caches.closed)

    def refuses(self, text: TokenIds) -> bool:
        """Whether a text of this length was refused, and no room was released since."""
        return self._refused is not None and (
            len(text) >= self._refused[0] and self._refused[1] == self._caches.closed
        )

    def note_text(self, length: int) -> None:
        """Records that its first `length` tokens equal the text's."""
        self._sound = length

    def fork(self) -> DraftCompanion:
        """A companion for a fork of the text; an empty one if there is no room."""
        twin = DraftCompanion(self._caches, self.transcript.sequence.salt)
        with self._caches.lock:
            try:
                transcript = self.transcript.fork()
            except PagerError as error:
                _log.warning("the draft model's cache was not forked: %s", error)
            else:
                twin.transcript.close()
                twin.transcript = transcript
                twin._sound = self._sound
        return twin

    def close(self) -> None:
        """Releases its chunks. May be called twice."""
        with self._caches.lock:
            if not self.transcript.closed:
                self.transcript.close()
                self._caches.closed += 1

    def freeze(self, upto: int) -> CompanionSnapshot | None:
        """Its cache of the first `upto` tokens, for a save; None if it holds none of them.

        None for a recurrent draft, whose K/V are of no use without states.
        """
        if self.transcript.states is not None:
            return None
        with self._caches.lock:
            length = min(upto, self.length)
            if length < max(1, self.transcript.sequence.earliest_trim):
                return None
            content = self.transcript.sequence.freeze(length)
            return CompanionSnapshot(
                kind=self.kind,
                content=content,
                fingerprint=self._caches.core.pager.fingerprint_json,
                session=self.transcript.sequence.session_text({"version": _VERSION}, content),
            )

    def restore(self, snapshot: SnapshotInfo, source: SnapshotStore, tenant: StretchedSalt) -> None:
        """Replaces its cache by one that `freeze` saved.

        Another release or processor may have saved it, because guesses need no equal bits. Damage
        found later is reported to `source`, the store with the snapshot. `tenant`: whose it is.

        Raises:
            PagerError: it cannot be used; nothing was changed.
        """
        core = self._caches.core
        provenance = fingerprints.compare(
            core.facts.fingerprint,
            snapshot.fingerprint,
            on_mismatch="approximate",
            source=snapshot.path,
        )
        with self._caches.lock:
            sequence = core.pager.restore(snapshot, salt=tenant.namespace, provenance=provenance)
            self.transcript.close()
            first = len(snapshot.released_tokens) // core.facts.layout.chunk_tokens
            damage = DamageHandling(RECOMPUTE, source, snapshot.reader, first)
            self.transcript = core.transcripts.adopt(sequence, damage=damage)
            self._sound, self._refused = sequence.length, None

    @property
    def _cache(self) -> Cache:
        return PrimaryCache(self.transcript)
