"""One conversation as the runtime sees it: its text, its caches and their state."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import torch

from kvpager._runtime.logits.processors import Processors
from kvpager._runtime.recurrent.cursor import StateCursor
from kvpager._runtime.text.assembly import Assembly
from kvpager._runtime.text.conversation import Conversation
from kvpager._runtime.text.damage import DamageHandling
from kvpager._support.tokens import TokenIds
from kvpager.companions import Cache, TrimCounters
from kvpager.config import PagerConfig
from kvpager.errors import PagerError
from kvpager.pager import Sequence
from kvpager.sampling import Sampling, choose_after, fresh_seed, seed_after
from kvpager.speculation.speculation import SpeculationStats
from kvpager.stores import SnapshotStore
from kvpager.stores.companions import CompanionSnapshot

MarkComputed = Callable[[int, int], object]  # (first position, number of positions)
MakeStates = Callable[[Sequence], StateCursor | None]

_NONE = np.zeros(0, dtype=np.int32)
_NOWHERE = -2  # no position, and before none


class Companion(Cache, Protocol):
    """A cache that is cut, forked, saved and closed with the transcript it belongs to."""

    kind: str  # of companion, as a store records it

    def fork(self) -> Companion:
        """A companion for a fork of the transcript; an empty one if there is no room."""
        ...

    def freeze(self, upto: int) -> CompanionSnapshot | None:
        """Its cache of the first `upto` tokens, for a save; None if it holds none of them."""
        ...

    def close(self) -> None:
        """Releases its chunks. May be called twice."""
        ...


@dataclass(frozen=True)
class Accepted:
    """Guesses that a forward confirmed and that no caller has received yet.

    The sequence holds their K/V. start: position of the first. logits: [len(tokens), vocab], after
    each of them. sampling, processors: the options that chose them.
    """

    start: int
    tokens: tuple[int, ...]
    logits: torch.Tensor
    sampling: Sampling
    processors: Processors | None = None

    @property
    def end(self) -> int:
        """The position after the last of them."""
        return self.start + len(self.tokens)

    def rest(self) -> Accepted:
        """All but the first."""
        return replace(self, start=self.start + 1, tokens=self.tokens[1:], logits=self.logits[1:])


class Reservation:
    """Room for a number of tokens of a text. Made by `Transcript.reserve`."""

    def __init__(self, transcript: Transcript, key: object, total_tokens: int) -> None:
        self.total_tokens = total_tokens
        self._transcript = transcript
        self._key = key

    def release(self) -> None:
        """Releases the room that no other reservation of the text needs. May be called twice."""
        self._transcript.release(self._key)

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class Transcript:
    """A text, the sequence with its K/V, and their companions; made by `Transcripts`.

        0            committed                    next_position
        | K/V are there | uncomputed ............ | pending |
        | K/V are there | accepted: K/V are there, not yet part of the text |

    *Uncomputed* tokens belong to the text, but their K/V have to be computed (again). The *pending*
    token was sampled last; the next forward computes its K/V. *Accepted* guesses were committed by
    the forward that verified them. Each becomes part of the text when it is sampled and becomes the
    pending token; every other step drops them.

    Each of these values is stored with the position it is valid for and is ignored at any other
    position. So an exception between a commit or trim of the sequence and the update here leaves no
    wrong value.

    A `kvpager.Session` is the user's handle of one. A transcript without references releases its
    chunks, as `close` does.

    Attributes:
        sequence: holds the K/V.
        config: the engine's.
        sampling: options of the last generation, or the restored ones; before the first generation
            only the seed is meaningful.
        speculation: counters of all generations that speculated.
        damage: what to do about damaged chunks.
        tokens_computed: rows that forwards committed for prompts.
        generation_start: where the last generation began; None if that was cut or there was none.
        companions: other models' caches of the text.
        states: positions with recurrent states; None for a model without recurrent layers.
        assembly: how the text was put together, if from segments.
        conversation: the messages of `Session.chat`.
        metadata: the user's own JSON values, saved with it.
        store: where a prefill of an empty text looks for its beginning; None: the engine's.
        restored_tokens: positions that came from a snapshot or store.
        restored_tokens_consumed: restored positions that replaced a prefill.
        trims: counters of its trims.
        mark_computed: counts what is computed for the request that the text is in, if any.
    """

    def __init__(
        self,
        owner: Transcripts,
        sequence: Sequence,
        *,
        sampling: Sampling | None = None,
        restored_tokens: int = 0,
        damage: DamageHandling | None = None,
    ) -> None:
        self._owner = owner
        self.config = owner.config
        # Options of the last generation, and the position it has come to: of its last token, or of
        # the next one if it was interrupted before that; nowhere if it has none, or was cut away.
        self._generation = (sampling or Sampling(seed=fresh_seed()), _NOWHERE)
        self.speculation = SpeculationStats()
        self.damage = damage or DamageHandling()
        self.tokens_computed = 0
        self.generation_start: int | None = None
        self.trims = owner.trims
        self.companions: list[Companion] = []
        self.states: StateCursor | None = None
        self.assembly: Assembly | None = None
        self.conversation = Conversation()
        self.metadata: dict[str, Any] = {}
        self.store: SnapshotStore | None = None
        self.mark_computed: MarkComputed | None = None
        self._scheduler: weakref.ref[object] | None = None
        self._reserved: dict[object, int] = {}  # total tokens by the key of each reservation
        self._reprefilled_to = 0  # end of the tokens computed again that a trim had kept
        self._begin(sequence, restored_tokens)

    def _begin(self, sequence: Sequence, restored_tokens: int) -> None:
        self.sequence = sequence
        self._provisional: int | None = None  # position of the first provisional row
        self._pending: tuple[int, int] | None = None  # (position, token)
        self._logits: tuple[int, torch.Tensor] | None = None  # (position of what they predict, ...)
        self._uncomputed: tuple[int, TokenIds] | None = None  # (position of the first, tokens)
        self._accepted: Accepted | None = None
        self.restored_tokens = restored_tokens
        self.restored_tokens_consumed = 0
        self._restored_left = restored_tokens
        self._finalizer = weakref.finalize(self, sequence.close)
        self._finalizer.atexit = False
        if self.states is not None:
            self.states.close()
        self.states = self._owner.states_of(sequence)

    @property
    def closed(self) -> bool:
        """Whether its chunks were released."""
        return self.sequence.closed

    @property
    def committed(self) -> int:
        """Tokens of the text whose K/V the sequence holds."""
        length = self.sequence.length
        accepted = self._accepted
        return length if accepted is None or length != accepted.end else accepted.start

    @property
    def provisional(self) -> bool:
        """Whether a forward with an unproven row count may have written rows of the open chunk.

        Set before such a row is committed.
        """
        return self._provisional is not None

    @provisional.setter
    def provisional(self, value: bool) -> None:
        if not value:
            self._provisional = None
        elif self._provisional is None or self._provisional > self.committed:
            self._provisional = self.committed

    @property
    def uncomputed(self) -> TokenIds:
        """Tokens of the text after the committed ones, whose K/V have to be computed."""
        if self._uncomputed is None:
            return _NONE
        start, tokens = self._uncomputed
        done = self.committed - start
        return tokens[done:] if done >= 0 else _NONE

    @property
    def next_position(self) -> int:
        """The position of the next sampled token."""
        if self._uncomputed is None:
            return self.committed
        return self.committed + len(self.uncomputed)

    @property
    def pending(self) -> int | None:
        """The token sampled last, if no forward has computed its K/V yet."""
        if self._pending is not None and self._pending[0] == self.next_position:
            return self._pending[1]
        return None

    @property
    def length(self) -> int:
        """Number of tokens of the text, the pending one included."""
        return self.next_position + (self.pending is not None)

    @property
    def tokens(self) -> TokenIds:
        """A copy of the text, [length] int32, the pending token included."""
        held = self.sequence.tokens[: self.committed]
        uncomputed, pending = self.uncomputed, self.pending
        if not uncomputed.size and pending is None:
            return held
        last = _NONE if pending is None else np.array([pending], dtype=np.int32)
        return np.concatenate([held, uncomputed, last])

    @property
    def known_logits(self) -> torch.Tensor | None:
        """Logits for the position after the text without its pending token, if known."""
        if self._logits is not None and self._logits[0] == self.next_position:
            return self._logits[1]
        return None

    @property
    def ready(self) -> bool:
        """Whether the next token can be sampled without a forward."""
        position = self.next_position
        pending = self._pending is not None and self._pending[0] == position
        return not pending and self._logits is not None and self._logits[0] == position

    def set_pending(self, token: int | None) -> None:
        """Makes `token` the pending one; None: no token is pending."""
        self._pending = None if token is None else (self.next_position, token)

    def accept(self, accepted: Accepted) -> None:
        """Keeps the guesses that a forward is about to commit; ignored until it has."""
        self._accepted = accepted

    def advance(self) -> bool:
        """Commits the pending token without a forward if it is the first accepted one."""
        accepted = self._accepted
        if (
            accepted is None
            or self.pending != accepted.tokens[0]
            or self.committed != accepted.start
        ):
            return False
        self._logits = (accepted.start + 1, accepted.logits[0])
        self._accepted = accepted.rest() if len(accepted.tokens) > 1 else None
        return True

    def drop_accepted(self) -> None:
        """Trims accepted guesses away. They never fill a chunk, so this needs no free block."""
        if self._accepted is not None:
            self.sequence.trim(self.committed)
            self._accepted = None

    def set_text(self, tokens: TokenIds) -> None:
        """Makes `tokens` the text; tokens without K/V in the sequence are uncomputed."""
        self._uncomputed = (0, tokens)

    def forget_from(self, position: int) -> None:
        """Drops the K/V from `position` on; their tokens become uncomputed."""
        if position >= self.committed:
            return
        tokens = np.concatenate([self.sequence.tokens[position : self.committed], self.uncomputed])
        # Before the trim these are the tokens uncomputed so far; after it, the trimmed ones too.
        self._uncomputed = (position, tokens)
        self.sequence.trim(position)

    def cut(self, position: int) -> None:
        """Keeps the tokens [0, position) of the text, the pending one only if it is among them."""
        if position > self.next_position:
            return
        committed = self.committed
        if position < committed:
            self.sequence.trim(position)
            self._uncomputed = None
            if self._provisional is not None and position <= self._provisional:
                self._provisional = None
        elif position < self.next_position:
            self._uncomputed = (committed, self.uncomputed[: position - committed])
        self._pending = None
        if self._logits is not None and self._logits[0] > position:
            self._logits = None

    def sample(self, sampling: Sampling, processors: Processors | None = None) -> int:
        """Samples the next token and makes it the pending one. REQUIRES: ready."""
        position, accepted = self.next_position, self._accepted
        self._generation = (sampling, position)  # first: an interrupt may follow
        if (
            accepted is not None
            and position == accepted.start
            and sampling == accepted.sampling
            and processors is accepted.processors
        ):
            token = accepted.tokens[0]
        else:
            assert self._logits is not None
            assert self._logits[0] == position
            logits = self._logits[1]
            if sampling.reads_tokens or processors is not None:
                token = choose_after(self.tokens, logits, sampling, processors)
            else:
                token = sampling.choose(logits, position)
        self._pending = (position, token)
        return token

    def keep_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Keeps a copy of a forward's logits after the last committed token, and returns it."""
        kept = logits.clone()
        self._logits = (self.next_position, kept)
        self.mark_used()
        return kept

    def drop_inexact(self) -> None:
        """Drops K/V that no exact row may follow; their tokens become uncomputed.

        Drops the whole chunk of provisional rows where possible. After a cut, the chunks that its
        first rows need may be released (behind a window); then only rows from the first provisional
        one on are dropped.
        """
        self.drop_accepted()
        if self._provisional is None:
            return
        size = self.config.chunk_tokens
        boundary = self.committed // size * size
        within_reach = boundary == 0 or boundary >= self.sequence.earliest_trim
        self.forget_from(boundary if within_reach else self._provisional)
        self._provisional = None

    @property
    def scheduled_by(self) -> object | None:
        """The scheduler that has an unfinished request of it, while that is in use."""
        return None if self._scheduler is None else self._scheduler()

    @scheduled_by.setter
    def scheduled_by(self, scheduler: object | None) -> None:
        self._scheduler = None if scheduler is None else weakref.ref(scheduler)

    @property
    def must_recompute(self) -> bool:
        """Whether tokens are uncomputed, or the pending one would seal provisional rows."""
        if self.uncomputed.size:
            return True
        return (
            self.config.exact == "reuse"
            and self.pending is not None
            and (self.committed + 1) % self.config.chunk_tokens == 0
        )

    @property
    def sampling(self) -> Sampling:
        """Options of the last generation; before the first, only its seed."""
        return self._generation[0]

    @sampling.setter
    def sampling(self, sampling: Sampling) -> None:
        self._generation = (sampling, self._generation[1])

    @property
    def generated_last(self) -> bool:
        """Whether the text is as the last generation left it."""
        return 0 <= self.length - self._generation[1] <= 1

    @generated_last.setter
    def generated_last(self, value: bool) -> None:
        self._generation = (self.sampling, self.length - 1 if value else _NOWHERE)

    def goes_on(self, text: TokenIds | None = None) -> bool:
        """Whether a generation behind `text` (None: its own) goes on with the last one.

        `text` is what the transcript is to hold by then. A generation that was interrupted goes on,
        also after a save; one behind tokens that were added, or after a cut, does not.
        """
        if text is None or len(text) == self.length:
            return self.generated_last and (text is None or np.array_equal(self.tokens, text))
        cut = self.tokens[: len(text)]
        return len(text) == self._generation[1] + 1 and np.array_equal(cut, text)

    def seed_for(self, sampling: Sampling, text: TokenIds | None = None) -> int:
        """The seed of a generation behind `text` that was given none: see `Session.generate`."""
        own = self.sampling.seed
        return own if sampling.temperature == 0 or self.goes_on(text) else seed_after(own)

    def token_at(self, position: int) -> int:
        """The committed token at a position."""
        return int(self.sequence.tokens[position])

    def reserve(self, total_tokens: int) -> Reservation:
        """Holds room to grow to `total_tokens` until the reservation is released.

        The pager holds room for the largest reservation.

        Raises:
            CapacityError: nothing more is held than before.
        """
        key = object()
        self._reserved[key] = total_tokens
        try:
            self.sequence.reserve(self._most_reserved())
        except BaseException:
            del self._reserved[key]
            raise
        return Reservation(self, key, total_tokens)

    def release(self, key: object) -> None:
        """Releases the room of the reservation with this key: see `Reservation.release`."""
        if self._reserved.pop(key, None) is not None and not self.sequence.closed:
            # A sequence that replaced the first one keeps what it could reserve; one that another
            # thread closed, or that a forked child inherited, has nothing to release.
            with suppress(PagerError):
                self.sequence.reserve(self._most_reserved())

    def _most_reserved(self) -> int:
        """The largest reservation, at least the sequence's length (accepted guesses count)."""
        return max([self.sequence.length, *self._reserved.values()])

    def start_for(self, sampling: Sampling, text: TokenIds) -> int:
        """`Sampling.start` of a generation behind `text`.

        One that goes on with an interrupted generation counts that one's tokens too, also after a
        save, as it takes over its seed.
        """
        if not sampling.counts_produced:
            return 0
        goes_on = self.sampling.counts_produced and self.goes_on(text)
        return self.sampling.start if goes_on else len(text)

    def mark_used(self) -> None:
        """Records that the K/V held so far replaced a prefill."""
        self.restored_tokens_consumed = self._restored_left

    def mark_provisional(self) -> None:
        """Call before a forward with an unproven row count commits rows."""
        if self.config.exact == "reuse":
            self.provisional = True

    def count_computed(self, start: int, count: int) -> None:
        """Counts `count` tokens of the text from `start` on that a forward has committed."""
        self.tokens_computed += count
        if self.mark_computed is not None:
            self.mark_computed(start, count)
        if start + count >= self._reprefilled_to:
            self._reprefilled_to = 0

    def count_adopted(self, start: int, count: int) -> None:
        """Counts tokens that were found in shared chunks and need not be computed again."""
        found = max(0, min(start + count, self._reprefilled_to) - start)
        self.trims.tokens_reprefilled -= found

    def count_speculation(self, proposed: int, accepted: int) -> None:
        """Counts a forward with `proposed` guesses, of which it confirmed `accepted`."""
        one = SpeculationStats(1, proposed, accepted, 1 + accepted)
        self.speculation += one
        self._owner.speculation += one

    def finish_cut(self, position: int, held: int) -> None:
        """Cuts the text once all caches are trimmed. held: tokens committed before the trim."""
        kept = self.committed
        self.cut(position)
        lost = min(held, position)
        self._reprefilled_to = lost if kept < lost else min(self._reprefilled_to, position)
        self._restored_left = min(self._restored_left, kept)
        if self.generation_start is not None and self.generation_start > position:
            self.generation_start = None
        if position <= self._generation[1]:
            self.generated_last = False
        self.conversation = self.conversation.cut(position)

    def replace_sequence(
        self, sequence: Sequence, *, restored_tokens: int = 0, text: TokenIds | None = None
    ) -> None:
        """Replaces its sequence by another one and closes the old one.

        text: the new text, of which the sequence holds a prefix; None: the text stays.
        """
        text = self.tokens if text is None else text
        before = self.sequence
        self._finalizer.detach()
        before.close()
        self._begin(sequence, restored_tokens)
        self.set_text(text)
        self._owner.register(self, before)

    def give_up_sequence(self) -> tuple[TokenIds, int | None]:
        """Closes its sequence; returns its text without the pending token, and that token."""
        self.drop_accepted()
        tokens, pending = self.tokens, self.pending
        self.sequence.close()
        return (tokens if pending is None else tokens[:-1]), pending

    def restart(self, sequence: Sequence, text: TokenIds, pending: int | None) -> None:
        """Replaces its sequence by an empty one; all of `text` is uncomputed."""
        self.replace_sequence(sequence, text=text)
        self.set_pending(pending)
        self.damage = DamageHandling(tokens=self.damage.tokens)
        self.assembly = None

    def fork(self) -> Transcript:
        """A transcript with the same text, without companions; both share the sealed chunks."""
        self.drop_accepted()
        twin: Transcript = self._owner.adopt(
            self.sequence.fork(), sampling=self.sampling, damage=self.damage.for_fork()
        )
        twin._provisional = self._provisional
        twin._pending, twin._logits = self._pending, self._logits
        twin._uncomputed = self._uncomputed
        twin._generation = self._generation
        twin.generation_start = self.generation_start
        twin.assembly = self.assembly
        twin.conversation = self.conversation
        twin.metadata = copy.deepcopy(self.metadata)
        if self.states is not None:
            twin.states = self.states.fork(twin.sequence)
        return twin

    def close(self, *, forget: bool = False) -> None:
        """Releases its chunks and closes its companions. May be called twice.

        forget: whether chunks that nothing else uses are not kept for prefix reuse.
        """
        if not self.closed:
            self.sequence.close(forget)
        if self.states is not None:
            self.states.close()
        for companion in self.companions:
            companion.close()


class Transcripts:
    """The transcripts of one engine, by the sequence each holds.

    Attributes:
        config: the engine's.
        states_of: makes the `StateCursor` of a sequence; returns None for a model without recurrent
            layers.
        trims: counters of all trims.
        speculation: counters of all generations that speculated.
    """

    def __init__(self, config: PagerConfig, states_of: MakeStates) -> None:
        self.config = config
        self.states_of = states_of
        self.trims = TrimCounters()
        self.speculation = SpeculationStats()
        self._by_sequence: weakref.WeakValueDictionary[int, Transcript] = (
            weakref.WeakValueDictionary()
        )

    def adopt(self, sequence: Sequence, **state: Any) -> Transcript:
        """Makes a transcript over `sequence`."""
        transcript = Transcript(self, sequence, **state)
        self.register(transcript)
        return transcript

    def register(self, transcript: Transcript, before: Sequence | None = None) -> None:
        """Records the transcript under its sequence. before: its sequence until now."""
        self._by_sequence[transcript.sequence.uid] = transcript
        if before is not None:
            self._by_sequence.pop(before.uid, None)

    def of(self, sequence: Sequence) -> Transcript | None:
        """The transcript that holds `sequence`, or None."""
        return self._by_sequence.get(sequence.uid)

    def __iter__(self) -> Iterator[Transcript]:
        """Every transcript that is referenced, once."""
        return iter(list(dict.fromkeys(self._by_sequence.values())))
