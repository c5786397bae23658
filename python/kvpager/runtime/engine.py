"""A model, a pager and the rule that joins them: every forward has exactly M rows."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

import torch

from kvpager import fingerprint as fingerprints
from kvpager.config import PagerConfig, known_options
from kvpager.errors import CorruptSnapshotError, InvalidArgumentError
from kvpager.hf import Attachment, check_supported, probe_model
from kvpager.pager import Pager, Sequence
from kvpager.runtime.decode import Stream, decode
from kvpager.runtime.prefill import prefill_all
from kvpager.runtime.progress import Progress
from kvpager.runtime.runner import Runner
from kvpager.runtime.sampling import Sampling
from kvpager.runtime.score import Score, score_tokens
from kvpager.runtime.session import MODEL_EOS, Session
from kvpager.runtime.tokens import TokenIdsLike, as_token_ids

_log = logging.getLogger(__name__)


class Engine:
    """Runs sessions of one transformers causal LM over one pager.

    The token at a position, its K/V and its logits are a pure function of the tokens before it, of
    the model and of what `fingerprint` holds: not of the pool's size, of other sessions, of when it
    was computed, nor of whether it was saved and restored meanwhile.

    While an engine is open the model's attention is kvpager's, and its weights must not change;
    `close` (or leaving the `with` block) gives the model back as it was. One thread at a time per
    session; forwards of different sessions take turns.

    Example:
        >>> engine = Engine(model, PagerConfig(pool_tokens=2048, selection=TopK(chunks=32)))
        >>> session = engine.session()
        >>> session.prefill(ids)
        >>> answer = list(session.generate(64))
    """

    def __init__(
        self,
        model: Any,
        config: PagerConfig | None = None,
        *,
        salt: str = "",
        threads: int | None = None,
        **options: Any,
    ) -> None:
        """Checks the model by running it twice on M rows of made-up tokens, and hashes its weights.

        Args:
            model: a transformers causal LM on the CPU, in eval mode.
            config: how to page; or give its options by name, which also override it.
            salt: separates tenants: no chunk and no snapshot is shared between different salts.
            threads: set torch's number of threads, for the whole process; by default it is left
                alone.
            **options: of PagerConfig.

        Raises:
            UnsupportedModelError: this model cannot keep the promise; says why and what to do.
            InvalidArgumentError: an option is unknown or out of range.
            CapacityError: the memory asked for cannot be had.
        """
        self.config = _configuration(config, options)
        self.model = check_supported(model)
        self.rows = self.config.resolve_rows()
        if not isinstance(salt, str):
            raise InvalidArgumentError(f"salt is {salt!r}; expected a string")
        self.salt = salt
        if threads is not None:
            if type(threads) is not int or threads < 1:
                raise InvalidArgumentError(
                    f"threads is {threads!r}; expected an integer, 1 or more"
                )
            torch.set_num_threads(threads)
        self.vocab_size = _vocab_size(self.model)
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._attachment = Attachment(self.model)
        try:
            self.layout = probe_model(
                self.model,
                rows=self.rows,
                chunk_tokens=self.config.chunk_tokens,
                kv_dtype=self.config.kv_dtype,
            )
            self.fingerprint: Mapping[str, Any] = fingerprints.describe(
                self.model, self.config, self.layout, rows=self.rows, salt=salt
            )
            self.pager = Pager(
                self.layout,
                self.config,
                rows=self.rows,
                fingerprint=self.fingerprint,
                threads=threads,
            )
        except BaseException:
            self._attachment.release()
            raise
        self.runner = Runner(self.model, self.pager)
        _log.info(
            "%s: %d rows per forward, pool of %d chunks of %d tokens",
            type(model).__name__,
            self.rows,
            self.config.pool_blocks,
            self.config.chunk_tokens,
        )

    def session(self) -> Session:
        """A new, empty session."""
        self._check_open()
        return self.adopt(self.pager.sequence(salt=self.salt))

    def restore(self, path: str | os.PathLike[str], *, on_mismatch: str = "refuse") -> Session:
        """The session that `Session.save` wrote. Reads metadata only; chunks follow when needed.

        The next `prefill` takes the whole, longer prompt and computes what follows the restored
        tokens; one that does not begin with them is refused, never silently computed again.
        `restored_tokens_consumed` of the session tells that they were used.

        Args:
            path: of the snapshot.
            on_mismatch: "refuse", or "approximate" to accept other torch or transformers versions,
                another processor, thread count or kernel version, with results that may differ in
                their last bits and are never shared as exact. Another model, layout, dtype, RoPE,
                selection, row or chunk count, or salt is refused always.

        Raises:
            FingerprintMismatchError: written by another model or under other numerics; `.field`
                says which.
            CorruptSnapshotError, UnsupportedVersionError, StorageError: the file cannot be used.
            CapacityError: the session's summaries do not fit.
        """
        self._check_open()
        snapshot = self.pager.open_snapshot(path)
        provenance = fingerprints.compare(
            self.fingerprint, snapshot.fingerprint, on_mismatch=on_mismatch, source=os.fspath(path)
        )
        pending, sampling = _session_state(snapshot.session, self.vocab_size, os.fspath(path))
        sequence = self.pager.restore(snapshot, salt=self.salt, provenance=provenance)
        return self.adopt(
            sequence, pending=pending, sampling=sampling, restored_tokens=sequence.length
        )

    def prefill_many(
        self, prompts: Iterable[tuple[Session, TokenIdsLike]], *, progress: Progress = None
    ) -> None:
        """`Session.prefill` for several sessions, packed into common forwards; the same bits.

        Every prompt is checked, and room is reserved for all, before anything is computed.
        """
        self._check_open()
        checked = [(session, as_token_ids(ids, self.vocab_size)) for session, ids in prompts]
        prefill_all(self, checked, progress)

    def generate_many(
        self,
        sessions: Iterable[Session],
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | Iterable[int] | None = None,
        eos: int | Iterable[int] | str | None = MODEL_EOS,
        stop: Iterable[Iterable[int]] = (),
    ) -> Iterator[tuple[Session, int]]:
        """`Session.generate` for several sessions at once; yields (session, token) as they come.

        Each session's tokens are those it would produce alone. `seed` may be one per session; forks
        that share a seed draw alike. The other arguments are those of `Session.generate`, for each
        session.
        """
        self._check_open()
        sessions = list(sessions)
        if len({id(session) for session in sessions}) != len(sessions):
            raise InvalidArgumentError("a session is named twice; expected each once")
        if type(max_new_tokens) is not int or max_new_tokens < 1:
            raise InvalidArgumentError(
                f"max_new_tokens is {max_new_tokens!r}; expected an integer, 1 or more"
            )
        seeds = _seeds(seed, sessions)
        ends = self._end_tokens(eos)
        stops = tuple(
            tuple(as_token_ids(list(part), self.vocab_size, f"stop[{i}]").tolist())
            for i, part in enumerate(stop)
        )
        samplings = [Sampling(temperature, top_k, top_p, seed) for seed in seeds]
        streams = [
            Stream(session, sampling, max_new_tokens, ends, stops)
            for session, sampling in zip(sessions, samplings)
        ]
        for session in sessions:
            self.check_session(session)
            if not session.length:
                raise InvalidArgumentError(
                    "generate: the session is empty; call prefill(ids) first"
                )
        for session in sessions:
            session.sequence.reserve(session.length + max_new_tokens)
        return decode(self, streams)

    def score(self, ids: TokenIdsLike, *, progress: Progress = None) -> Score:
        """Log-probabilities of given tokens, teacher-forced in a sequence of its own.

        Args:
            ids: [n] or [1, n], n >= 2.
            progress: as for `Session.prefill`.

        Raises:
            InvalidArgumentError, CapacityError: as for `Session.prefill`.
        """
        self._check_open()
        return score_tokens(self, as_token_ids(ids, self.vocab_size), progress)

    def stats(self) -> dict[str, Any]:
        """The pager's counters, and the runtime's: forwards run, and where their seconds went."""
        self._check_open()
        return self.pager.stats() | {
            "model_forwards": self.runner.forwards,
            "seconds_forward": self.runner.seconds,
            "seconds_attention": self.runner.attention_seconds,
            "seconds_head": self.runner.head_seconds,
        }

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._attachment.released

    def close(self) -> None:
        """Closes every session and the pager, and gives the model its own attention back."""
        if self.closed:
            return
        try:
            for session in list(self._sessions):
                session.close()
            self.pager.close()
        finally:
            self._attachment.release()

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

    def adopt(self, sequence: Sequence, **state: Any) -> Session:
        """A session of this engine over `sequence`."""
        session = Session(self, sequence, **state)
        self._sessions.add(session)
        return session

    def check_session(self, session: Session) -> None:
        """Raises InvalidArgumentError unless `session` is open and this engine's."""
        self._check_open()
        if not isinstance(session, Session) or session.engine is not self:
            raise InvalidArgumentError(f"{session!r} is no session of this engine")
        if session.closed:
            raise InvalidArgumentError("the session is closed; use engine.session() or restore()")

    def _check_open(self) -> None:
        if self.closed:
            raise InvalidArgumentError("the engine is closed; make a new Engine(model, ...)")

    def _end_tokens(self, eos: int | Iterable[int] | str | None) -> frozenset[int]:
        if eos is None:
            return frozenset()
        if isinstance(eos, str):
            if eos != MODEL_EOS:
                raise InvalidArgumentError(
                    f'eos is {eos!r}; expected token ids, None or "{MODEL_EOS}"'
                )
            return self._models_end_tokens()
        ids = [eos] if isinstance(eos, int) else list(eos)
        return frozenset(as_token_ids(ids, self.vocab_size, "eos").tolist())

    def _models_end_tokens(self) -> frozenset[int]:
        for holder in (getattr(self.model, "generation_config", None), self.model.config):
            ids = getattr(holder, "eos_token_id", None)
            if ids is not None:
                return frozenset([ids] if isinstance(ids, int) else ids)
        return frozenset()


def _configuration(config: PagerConfig | None, options: Mapping[str, Any]) -> PagerConfig:
    options = known_options(options)
    if config is None:
        if "pool_tokens" not in options:
            raise InvalidArgumentError(
                "pool_tokens is missing; give Engine(model, PagerConfig(pool_tokens=...)) or "
                "Engine(model, pool_tokens=...)"
            )
        return PagerConfig(**options)
    if not isinstance(config, PagerConfig):
        raise InvalidArgumentError(f"config is {config!r}; expected a PagerConfig")
    return config.replace(**options) if options else config


def _vocab_size(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0])


def _seeds(seed: int | Iterable[int] | None, sessions: list[Session]) -> list[int]:
    if seed is None:
        return [session.sampling.seed for session in sessions]
    if isinstance(seed, int):
        return [seed] * len(sessions)
    seeds = list(seed)
    if len(seeds) != len(sessions):
        raise InvalidArgumentError(
            f"seed has {len(seeds)} values; expected {len(sessions)}, one each"
        )
    return seeds


def _session_state(
    state: Mapping[str, Any], vocab_size: int, path: str
) -> tuple[int | None, Sampling]:
    """Pending token and sampler of a snapshot; a pager alone writes one without."""
    pending = state.get("pending")
    if pending is not None and (type(pending) is not int or not 0 <= pending < vocab_size):
        raise CorruptSnapshotError(
            f"{path}: session.pending is {pending!r}; expected a token id below {vocab_size}"
        )
    try:
        return pending, Sampling.from_json(state.get("sampling", {}))
    except InvalidArgumentError as error:
        raise CorruptSnapshotError(f"{path}: session.sampling: {error}") from error
