"""`EngineCore`: a model, its pager and their properties, on which the rooms above work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import ExitStack
from functools import cached_property
from threading import Lock
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import torch

from kvpager import _core
from kvpager.config import PagerConfig
from kvpager.errors import InvalidArgumentError
from kvpager.execution.runner import Runner
from kvpager.execution.unchanged import Unchanged
from kvpager.execution.workers import new_workers
from kvpager.hf import RowCounts, RowProof
from kvpager.hf.linear import LinearLayers
from kvpager.hf.positions import Positions
from kvpager.hf.recurrent import Recurrence
from kvpager.hf.rotary import KeyMover
from kvpager.hf.watch import ModelWatch
from kvpager.layout import Layout
from kvpager.pager import Pager, Sequence
from kvpager.pager.device import Place
from kvpager.plan import PoolChoice
from kvpager.process import MadeIn
from kvpager.recurrent.checkpoints import Checkpoints
from kvpager.recurrent.cursor import StateContext, StateCursor, state_cursor
from kvpager.recurrent.saved_states import StateFormat
from kvpager.salts import Tenant
from kvpager.sampling import Sampling
from kvpager.stores import SnapshotStore
from kvpager.text.tokenizer import Tokenizer, read_ids
from kvpager.text.transcript import Transcript, Transcripts
from kvpager.tokens import TextOrIds, TokenIds

# Who computes linear layers: torch, or kvpager on the processor or on its device.
Products: TypeAlias = Literal["torch", "processor", "device"]


class Numerics(NamedTuple):
    """Properties of a model's attention, for its pager and fingerprint.

    Attributes:
        q_heads: query heads of each layer.
        kernel_version: identifies the arithmetic of its attention.
        window: the largest window of any layer, in tokens; 0: one has no window.
        behaviour: digest of the forward that they were found with, where it is the fingerprint's
            (hf/behaviour.py); else empty.
    """

    q_heads: int
    kernel_version: int | str
    window: int
    behaviour: str


class Ask(NamedTuple):
    """A text's request for guesses of a draft model.

    Attributes:
        transcript: whose text it is.
        text: the whole text, [n] int32, the pending token included.
        most: the largest number of guesses, at least 1.
        sampling: chooses the tokens; the draft samples with it as well, because equal random
            numbers make the two agree more often.
        eos: token ids that end the guesses; the last guess may be one of them.
    """

    transcript: Transcript
    text: TokenIds
    most: int
    sampling: Sampling
    eos: frozenset[int]


class Drafter(Protocol):
    """A draft model's side of speculation, for all texts of an engine.

    Attributes:
        core: the draft model's.
        guess_cost: cost of one guess relative to a forward of the target.
        shares_forwards: whether one forward computes guesses of several texts.
    """

    core: EngineCore
    guess_cost: float
    shares_forwards: bool

    def propose(self, asks: SequenceOf[Ask]) -> list[list[int]]:
        """Returns guesses for each, at most `most`."""
        ...

    def restore(
        self, transcript: Transcript, snapshot: Any, source: SnapshotStore, tenant: Tenant
    ) -> None:
        """Restores the draft's cache from a snapshot saved with the text. Raises PagerError."""
        ...


class EngineCore:
    """An engine as the runtime sees it; `kvpager.Engine` is the user's handle.

    Made by `kvpager.opening.open_core`, which finds out the model's properties.

    Attributes:
        model: a transformers causal LM.
        config: the engine's configuration.
        place: the device of pool and model.
        salt: the user's. namespace: the salt as it enters chunk names.
        store: where prefills look for the beginning of their prompts.
        vocab_size: number of token ids the model accepts.
        positions: the largest length of a text.
        layout, row_counts, row_proof, recurrence, numerics, fingerprint, watch, plan: properties of
            the model, found by `kvpager.opening`.
        pager, runner: made for these properties.
        transcripts: all conversations.
        checkpoints: all recurrent states.
        turns: lets one forward run at a time.
        workers: threads of the pager and of linear layers.
        products: who computes linear layers.
        linear: which are; None: torch computes all.
        drafter: of the engine's draft model, if it has one.
        tokenizer: the user's, if one was given.
    """

    layout: Layout
    row_counts: RowCounts
    row_proof: RowProof | None
    recurrence: Recurrence | None
    numerics: Numerics
    fingerprint: Mapping[str, Any]
    watch: ModelWatch
    plan: PoolChoice | None
    pager: Pager
    runner: Runner

    def __init__(
        self,
        model: Any,
        config: PagerConfig,
        place: Place,
        *,
        salt: str,
        namespace: str,
        store: SnapshotStore | None,
        threads: int | None,
        vocab_size: int,
        row_choices: tuple[int, ...],
    ) -> None:
        """`row_choices`: candidates for M, best first. `kvpager.opening` finds out the rest."""
        self.model = model
        self.config = config
        self.place = place
        self.salt = salt
        self.namespace = namespace
        self.store = store
        self.vocab_size = vocab_size
        self.row_choices = row_choices
        self.positions = Positions(model, beyond=config.beyond_max_positions)
        self.turns = _core.Turns()
        self.checkpoints = Checkpoints(
            budget_bytes=config.checkpoint_bytes,
            every=config.checkpoint_chunks,
            chunk_tokens=config.chunk_tokens,
            policy=config.checkpoint_policy,
        )
        self.transcripts = Transcripts(config, self.states_of)
        self.drafter: Drafter | None = None
        self.tokenizer: Tokenizer | None = None
        self.made_in = MadeIn()
        self.workers = new_workers(torch.get_num_threads() if threads is None else threads)
        self.products: Products = "torch"
        self.linear: LinearLayers | None = None
        self._closing = Lock()
        self._closed = False

    @property
    def rows(self) -> int:
        """M, the most rows of a forward."""
        return self.row_counts.rows

    @property
    def tenant(self) -> Tenant:
        """The engine's own."""
        return Tenant(self.salt, self.namespace)

    @property
    def shares_chunks(self) -> bool:
        """Whether prompts may start from chunks that others have computed."""
        return self.config.exact is not False

    @cached_property
    def key_mover(self) -> KeyMover:
        """Moves keys of this model to other positions; made at the first use.

        Raises:
            UnsupportedModelError: position does not enter the keys as a rotation.
        """
        return self.runner.find_rotation()

    @cached_property
    def state_context(self) -> StateContext:
        """What recurrent states of all texts share. REQUIRES: the model has recurrent layers."""
        assert self.recurrence is not None
        return StateContext(
            pager=self.pager,
            checkpoints=self.checkpoints,
            format=StateFormat(self.recurrence.shape),
            fingerprint=self.fingerprint,
            chunk_tokens=self.layout.chunk_tokens,
            shared=self.shares_chunks,
        )

    def open_pager(self) -> None:
        """Opens a pager and a runner for the model; closes an older pager first."""
        if hasattr(self, "pager"):
            self.pager.close()
        self.pager = self.new_pager(self.config, self.fingerprint)
        for name in ("key_mover", "state_context"):
            vars(self).pop(name, None)
        self.make_runner()

    def new_pager(self, config: PagerConfig, fingerprint: Mapping[str, Any]) -> Pager:
        """A pager for the model's forwards; the caller closes it."""
        return Pager(
            self.layout,
            config,
            rows=self.rows,
            smaller_rows=self.row_counts.smaller,
            fingerprint=fingerprint,
            workers=self.workers,
            device=self.place.name,
            q_heads=self.numerics.q_heads,
            window=self.numerics.window,
        )

    @property
    def _can_replay(self) -> bool:
        """Whether forwards can be replayed. CUDA graphs read missed chunks in place."""
        if self.place.kind == "cuda":
            return self.config.missed_chunks != "staged"
        return self.place.kind == "cpu" and self.model.device.type == "cpu"

    def make_runner(self) -> None:
        """Makes a new runner, with its counters at 0."""
        unchanged = Unchanged(self.model, self.watch)
        self.runner = Runner(
            self.model,
            self.pager,
            self.row_counts,
            unchanged,
            self.recurrence,
            self.turns,
            graphs=self.config.graphs and self._can_replay,
            linear=self.linear,
        )

    def read_ids(
        self, given: TextOrIds, name: str = "ids", *, special_tokens: bool = True
    ) -> TokenIds:
        """The token ids [n] of text or of ids; see `kvpager.tokens.as_token_ids`.

        special_tokens: for text, whether it gets the tokens that begin a text, such as BOS.

        Raises:
            InvalidArgumentError: no tokens, ids that are none of the model's, or text without a
                tokenizer.
        """
        return read_ids(given, self.tokenizer, self.vocab_size, name, special_tokens=special_tokens)

    def transcript(
        self, namespace: str | None = None, store: SnapshotStore | None = None
    ) -> Transcript:
        """Makes a new, empty transcript.

        Args:
            namespace: a stretched salt; None: the engine's.
            store: where its prefill looks for the beginning of its prompt; None: the engine's.
        """
        salt = self.namespace if namespace is None else namespace
        transcript = self.transcripts.adopt(self.pager.sequence(salt=salt))
        transcript.store = store
        return transcript

    def states_of(self, sequence: Sequence) -> StateCursor | None:
        """Makes the state cursor of a sequence; None for a model without recurrent layers."""
        return None if self.recurrence is None else state_cursor(self.state_context, sequence)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def check_open(self, transcript: Transcript | None = None) -> None:
        """Raises InvalidArgumentError if it or the transcript is closed or of another process."""
        self.made_in.require("this engine")
        if self._closed:
            raise InvalidArgumentError("the engine is closed; make a new Engine(model, ...)")
        if transcript is not None and transcript.closed:
            raise InvalidArgumentError("the session is closed; use engine.session() or restore()")

    def check_can_close(self) -> None:
        """Raises InvalidArgumentError inside a forward, because `close` would wait for its end."""
        if self.turns.held_here:
            raise InvalidArgumentError(
                "close: called inside a forward of the engine, which cannot end before its "
                "caller does; close it when the forward has returned"
            )

    def close(self, *first: Callable[[], object]) -> None:
        """Ends the forwards and the transcripts, and frees the pool. May be called twice.

        Waits for a running forward. first: functions to call before everything else, in order. If
        some step fails, the others still run, and then its error is raised.
        """
        with self._closing, ExitStack() as steps:
            if self._closed:
                return
            self.turns.end()
            self._closed = True
            if self.drafter is not None:
                steps.callback(self.drafter.core.close)
            if self.linear is not None and self.linear.compressed is not None:
                steps.callback(self.linear.compressed.clear)
            steps.callback(self.pager.close)
            for transcript in self.transcripts:
                steps.callback(transcript.close)
            for step in reversed(first):
                steps.callback(step)
