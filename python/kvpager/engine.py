"""The user's handle of an engine: a model, its pager and its sessions."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from kvpager._model import pretrained
from kvpager._model.facts.checked_model import configuration
from kvpager._model.facts.compression import compressed_bytes
from kvpager._model.facts.opening import open_core, prove_again
from kvpager._model.layout import Layout
from kvpager._model.proof.prove import RowProof
from kvpager._model.seam.causal_lm import vocab_size
from kvpager._model.seam.rows import RowCounts
from kvpager._runtime.execution.core import EngineCore
from kvpager._runtime.gradients.logprobs import TextLogprobs, logprobs_of
from kvpager._runtime.scheduling.decode import TokenIterator, begin_streams
from kvpager._runtime.scheduling.options import GenerationOptions
from kvpager._runtime.scheduling.prefill import prefill_all
from kvpager._runtime.scheduling.score import Score, score_tokens
from kvpager._runtime.scheduling.stream import GeneratedToken, Generation, seeds_of
from kvpager._runtime.snapshots.freezing import check_store
from kvpager._runtime.snapshots.restoring import restore_transcript
from kvpager._runtime.snapshots.saving import Saves
from kvpager._runtime.text.tokenizer import Tokenizer
from kvpager._runtime.text.transcript import Transcript
from kvpager._support.arguments import Integer, as_flag, as_integer, is_one_of, listed, refusal
from kvpager._support.notebook import card
from kvpager._support.salts import StretchedSalt, salt_digest
from kvpager._support.tokens import TextOrIds, as_prompts
from kvpager.config import PagerConfig, PagerOptions
from kvpager.drafts.drafting import draft_stats
from kvpager.drafts.model import DraftModel, open_draft
from kvpager.errors import InvalidArgumentError
from kvpager.pager import Pager, Sequence
from kvpager.pager.device import torch_device
from kvpager.plan import PoolChoice
from kvpager.progress import Progress, check_progress, reporting_work
from kvpager.requests.request import OnToken, Request, RequestCompletion
from kvpager.requests.scheduler import Scheduler
from kvpager.requests.streams import AsyncScheduler
from kvpager.sampling import seed_after
from kvpager.segments import RepairPolicy
from kvpager.segments.assemble import assemble
from kvpager.segments.segment import Segment
from kvpager.segments.shelf import Segments
from kvpager.session import Session, require_own
from kvpager.speculation.speculation import SpeculationStats
from kvpager.stores import SnapshotStore, StoreEntry
from kvpager.stores.origin import is_under

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from typing_extensions import Unpack

_log = logging.getLogger(__name__)
_MOST_CHOICES = 1 << 16  # of one prompt
_PAIRS = "pairs (session, text or token ids)"


class Engine:
    """Runs sessions of one transformers causal LM over one pager.

    The token at a position, its K/V and its logits are a pure function of the tokens before it,
    the model and the fields of `fingerprint`. They do not depend on the pool's size, other
    sessions, the time of computation, speculation, or saves and restores in between. This holds
    with `PagerConfig.exact="all"`; with "reuse" it holds for sealed and saved chunks, generated
    text included; with False for nothing.

    A model on a GPU (`model.to("cuda")`) is paged there, on torch's current stream; each forward
    copies its logits to the CPU, where tokens are sampled.

    The engine does not modify the model: `model()` and `model.generate` work as before, also while
    the engine is open and in other threads. Only its weights must not change. `close` (or leaving
    the `with` block) ends the sessions and frees the pool. One thread at a time per session;
    forwards of different sessions take turns.

    Example:
        >>> engine = Engine(model, PagerConfig(pool_tokens=2048, selection=TopK(chunks=32)))
        >>> session = engine.session()
        >>> session.prefill(ids)
        >>> answer = session.generate(64).text
        >>> completions = engine.run(prompts, 64)
    """

    def __init__(
        self,
        model: torch.nn.Module,
        config: PagerConfig | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        salt: str = "",
        store: SnapshotStore | None = None,
        threads: Integer | None = None,
        draft: DraftModel | torch.nn.Module | None = None,
        progress: Progress = None,
        verify: Callable[[Engine], object] | None = None,
        **options: Unpack[PagerOptions],
    ) -> None:
        """Checks the model on rows of made-up tokens, and hashes its weights.

        Finding the row counts that give the same bits (`row_counts`, `row_proof`) takes about as
        long as a prefill of 2 M tokens; less with a smaller `rows`.

        Args:
            model: a transformers causal LM in eval mode, on the CPU or on one GPU; the pool is
                where the model is.
            config: the pager's options; options given by name override it. With
                `pool_tokens="auto"` the pool holds the model's longest context, or as much as free
                memory allows; `plan` says what was chosen and why. No bit depends on it.
            tokenizer: the model's, of transformers. With one, text is taken wherever token ids are,
                and `Session.chat` and streamed text work.
            salt: separates tenants: no chunk and no snapshot is shared between different salts. It
                is no password: see docs/stores.md. Testing a guess against files takes some 50 ms.
            store: where a prefill of an empty session looks for the beginning of its prompt, among
                all snapshots saved under this fingerprint and salt.
            threads: sets torch's number of threads for the whole process; None: leaves it alone.
            draft: a small model of the same vocabulary that guesses tokens, for
                `speculate="draft"`; or a `DraftModel`, which has options for its pager. The draft
                has a pager of its own.
            progress: of hashing the weights: True for a bar on stderr, or a callable (bytes done,
                bytes in all).
            verify: a check to pass before anything else, such as `kvpager.verify.verify_engine`,
                which compares decoding, packing, speculation and reuse with a cold run, bit by
                bit, in a second for a small model.
            **options: of `PagerConfig`, whose help explains each.

        Raises:
            VerificationError: with `verify`, if a bit differs; `.report` says where.
            UnsupportedModelError: this model cannot keep the promise; says why and what to do.
            InvalidArgumentError: an option is unknown or out of range.
            CapacityError: there is not enough memory.
            DeviceError: the model's device cannot be used; says what was found.
        """
        check_store(store)
        if verify is not None and not callable(verify):
            raise refusal(
                "verify", verify, "a check, such as kvpager.verify.verify_engine, or None"
            )
        text = None if tokenizer is None else Tokenizer(tokenizer, vocab_size(model))
        threads_before = torch.get_num_threads()
        core = open_core(
            model,
            configuration(config, options),
            salt=salt,
            store=store,
            threads=threads,
            tokenizer=text,
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
        if verify is not None:
            self._verify(verify)
        _log.info(
            "%s: forwards of %s rows, pool of %d chunks of %d tokens",
            type(core.model).__name__,
            core.facts.row_counts.describe(),
            core.config.pool_blocks,
            core.config.chunk_tokens,
        )

    @classmethod
    def from_pretrained(
        cls,
        source: str | os.PathLike[str],
        config: PagerConfig | None = None,
        *,
        dtype: str = "auto",
        local_files_only: bool = False,
        salt: str = "",
        store: SnapshotStore | None = None,
        threads: Integer | None = None,
        draft: DraftModel | torch.nn.Module | None = None,
        progress: Progress = None,
        verify: Callable[[Engine], object] | None = None,
        **options: Unpack[PagerOptions],
    ) -> Engine:
        """Loads a model and its tokenizer, and makes an engine of them.

        Example:
            >>> engine = Engine.from_pretrained("SmolLM2-135M-Instruct.Q4_1.gguf")

        Args:
            source: a name on the Hugging Face hub, a folder, or a GGUF file that transformers reads
                (`pip install 'kvpager[gguf]'`), whose weights are unpacked to `dtype`.
            config: as for `Engine`; the model goes to its `device`.
            dtype: of the weights: "float32", "bfloat16" or "float16"; "auto": the dtype of the
                checkpoint, and bfloat16 for a GGUF file.
            local_files_only: download nothing.
            salt: as for `Engine`, like all that follow.
            store: where a prefill looks for the beginning of its prompt.
            threads: of torch.
            draft: a model that guesses tokens.
            progress: of hashing the weights.
            verify: a check to pass.
            **options: of `PagerConfig`.

        Raises:
            InvalidArgumentError: there is no such model, or transformers cannot load it.
            VerificationError, UnsupportedModelError, CapacityError, DeviceError: as for `Engine`.
        """
        if not is_one_of(dtype, pretrained.DTYPES):
            raise refusal("dtype", dtype, " or ".join(map(repr, pretrained.DTYPES)))
        chosen, download = configuration(config, options), not local_files_only
        place = torch_device(chosen.device) if chosen.device.startswith("cuda") else "cpu"
        model = pretrained.load_model(source, dtype, download=download).to(place)
        return cls(
            model,
            chosen,
            tokenizer=pretrained.load_tokenizer(source, download=download),
            salt=salt,
            store=store,
            threads=threads,
            draft=draft,
            progress=progress,
            verify=verify,
        )

    _is_draft = False  # of another engine, which closes it

    def _serve(self, core: EngineCore) -> None:
        self.core = core  # the runtime works on it
        self.segments = Segments(core)
        self._saves = Saves()
        self._schedulers: weakref.WeakSet[Scheduler] = weakref.WeakSet()

    @property
    def model(self) -> PreTrainedModel:
        """The transformers model."""
        model: PreTrainedModel = self.core.model
        return model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer it was given, or None."""
        text = self.core.tokenizer
        tokenizer: PreTrainedTokenizerBase | None = None if text is None else text.wrapped
        return tokenizer

    @property
    def config(self) -> PagerConfig:
        """The pager's options; `pool_tokens` is a number even if "auto" was given."""
        return self.core.config

    @property
    def plan(self) -> PoolChoice | None:
        """The pool size chosen for `pool_tokens="auto"`, and why; None if a number was given."""
        return self.core.facts.plan

    @property
    def salt(self) -> str:
        """Separates its chunks and snapshots from those of other salts."""
        return self.core.tenant.salt

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
        return self.core.facts.layout

    @property
    def vocab_size(self) -> int:
        """Number of token ids the model accepts."""
        return self.core.facts.vocab_size

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        """The fields that the bits depend on; `salt` is the digest of its own."""
        return {**self.core.facts.fingerprint, "salt": salt_digest(self.core.tenant.namespace)}

    @property
    def rows(self) -> int:
        """M, the most rows of a forward."""
        return self.core.rows

    @property
    def row_counts(self) -> RowCounts:
        """The row counts that forwards may have."""
        return self.core.facts.row_counts

    @property
    def row_proof(self) -> RowProof | None:
        """How they were proven; None for a model with recurrent layers."""
        return self.core.facts.row_proof

    @cached_property
    def draft(self) -> Engine | None:
        """The draft model's engine, with a pager of its own; None without a draft."""
        if self.core.drafter is None:
            return None
        engine = object.__new__(Engine)
        engine._serve(self.core.drafter.core)
        engine._is_draft = True
        return engine

    def session(self, *, salt: str | None = None, store: SnapshotStore | None = None) -> Session:
        """A new, empty session.

        Args:
            salt: its tenant's, in the place of the engine's. It shares no chunk and no snapshot
                with sessions of other salts, and has the bits of an engine made with this one.
            store: where its first prefill looks for the beginning of its prompt; None: the
                engine's.
        """
        self.core.check_open()
        check_store(store)
        return self._session_in(self._tenant(salt).namespace, store)

    def adopt(self, sequence: Sequence) -> Session:
        """Makes a session over a sequence of the engine's pager, such as one of another salt.

        Raises:
            InvalidArgumentError: it is no open sequence of this pager, or a session has it.
        """
        self.core.check_open()
        if not isinstance(sequence, Sequence) or sequence.pager is not self.core.pager:
            raise InvalidArgumentError(
                f"sequence is {sequence!r}; expected one of this engine's pager"
            )
        if sequence.closed or self.core.transcripts.of(sequence) is not None:
            why = "closed" if sequence.closed else "a session's already; fork that"
            raise InvalidArgumentError(f"sequence {sequence.uid} is {why}")
        return self._session_of(self.core.transcripts.adopt(sequence))

    def restore(
        self,
        name_or_path: str | os.PathLike[str],
        *,
        store: SnapshotStore | None = None,
        on_mismatch: str = "refuse",
        on_corrupt: str = "fail",
        salt: str | None = None,
    ) -> Session:
        """The session that `Session.save` wrote. Reads metadata only; chunks follow when needed.

        The next `prefill` takes the whole, longer prompt and computes the tokens after the restored
        ones. A prompt that does not begin with the restored tokens raises an error; they are never
        silently computed again. The session's `restored_tokens_consumed` says how many were used.

        Every chunk is verified when it is read. A damaged one raises CorruptSnapshotError where it
        is first needed, naming chunk, tokens and layer. The forward changes nothing; the session
        stays usable for everything that does not need the chunk. With `on_corrupt="recompute"` its
        tokens are computed again instead, with the bits that were saved; the session's
        `recomputed_tokens` counts them, and a warning is logged. Damaged metadata always raise,
        because the result could not be verified.

        A draft model's cache and recurrent states are restored too, if they were saved and are
        undamaged; otherwise they are computed again, with a warning.

        Args:
            name_or_path: the snapshot's name in `store`; without one, the path of a file.
            store: the store it was saved to.
            on_mismatch: "refuse"; "approximate" to accept another value of the waivable fields of
                fingerprint (docs/exactness.md: releases, processor ...), with results that may
                differ in their last bits and are never shared as exact; or "convert" to accept
                K/V of another dtype too, which are read and rounded to this engine's now, into a
                temporary file. Another model, shape, RoPE, selection, row or chunk count, or salt
                is always refused.
            on_corrupt: "fail" or "recompute".
            salt: the one it was saved under, if that is not the engine's.

        Raises:
            FingerprintMismatchError: written by another model or under other numerics; `.field`
                says which.
            CorruptSnapshotError, UnsupportedVersionError, StorageError: the file cannot be used.
            CapacityError: the session's summaries, or tokens to compute again, do not fit.
        """
        self.core.check_open()
        return self._session_of(
            restore_transcript(
                self.core, name_or_path, store, on_mismatch, on_corrupt, self._tenant(salt)
            )
        )

    def cache_segment(
        self, ids: TextOrIds, name: str | None = None, *, progress: Progress = None
    ) -> Segment:
        """Computes a text's K/V alone, once, for use at any place of other texts (`assemble`).

        Does not compute again a text that is cached already, or whose chunks are in the engine's
        store. `segments` lists, saves, loads and removes segments.

        Args:
            ids: the text, [n] or [1, n]; n may be 0.
            name: its name, of letters, digits, '.', '_' and '-'; by default its ids' digest.
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
        parts: Iterable[TextOrIds | Segment | str],
        *,
        repair: RepairPolicy | None = None,
        progress: Progress = None,
    ) -> Session:
        """Makes a session whose text is these parts in this order, with the K/V of segments.

        Ids at the beginning, or a segment at position 0, have the K/V of a full prefill. A segment
        at another position was computed without the text before it: its keys are rotated to their
        new positions, and the tokens that `repair` chooses are computed again, attending to
        everything before them. From the first moved token that is not computed again, the session
        is *approximate*: its chunks are marked so and never shared. `Session.assembly` reports what
        was done.

        Example:
            >>> engine.cache_segment(ids_a, name="a")
            >>> engine.cache_segment(ids_b, name="b")
            >>> session = engine.assemble([system, "b", "a", question])
            >>> answer = session.generate(64).text

        Args:
            parts: token ids, segments, or names of segments; those in the engine's store are
                loaded. Ids after a segment are computed in place. Any part may be empty, not all.
            repair: which tokens to compute again, such as `SegmentHead(16)`; None: the default,
                which `docs/segments.md` compares with others.
            progress: True for a bar on stderr, or a callable (tokens done, tokens in all).

        Raises:
            InvalidArgumentError: no tokens, a segment that is unknown or removed, invalid ids (as
                for `Session.prefill`), or `repair` is no policy.
            UnsupportedModelError: as for `cache_segment`.
            CapacityError: the tiers below the pool cannot hold the text, or the pool the chunks
                that one forward of the repair opens.
            CorruptSnapshotError: a segment's snapshot is damaged, and cannot be computed again.
        """
        return self._session_of(assemble(self.segments, parts, repair, progress))

    def prefill_many(
        self, prompts: Iterable[tuple[Session, TextOrIds]], *, progress: Progress = None
    ) -> None:
        """`Session.prefill` for several sessions, packed into common forwards; the same bits.

        Every prompt is checked, and room is reserved for all, before anything is computed.

        Args:
            prompts: pairs of a session of this engine, each once, and its whole prompt.
            progress: True for a bar on stderr, or a callable (tokens done, tokens in all), of all
                prompts together.

        Raises:
            InvalidArgumentError: an item is no such pair, or a session is named twice; and what
                `Session.prefill` raises for one of them.
        """
        self.core.check_open()
        pairs = listed(prompts, "prompts", _PAIRS)
        for number, pair in enumerate(pairs):
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise refusal(f"prompts[{number}]", pair, "a pair (session, text or token ids)")
        given = [(session, self.core.read_ids(ids)) for session, ids in pairs]
        checked = [(require_own(self.core, session), ids) for session, ids in given]
        prefill_all(self.core, checked, progress)

    @overload
    def generate_many(
        self,
        sessions: Iterable[Session],
        max_new_tokens: Integer | None = None,
        *,
        seed: Integer | Iterable[Integer] | None = None,
        logprobs: Literal[False] = False,
        **options: Unpack[GenerationOptions],
    ) -> Iterator[tuple[Session, int]]: ...

    @overload
    def generate_many(
        self,
        sessions: Iterable[Session],
        max_new_tokens: Integer | None = None,
        *,
        seed: Integer | Iterable[Integer] | None = None,
        logprobs: Literal[True],
        **options: Unpack[GenerationOptions],
    ) -> Iterator[tuple[Session, GeneratedToken]]: ...

    def generate_many(
        self,
        sessions: Iterable[Session],
        max_new_tokens: Integer | None = None,
        *,
        seed: Integer | Iterable[Integer] | None = None,
        logprobs: bool = False,
        **options: Unpack[GenerationOptions],
    ) -> Iterator[tuple[Session, int | GeneratedToken]]:
        """`Session.generate` for several sessions at once; yields (session, token) as they come.

        Each session's tokens are those it would produce alone.

        Args:
            sessions: of this engine, each once.
            max_new_tokens: most tokens for each; None: as generation_config says.
            seed: one for all, or one per session, in their order; sessions with equal tokens and
                equal seeds produce equal tokens. None: as for `Session.generate`.
            logprobs: yield (session, `GeneratedToken`), with log-probabilities.
            **options: `kvpager.GenerationOptions`, for each session.

        Raises:
            InvalidArgumentError: a session is named twice, or as many seeds are not given as there
                are sessions; and what `Session.generate` raises for one of them.
        """
        self.core.check_open()
        by_transcript: dict[Transcript, Session] = {}
        for session in listed(sessions, "sessions", "sessions of this engine"):
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
        prompts: Iterable[TextOrIds | Session] | Mapping[str, Any],
        max_new_tokens: Integer | None = None,
        *,
        n: Integer = 1,
        seed: Integer | Iterable[Integer] | None = None,
        logprobs: bool = False,
        max_sessions: Integer | None = None,
        keep_sessions: bool = False,
        on_token: OnToken | None = None,
        progress: Progress = None,
        **options: Unpack[GenerationOptions],
    ) -> list[RequestCompletion]:
        """Completes many prompts, as many at a time as fit; returns results in the prompts' order.

        Each prompt's tokens are those it would have alone. An error of one prompt is reported in
        its completion (finish "error") and not raised, also if the prompt cannot fit, or comes to
        more tokens than the model has positions for.

        Args:
            prompts: text or token ids each, or sessions to continue; or what a tokenizer returns
                for several texts, whose padding is left out.
            max_new_tokens: as for `Session.generate`.
            n: completions of each prompt, which share its chunks; a prompt's stand together in the
                results. Those of a session come from forks of it, but for the first.
            seed: of sampling, one for all or one each; by default a given session's as in
                `Session.generate`, and a fresh one for every other prompt. The second completion of
                a prompt has a seed that follows from that of the first, and so on.
                `Completion.seed` is the seed used.
            logprobs: whether completions have log-probabilities.
            max_sessions: most prompts that run at once; by default one per row of a forward.
            keep_sessions: keep the sessions made for prompts open, in the completions.
            on_token: called with (request, token) as each token is produced; `request.index` counts
                completions in the order of the results, and `request.cancel()` ends one.
            progress: True for a bar on stderr, or a callable (tokens done, tokens in all).
            **options: `kvpager.GenerationOptions`: temperature, top_k, top_p, min_p, penalties,
                logit_bias, logits_processor, generation_config, eos, stop, speculate and others.

        Raises:
            InvalidArgumentError: at the call, for an argument out of range or an unknown option,
                before anything is computed.

        After a BaseException such as Ctrl-C, sessions made here are closed, and given sessions keep
        the tokens they have. If another thread closes the engine, unfinished prompts end with
        finish "closed".
        """
        self.core.check_open()
        check_progress(progress)
        as_flag(keep_sessions, "keep_sessions")
        given, choices = as_prompts(prompts), as_integer(n, "n", 1, _MOST_CHOICES)
        seeds: list[int] | list[None] = [None] * len(given)
        if seed is not None:
            seeds = seeds_of(seed, [0] * len(given))
        scheduler = self.scheduler(max_sessions)
        generation = Generation.checked(self.core, max_new_tokens, options, logprobs=logprobs)
        requests: list[Request] = []
        with ExitStack() as forks:
            for i, (prompt, its_seed) in enumerate(zip(given, seeds)):
                for choice in range(choices):
                    own = prompt
                    if choice and isinstance(prompt, Session):
                        own = forks.enter_context(prompt.fork())
                    request = scheduler.queue(
                        own,
                        generation,
                        its_seed,
                        keep_session=keep_sessions,
                        on_token=on_token,
                        name=f"prompts[{i}]",
                        among_others=True,
                    )
                    requests.append(request)
                    its_seed = seed_after(request.seed)
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
            if keep_sessions:
                forks.pop_all()
        done = [each.completion for each in requests if each.completion is not None]
        if choices == 1:
            return done
        return [
            replace(each, index=each.index // choices, choice=each.index % choices) for each in done
        ]

    def scheduler(
        self, max_sessions: Integer | None = None, *, max_waiting: Integer | None = None
    ) -> Scheduler:
        """The lower level of `run`, for a serving stack: submit requests, step, cancel.

        Args:
            max_sessions: most requests that run at once; by default one per row of a forward.
            max_waiting: most requests that wait, 1 or more; further ones raise QueueFullError.
                None: any number.
        """
        self.core.check_open()
        scheduler = Scheduler(self.core, self._session_in, max_sessions, max_waiting)
        self._schedulers.add(scheduler)
        return scheduler

    def serve(
        self, max_sessions: Integer | None = None, *, max_waiting: Integer | None = None
    ) -> AsyncScheduler:
        """Requests of many asyncio tasks in common forwards, which a thread of its own runs.

        Example:
            >>> async with engine.serve() as serving:
            ...     async for text in serving.stream("Once upon a time", 100):
            ...         print(text, end="", flush=True)

        Args:
            max_sessions: most requests that run at once; by default one per row of a forward.
            max_waiting: most requests that wait, 1 or more; further ones raise QueueFullError.
                None: any number.
        """
        scheduler = self.scheduler(max_sessions, max_waiting=max_waiting)
        return AsyncScheduler(scheduler, has_text=self.tokenizer is not None)

    def score(
        self,
        ids: TextOrIds,
        *,
        top_logprobs: Integer = 0,
        temperature: float = 1.0,
        progress: Progress = None,
    ) -> Score:
        """Log-probabilities of given tokens, teacher-forced in a sequence of its own.

        Args:
            ids: [n] or [1, n], n >= 2.
            top_logprobs: how many of the most likely tokens to list at each place, 0 to 20.
            temperature: divides the logits.
            progress: as for `Session.prefill`.

        Raises:
            InvalidArgumentError, CapacityError: as for `Session.prefill`.
        """
        self.core.check_open()
        return score_tokens(self.core, self.core.read_ids(ids), progress, top_logprobs, temperature)

    def logprobs(
        self,
        texts: Iterable[Any],
        masks: Iterable[Any] | None = None,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        top_logprobs: Integer = 0,
        grad: bool = True,
        progress: Progress = None,
    ) -> list[TextLogprobs]:
        """Log-probabilities of given texts with the bits of a rollout, attached to autograd.

        The forwards are those of `run` and `score`, with autograd recorded: so the ratio of a
        policy to itself is 1 in every bit, and gradients flow to all parameters of the model that
        require them. What several texts begin with is computed once, forward and backward, as the
        prompt of a group of completions. Texts may be longer than the pool.

            pairs = [(prompt, completion.tokens) for completion in completions]
            for new, old in zip(engine.logprobs(pairs), completions):
                ratio = (new.logprobs - torch.from_numpy(old.logprobs)).exp()  # 1, every bit

        The model may be in training mode, without dropout. After an optimiser's step call
        `weights_changed`.

        Args:
            texts: of each a pair (prompt, completion), of whose completion all tokens count; or a
                whole text [n]. Token ids, or text if the engine has a tokenizer.
            masks: which tokens of each whole text count, [n] bool, False at 0; None: all but the
                first.
            temperature: divides the logits.
            entropy: whether the entropy of each distribution is computed too.
            top_logprobs: how many of the most likely tokens to list at each place, 0 to 20.
            grad: False: values alone, as for a reference policy.
            progress: as for `Session.prefill`.

        Returns:
            One for each text.

        Raises:
            InvalidArgumentError: a text, a mask or an option is not as it should be, gradients are
                off here, or no parameter requires one.
            UnsupportedModelError: the model has recurrent layers, dropout, or checkpoints that
                record no graph; or it computes other bits where autograd records it.
            CapacityError: the pager has no room for a text.
        """
        self.core.check_open()
        return logprobs_of(
            self.core,
            texts,
            masks,
            temperature=temperature,
            entropy=entropy,
            top_logprobs=top_logprobs,
            grad=grad,
            progress=progress,
        )

    def snapshots(
        self, store: SnapshotStore | None = None, *, salt: str | None = None
    ) -> list[StoreEntry]:
        """Lists a store's snapshots of one salt, by name.

        Sessions and segments of any model. This is no access control: anyone with the store can
        list all of it (`store.entries()`).

        Args:
            store: by default the engine's.
            salt: by default the engine's.

        Raises:
            InvalidArgumentError: there is no store.
        """
        check_store(store)
        chosen = self.store if store is None else store
        if chosen is None:
            raise InvalidArgumentError(
                "store is None, and so is the engine's; give one here, or Engine(..., store=...)"
            )
        own = self._tenant(salt).salt
        return [entry for entry in chosen.entries() if is_under(own, entry.salt_digest)]

    def weights_changed(self, *, progress: Progress = None) -> None:
        """Goes on with the model as it is now. Call this after changing weights or adapters.

        The engine gets another fingerprint, as a new `Engine` would. Sessions keep their text,
        pending token and sampling options; their next forward computes their K/V again, with the
        bits of a new engine. Everything computed with the old model is dropped: chunks, segments'
        K/V, checkpoints of recurrent states. Segments are computed again when they are next used. A
        draft model's cache stays. Saved snapshots remain snapshots of the old model.

        Row counts are proven again if more than the values of weights has changed. No other thread
        may use the engine during the call. It waits for running saves.

        Args:
            progress: of hashing the weights: True for a bar on stderr, or a callable (bytes done,
                bytes in all).

        Raises:
            UnsupportedModelError: the changed model cannot keep the promise; the engine is
                unchanged.
            InvalidArgumentError: its vocabulary differs from the draft's now, or a session has a
                token that it lacks now; the engine is unchanged.
            CapacityError: there is not enough memory any more; the engine is closed.
        """
        core = self.core
        core.check_open()
        self._saves.wait()  # they write under the old fingerprint
        found = False
        try:
            with core.turns:  # between forwards
                facts = prove_again(core, progress)
                found = True
                core.renew(facts)
        except BaseException:
            if found:  # the sessions' K/V are gone
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
            "graph_replays": 0 if runner.graphs is None else runner.graphs.replays,
            "compressed_weight_bytes": compressed_bytes(core.facts.linear),
            "speculation_forwards": speculation.forwards,
            "speculation_proposed": speculation.proposed,
            "speculation_accepted": speculation.accepted,
            "seconds_forward": runner.seconds,
            "seconds_attention": runner.attention_seconds,
            "seconds_head": runner.head_seconds,
            **asdict(core.transcripts.trims),
            **draft_stats(core.drafter),
            **({} if core.facts.recurrence is None else core.checkpoints.stats()),
        }

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self.core.closed

    def close(self) -> None:
        """Ends and frees everything that the engine owns; or raises and changes nothing.

        May be called twice, and from any thread. It waits for running forwards and saves.
        Unfinished requests end with finish "closed" (if another thread runs a scheduler's step,
        when that step returns); iterators of tokens raise at their next token. Does nothing in a
        forked child, because the parent owns everything.

        Raises:
            InvalidArgumentError: called inside a forward (from a hook or a proposer) or from the
                progress callback of a save, which it would wait for; or it is another engine's
                draft.
        """
        core = self.core
        if core.made_in.forked:
            return
        if self._is_draft and not core.closed:
            raise InvalidArgumentError(
                "close: this is the draft of another engine, which closes it; close that one"
            )
        core.check_can_close()
        if core.drafter is not None:
            core.drafter.core.check_can_close()
        self._saves.wait()
        ends = [partial(scheduler.end, "closed") for scheduler in list(self._schedulers)]
        core.close(*ends, self.segments.forget)

    def __repr__(self) -> str:
        if self.core.closed:
            return "Engine(closed)"
        name = type(self.model).__name__
        return f"Engine({name}, pool_tokens={self.config.pool_tokens}, rows={self.rows})"

    def _repr_html_(self) -> str:
        """The model, the pool and what was done, for notebooks."""
        if self.core.closed:
            return card(repr(self), ())
        stats, layout = self.stats(), self.layout
        selection = str(self.fingerprint["selection"])
        facts = [
            ("model", f"{type(self.model).__name__}, {self.fingerprint['model_dtype']}"),
            ("K/V", f"{layout.layers} layers x {layout.kv_heads} kv heads, {layout.k_dtype}"),
            ("attention", selection),
            ("pool", self.plan or f"{self.config.pool_tokens:,} tokens"),
            ("rows of a forward", f"{self.rows:,}, exact: {self.config.exact}"),
            ("forwards", f"{stats['model_forwards']:,}"),
        ]
        return card("Engine", facts)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _session_in(
        self, namespace: str | None = None, store: SnapshotStore | None = None
    ) -> Session:
        """An empty session of a stretched salt, with a store; None: the engine's."""
        return self._session_of(self.core.transcript(namespace, store))

    def _tenant(self, salt: str | None) -> StretchedSalt:
        return self.core.tenant if salt is None else StretchedSalt.of(salt)

    def _session_of(self, transcript: Transcript) -> Session:
        return Session(self.core, transcript, self._saves)

    def _verify(self, check: Callable[[Engine], object]) -> None:
        try:
            check(self)
            self.core.pager.reset()  # drops the chunks of the verification
            self.core.checkpoints.clear()
            self.core.make_runner()
            self.core.transcripts.speculation = SpeculationStats()
        except BaseException:
            self.close()
            raise
