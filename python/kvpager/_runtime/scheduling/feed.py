"""A prompt that is being prefilled into a session, and which prompt comes next."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Iterable

import numpy as np

from kvpager import _core
from kvpager._runtime.execution.core import EngineCore
from kvpager._runtime.text.damage import DamageHandling
from kvpager._runtime.text.transcript import Reservation, Transcript
from kvpager._support.tokens import TokenIds
from kvpager.errors import CapacityError, CorruptSnapshotError, PagerError, damaged_chunk
from kvpager.pager import Sequence, SnapshotInfo
from kvpager.stores import SnapshotStore

_log = logging.getLogger(__name__)


class Account:
    """Rows that the prompts of one tenant have had so far."""

    def __init__(self, served: int = 0) -> None:
        self.served = served


class Feed:
    """All tokens that a session is to hold, and the session, which holds the first of them.

    Attributes:
        served: rows this prompt has had so far; forwards serve the prompt with the fewest first. A
            prompt that joins others starts with the smallest of their numbers.
        account: rows of its tenant's prompts, which have one account; else its own alone.
    """

    def __init__(self, transcript: Transcript, ids: TokenIds) -> None:
        self.transcript = transcript
        self.ids = ids
        self.served = 0
        self.account = Account()
        self._room: Reservation | None = None
        self._fresh = not transcript.committed  # no row of it has been computed
        # Tokens of whole chunks in common with other prompts.
        self._common: weakref.WeakKeyDictionary[Feed, int] = weakref.WeakKeyDictionary()

    @property
    def done(self) -> int:
        """Number of tokens that have K/V."""
        return self.transcript.committed

    @property
    def left(self) -> int:
        """Number of tokens still to compute."""
        return len(self.ids) - self.done

    def admit(self, core: EngineCore, total_tokens: int | None = None) -> None:
        """Reserves lower-tier room for the whole prompt, less what is shared; or changes nothing.

        REQUIRES: if this returns, `leave` is called later.

        total_tokens: reserve room for this many tokens instead.
        """
        transcript = self.transcript
        empty = not self.done
        text = transcript.tokens if empty else None
        transcript.drop_inexact()
        core.runner.unchanged.check_model(thorough=True)
        self.adopt(core)
        # K/V of a model with recurrent layers are of no use without a state after them.
        if empty and core.shares_chunks and core.facts.recurrence is None:
            found = transcript.committed
            adopt_stored_prefix(core, transcript, self.ids)
            transcript.count_adopted(found, transcript.committed - found)
            self._fresh = self._fresh and not transcript.restored_tokens
        try:
            self._room = transcript.reserve(len(self.ids) if total_tokens is None else total_tokens)
        except BaseException:
            if empty:
                transcript.replace_sequence(
                    core.pager.sequence(salt=transcript.sequence.salt), text=text
                )
            raise

    def leave(self) -> None:
        """Releases what is left of the reserved room. May be called twice."""
        room, self._room = self._room, None
        if room is not None:
            room.release()

    def adopt(self, core: EngineCore) -> None:
        """Before a session's first row: adopts chunks of its prompt that the pager holds by now."""
        if not self._fresh or not core.shares_chunks:
            return
        if not self.done:
            self.transcript.count_adopted(0, self.transcript.sequence.adopt_prefix(self.ids))
        elif self._common and max(self._common.values()) > self.done:
            self._adopt_more(core)

    def start(self) -> None:
        """Call before its first row is computed: from then on it can adopt no chunks."""
        self._fresh = False

    def waits_for(self, other: Feed, chunk_tokens: int) -> bool:
        """Whether `other` is about to compute chunks that this one can then adopt."""
        if not self._fresh:
            return False
        if other not in self._common:
            self._common[other] = self._whole_chunks_in_common(other, chunk_tokens)
        common = self._common[other]
        return common > 0 and common > max(self.done, other.done)

    def _whole_chunks_in_common(self, other: Feed, size: int) -> int:
        if self.transcript.sequence.salt != other.transcript.sequence.salt:
            return 0
        n = min(len(self.ids), len(other.ids))
        if n < size or (self.ids[:size] != other.ids[:size]).any():
            return 0
        different = np.flatnonzero(self.ids[:n] != other.ids[:n])
        return (int(different[0]) if different.size else n) // size * size

    def _adopt_more(self, core: EngineCore) -> None:
        """Adopts into a new sequence, because only an empty one can adopt chunks."""
        longer = core.pager.sequence(salt=self.transcript.sequence.salt)
        try:
            if longer.adopt_prefix(self.ids) > self.done:
                longer.reserve(len(self.ids) if self._room is None else self._room.total_tokens)
                done = self.done
                self.transcript.replace_sequence(longer)
                self.transcript.count_adopted(done, self.done - done)
                return
        except CapacityError:  # no room for both sequences at once: compute instead
            pass
        longer.close()


def runnable(feeds: Iterable[Feed], chunk_tokens: int) -> list[Feed]:
    """Unfinished prompts, without those that can adopt chunks an earlier one will compute."""
    chosen: list[Feed] = []
    before: list[Feed] = []
    for feed in feeds:
        if not any(feed.waits_for(other, chunk_tokens) for other in before):
            chosen.append(feed)
        before.append(feed)
    return chosen


def share_rows(feeds: Iterable[Feed], room: int, chunk_tokens: int) -> list[tuple[Feed, int]]:
    """How many of `room` rows each prompt gets: up to the end of its chunk, then the next prompt.

    The account served least comes first, and of its prompts the one served least; once each prompt
    of an account has had its chunk, another round of them starts. Where possible a prompt's rows
    end at a chunk boundary, so that it keeps no open chunk while it waits.
    """
    granted: dict[Feed, int] = {}
    waiting: dict[Account, deque[Feed]] = {}
    order = sorted(feeds, key=lambda feed: (feed.account.served, feed.served))
    for feed in order:
        waiting.setdefault(feed.account, deque()).append(feed)
    served = {account: account.served for account in waiting}
    while room and waiting:
        account = min(waiting, key=served.__getitem__)
        feed = waiting[account].popleft()
        had = granted.get(feed, 0)
        rows = min(room, feed.left - had, chunk_tokens - (feed.done + had) % chunk_tokens)
        granted[feed] = had + rows
        served[account] += rows
        room -= rows
        if had + rows < feed.left:
            waiting[account].append(feed)
        if not waiting[account]:
            del waiting[account]
    return [(feed, granted[feed]) for feed in order if granted.get(feed)]


def adopt_stored_prefix(core: EngineCore, transcript: Transcript, ids: TokenIds) -> None:
    """Makes a session start from the longest prefix of its prompt in its or the engine's store.

    Does so only if that is more than the session holds. A chunk's name covers fingerprint and salt,
    so that only chunks of an equal engine are found. A problem with the store is no error: the
    caller gets a warning, and the tokens are computed. Chunks found damaged when they are read are
    computed again.
    """
    size = core.facts.layout.chunk_tokens
    store = transcript.store or core.store
    if store is None or len(ids) - transcript.committed < size:
        return
    hashes = core.pager.chain_hashes(ids, transcript.sequence.salt)
    while len(hashes) * size > transcript.committed:
        try:
            found = _restore(store, core, transcript, hashes, ids)
        except (PagerError, OSError) as error:  # noqa: PERF203  # a shorter one each time
            chunk = damaged_chunk(error) if isinstance(error, CorruptSnapshotError) else None
            shorter = hashes[:chunk] if chunk is not None and chunk < len(hashes) else []
            _log.warning("no prefix of %d chunks from the store: %s", len(hashes), error)
            hashes = shorter
        else:
            if found is not None:
                sequence, reader = found
                transcript.replace_sequence(sequence, restored_tokens=sequence.length)
                transcript.damage = DamageHandling(
                    store=store, reader=reader, tokens=transcript.damage.tokens
                )
            return


def _restore(
    store: SnapshotStore,
    core: EngineCore,
    transcript: Transcript,
    hashes: list[bytes],
    ids: TokenIds,
) -> tuple[Sequence, _core.SnapshotReader] | None:
    """The longest prefix in the store, with its snapshot; None if the session holds as much."""
    reader = store.find_prefix(hashes)
    if reader is None or len(reader.tokens) <= transcript.committed:
        return None
    tokens = reader.tokens
    if not np.array_equal(tokens, ids[: len(tokens)]):  # found by name, verified by token ids
        raise CorruptSnapshotError(f"{reader.path}: its token ids are not those it was found by")
    return core.pager.restore(SnapshotInfo.of(reader), salt=transcript.sequence.salt), reader
