"""One conversation, as its user has it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import torch

from kvpager.errors import InvalidArgumentError
from kvpager.execution.core import EngineCore
from kvpager.pager import ChunkInfo, Pin, Sequence
from kvpager.progress import Progress, check_progress, reporting_bytes
from kvpager.sampling import Sampling, fresh_seed
from kvpager.scheduling.decode import TokenIterator, begin_streams
from kvpager.scheduling.packing import read_logits
from kvpager.scheduling.prefill import prefill_all
from kvpager.scheduling.recompute import recomputing_damage
from kvpager.scheduling.stream import GeneratedToken, Generation
from kvpager.scheduling.trim import trim
from kvpager.snapshots.freezing import freeze
from kvpager.snapshots.saving import SaveHandle, Saves
from kvpager.speculation.speculation import SpeculationStats
from kvpager.stores import SaveReport, SnapshotStore
from kvpager.text.assembly import Assembly
from kvpager.text.transcript import Transcript
from kvpager.tokens import TokenIds, TokenIdsLike, as_token_ids

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from kvpager.scheduling.options import GenerationOptions


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

    With `exact="reuse"` there may be *uncomputed* tokens between the two: decoded ones whose K/V
    are computed again before a chunk is sealed or saved. Nobody has to do anything about them.
    """

    def __init__(self, core: EngineCore, transcript: Transcript, saves: Saves) -> None:
        """`saves`: of the engine, which waits for those of its sessions."""
        self.transcript = transcript  # it and the core are what the runtime works on
        self.core = core
        self._engine_saves = saves
        self._saves = Saves()

    @property
    def sequence(self) -> Sequence:
        """What holds its K/V, for those who want to look at them; its chunks are the session's."""
        return self.transcript.sequence

    @property
    def committed(self) -> int:
        """Tokens of the session whose K/V the pager holds."""
        return self.transcript.committed

    @property
    def pending(self) -> int | None:
        """The sampled token that no forward has taken yet."""
        return self.transcript.pending

    @property
    def tokens(self) -> TokenIds:
        """All token ids [length] int32, the pending one included; a copy."""
        return self.transcript.tokens

    @property
    def length(self) -> int:
        """Number of tokens, the pending one included."""
        return self.transcript.length

    @property
    def closed(self) -> bool:
        """Whether `close` was called, on the session or on its engine."""
        return self.transcript.closed

    @property
    def sampling(self) -> Sampling:
        """Of the last generation, or the restored one; before the first, its seed alone counts."""
        return self.transcript.sampling

    @property
    def speculation(self) -> SpeculationStats:
        """What speculation was worth, over all generations that speculated."""
        return self.transcript.speculation

    @property
    def assembly(self) -> Assembly | None:
        """How `Engine.assemble` put it together; None for any other session."""
        return self.transcript.assembly

    @property
    def generation_start(self) -> int | None:
        """Where the last `generate` or `regenerate` began; None where it was cut or never was."""
        return self.transcript.generation_start

    @property
    def tokens_computed(self) -> int:
        """Of prompts: tokens whose K/V were computed, whatever was shared with others."""
        return self.transcript.tokens_computed

    @property
    def restored_tokens(self) -> int:
        """Tokens whose K/V came from a snapshot or a store."""
        return self.transcript.restored_tokens

    @property
    def restored_tokens_consumed(self) -> int:
        """Of those, how many have served in place of a prefill."""
        return self.transcript.restored_tokens_consumed

    @property
    def recomputed_tokens(self) -> int:
        """Tokens computed again because what a snapshot holds of them is damaged."""
        return self.transcript.damage.tokens

    @property
    def logits(self) -> torch.Tensor:
        """Logits [vocab] after the last token that is not pending, in the model's dtype; a copy.

        Those of the last forward, or computed again with one row that reads: the same bits. This
        commits no pending token, which was chosen from these logits.

        Raises:
            InvalidArgumentError: the session is empty.
        """
        self._check_open()
        if not self.length:
            raise InvalidArgumentError("logits: the session is empty; call prefill(ids) first")
        logits = self.transcript.known_logits
        return (read_logits(self.core, self.transcript) if logits is None else logits).clone()

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
        self._check_open()
        checked = as_token_ids(ids, self.core.vocab_size)
        prefill_all(self.core, [(self.transcript, checked)], progress)

    def append(self, ids: TokenIdsLike, *, progress: Progress = None) -> None:
        """Adds new tokens after the session's own, the pending one included. Errors: `prefill`."""
        self._check_open()
        new = as_token_ids(ids, self.core.vocab_size)
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
        streams = begin_streams(
            self.core, [self.transcript], max_new_tokens, seed, logprobs, options
        )
        return TokenIterator(self.core, streams, lambda step: step[1])

    def trim(self, position: int) -> None:
        """Keeps the tokens [0, position), 0 <= position <= length.

        The text is cut there whatever the caches can do. What one of them cannot keep (a window has
        let go of what lies behind it, a recurrent state was kept at fewer places, the pool has no
        block for a part of a chunk) is computed again with the next forward, and a companion's loss
        is its own: see `kvpager.CacheGroup`, and `Engine.stats` for what it cost.
        """
        self._check_open()
        if type(position) is not int or not 0 <= position <= self.length:
            raise InvalidArgumentError(
                f"position is {position!r}; expected 0 to {self.length}, the tokens the session "
                "holds"
            )
        trim(self.core, self.transcript, position)

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
        self._check_open()
        start = self.transcript.generation_start if from_position is None else from_position
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
        generation = Generation.checked(self.core, max_new_tokens, options, logprobs=logprobs)
        if seed is not None:
            generation.sampling_with(seed)
        self.core.positions.check(start + max_new_tokens, "the text with max_new_tokens")
        transcript = self.transcript
        with transcript.reserve(start + max_new_tokens):
            text, begun = transcript.tokens, transcript.generation_start
            self.trim(start)
            try:
                return self.generate(max_new_tokens, seed=seed, logprobs=logprobs, **options)
            except BaseException:  # chunks that others hold as well made no room
                transcript.set_text(text)
                transcript.generation_start = begun
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
        self._check_open()
        new = as_token_ids(ids, self.core.vocab_size)
        check_progress(progress)
        self.core.positions.check(len(new), "ids")
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
        self._check_open()
        twin = self.transcript.fork()
        twin.sampling = replace(self.sampling, seed=fresh_seed())
        for companion in self.transcript.companions:
            twin.companions.append(companion.fork())
        return Session(self.core, twin, self._engine_saves)

    def pin(self, start: int, stop: int) -> Pin:
        """Keeps positions [start, stop) resident until the pin is released; changes no result.

        Raises:
            CapacityError: says how many chunks are free to pin.
        """
        self._check_open()
        self.transcript.drop_accepted()
        sequence = self.sequence
        return recomputing_damage(self.core, [sequence], lambda: sequence.pin(start, stop))

    def ledger(self) -> list[ChunkInfo]:
        """What is known of each chunk, in logical order: where it is, its provenance, its score.

        With recurrent layers also whether the state behind it is kept (`checkpoint`).
        """
        self._check_open()
        self.transcript.drop_accepted()
        chunks = self.sequence.ledger()
        states = self.transcript.states
        if states is not None:
            kept = states.held(self.committed)
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
        state = freeze(
            self.core, self.transcript, name_or_path, store=store, upto=upto, overwrite=overwrite
        )
        if wait:
            with reporting_bytes(progress, "save") as report:
                return state.write(report)
        return SaveHandle(state, progress).start(self._saves, self._engine_saves)

    def close(self) -> None:
        """Gives the session's chunks up, once its saves have ended. May be called twice.

        In a forked child nothing is done.
        """
        if self.core.made_in.forked:
            return
        self._saves.wait()
        self.transcript.close()

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

    def _check_open(self) -> None:
        self.core.check_open(self.transcript)

    def belongs_to(self, core: EngineCore) -> bool:
        """Whether it is one of that engine's."""
        return self.core is core


def require_own(core: EngineCore, session: object) -> Transcript:
    """The transcript of an open session of this engine. Raises InvalidArgumentError."""
    core.check_open()
    if not isinstance(session, Session) or not session.belongs_to(core):
        raise InvalidArgumentError(f"{session!r} is no session of this engine")
    core.check_open(session.transcript)
    return session.transcript
