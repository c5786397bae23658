"""A model, a pager and the rule that joins them: every forward has a proven number of rows."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from kvpager import _core
from kvpager import fingerprint as fingerprints
from kvpager.config import PagerConfig
from kvpager.device import resolve
from kvpager.errors import (
    InvalidArgumentError,
)
from kvpager.hf import (
    RowProof,
    attach,
    check_supported,
    layout_of,
    settle_rows,
)
from kvpager.hf.aligned import settle_states
from kvpager.hf.behaviour import behaviour_digest, behaviour_seen
from kvpager.hf.own_attention import require_own_attention
from kvpager.hf.recurrent import Recurrence, is_recurrent
from kvpager.hf.rotary import KeyMover
from kvpager.hf.watch import ModelWatch
from kvpager.pager import Pager, Sequence
from kvpager.process import MadeIn
from kvpager.runtime.checkpoints import Checkpoints
from kvpager.runtime.completion import Completion
from kvpager.runtime.decode import TokenIterator
from kvpager.runtime.draft import DraftModel, open_draft
from kvpager.runtime.drafting import Drafting, draft_stats
from kvpager.runtime.generation_options import GenerationOptions
from kvpager.runtime.group import TrimCounters
from kvpager.runtime.opening import (
    Numerics,
    attention,
    common_window,
    configuration,
    row_choices,
    sized,
    vocab_size,
)
from kvpager.runtime.positions import Positions
from kvpager.runtime.prefill import prefill_all
from kvpager.runtime.progress import Progress, reporting_bytes, reporting_work
from kvpager.runtime.recurrent import StateCursor, state_cursor
from kvpager.runtime.renewal import renew
from kvpager.runtime.request import OnToken
from kvpager.runtime.restoring import restore_session
from kvpager.runtime.runner import Runner
from kvpager.runtime.saved_states import StateFormat
from kvpager.runtime.saving import Saves, check_store
from kvpager.runtime.scheduler import Scheduler
from kvpager.runtime.score import Score, score_tokens
from kvpager.runtime.segments import RepairPolicy
from kvpager.runtime.segments.assemble import assemble
from kvpager.runtime.segments.segment import Segment
from kvpager.runtime.segments.shelf import Segments
from kvpager.runtime.session import Session
from kvpager.runtime.settling import settle
from kvpager.runtime.speculation import SpeculationStats
from kvpager.runtime.stream import (
    GeneratedToken,
    Generation,
    Stream,
    seeds_of,
)
from kvpager.runtime.tokens import TokenIdsLike, as_token_ids
from kvpager.runtime.unchanged import Unchanged
from kvpager.salts import stretched
from kvpager.stores import SnapshotStore, StoreEntry
from kvpager.stores.belonging import is_under

if TYPE_CHECKING:
    from typing_extensions import Unpack

_log = logging.getLogger(__name__)


class Engine:
    """Runs sessions of one transformers causal LM over one pager.

    The token at a position, its K/V and its logits are a pure function of the tokens before it, of
    the model and of what `fingerprint` holds: not of the pool's size, of other sessions, of when it
    was computed, of speculation, nor of whether it was saved and restored meanwhile. That is
    `PagerConfig.exact="all"`; with "reuse" it holds for sealed and saved chunks, generated text
    included, and with False for nothing.

    A model on a GPU (`model.to("cuda")`) is paged there, on torch's current stream; logits come to
    the CPU once per forward, where tokens are chosen.

    The model stays its owner's: `model()` and `model.generate` are what they were, also while an
    engine is open and in other threads; only its weights must not change. `close` (or leaving the
    `with` block) ends the sessions and frees the pool. One thread at a time per session; forwards
    of different sessions take turns.

    Example:
        >>> engine = Engine(model, PagerConfig(pool_tokens=2048, selection=TopK(chunks=32)))
        >>> session = engine.session()
        >>> session.prefill(ids)
        >>> answer = list(session.generate(64))
        >>> completions = engine.run(prompts, 64)
    """

    def __init__(
        self,
        model: Any,
        config: PagerConfig | None = None,
        *,
        salt: str = "",
        store: SnapshotStore | None = None,
        threads: int | None = None,
        draft: DraftModel | Any = None,
        progress: Progress = None,
        verify: bool = False,
        **options: Any,
    ) -> None:
        """Checks the model on rows of made-up tokens, and hashes its weights.

        Finding out which row counts give the same bits (`row_counts`, `row_proof`) takes about as
        long as a prefill of 2 M tokens; with a smaller `rows` it takes less.

        Args:
            model: a transformers causal LM in eval mode, on the CPU or on one GPU; the pool is
                where the model is.
            config: how to page; or give its options by name, which also override it. With
                `pool_tokens="auto"` the pool holds the model's longest context as far as free
                memory goes; `plan` says what was chosen and why, and no bit depends on it.
            salt: separates tenants: no chunk and no snapshot is shared between different salts. It
                is no password: see docs/stores.md. A guess at it from files costs some 50 ms.
            store: where a prefill of an empty session looks for the beginning of its prompt, in all
                snapshots that were saved under this fingerprint and salt.
            threads: set torch's number of threads, for the whole process; by default it is left
                alone.
            draft: a small model of the same vocabulary that guesses how texts go on, for
                `speculate="draft"`; or a `DraftModel`, which says how to page it. It has a pager of
                its own, beside this one.
            progress: of hashing the weights: True for a bar on stderr, or a callable (bytes done,
                bytes in all).
            verify: compare decoding, packing, speculation and reuse with a cold run, bit by bit,
                before anything else; a second for a small model. See `kvpager.verify`.
            **options: of PagerConfig.

        Raises:
            VerificationError: with `verify`, if a bit differs; `.report` says where.
            UnsupportedModelError: this model cannot keep the promise; says why and what to do.
            InvalidArgumentError: an option is unknown or out of range.
            CapacityError: the memory asked for cannot be had.
            DeviceError: the model's device cannot be used; says what was found.
        """
        self.config = configuration(config, options)
        exact = self.config.exact is not False
        one_at_a_time = self.config.exact != "all"
        self.model = check_supported(model, exact=exact, one_at_a_time=one_at_a_time)
        self.place = resolve(self.config.device, self.model.device)
        self._choices = row_choices(self.config, self.model, exact=exact)
        if not isinstance(salt, str):
            raise InvalidArgumentError(f"salt is {salt!r}; expected a string")
        self.salt = salt
        self.namespace = stretched(salt)  # what chunks are under
        if threads is not None and (type(threads) is not int or threads < 1):
            raise InvalidArgumentError(f"threads is {threads!r}; expected an integer, 1 or more")
        check_store(store)
        self.store = store
        self.vocab_size = vocab_size(self.model)
        self.positions = Positions(self.model, beyond=self.config.beyond_max_positions)
        # By the sequence each holds.
        self._sessions: weakref.WeakValueDictionary[int, Session] = weakref.WeakValueDictionary()
        self.saves = Saves()
        self._schedulers: weakref.WeakSet[Scheduler] = weakref.WeakSet()
        self._closing = threading.Lock()
        self.turns = _core.Turns()  # of forwards
        self.trims = TrimCounters()  # of all sessions
        self.segments = Segments(self)
        self.checkpoints = Checkpoints(
            budget_bytes=self.config.checkpoint_bytes,
            every=self.config.checkpoint_chunks,
            chunk_tokens=self.config.chunk_tokens,
            policy=self.config.checkpoint_policy,
        )
        self.drafting: Drafting | None = None
        self._speculation = SpeculationStats()
        self._closed = False
        self.made_in = MadeIn()
        self.pager: Pager
        self.runner: Runner
        self._threads = threads
        attach(self.model)
        threads_before = torch.get_num_threads()
        try:
            if threads is not None:
                torch.set_num_threads(threads)
            self.identify(progress)
            self.open_pager()
            if draft is not None:
                self.drafting = open_draft(draft, self)
        except BaseException:
            if threads is not None:
                torch.set_num_threads(threads_before)
            raise
        if verify:
            self._verify()
        _log.info(
            "%s: forwards of %s rows, pool of %d chunks of %d tokens",
            type(model).__name__,
            self.row_counts.describe(),
            self.config.pool_blocks,
            self.config.chunk_tokens,
        )

    def session(self) -> Session:
        """A new, empty session."""
        self.check_open()
        return self.adopt(self.pager.sequence(salt=self.namespace))

    def restore(
        self,
        name_or_path: str | os.PathLike[str],
        *,
        store: SnapshotStore | None = None,
        on_mismatch: str = "refuse",
        on_corrupt: str = "fail",
    ) -> Session:
        """The session that `Session.save` wrote. Reads metadata only; chunks follow when needed.

        The next `prefill` takes the whole, longer prompt and computes what follows the restored
        tokens; one that does not begin with them is refused, never silently computed again.
        `restored_tokens_consumed` of the session tells that they were used.

        Every chunk is verified when it is read. One that is not what was saved raises
        CorruptSnapshotError where it is first needed, naming chunk, tokens and layer; the forward
        ends as if it had not begun, and the session stays usable for what does not need the chunk.
        With `on_corrupt="recompute"` its tokens are computed again instead, with the bits that were
        saved; `recomputed_tokens` of the session counts them, and a warning is logged. Damaged
        metadata fail always: nothing would prove the result.

        What a draft model and recurrent layers held comes back too, where it was saved and is
        sound; else it is computed again, with a warning.

        Args:
            name_or_path: the snapshot's name in `store`; without one, the path of a file.
            store: what it was saved to.
            on_mismatch: "refuse", or "approximate" to accept another value of the waivable fields
                of `kvpager.fingerprint.RULES` (releases, processor, threads ...), with results that
                may differ in their last bits and are never shared as exact. Another model, layout,
                dtype, RoPE, selection, row or chunk count, or salt is refused always.
            on_corrupt: "fail" or "recompute".

        Raises:
            FingerprintMismatchError: written by another model or under other numerics; `.field`
                says which.
            CorruptSnapshotError, UnsupportedVersionError, StorageError: the file cannot be used.
            CapacityError: the session's summaries, or tokens to compute again, do not fit.
        """
        self.check_open()
        return restore_session(self, name_or_path, store, on_mismatch, on_corrupt)

    def cache_segment(
        self, ids: TokenIdsLike, name: str | None = None, *, progress: Progress = None
    ) -> Segment:
        """Computes a text's K/V alone, once, to be used at any place of other texts (`assemble`).

        A text that is cached already is returned as it is, and one whose chunks are in the engine's
        store is not computed again. `segments` lists, saves, loads and removes them.

        Args:
            ids: the text, [n] or [1, n]; n may be 0.
            name: to find it by: letters, digits, '.', '_' and '-'; by default its ids' digest.
            progress: as for `Session.prefill`.

        Raises:
            UnsupportedModelError: K/V of this model cannot be moved: its keys do not move by a
                rotation (learned positions, RoPE "dynamic" or "longrope"), it has recurrent layers,
                or all of its layers have a window.
            InvalidArgumentError: not integers, an id outside the vocabulary, or a name that another
                text has.
            CapacityError: the tiers below the pool cannot hold it.
        """
        return self.segments.cache(ids, name, progress=progress)

    def assemble(
        self,
        parts: Iterable[TokenIdsLike | Segment | str],
        *,
        repair: RepairPolicy | None = None,
        progress: Progress = None,
    ) -> Session:
        """A session whose text is these parts in this order, with K/V of segments where they go.

        Ids at the beginning, or a segment at position 0, give the K/V a full prefill would. A
        segment further on was computed without what is before it now: its keys are rotated to their
        new positions, and the tokens that `repair` chooses are computed again, over everything
        before them. So from the first moved token that is left as it is, the session is
        *approximate*, and so is all that follows: its chunks say so, and are shared with nobody.
        `Session.assembly` says what was done.

        Example:
            >>> engine.cache_segment(ids_a, name="a")
            >>> engine.cache_segment(ids_b, name="b")
            >>> session = engine.assemble([system, "b", "a", question])
            >>> answer = list(session.generate(64))

        Args:
            parts: token ids, segments, or names of segments; those in the engine's store are
                loaded. Ids after a segment are computed in place. Any part may be empty, not all.
            repair: which tokens to compute again, such as `SegmentHead(16)`; None: the default,
                which `docs/segments.md` compares with others.
            progress: True for a bar on stderr, or a callable (tokens done, tokens in all).

        Raises:
            InvalidArgumentError: no tokens, a segment that is unknown or removed, ids as for
                `Session.prefill`, or no policy.
            UnsupportedModelError: as for `cache_segment`.
            CapacityError: the tiers below the pool cannot hold the text, or the pool the chunks
                that one forward of the repair opens.
            CorruptSnapshotError: what a store has of a segment is damaged, and cannot be computed
                again.
        """
        return assemble(self, parts, repair, progress)

    @cached_property
    def key_mover(self) -> KeyMover:
        """How keys of this model are moved to other positions; found out when first asked for.

        Raises:
            UnsupportedModelError: they do not move by a rotation.
        """
        return self.runner.find_rotation()

    def prefill_many(
        self, prompts: Iterable[tuple[Session, TokenIdsLike]], *, progress: Progress = None
    ) -> None:
        """`Session.prefill` for several sessions, packed into common forwards; the same bits.

        Every prompt is checked, and room is reserved for all, before anything is computed.
        """
        self.check_open()
        checked = [(session, as_token_ids(ids, self.vocab_size)) for session, ids in prompts]
        prefill_all(self, checked, progress)

    @overload
    def generate_many(
        self,
        sessions: Iterable[Session],
        max_new_tokens: int,
        *,
        seed: int | Iterable[int] | None = None,
        logprobs: Literal[False] = False,
        **options: Unpack[GenerationOptions],
    ) -> Iterator[tuple[Session, int]]: ...

    @overload
    def generate_many(
        self,
        sessions: Iterable[Session],
        max_new_tokens: int,
        *,
        seed: int | Iterable[int] | None = None,
        logprobs: Literal[True],
        **options: Unpack[GenerationOptions],
    ) -> Iterator[tuple[Session, GeneratedToken]]: ...

    def generate_many(
        self,
        sessions: Iterable[Session],
        max_new_tokens: int,
        *,
        seed: int | Iterable[int] | None = None,
        logprobs: bool = False,
        **options: Any,
    ) -> Iterator[tuple[Session, Any]]:
        """`Session.generate` for several sessions at once; yields (session, token) as they come.

        Each session's tokens are those it would produce alone. `seed` may be one per session;
        sessions of the same tokens that share a seed draw alike. The other arguments are those of
        `Session.generate`, for each session.
        """
        streams = self._begin(list(sessions), max_new_tokens, seed, logprobs, options)
        return TokenIterator(self, streams, lambda step: step)

    def generate_alone(
        self,
        session: Session,
        max_new_tokens: int,
        *,
        seed: int | None,
        logprobs: bool,
        **options: Any,
    ) -> Iterator[Any]:
        """See `Session.generate`."""
        streams = self._begin([session], max_new_tokens, seed, logprobs, options)
        return TokenIterator(self, streams, lambda step: step[1])

    def _begin(
        self,
        sessions: list[Session],
        max_new_tokens: int,
        seed: int | Iterable[int] | None,
        logprobs: bool,
        options: Mapping[str, Any],
    ) -> list[Stream]:
        """The streams of a generation, with room for all of it. Arguments: as for `generate`."""
        self.check_open()
        if len({id(session) for session in sessions}) != len(sessions):
            raise InvalidArgumentError("a session is named twice; expected each once")
        generation = Generation.checked(self, max_new_tokens, options, logprobs=logprobs)
        seeds = seeds_of(seed, [session.seed_for(generation.sampling) for session in sessions])
        streams = [generation.stream(session, seed) for session, seed in zip(sessions, seeds)]
        for session in sessions:
            self.check_session(session)
            if not session.length:
                raise InvalidArgumentError(
                    "generate: the session is empty; call prefill(ids) first"
                )
            self.positions.check(session.length + max_new_tokens, "the text with max_new_tokens")
        try:
            for stream in streams:
                stream.reserve()
        except BaseException:
            for stream in streams:
                stream.leave()
            raise
        for session in sessions:
            session.generation_start = session.length
        return streams

    def run(
        self,
        prompts: Iterable[TokenIdsLike | Session],
        max_new_tokens: int,
        *,
        seed: int | Iterable[int] | None = None,
        logprobs: bool = False,
        max_sessions: int | None = None,
        keep_sessions: bool = False,
        on_token: OnToken | None = None,
        progress: Progress = None,
        **options: Unpack[GenerationOptions],
    ) -> list[Completion]:
        """Completes many prompts, as many at a time as there is room for; in the prompts' order.

        Each prompt's tokens are those it would have alone. What goes wrong with one of them is in
        its completion (finish "error"), not raised, and so is a prompt that cannot fit.

        Args:
            prompts: token ids, [n] or [1, n] each, or sessions that are to go on.
            max_new_tokens: as for `Session.generate`.
            seed: likewise, for all or one each; by default a given session's as in `generate`, and
                a fresh one for every other prompt. `Completion.seed` says which it was.
            logprobs: have log-probabilities in the completions.
            max_sessions: most prompts that run at once; by default one per row of a forward.
            keep_sessions: leave the sessions that are made open, in the completions.
            on_token: called with (request, token) as each token is produced; `request.index` is the
                prompt's number, and `request.cancel()` ends it.
            progress: True for a bar on stderr, or a callable (tokens done, tokens in all).
            **options: `kvpager.GenerationOptions`: temperature, top_k, top_p, eos, stop, speculate.

        Raises:
            InvalidArgumentError: at the call, for an argument out of range or an unknown option,
                before anything is computed.

        What is no Exception (Ctrl-C): the sessions made here are closed, and those given are as far
        as they had come. Where another thread closes the engine, what is not finished ends with
        finish "closed".
        """
        self.check_open()
        prompts = list(prompts)
        seeds: list[int] | list[None] = [None] * len(prompts)
        if seed is not None:
            seeds = seeds_of(seed, [0] * len(prompts))
        scheduler = self.scheduler(max_sessions)
        generation = Generation.checked(self, max_new_tokens, options, logprobs=logprobs)
        requests = [
            scheduler.queue(
                prompt,
                generation,
                its_seed,
                keep_session=keep_sessions,
                on_token=on_token,
                name=f"prompts[{i}]",
            )
            for i, (prompt, its_seed) in enumerate(zip(prompts, seeds))
        ]
        try:
            with scheduler, reporting_work(progress, "run") as report:
                report(*scheduler.work)
                while not scheduler.idle:
                    scheduler.step_if_open()
                    report(*scheduler.work)
        except BaseException:
            for request in requests:
                request.discard()
            raise
        return [request.completion for request in requests if request.completion is not None]

    def scheduler(self, max_sessions: int | None = None) -> Scheduler:
        """The lower level of `run`, for a serving stack: submit requests, step, cancel.

        max_sessions: most requests that run at once; by default one per row of a forward.
        """
        self.check_open()
        scheduler = Scheduler(self, max_sessions)
        self._schedulers.add(scheduler)
        return scheduler

    def score(self, ids: TokenIdsLike, *, progress: Progress = None) -> Score:
        """Log-probabilities of given tokens, teacher-forced in a sequence of its own.

        Args:
            ids: [n] or [1, n], n >= 2.
            progress: as for `Session.prefill`.

        Raises:
            InvalidArgumentError, CapacityError: as for `Session.prefill`.
        """
        self.check_open()
        return score_tokens(self, as_token_ids(ids, self.vocab_size), progress)

    def snapshots(self, store: SnapshotStore | None = None) -> list[StoreEntry]:
        """What a store has of this engine's salt, by name; of others nothing is told.

        Sessions and segments, of whatever model. This is order, not protection: whoever has the
        store can list all of it (`store.entries()`).

        Args:
            store: by default the engine's.

        Raises:
            InvalidArgumentError: there is no store.
        """
        check_store(store)
        chosen = self.store if store is None else store
        if chosen is None:
            raise InvalidArgumentError(
                "store is None, and so is the engine's; give one here, or Engine(..., store=...)"
            )
        return [entry for entry in chosen.entries() if is_under(self.salt, entry.salt_digest)]

    def weights_changed(self, *, progress: Progress = None) -> None:
        """Goes on with the model as it is now; to be called after weights or adapters were changed.

        The engine gets another fingerprint, as a new `Engine` would. Sessions keep their text,
        their pending token and what they have of sampling; their K/V are computed again with their
        next forward, and have the bits of a new engine. Chunks, segments' K/V, checkpoints of
        recurrent states and whatever else was computed of the old model are forgotten; segments
        are computed again when they are next used. A draft model's cache stays. What was saved
        stays what it is, a snapshot of the old model.

        Row counts are proven again where more than the values of weights has changed. To be called
        while no other thread uses the engine. Saves that still run are waited for.

        Args:
            progress: of hashing the weights: True for a bar on stderr, or a callable (bytes done,
                bytes in all).

        Raises:
            UnsupportedModelError: the model as it is now cannot keep the promise; the engine is as
                it was.
            InvalidArgumentError: its vocabulary is not its draft's any more; likewise.
            CapacityError: the memory asked for cannot be had again; the engine is closed.
        """
        renew(self, progress)

    def stats(self) -> dict[str, Any]:
        """The pager's counters, and the runtime's: forwards run, and where their seconds went."""
        self.check_open()
        return self.pager.stats() | {
            "model_forwards": self.runner.forwards,
            "model_rows": self.runner.rows,
            "model_rows_used": self.runner.rows_used,
            "speculation_forwards": self._speculation.forwards,
            "speculation_proposed": self._speculation.proposed,
            "speculation_accepted": self._speculation.accepted,
            "seconds_forward": self.runner.seconds,
            "seconds_attention": self.runner.attention_seconds,
            "seconds_head": self.runner.head_seconds,
            **asdict(self.trims),
            **draft_stats(self.drafting),
            **({} if self.recurrence is None else self.checkpoints.stats()),
        }

    @property
    def draft(self) -> Engine | None:
        """The draft model's engine, with a pager of its own; None without a draft."""
        return None if self.drafting is None else self.drafting.engine

    @property
    def rows(self) -> int:
        """M, the most rows of a forward."""
        return self.row_counts.rows

    def _verify(self) -> None:
        from kvpager.verify.start import verify_engine  # which imports this module

        try:
            verify_engine(self)
            self.pager.reset()  # what it left behind
            self.checkpoints.clear()
            self._make_runner()
            self._speculation = SpeculationStats()
        except BaseException:
            self.close()
            raise

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """Ends all that the engine owns, and frees it; or changes nothing. Twice is harmless.

        Any thread may call it. A forward that runs in another one is waited for, and so are saves;
        requests that are not finished end with finish "closed" (those of a scheduler that another
        thread steps, when that step returns), iterators of tokens raise at their next token. In a
        forked child nothing is done: all is the parent's.

        Raises:
            InvalidArgumentError: called inside a forward (from a hook or a proposer), or from the
                progress callback of a save, either of which it would have to wait for.
        """
        if self.made_in.forked:
            return
        for engine in filter(None, (self, self.draft)):
            if engine.turns.held_here:
                raise InvalidArgumentError(
                    "close: called inside a forward of the engine, which cannot end before its "
                    "caller does; close it when the forward has returned"
                )
        self.saves.wait()
        with self._closing:
            if self._closed:
                return
            self.turns.end()
            self._closed = True
            with ExitStack() as ending:
                if self.draft is not None:
                    ending.callback(self.draft.close)
                ending.callback(self.pager.close)
                ending.callback(self.segments.forget)
                for session in self.sessions():
                    ending.callback(session.close)
                for scheduler in list(self._schedulers):
                    ending.callback(scheduler.end, "closed")

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # For the runtime.

    def identify(self, progress: Progress, *, proven: bool = False) -> None:
        """Finds out what the model is and gives it a name: row counts, layout, fingerprint.

        proven: what was found out about row counts and the layout still holds.
        """
        watch = ModelWatch(self.model)
        recurrent = is_recurrent(self.model)
        if recurrent or not proven:
            settle(self, watch)
        with reporting_bytes(progress, "hash weights") as report:
            self.fingerprint: Mapping[str, Any] = fingerprints.describe(
                self.model,
                self.config,
                self.layout,
                row_counts=self.row_counts,
                kernel_version=self._numerics.kernel_version,
                salt=self.salt,
                aligned=recurrent,
                behaviour=self._numerics.behaviour or behaviour_digest(self.model, self.row_counts),
                progress=report,
            )
        watch.learn()
        watch.check(thorough=True)
        self._watch = watch

    def settle(self, small_rows: str | tuple[int, ...]) -> None:
        """Finds row counts, layout and what follows. `small_rows`: as in `PagerConfig`."""
        exact = self.config.exact is not False
        self.recurrence: Recurrence | None = None
        self.row_proof: RowProof | None = None
        recurrent = is_recurrent(self.model)
        require_own_attention(self.model, self.config.chunk_tokens, packed=not recurrent)
        if recurrent:
            seen, self.row_counts, self.recurrence = settle_states(self.model, self._choices[0])
        else:
            seen, self.row_counts, self.row_proof = settle_rows(
                self.model, self._choices, small_rows=small_rows, exact=exact
            )
        self.layout = layout_of(
            self.model,
            seen,
            chunk_tokens=self.config.chunk_tokens,
            kv_dtype=self.config.kv_dtype,
            recurrent=self.recurrence is not None,
        )
        self.config, self.plan = sized(self.config, self.model, self.layout, self.rows, self.place)
        q_heads, kernel_version = attention(seen, self.layout, self.config, self.place)
        behaviour = "" if self.recurrence is None else behaviour_seen(self.model, seen)
        self._numerics = Numerics(q_heads, kernel_version, common_window(seen), behaviour)

    def open_pager(self) -> None:
        """A pager for the model as it is known, and what runs it; an older one is closed first."""
        if hasattr(self, "pager"):
            self.pager.close()
        self.pager = self.new_pager(self.config, self.fingerprint)
        vars(self).pop("key_mover", None)
        self._make_runner()

    def new_pager(self, config: PagerConfig, fingerprint: Mapping[str, Any]) -> Pager:
        """A pager for the model's forwards; the caller closes it."""
        return Pager(
            self.layout,
            config,
            rows=self.rows,
            smaller_rows=self.row_counts.smaller,
            fingerprint=fingerprint,
            threads=self._threads,
            device=self.place.name,
            q_heads=self._numerics.q_heads,
            window=self._numerics.window,
        )

    def _make_runner(self) -> None:
        unchanged = Unchanged(self.model, self._watch)
        self.runner = Runner(
            self.model, self.pager, self.row_counts, unchanged, self.recurrence, self.turns
        )

    def sessions(self) -> list[Session]:
        """Those that somebody holds, each once."""
        return list(dict.fromkeys(self._sessions.values()))

    def adopt(self, sequence: Sequence, **state: Any) -> Session:
        """A session of this engine over `sequence`."""
        session = Session(self, sequence, **state)
        self.register(session)
        return session

    @property
    def state_format(self) -> StateFormat:
        """How a state of the model's recurrent layers is saved. REQUIRES: it has such layers."""
        assert self.recurrence is not None
        return StateFormat(self.recurrence.shape)

    def states_of(self, sequence: Sequence) -> StateCursor | None:
        """Where recurrent layers stand over a sequence; None for a model without such layers."""
        return None if self.recurrence is None else state_cursor(self, sequence)

    def register(self, session: Session, before: Sequence | None = None) -> None:
        """Remembers which session holds a sequence; before: the one it held until now."""
        self._sessions[session.sequence.uid] = session
        if before is not None:
            self._sessions.pop(before.uid, None)

    def session_of(self, sequence: Sequence) -> Session | None:
        """The session that holds a sequence, if one does."""
        return self._sessions.get(sequence.uid)

    @property
    def shares_chunks(self) -> bool:
        """Whether prompts may start from chunks that others have computed."""
        return self.config.exact is not False

    def note_speculation(self, session: Session, proposed: int, accepted: int) -> None:
        """Counts a forward that continued a session which speculates."""
        one = SpeculationStats(1, proposed, accepted, 1 + accepted)
        session.speculation += one
        self._speculation += one

    def check_session(self, session: Session) -> None:
        """Raises InvalidArgumentError unless `session` is open and this engine's."""
        self.check_open()
        if not isinstance(session, Session) or session.engine is not self:
            raise InvalidArgumentError(f"{session!r} is no session of this engine")
        if session.closed:
            raise InvalidArgumentError("the session is closed; use engine.session() or restore()")

    def check_open(self) -> None:
        """Raises InvalidArgumentError if the engine is closed, or another process's."""
        self.made_in.require("this engine")
        if self._closed:
            raise InvalidArgumentError("the engine is closed; make a new Engine(model, ...)")
