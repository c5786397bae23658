"""One conversation as the runtime has it: its text, its caches, and what is known of both."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from kvpager.caches import TrimCounters
from kvpager.config import PagerConfig
from kvpager.pager import Sequence
from kvpager.recurrent.cursor import StateCursor
from kvpager.sampling import Sampling, fresh_seed, seed_after
from kvpager.speculation.speculation import SpeculationStats
from kvpager.text.assembly import Assembly
from kvpager.text.companion import Companion
from kvpager.text.cursor import Cursor
from kvpager.text.damage import DamageHandling
from kvpager.text.reservations import Reservation, Reservations
from kvpager.tokens import TokenIds

MakeStates = Callable[[Sequence], StateCursor | None]


class Transcript(Cursor):
    """A text, the sequence that holds its K/V, and what goes with it; made by `Transcripts`.

    A `kvpager.Session` is its user's handle. One that nobody holds gives its chunks up, as if
    closed.

    Attributes:
        config: of the engine.
        sampling: of the last generation, or the restored one; before the first, its seed alone
            counts.
        speculation: of all generations that speculated.
        damage: what is done about damaged chunks.
        tokens_computed: of prompts: rows that forwards committed, whatever they shared.
        generation_start: where the last generation began; None where it was cut or there was none.
        companions: other models' caches of the text.
        states: of recurrent layers; None for a model without such layers.
        assembly: how it was put together, if from segments.
        restored_tokens: positions that came from a snapshot or store.
        restored_tokens_consumed: of those, how many have served in place of a prefill.
        trims: where its trims are counted.
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
        self.sampling = sampling or Sampling(seed=fresh_seed())
        self.speculation = SpeculationStats()
        self.damage = damage or DamageHandling()
        self.tokens_computed = 0
        self.generation_start: int | None = None
        self.trims = owner.trims
        self.companions: list[Companion] = []
        self.states: StateCursor | None = None
        self.assembly: Assembly | None = None
        self._reservations = Reservations(sequence)
        self._reprefilled_to = 0  # up to where tokens are computed that a trim had kept
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
        """Whether its chunks were given up."""
        return self.sequence.closed

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

    def seed_for(self, sampling: Sampling) -> int:
        """Of a generation that was given none: see `Session.generate`."""
        own = self.sampling.seed
        return own if self.pending is not None or sampling.temperature == 0 else seed_after(own)

    def token_at(self, position: int) -> int:
        """The committed token at a position."""
        return int(self.sequence.tokens[position])

    def reserve(self, total_tokens: int) -> Reservation:
        """Holds room to grow to so many tokens, until what is returned is released."""
        return self._reservations.reserve(total_tokens)

    def sample(self, sampling: Sampling) -> int:
        """Chooses the token after the committed ones and makes it the pending one."""
        token = super().sample(sampling)
        self.sampling = sampling
        return token

    def keep_logits(self, logits: Any) -> Any:
        """`set_logits` of a forward, for which the K/V held so far were used."""
        kept = self.set_logits(logits)
        self.mark_used()
        return kept

    def mark_used(self) -> None:
        """The K/V held so far have served in place of a prefill."""
        self.restored_tokens_consumed = self._restored_left

    def mark_provisional(self) -> None:
        """The next rows come from a forward of any row count."""
        if self.config.exact == "reuse":
            self.provisional = True

    def drop_inexact(self) -> None:
        """Makes the K/V held such that exact rows may follow; what it costs is uncomputed."""
        self.drop_accepted()
        self.forget_provisional(self.config.chunk_tokens)

    def count_computed(self, start: int, count: int) -> None:
        """A forward has committed `count` tokens of the text from `start` on."""
        self.tokens_computed += count
        if start + count >= self._reprefilled_to:
            self._reprefilled_to = 0

    def count_adopted(self, start: int, count: int) -> None:
        """Chunks of others hold these tokens, so that they need not be computed again after all."""
        found = max(0, min(start + count, self._reprefilled_to) - start)
        self.trims.tokens_reprefilled -= found

    def count_speculation(self, proposed: int, accepted: int) -> None:
        """A forward has continued the text, with so many guesses in it."""
        one = SpeculationStats(1, proposed, accepted, 1 + accepted)
        self.speculation += one
        self._owner.speculation += one

    def finish_cut(self, position: int, held: int) -> None:
        """Cuts the text at a position, now that no cache goes beyond. held: committed before."""
        kept = self.committed
        self.cut(position)
        lost = min(held, position)
        self._reprefilled_to = lost if kept < lost else min(self._reprefilled_to, position)
        self._restored_left = min(self._restored_left, kept)
        if self.generation_start is not None and self.generation_start > position:
            self.generation_start = None

    def replace_sequence(
        self, sequence: Sequence, *, restored_tokens: int = 0, text: TokenIds | None = None
    ) -> None:
        """Goes on with another sequence in the place of its own, which is closed.

        text: what the text is from now on, of which the sequence has a beginning or more; None:
            what it was.
        """
        text = self.tokens if text is None else text
        before = self.sequence
        self._finalizer.detach()
        before.close()
        self._begin(sequence, restored_tokens)
        self.set_text(text)
        self._owner.register(self, before)

    def restart(self, sequence: Sequence, text: TokenIds, pending: int | None) -> None:
        """Goes on over an empty sequence, with all of its text uncomputed."""
        self.replace_sequence(sequence, text=text)
        self.set_pending(pending)
        self.damage = DamageHandling(tokens=self.damage.tokens)
        self.assembly = None

    def fork(self) -> Transcript:
        """Another one with the same text, without companions; sealed chunks are shared."""
        self.drop_accepted()
        twin = self._owner.adopt(
            self.sequence.fork(), sampling=self.sampling, damage=self.damage.for_fork()
        )
        self.copy_to(twin)
        twin.generation_start = self.generation_start
        twin.assembly = self.assembly
        if self.states is not None:
            twin.states = self.states.fork(twin.sequence)
        return twin

    def close(self) -> None:
        """Gives the chunks up, and the companions'. Twice is harmless."""
        if not self.closed:
            self.sequence.close()
        if self.states is not None:
            self.states.close()
        for companion in self.companions:
            companion.close()


class Transcripts:
    """The transcripts of one engine, by the sequence each holds.

    Attributes:
        config: of the engine.
        states_of: makes what is known of a sequence's recurrent state; of a model without
            recurrent layers, None.
        trims: counters of all their trims.
        speculation: of all of them.
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
        """A transcript over `sequence`."""
        transcript = Transcript(self, sequence, **state)
        self.register(transcript)
        return transcript

    def register(self, transcript: Transcript, before: Sequence | None = None) -> None:
        """Remembers which one holds a sequence; before: the one it held until now."""
        self._by_sequence[transcript.sequence.uid] = transcript
        if before is not None:
            self._by_sequence.pop(before.uid, None)

    def of(self, sequence: Sequence) -> Transcript | None:
        """The one that holds a sequence, if one does."""
        return self._by_sequence.get(sequence.uid)

    def __iter__(self) -> Iterator[Transcript]:
        """Those that somebody holds, each once."""
        return iter(list(dict.fromkeys(self._by_sequence.values())))
