"""One conversation as the runtime sees it: its text, its caches and their state."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kvpager.companions import TrimCounters
from kvpager.config import PagerConfig
from kvpager.logits.processors import Processors
from kvpager.pager import Sequence
from kvpager.recurrent.cursor import StateCursor
from kvpager.sampling import Sampling, fresh_seed, seed_after
from kvpager.speculation.speculation import SpeculationStats
from kvpager.stores import SnapshotStore
from kvpager.text.assembly import Assembly
from kvpager.text.companion import Companion
from kvpager.text.conversation import Conversation
from kvpager.text.cursor import Cursor
from kvpager.text.damage import DamageHandling
from kvpager.text.reservations import Reservation, Reservations
from kvpager.tokens import TokenIds

MarkComputed = Callable[[int, int], object]  # (first position, number of positions)
MakeStates = Callable[[Sequence], StateCursor | None]


_NOWHERE = -2  # no position, and before none


class Transcript(Cursor):
    """A text, the sequence with its K/V, and their companions; made by `Transcripts`.

    A `kvpager.Session` is the user's handle of one. A transcript without references releases its
    chunks, as `close` does.

    Attributes:
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
        self._reservations = Reservations(sequence)
        self._reprefilled_to = 0  # end of the tokens computed again that a trim had kept
        self._begin(sequence, restored_tokens)

    def _begin(self, sequence: Sequence, restored_tokens: int) -> None:
        Cursor.__init__(self, sequence)
        self._reservations.sequence = sequence
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
        """Holds room to grow to `total_tokens` until the reservation is released."""
        return self._reservations.reserve(total_tokens)

    def start_for(self, sampling: Sampling, text: TokenIds) -> int:
        """`Sampling.start` of a generation behind `text`.

        One that goes on with an interrupted generation counts that one's tokens too, also after a
        save, as it takes over its seed.
        """
        if not sampling.counts_produced:
            return 0
        goes_on = self.sampling.counts_produced and self.goes_on(text)
        return self.sampling.start if goes_on else len(text)

    def sample(self, sampling: Sampling, processors: Processors | None = None) -> int:
        """Samples the token after the committed ones and makes it the pending one."""
        self._generation = (sampling, self.next_position)  # first: an interrupt may follow
        return super().sample(sampling, processors)

    def keep_logits(self, logits: Any) -> Any:
        """`set_logits` with logits of a forward, which used the K/V held so far."""
        kept = self.set_logits(logits)
        self.mark_used()
        return kept

    def mark_used(self) -> None:
        """Records that the K/V held so far replaced a prefill."""
        self.restored_tokens_consumed = self._restored_left

    def mark_provisional(self) -> None:
        """Call before a forward with an unproven row count commits rows."""
        if self.config.exact == "reuse":
            self.provisional = True

    def drop_inexact(self) -> None:
        """Drops K/V that no exact row may follow; their tokens become uncomputed."""
        self.drop_accepted()
        self.forget_provisional(self.config.chunk_tokens)

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

    def restart(self, sequence: Sequence, text: TokenIds, pending: int | None) -> None:
        """Replaces its sequence by an empty one; all of `text` is uncomputed."""
        self.replace_sequence(sequence, text=text)
        self.set_pending(pending)
        self.damage = DamageHandling(tokens=self.damage.tokens)
        self.assembly = None

    def fork(self) -> Transcript:
        """A transcript with the same text, without companions; both share the sealed chunks."""
        self.drop_accepted()
        twin = self._owner.adopt(
            self.sequence.fork(), sampling=self.sampling, damage=self.damage.for_fork()
        )
        self.copy_to(twin)
        twin._generation = self._generation  # noqa: SLF001  # a transcript like this one
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
