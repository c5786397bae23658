"""A model, its pager and what is known of both: what everything above the model works on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import ExitStack
from functools import cached_property
from threading import Lock
from typing import Any, NamedTuple, Protocol

from kvpager import _core
from kvpager.config import PagerConfig
from kvpager.errors import InvalidArgumentError
from kvpager.execution.runner import Runner
from kvpager.execution.unchanged import Unchanged
from kvpager.hf import RowCounts, RowProof
from kvpager.hf.positions import Positions
from kvpager.hf.recurrent import Recurrence
from kvpager.hf.rotary import KeyMover
from kvpager.hf.watch import ModelWatch
from kvpager.pager import Layout, Pager, Sequence
from kvpager.pager.device import Place
from kvpager.plan import PoolChoice
from kvpager.process import MadeIn
from kvpager.recurrent.checkpoints import Checkpoints
from kvpager.recurrent.cursor import StateContext, StateCursor, state_cursor
from kvpager.recurrent.saved_states import StateFormat
from kvpager.sampling import Sampling
from kvpager.stores import SnapshotStore
from kvpager.text.transcript import Transcript, Transcripts
from kvpager.tokens import TokenIds


class Numerics(NamedTuple):
    """What is known of a model's attention, for a pager and its fingerprint.

    Attributes:
        q_heads: of every layer.
        kernel_version: what decides the bits of its attention.
        window: how far back any layer looks; 0: one looks at everything.
        behaviour: digest of a forward that depends on the length of a chunk; empty: there is none.
    """

    q_heads: int
    kernel_version: int | str
    window: int
    behaviour: str


class Ask(NamedTuple):
    """Guesses that a text wants of a draft model.

    Attributes:
        transcript: whose.
        text: all of it, [n] int32, the pending token included.
        most: guesses wanted, at least 1.
        sampling: what will choose the tokens, and so the guesses: with the same draws they agree
            more often.
        eos: a guess of one of these is the last one.
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
        guess_cost: of one guess beside a forward of the target.
        shares_forwards: whether guesses of several texts take one forward together.
    """

    core: EngineCore
    guess_cost: float
    shares_forwards: bool

    def propose(self, asks: SequenceOf[Ask]) -> list[list[int]]:
        """Guesses for each, at most as many as it asked for."""
        ...

    def restore(self, transcript: Transcript, snapshot: Any, source: SnapshotStore) -> None:
        """Goes on with what a save of the text kept of the draft's cache. Raises PagerError."""
        ...


class EngineCore:
    """What an engine is to the runtime; `kvpager.Engine` is its user's handle.

    Made by `kvpager.opening.open_core`, which finds out what the model is.

    Attributes:
        model: a transformers causal LM.
        config: how it is paged.
        place: the device of pool and model.
        salt: the user's; namespace: what chunks are under.
        store: where prefills look for the beginning of their prompts.
        vocab_size: token ids the model knows.
        positions: how long its texts may be.
        layout, row_counts, row_proof, recurrence, numerics, fingerprint, watch, plan: what was
            found out about the model.
        pager, runner: of the model as it is known.
        transcripts: of all conversations.
        checkpoints: of all recurrent states.
        turns: of forwards.
        drafter: of the engine's draft model, if it has one.
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
        """`row_choices`: what M may be, best first. The rest is found out by `kvpager.opening`."""
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
        self.made_in = MadeIn()
        self._threads = threads
        self._closing = Lock()
        self._closed = False

    @property
    def rows(self) -> int:
        """M, the most rows of a forward."""
        return self.row_counts.rows

    @property
    def shares_chunks(self) -> bool:
        """Whether prompts may start from chunks that others have computed."""
        return self.config.exact is not False

    @cached_property
    def key_mover(self) -> KeyMover:
        """How keys of this model are moved to other positions; found out when first asked for.

        Raises:
            UnsupportedModelError: they do not move by a rotation.
        """
        return self.runner.find_rotation()

    @cached_property
    def state_context(self) -> StateContext:
        """What its texts' recurrent states have in common. REQUIRES: it has such layers."""
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
        """A pager for the model as it is known, and what runs it; an older one is closed first."""
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
            threads=self._threads,
            device=self.place.name,
            q_heads=self.numerics.q_heads,
            window=self.numerics.window,
        )

    def make_runner(self) -> None:
        """What runs the model, with all that is counted at zero."""
        unchanged = Unchanged(self.model, self.watch)
        self.runner = Runner(
            self.model, self.pager, self.row_counts, unchanged, self.recurrence, self.turns
        )

    def transcript(self) -> Transcript:
        """A new, empty one."""
        return self.transcripts.adopt(self.pager.sequence(salt=self.namespace))

    def states_of(self, sequence: Sequence) -> StateCursor | None:
        """Where recurrent layers stand over a sequence; None for a model without such layers."""
        return None if self.recurrence is None else state_cursor(self.state_context, sequence)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def check_open(self, transcript: Transcript | None = None) -> None:
        """Raises InvalidArgumentError if it is closed, or another process's; or the transcript."""
        self.made_in.require("this engine")
        if self._closed:
            raise InvalidArgumentError("the engine is closed; make a new Engine(model, ...)")
        if transcript is not None and transcript.closed:
            raise InvalidArgumentError("the session is closed; use engine.session() or restore()")

    def check_can_close(self) -> None:
        """Raises InvalidArgumentError inside a forward, whose end `close` waits for."""
        if self.turns.held_here:
            raise InvalidArgumentError(
                "close: called inside a forward of the engine, which cannot end before its "
                "caller does; close it when the forward has returned"
            )

    def close(self, *first: Callable[[], object]) -> None:
        """Ends the forwards and the transcripts, and frees the pool. Twice is harmless.

        Waits for a forward that runs. first: what is to be ended before all that, in order. What
        fails is raised when all has been tried.
        """
        with self._closing, ExitStack() as steps:
            if self._closed:
                return
            self.turns.end()
            self._closed = True
            if self.drafter is not None:
                steps.callback(self.drafter.core.close)
            steps.callback(self.pager.close)
            for transcript in self.transcripts:
                steps.callback(transcript.close)
            for step in reversed(first):
                steps.callback(step)
