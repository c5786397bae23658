"""One conversation: its tokens, their K/V in the pager, and where its generation stands."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import numpy as np
import torch

from kvpager import _core
from kvpager.errors import InvalidArgumentError
from kvpager.pager import ChunkInfo, Pin, Sequence
from kvpager.released import ReleasedText
from kvpager.runtime.companions import freeze_companions
from kvpager.runtime.cursor import Cursor, Lookahead
from kvpager.runtime.draft import DraftCompanion
from kvpager.runtime.group import CacheGroup, TrimCounters
from kvpager.runtime.packing import read_logits
from kvpager.runtime.primary import PrimaryCache
from kvpager.runtime.progress import Progress, check_progress, reporting_bytes
from kvpager.runtime.recurrent import StateCursor
from kvpager.runtime.repair import Repairs, repairing
from kvpager.runtime.room import Room, Rooms
from kvpager.runtime.sampling import Sampling, fresh_seed, seed_after
from kvpager.runtime.saving import FrozenState, SaveHandle, Saves, destination
from kvpager.runtime.segments.report import Assembly
from kvpager.runtime.speculation import SpeculationStats
from kvpager.runtime.stream import GeneratedToken, Generation
from kvpager.runtime.tokens import TokenIds, TokenIdsLike, as_token_ids
from kvpager.stores import SaveReport, SnapshotStore

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from kvpager.runtime.engine import Engine
    from kvpager.runtime.generation_options import GenerationOptions

SESSION_VERSION = 1  # of what a snapshot keeps beside the K/V
RELEASED_VERSION = 2  # likewise, where chunks behind a window were let go

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Reuse:
    """What `Session.update` found to be there already.

    Attributes:
        total: tokens of the text.
        computed: of those, tokens whose K/V had to be computed.
        changed: position of the first token that was another one; the session's old length where
            the new text merely goes on.
    """

    total: int
    computed: int
    changed: int

    @property
    def reused(self) -> int:
        """Tokens that were not computed."""
        return self.total - self.computed


class Session:
    """Made by `Engine.session`, `Engine.restore` or `fork`. One thread at a time.

    The session's tokens are the committed ones, whose K/V the pager holds, and at most one
    *pending* token: the last one sampled, whose K/V come with the next forward. `tokens`, `length`
    and the prompt that `prefill` takes include it; `committed` does not. An operation that fails
    changes nothing, except that a prefill keeps what its earlier forwards committed: calling it
    again goes on from there.

    With `exact="reuse"` there may be *owed* tokens between the two: decoded ones whose K/V are
    computed again before a chunk is sealed or saved. Nobody has to do anything about them.
    """

    def __init__(
        self,
        engine: Engine,
        sequence: Sequence,
        *,
        sampling: Sampling | None = None,
        restored_tokens: int = 0,
        repairs: Repairs | None = None,
    ) -> None:
        self.engine = engine
        # Of the last generate(), or the restored one; before the first one, its seed alone counts.
        self.sampling = sampling or Sampling(seed=fresh_seed())
        self.speculation = SpeculationStats()  # of all generate() calls that speculated
        self.repairs = repairs or Repairs()
        self.tokens_computed = 0  # of prompts: rows that forwards committed, whatever they shared
        self.generation_start: int | None = None  # where the last generate() began
        self._saves = Saves()
        self._rooms = Rooms(sequence)
        self._trims = engine.trims
        self.companions: list[DraftCompanion] = []  # other models' caches of the text
        self.states: StateCursor | None = None  # of recurrent layers
        self.saved_beside: dict[str, object] = {}  # what else its snapshots say, JSON-able
        self.assembly: Assembly | None = None  # how it was put together, if from segments
        self._reprefilled_to = 0  # up to where tokens are computed that a trim had kept
        self._take(sequence, restored_tokens)

    def _take(self, sequence: Sequence, restored_tokens: int) -> None:
        self.sequence = sequence
        self._rooms.sequence = sequence
        self._cursor = Cursor(sequence)
        self.restored_tokens = restored_tokens  # positions that came from a snapshot or store
        self.restored_tokens_consumed = 0  # of those, how many have served in place of a prefill
        self._restored_left = restored_tokens
        # A session nobody holds gives its chunks up, as if closed.
        self._finalizer = weakref.finalize(self, sequence.close)
        self._finalizer.atexit = False
        if self.states is not None:
            self.states.close()
        self.states = self.engine.states_of(sequence)

    @property
    def recomputed_tokens(self) -> int:
        """Tokens computed again because what a snapshot holds of them is damaged."""
        return self.repairs.tokens

    @property
    def committed(self) -> int:
        """Tokens of the session whose K/V the pager holds."""
        return self._cursor.committed

    @property
    def owed(self) -> TokenIds:
        """Tokens after the committed ones whose K/V have to be computed again, int32; a copy."""
        return np.array(self._cursor.owed)

    @property
    def pending(self) -> int | None:
        """The sampled token that no forward has taken yet."""
        return self._cursor.pending

    @property
    def tokens(self) -> TokenIds:
        """All token ids [length] int32, the pending one included; a copy."""
        return self._cursor.tokens

    @property
    def length(self) -> int:
        """Number of tokens, the pending one included."""
        return self._cursor.length

    @property
    def closed(self) -> bool:
        """Whether `close` was called, on the session or on its engine."""
        return self.sequence.closed

    @property
    def logits(self) -> torch.Tensor:
        """Logits [vocab] after the last token that is not pending, in the model's dtype; a copy.

        Those of the last forward, or computed again with one row that reads: the same bits. This
        commits no pending token, which was chosen from these logits.

        Raises:
            InvalidArgumentError: the session is empty.
        """
        self.engine.check_session(self)
        self._check_not_empty("logits")
        logits = self.known_logits
        return (read_logits(self.engine, self) if logits is None else logits).clone()

    def prefill(self, ids: TokenIdsLike, *, progress: Progress = None) -> None:
        """Makes the session hold exactly the whole prompt `ids`, computing only what is missing.

        Args:
            ids: the whole prompt, [n] or [1, n]; the session's tokens must be its beginning.
            progress: True for a bar on stderr, or a callable (tokens done, tokens in all).

        Raises:
            PrefixMismatchError: `ids` is shorter than or differs from what the session holds;
                `.position` is the first token that differs. A restored session that cannot be used
                says so here.
            InvalidArgumentError: no tokens, not integers, or an id outside the vocabulary.
            CapacityError: the tiers below the pool cannot hold the prompt; says how many bytes it
                needs.
            CorruptSnapshotError: a restored chunk it needs is damaged, and was to be reported; see
                `Engine.restore`.
        """
        self.engine.prefill_many([(self, ids)], progress=progress)

    def append(self, ids: TokenIdsLike, *, progress: Progress = None) -> None:
        """Adds new tokens after the session's own, the pending one included. Errors: `prefill`."""
        new = as_token_ids(ids, self.engine.vocab_size)
        self.engine.check_session(self)
        self.prefill(np.concatenate([self.tokens, new]), progress=progress)

    @overload
    def generate(
        self,
        max_new_tokens: int,
        *,
        seed: int | None = None,
        logprobs: Literal[False] = False,
        **options: Unpack[GenerationOptions],
    ) -> Iterator[int]: ...

    @overload
    def generate(
        self,
        max_new_tokens: int,
        *,
        seed: int | None = None,
        logprobs: Literal[True],
        **options: Unpack[GenerationOptions],
    ) -> Iterator[GeneratedToken]: ...

    def generate(
        self,
        max_new_tokens: int,
        *,
        seed: int | None = None,
        logprobs: bool = False,
        **options: Any,
    ) -> Iterator[Any]:
        """Yields token ids as they are produced, each part of the session by then. Abandon at will.

        Args:
            max_new_tokens: most tokens to produce, at least 1.
            seed: of the draws. By default a text that was left in the middle goes on with its own
                (also after a save), and every other call has a new one, which follows from the last
                and so, over all calls, from one that a new session or fork takes from the system.
                `sampling.seed` says which it was: given again, it gives the same text.
            logprobs: yield `GeneratedToken(id, logprob)` instead of ids.
            **options: `kvpager.GenerationOptions`: temperature, top_k, top_p, eos, stop, speculate.

        Raises:
            InvalidArgumentError: at the call, for an argument out of range, an unknown option or an
                empty session; from the iterator, for a proposer that misbehaves.
            CapacityError: at the call, if max_new_tokens more do not fit below the pool.
            NonFiniteError: from the iterator.
            CorruptSnapshotError: from the iterator, as for `prefill`; generate again to go on.
        """
        return self.engine.generate_alone(
            self, max_new_tokens, seed=seed, logprobs=logprobs, **options
        )

    def trim(self, position: int) -> None:
        """Keeps the tokens [0, position), 0 <= position <= length.

        The text is cut there whatever the caches can do. What one of them cannot keep (a window has
        let go of what lies behind it, a recurrent state was kept at fewer places, the pool has no
        block for a part of a chunk) is computed again with the next forward, and a companion's loss
        is its own: see `kvpager.CacheGroup`, and `Engine.stats` for what it cost.
        """
        self.engine.check_session(self)
        if type(position) is not int or not 0 <= position <= self.length:
            raise InvalidArgumentError(
                f"position is {position!r}; expected 0 to {self.length}, the tokens the session "
                "holds"
            )
        if position == self.length:
            return
        self._cursor.drop_ahead()
        held = self.committed
        group = CacheGroup(PrimaryCache(self), self.companions, self._trims)
        try:
            self._repairing(lambda: group.trim(position))
        finally:  # also where a companion failed: by then the primary cache has been cut
            if self.committed <= position:
                self._cut(position, held)

    def regenerate(
        self, max_new_tokens: int, *, from_position: int | None = None, **options: Any
    ) -> Iterator[Any]:
        """Drops what was generated last and yields tokens in its place, as `generate` does.

        Args:
            max_new_tokens: as for `generate`.
            from_position: where the new text begins, 1 .. length; None: where the last call of
                `generate` or `regenerate` began, also if it was before a save.
            **options: of `generate`; with a temperature each call draws another text, unless a
                `seed` is given.

        Raises:
            InvalidArgumentError: at the call, before anything is dropped: nothing was generated
                since the session or its last trim, or an argument is out of range.
            CapacityError: at the call, if max_new_tokens more do not fit below the pool; the
                session's text is as it was.
        """
        self.engine.check_session(self)
        start = self.generation_start if from_position is None else from_position
        if start is None:
            raise InvalidArgumentError(
                "regenerate: the session has generated nothing since it began or was cut; give "
                "from_position"
            )
        if type(start) is not int or not 1 <= start <= self.length:
            raise InvalidArgumentError(
                f"from_position is {start!r}; expected 1 to {self.length}, the tokens the session "
                "holds"
            )
        if "stop" in options:  # both are read twice
            options["stop"] = [list(part) for part in options["stop"]]
        if isinstance(options.get("eos"), Iterator):
            options["eos"] = list(options["eos"])
        seed, logprobs = options.pop("seed", None), options.pop("logprobs", False)
        generation = Generation.checked(self.engine, max_new_tokens, options, logprobs=logprobs)
        if seed is not None:
            generation.sampling_with(seed)
        self.engine.positions.check(start + max_new_tokens, "the text with max_new_tokens")
        with self.reserve(start + max_new_tokens):
            text, begun = self.tokens, self.generation_start
            self.trim(start)
            try:
                return self.generate(max_new_tokens, seed=seed, logprobs=logprobs, **options)
            except BaseException:  # chunks that others hold as well made no room
                self._cursor.owe(text)
                self.generation_start = begun
                raise

    def update(self, ids: TokenIdsLike, *, progress: Progress = None) -> Reuse:
        """Makes the session hold exactly `ids`, whatever it held: the common beginning is kept.

        For an edited message, reasoning that is dropped between turns, or a client that renders the
        whole conversation anew each time. `prefill` is for those who are sure that the text only
        grows, and says so where it does not.

        Args:
            ids: the whole text, [n] or [1, n].
            progress: as for `prefill`.

        Raises:
            InvalidArgumentError: no tokens, not integers, or an id outside the vocabulary, or
                progress is nothing to report to; nothing was changed.
            CapacityError, CorruptSnapshotError: as for `prefill`; the common beginning is kept, and
                calling it again goes on from there.
        """
        self.engine.check_session(self)
        new = as_token_ids(ids, self.engine.vocab_size)
        check_progress(progress)
        self.engine.positions.check(len(new), "ids")
        held = self.tokens
        common = min(len(held), len(new))
        different = np.flatnonzero(held[:common] != new[:common])
        changed = int(different[0]) if different.size else common
        self.trim(changed)
        before = self.tokens_computed
        self.prefill(new, progress=progress)
        return Reuse(total=len(new), computed=self.tokens_computed - before, changed=changed)

    def fork(self) -> Session:
        """Another session with the same tokens; sealed chunks are shared, the rest is its own.

        What it draws is its own as well, unless `generate` is given a seed.
        """
        self.engine.check_session(self)
        twin = self._alone()
        twin.sampling = replace(self.sampling, seed=fresh_seed())
        for companion in self.companions:
            twin.add_companion(companion.fork())
        return twin

    def pin(self, start: int, stop: int) -> Pin:
        """Keeps positions [start, stop) resident until the pin is released; changes no result.

        Raises:
            CapacityError: says how many chunks are free to pin.
        """
        self.engine.check_session(self)
        self._cursor.drop_ahead()
        return self._repairing(lambda: self.sequence.pin(start, stop))

    def ledger(self) -> list[ChunkInfo]:
        """What is known of each chunk, in logical order: where it is, its provenance, its score.

        With recurrent layers also whether the state behind it is kept (`checkpoint`).
        """
        self.engine.check_session(self)
        self._cursor.drop_ahead()
        chunks = self.sequence.ledger()
        if self.states is not None:
            kept = self.states.held(self.committed)
            for chunk in chunks:
                chunk.checkpoint = chunk.sealed and chunk.stop in kept
        return chunks

    @overload
    def save(
        self,
        name_or_path: str | os.PathLike[str],
        *,
        store: SnapshotStore | None = None,
        upto: int | None = None,
        overwrite: bool = False,
        wait: Literal[True] = True,
        progress: Progress = None,
    ) -> SaveReport: ...

    @overload
    def save(
        self,
        name_or_path: str | os.PathLike[str],
        *,
        store: SnapshotStore | None = None,
        upto: int | None = None,
        overwrite: bool = False,
        wait: Literal[False],
        progress: Progress = None,
    ) -> SaveHandle: ...

    @overload
    def save(
        self,
        name_or_path: str | os.PathLike[str],
        *,
        store: SnapshotStore | None = None,
        upto: int | None = None,
        overwrite: bool = False,
        wait: bool,
        progress: Progress = None,
    ) -> SaveReport | SaveHandle: ...

    def save(
        self,
        name_or_path: str | os.PathLike[str],
        *,
        store: SnapshotStore | None = None,
        upto: int | None = None,
        overwrite: bool = False,
        wait: bool = True,
        progress: Progress = None,
    ) -> SaveReport | SaveHandle:
        """Saves the session as it is now, atomically: whole, or what had the name is as it was.

        Everything `Engine.restore` needs is saved: tokens, K/V, summaries, the pending token and
        the sampler; and beside it, under the name and `.draft` or `.states`, what a draft model and
        recurrent layers hold of the text (`SaveReport.companions`). With `wait=False` a thread
        writes while the session goes on; what is saved is the session at the call, bit for bit, and
        `close` of the session or its engine waits for it.

        Args:
            name_or_path: the snapshot's name in `store`; without one, the path of a file.
            store: where to, such as a DirectoryStore, which writes only chunks it does not have.
            upto: the first tokens alone, 1 .. length; None: all, the pending one included. With
                fewer, the restored session has no pending token.
            overwrite: replace what has the name in a directory store also where that was saved
                under another salt or by another model.
            wait: whether to return when it is saved, or a handle at once.
            progress: True for a bar on stderr, or a callable (bytes done, bytes in all); with
                `wait=False` it is called from the writing thread. What it raises stops the save.

        Raises:
            InvalidArgumentError: the session is empty, or an argument cannot be.
            StorageError: the system refused to write; nothing is left of it.
            CapacityError: the store's budget cannot hold it.
            CorruptSnapshotError: a restored chunk that has to be copied is damaged, and the session
                was restored with `on_corrupt="fail"`.
        """
        self.engine.check_session(self)
        self._check_not_empty("save")
        name, target = destination(name_or_path, store)
        upto = self.length if upto is None else upto
        if type(upto) is not int or not 1 <= upto <= self.length:
            raise InvalidArgumentError(
                f"upto is {upto!r}; expected 1 to {self.length}, the tokens the session holds"
            )
        self.engine.runner.unchanged.check_model(thorough=True)
        content = self._freeze(min(upto, self._cursor.told))
        released = ReleasedText.of_content(content)
        values: dict[str, object] = {
            "version": SESSION_VERSION if released is None else RELEASED_VERSION,
            "pending": self.pending if upto == self.length else None,
            "sampling": self.sampling.to_json(),
            **self.saved_beside,
        }
        if self.generation_start is not None and self.generation_start <= upto:
            values["generation_start"] = self.generation_start
        state = FrozenState(
            engine=self.engine,
            content=content,
            released=None if released is None else released.tokens,
            session=self.sequence.session_text(values, content),
            salt=self.sequence.salt,
            repairs=self.repairs,
            name=name,
            store=target,
            companions=freeze_companions(self, upto),
            overwrite=overwrite,
        )
        if wait:
            with reporting_bytes(progress, "save") as report:
                return state.write(report)
        return SaveHandle(state, progress).start(self._saves, self.engine.saves)

    def close(self) -> None:
        """Gives the session's chunks up, once its saves have ended. Twice is harmless.

        In a forked child nothing is done.
        """
        if self.engine.made_in.forked:
            return
        self._saves.wait()
        if not self.closed:
            self.sequence.close()
        if self.states is not None:
            self.states.close()
        for companion in self.companions:
            companion.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        if self.closed:
            return "Session(closed)"
        return f"Session(length={self.length}, restored_tokens={self.restored_tokens})"

    # For the runtime.

    @property
    def known_logits(self) -> torch.Tensor | None:
        """Logits after the last token that is not pending, if a forward has left them."""
        return self._cursor.known_logits

    @property
    def ready(self) -> bool:
        """Whether the next token can be chosen without a forward."""
        return self._cursor.ready

    def add_companion(self, companion: DraftCompanion) -> None:
        """From here on it is cut, forked, saved and closed with the session."""
        self.companions.append(companion)

    @property
    def draft(self) -> DraftCompanion:
        """What the engine's draft model holds of the text; empty where it was not needed yet."""
        for companion in self.companions:
            return companion
        assert self.engine.drafting is not None
        self.add_companion(DraftCompanion(self.engine.drafting))
        return self.companions[-1]

    def seed_for(self, sampling: Sampling) -> int:
        """Of a generation that was given none: see `generate`."""
        own = self.sampling.seed
        return own if self.pending is not None or sampling.temperature == 0 else seed_after(own)

    @property
    def must_settle(self) -> bool:
        """Whether tokens are owed, or the pending one would seal a chunk of provisional rows."""
        cursor = self._cursor
        if cursor.owed.size:
            return True
        return (
            self.engine.config.exact == "reuse"
            and cursor.pending is not None
            and (cursor.committed + 1) % self.engine.layout.chunk_tokens == 0
        )

    @property
    def cursor(self) -> Cursor:
        """Where the session stands over its sequence."""
        return self._cursor

    def note_computed(self, start: int, count: int) -> None:
        """A forward has committed `count` tokens of the text from `start` on."""
        self.tokens_computed += count
        if start + count >= self._reprefilled_to:
            self._reprefilled_to = 0

    def note_adopted(self, start: int, count: int) -> None:
        """Chunks of others hold these tokens, so that they need not be computed again after all."""
        found = max(0, min(start + count, self._reprefilled_to) - start)
        self._trims.tokens_reprefilled -= found

    def reserve(self, total_tokens: int) -> Room:
        """Holds room to grow to so many tokens, until what is returned is released."""
        return self._rooms.claim(total_tokens)

    def keep_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Remembers, in a copy, the logits after the last committed token."""
        kept = self._cursor.keep_logits(logits)
        self.note_used()
        return kept

    def sample(self, sampling: Sampling) -> int:
        """Chooses the token after the committed ones and makes it the pending one."""
        token = self._cursor.sample(sampling)
        self.sampling = sampling
        return token

    def advance(self) -> bool:
        """Commits the pending token without a forward, if one has already accepted it."""
        return self._cursor.advance()

    def look_ahead(self, ahead: Lookahead) -> None:
        """What the running forward accepts beyond the pending token."""
        self._cursor.look_ahead(ahead)

    def drop_ahead(self) -> None:
        """Forgets accepted tokens that nobody was told."""
        self._cursor.drop_ahead()

    def note_provisional(self) -> None:
        """The next rows come from a forward of any row count."""
        if self.engine.config.exact == "reuse":
            self._cursor.provisional = True

    def settle(self) -> None:
        """Makes the K/V held such that exact rows may follow; what they cost is owed."""
        self._cursor.drop_ahead()
        self._cursor.owe_provisional(self.engine.layout.chunk_tokens)

    def token_at(self, position: int) -> int:
        """The committed token at a position."""
        return int(self.sequence.tokens[position])

    def hold(
        self, sequence: Sequence, *, restored_tokens: int = 0, text: TokenIds | None = None
    ) -> None:
        """Goes on with another sequence in the place of its own, which is closed.

        text: what the session's text is from now on, of which the sequence has a beginning or more;
            None: what it was.
        """
        text = self.tokens if text is None else text
        before = self.sequence
        self._finalizer.detach()
        before.close()
        self._take(sequence, restored_tokens)
        self._cursor.owe(text)
        self.engine.register(self, before)

    def begin_anew(self, sequence: Sequence, text: TokenIds, pending: int | None) -> None:
        """Goes on over an empty sequence, with all of its text owed: what it held is of no use."""
        self.hold(sequence, text=text)
        self.keep_pending(pending)
        self.repairs = Repairs(tokens=self.repairs.tokens)
        self.assembly = None

    def keep_pending(self, token: int | None) -> None:
        """Makes a token the pending one: sampled after the committed ones, but not here."""
        self._cursor.keep_pending(token)

    def note_used(self) -> None:
        """The K/V held so far have served in place of a prefill."""
        self.restored_tokens_consumed = self._restored_left

    def _cut(self, position: int, held: int) -> None:
        """Cuts the text at a position, now that no cache goes beyond. held: committed before."""
        kept = self.committed
        self._cursor.cut(position)
        lost = min(held, position)
        self._reprefilled_to = lost if kept < lost else min(self._reprefilled_to, position)
        self._restored_left = min(self._restored_left, kept)
        if self.generation_start is not None and self.generation_start > position:
            self.generation_start = None

    def _alone(self) -> Session:
        """A fork without companions."""
        self._cursor.drop_ahead()
        twin = self.engine.adopt(
            self.sequence.fork(), sampling=self.sampling, repairs=self.repairs.for_fork()
        )
        twin._cursor = self._cursor.over(twin.sequence)  # noqa: SLF001  # one of its own kind
        twin.generation_start = self.generation_start
        twin.assembly = self.assembly
        if self.states is not None:
            twin.states = self.states.fork(twin.sequence)
        return twin

    def _freeze(self, upto: int) -> _core.SnapshotContent:
        """The first `upto` tokens as a snapshot has them; of provisional rows, in exact ones."""
        self._cursor.drop_ahead()
        sealed = self.committed - self.committed % self.engine.layout.chunk_tokens
        if upto <= sealed or not (self._cursor.provisional or self._cursor.owed.size):
            return self._repairing(lambda: self.sequence.freeze(upto))
        with self._alone() as settled:
            settled._trims = TrimCounters()  # noqa: SLF001  # nobody has cut anything
            settled.trim(upto)
            settled.prefill(settled.tokens)
            return settled._freeze(upto)  # noqa: SLF001  # one of its own kind

    def _repairing(self, work: Callable[[], _Result]) -> _Result:
        return repairing(self.engine, [self.sequence], work)

    def _check_not_empty(self, what: str) -> None:
        if not self.length:
            raise InvalidArgumentError(f"{what}: the session is empty; call prefill(ids) first")
