"""What a draft model holds of one text, and of all texts of an engine."""

from __future__ import annotations

import logging
import threading
import weakref

import numpy as np

from kvpager import fingerprint as fingerprints
from kvpager.caches import Cache, NeedsCheckpoint, Ok, Refused, TrimAnswer, TrimCounters
from kvpager.errors import PagerError
from kvpager.execution.core import EngineCore
from kvpager.pager import SnapshotInfo
from kvpager.snapshots.older import in_todays_terms, salt_of
from kvpager.stores import SnapshotStore
from kvpager.stores.companion import CompanionSnapshot
from kvpager.stores.companions import DRAFT
from kvpager.text.damage import RECOMPUTE, DamageHandling
from kvpager.text.primary import PrimaryCache
from kvpager.text.transcript import Transcript
from kvpager.tokens import TokenIds

_log = logging.getLogger(__name__)

_VERSION = 1  # of what a snapshot keeps of it beside the K/V


class DraftCaches:
    """The companions that one engine's texts have in its draft model.

    Attributes:
        core: the draft model's.
        lock: held by whoever changes a companion.
        closed: companions that gave their room up for good.
    """

    def __init__(self, core: EngineCore, trims: TrimCounters) -> None:
        """`trims`: of the target's texts, where refusals are counted."""
        self.core = core
        self.lock = threading.RLock()
        self.closed = 0
        self._trims = trims
        self._companions: weakref.WeakSet[DraftCompanion] = weakref.WeakSet()

    def register(self, companion: DraftCompanion) -> None:
        """Remembers one, so that it can give its room to others."""
        with self.lock:
            self._companions.add(companion)

    def note_refusal(self, position: int) -> None:
        """Counts a companion that could not be cut at `position` and began anew."""
        self._trims.trim_companion_refused += 1
        self._trims.tokens_reprefilled += position

    def of(self, transcript: Transcript) -> DraftCompanion:
        """What is held of a text; empty where it was not needed yet."""
        for companion in transcript.companions:
            if isinstance(companion, DraftCompanion):
                return companion
        companion = DraftCompanion(self)
        transcript.companions.append(companion)
        return companion

    def restore(
        self, transcript: Transcript, snapshot: SnapshotInfo, source: SnapshotStore
    ) -> None:
        """See `DraftCompanion.restore`."""
        self.of(transcript).restore(snapshot, source)


class DraftCompanion:
    """The draft model's cache of one text: a companion of its transcript.

    It may end before the text does or hold guesses beyond it. Whatever happened to the text
    meanwhile, `follow` finds out by comparing tokens, so that nobody has to tell it. Nothing it
    does or loses changes a token: it decides how many guesses are right.
    """

    kind = DRAFT

    def __init__(self, caches: DraftCaches) -> None:
        """Empty."""
        self._caches = caches
        self.transcript = caches.core.transcript()
        self.used = 0  # when it last guessed, on its caches' clock
        self._refused: tuple[int, int] | None = None  # (length of a text, room given up by then)
        self._sound = 0  # of its tokens, how many are known to be the text's
        caches.register(self)

    @property
    def length(self) -> int:
        """How far into the text it is, guesses left out."""
        return min(self._sound, self.transcript.committed)

    @property
    def empty(self) -> bool:
        """Whether it has no room that others could use."""
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
        """Keeps what it holds of the beginning of `text` [n] int32, and nothing else."""
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
        """Cuts what it holds beyond the text, guesses mostly; where it cannot, it begins anew."""
        answer = self._cache.trim(position)
        if isinstance(answer, NeedsCheckpoint):
            self._cache.rewind(answer.position)
        elif isinstance(answer, Refused):
            self._caches.note_refusal(position)
            self._cache.reset()

    def _cut(self, position: int) -> None:
        """Forgets tokens from `position` on that have no K/V."""
        self.transcript.cut(position)
        self._sound = min(self._sound, self.transcript.committed)

    def give_up(self, text: TokenIds) -> None:
        """No text as long as this one is followed, until others have given room up."""
        self.reset()
        self._refused = (len(text), self._caches.closed)

    def refuses(self, text: TokenIds) -> bool:
        """Whether a text as long as this one was given up, and would be again."""
        return self._refused is not None and (
            len(text) >= self._refused[0] and self._refused[1] == self._caches.closed
        )

    def note_text(self, length: int) -> None:
        """So many of its first tokens are the text's."""
        self._sound = length

    def fork(self) -> DraftCompanion:
        """The same for a fork of the text; empty where there is no room for it."""
        twin = DraftCompanion(self._caches)
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
        """Gives its chunks up. May be called twice."""
        with self._caches.lock:
            if not self.transcript.closed:
                self.transcript.close()
                self._caches.closed += 1

    def freeze(self, upto: int) -> CompanionSnapshot | None:
        """What it holds of the first `upto` tokens, for a save; None if that is nothing.

        Of a recurrent draft nothing is saved: its K/V alone are of no use.
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

    def restore(self, snapshot: SnapshotInfo, source: SnapshotStore) -> None:
        """Goes on with what `freeze` kept, in the place of what it has.

        Another release or processor is fine: guesses need no bits. `source`, which it is in, is
        told of damage that is found later.

        Raises:
            PagerError: it cannot be used; nothing was changed.
        """
        core = self._caches.core
        snapshot = in_todays_terms(core, snapshot)
        provenance = fingerprints.compare(
            core.fingerprint,
            snapshot.fingerprint,
            on_mismatch="approximate",
            source=snapshot.path,
        )
        with self._caches.lock:
            salt = salt_of(core, snapshot)
            sequence = core.pager.restore(snapshot, salt=salt, provenance=provenance)
            self.transcript.close()
            first = len(snapshot.released_tokens) // core.layout.chunk_tokens
            damage = DamageHandling(RECOMPUTE, source, snapshot.reader, first)
            self.transcript = core.transcripts.adopt(sequence, damage=damage)
            self._sound, self._refused = sequence.length, None

    @property
    def _cache(self) -> Cache:
        return PrimaryCache(self.transcript)
