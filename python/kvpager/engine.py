"""The engine, as its user has it: a model, a pager, and the sessions of both."""

from __future__ import annotations

import importlib
import logging
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import cached_property, partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from kvpager.config import PagerConfig
from kvpager.drafts.drafting import draft_stats
from kvpager.drafts.model import DraftModel, open_draft
from kvpager.errors import InvalidArgumentError
from kvpager.execution.core import EngineCore
from kvpager.hf import RowCounts, RowProof
from kvpager.opening.choices import configuration
from kvpager.opening.identity import open_core
from kvpager.opening.renewal import begin_anew, identify_again
from kvpager.pager import Layout, Pager, Sequence
from kvpager.plan import PoolChoice
from kvpager.progress import Progress, reporting_work
from kvpager.requests.completion import Completion
from kvpager.requests.request import OnToken
from kvpager.requests.scheduler import Scheduler
from kvpager.scheduling.decode import TokenIterator, begin_streams
from kvpager.scheduling.options import GenerationOptions
from kvpager.scheduling.prefill import prefill_all
from kvpager.scheduling.score import Score, score_tokens
from kvpager.scheduling.stream import GeneratedToken, Generation, seeds_of
from kvpager.segments import RepairPolicy
from kvpager.segments.assemble import assemble
from kvpager.segments.segment import Segment
from kvpager.segments.shelf import Segments
from kvpager.session import Session, require_own
from kvpager.snapshots.freezing import check_store
from kvpager.snapshots.restoring import restore_transcript
from kvpager.snapshots.saving import Saves
from kvpager.speculation.speculation import SpeculationStats
from kvpager.stores import SnapshotStore, StoreEntry
from kvpager.stores.belonging import is_under
from kvpager.text.transcript import Transcript
from kvpager.tokens import TokenIdsLike, as_token_ids

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
        check_store(store)
        threads_before = torch.get_num_threads()
        core = open_core(
            model,
            configuration(config, options),
            salt=salt,
            store=store,
            threads=threads,
            progress=progress,
        )
        try:
            if draft is not None:
                core.drafter = open_draft(draft, core)
        except BaseException:
            core.close()
            torch.set_num_threads(threads_before)
            raise
        self._serve(core)
        if verify:
            self._verify()
        _log.info(
            "%s: forwards of %s rows, pool of %d chunks of %d tokens",
            type(core.model).__name__,
            core.row_counts.describe(),
            core.config.pool_blocks,
            core.config.chunk_tokens,
        )

    def _serve(self, core: EngineCore) -> None:
        self.core = core  # what the runtime works on
        self.segments = Segments(core)
        self._saves = Saves()
        self._schedulers: weakref.WeakSet[Scheduler] = weakref.WeakSet()

    @property
    def model(self) -> Any:
        """The transformers model."""
        return self.core.model

    @property
    def config(self) -> PagerConfig:
        """How it is paged, with a number of `pool_tokens` also where that was "auto"."""
        return self.core.config

    @property
    def plan(self) -> PoolChoice | None:
        """How `pool_tokens="auto"` was answered, and why; None where a number was given."""
        return self.core.plan

    @property
    def salt(self) -> str:
        """What separates its chunks and snapshots from those of other salts."""
        return self.core.salt

    @property
    def store(self) -> SnapshotStore | None:
        """Where a prefill of an empty session looks for the beginning of its prompt."""
        return self.core.store

    @property
    def pager(self) -> Pager:
        """The lower level, which holds the chunks."""
        return self.core.pager

    @property
    def layout(self) -> Layout:
        """Layers, heads and dtypes of the K/V."""
        return self.core.layout

    @property
    def vocab_size(self) -> int:
        """Token ids the model knows."""
        return self.core.vocab_size

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        """What the bits depend on; see `kvpager.fingerprint`."""
        return self.core.fingerprint

    @property
    def rows(self) -> int:
        """M, the most rows of a forward."""
        return self.core.rows

    @property
    def row_counts(self) -> RowCounts:
        """The numbers of rows that forwards have."""
        return self.core.row_counts

    @property
    def row_proof(self) -> RowProof | None:
        """How they were proven; None for a model with recurrent layers."""
        return self.core.row_proof

    @cached_property
    def draft(self) -> Engine | None:
        """The draft model's engine, with a pager of its own; None without a draft."""
        if self.core.drafter is None:
            return None
        engine = object.__new__(Engine)
        engine._serve(self.core.drafter.core)  # one of its own kind
        return engine

    def session(self) -> Session:
        """A new, empty session."""
        self.core.check_open()
        return self._session_of(self.core.transcript())

    def adopt(self, sequence: Sequence) -> Session:
        """A session over a sequence of the engine's pager, such as one under a salt of its own."""
        self.core.check_open()
        return self._session_of(self.core.transcripts.adopt(sequence))

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
        self.core.check_open()
        return self._session_of(
            restore_transcript(self.core, name_or_path, store, on_mismatch, on_corrupt)
        )

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
        return self._session_of(assemble(self.segments, parts, repair, progress))

    def prefill_many(
        self, prompts: Iterable[tuple[Session, TokenIdsLike]], *, progress: Progress = None
    ) -> None:
        """`Session.prefill` for several sessions, packed into common forwards; the same bits.

        Every prompt is checked, and room is reserved for all, before anything is computed.
        """
        self.core.check_open()
        given = [(session, as_token_ids(ids, self.vocab_size)) for session, ids in prompts]
        checked = [(require_own(self.core, session), ids) for session, ids in given]
        prefill_all(self.core, checked, progress)

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
        self.core.check_open()
        by_transcript: dict[Transcript, Session] = {}
        for session in sessions:
            transcript = require_own(self.core, session)
            if transcript in by_transcript:
                raise InvalidArgumentError("a session is named twice; expected each once")
            by_transcript[transcript] = session
        streams = begin_streams(
            self.core, list(by_transcript), max_new_tokens, seed, logprobs, options
        )
        return TokenIterator(self.core, streams, lambda step: (by_transcript[step[0]], step[1]))

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
        self.core.check_open()
        prompts = list(prompts)
        seeds: list[int] | list[None] = [None] * len(prompts)
        if seed is not None:
            seeds = seeds_of(seed, [0] * len(prompts))
        scheduler = self.scheduler(max_sessions)
        generation = Generation.checked(self.core, max_new_tokens, options, logprobs=logprobs)
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
        self.core.check_open()
        scheduler = Scheduler(self.core, self.session, max_sessions)
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
        self.core.check_open()
        return score_tokens(self.core, as_token_ids(ids, self.vocab_size), progress)

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
        core = self.core
        core.check_open()
        self._saves.wait()  # which write under the name that they began with
        found = False
        try:
            with core.turns:  # between forwards
                identify_again(core, progress)
                found = True
                begin_anew(core)
        except BaseException:
            if found:  # what the sessions held is gone
                self.close()
            raise

    def stats(self) -> dict[str, Any]:
        """The pager's counters, and the runtime's: forwards run, and where their seconds went."""
        core = self.core
        core.check_open()
        runner, speculation = core.runner, core.transcripts.speculation
        return core.pager.stats() | {
            "model_forwards": runner.forwards,
            "model_rows": runner.rows,
            "model_rows_used": runner.rows_used,
            "speculation_forwards": speculation.forwards,
            "speculation_proposed": speculation.proposed,
            "speculation_accepted": speculation.accepted,
            "seconds_forward": runner.seconds,
            "seconds_attention": runner.attention_seconds,
            "seconds_head": runner.head_seconds,
            **asdict(core.transcripts.trims),
            **draft_stats(core.drafter),
            **({} if core.recurrence is None else core.checkpoints.stats()),
        }

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self.core.closed

    def close(self) -> None:
        """Ends all that the engine owns, and frees it; or changes nothing. May be called twice.

        Any thread may call it. A forward that runs in another one is waited for, and so are saves;
        requests that are not finished end with finish "closed" (those of a scheduler that another
        thread steps, when that step returns), iterators of tokens raise at their next token. In a
        forked child nothing is done: all is the parent's.

        Raises:
            InvalidArgumentError: called inside a forward (from a hook or a proposer), or from the
                progress callback of a save, either of which it would have to wait for.
        """
        core = self.core
        if core.made_in.forked:
            return
        core.check_can_close()
        if core.drafter is not None:
            core.drafter.core.check_can_close()
        self._saves.wait()
        ends = [partial(scheduler.end, "closed") for scheduler in list(self._schedulers)]
        core.close(*ends, self.segments.forget)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _session_of(self, transcript: Transcript) -> Session:
        return Session(self.core, transcript, self._saves)

    def _verify(self) -> None:
        start = importlib.import_module("kvpager.verify.start")  # which stands above this module
        try:
            start.verify_engine(self)
            self.core.pager.reset()  # what it left behind
            self.core.checkpoints.clear()
            self.core.make_runner()
            self.core.transcripts.speculation = SpeculationStats()
        except BaseException:
            self.close()
            raise
