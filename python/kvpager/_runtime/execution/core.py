"""`EngineCore`: a model, its pager and their properties, on which the rooms above work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import ExitStack
from functools import cached_property
from threading import Lock
from typing import Any, NamedTuple, Protocol

from kvpager import _core
from kvpager._model.model_facts import Findings, ModelFacts
from kvpager._model.seam.causal_lm import Positions
from kvpager._model.seam.rotary import KeyMover
from kvpager._runtime.execution.runner import Runner
from kvpager._runtime.execution.unchanged import Unchanged
from kvpager._runtime.recurrent.checkpoints import Checkpoints
from kvpager._runtime.recurrent.cursor import StateContext, StateCursor, state_cursor
from kvpager._runtime.recurrent.saved_states import StateFormat
from kvpager._runtime.text.tokenizer import Tokenizer, read_ids
from kvpager._runtime.text.transcript import Transcript, Transcripts
from kvpager._support.process import MadeIn
from kvpager._support.salts import StretchedSalt
from kvpager._support.tokens import TextOrIds, TokenIds
from kvpager.config import PagerConfig
from kvpager.errors import InvalidArgumentError
from kvpager.pager import Pager, Sequence
from kvpager.pager.device import PoolDevice
from kvpager.sampling import Sampling
from kvpager.stores import SnapshotStore


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
        self, transcript: Transcript, snapshot: Any, source: SnapshotStore, tenant: StretchedSalt
    ) -> None:
        """Restores the draft's cache from a snapshot saved with the text. Raises PagerError."""
        ...


def new_pager(
    found: Findings,
    config: PagerConfig,
    fingerprint: Mapping[str, Any],
    workers: _core.Workers,
    place: PoolDevice,
) -> Pager:
    """A pager for a model's forwards; the caller closes it."""
    return Pager(
        found.layout,
        config,
        rows=found.rows,
        smaller_rows=found.row_counts.smaller,
        fingerprint=fingerprint,
        workers=workers,
        device=place.name,
        q_heads=found.q_heads,
        window=found.window,
    )


class EngineCore:
    """An engine as the runtime sees it; `kvpager.Engine` is the user's handle.

    Attributes:
        model: a transformers causal LM.
        facts: what is known of it; only `renew` replaces them.
        place: the device of pool and model.
        workers: threads of the pager and of linear layers.
        tenant: the engine's own salt.
        store: where prefills look for the beginning of their prompts.
        tokenizer: the user's, if one was given.
        positions: the largest length of a text.
        pager, runner: made for these facts.
        transcripts: all conversations.
        checkpoints: all recurrent states.
        turns: lets one forward run at a time.
        drafter: of the engine's draft model, if it has one.
    """

    pager: Pager
    runner: Runner

    def __init__(
        self,
        model: Any,
        facts: ModelFacts,
        place: PoolDevice,
        workers: _core.Workers,
        *,
        tenant: StretchedSalt,
        store: SnapshotStore | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """Opens a pager and a runner for the model.

        Raises:
            CapacityError: there is not enough memory.
            DeviceError: the device cannot be used.
        """
        self.model = model
        self.place = place
        self.workers = workers
        self.tenant = tenant
        self.store = store
        self.tokenizer = tokenizer
        config = facts.config
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
        self._closing = Lock()
        self._closed = False
        self._take(facts)

    @property
    def config(self) -> PagerConfig:
        """The engine's configuration, with a number as `pool_tokens`."""
        return self.facts.config

    @property
    def rows(self) -> int:
        """M, the most rows of a forward."""
        return self.facts.rows

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
        """Shared by recurrent states of all texts. REQUIRES: the model has recurrent layers."""
        assert self.facts.recurrence is not None
        return StateContext(
            pager=self.pager,
            checkpoints=self.checkpoints,
            format=StateFormat(self.facts.recurrence.shape),
            fingerprint=self.facts.fingerprint,
            chunk_tokens=self.facts.layout.chunk_tokens,
            shared=self.shares_chunks,
        )

    def renew(self, facts: ModelFacts) -> None:
        """Opens a new pager for a model that has changed.

        Everything computed before is dropped; all transcripts keep their texts, now uncomputed.
        """
        open_ones = [transcript for transcript in self.transcripts if not transcript.closed]
        texts = [transcript.give_up_sequence() for transcript in open_ones]
        self.checkpoints.clear()
        only_values = facts.row_proof is self.facts.row_proof  # of its weights have changed
        self.pager.close()
        self._take(facts, self.runner if only_values else None)
        for transcript, (text, pending) in zip(open_ones, texts):
            transcript.restart(self.pager.sequence(salt=transcript.sequence.salt), text, pending)

    def _take(self, facts: ModelFacts, before: Runner | None = None) -> None:
        self.facts = facts
        self.pager = new_pager(facts, facts.config, facts.fingerprint, self.workers, self.place)
        for name in ("key_mover", "state_context"):
            vars(self).pop(name, None)
        self.make_runner(before)

    @property
    def _can_replay(self) -> bool:
        """Whether forwards can be replayed. CUDA graphs read missed chunks in place."""
        if self.place.kind == "cuda":
            return self.config.missed_chunks != "staged"
        return self.place.kind == "cpu" and self.model.device.type == "cpu"

    def make_runner(self, before: Runner | None = None) -> None:
        """Makes a new runner, with its counters at 0; before: see `Runner`."""
        unchanged = Unchanged(self.model, self.facts.watch)
        self.runner = Runner(
            self.model,
            self.pager,
            self.facts.row_counts,
            unchanged,
            self.facts.recurrence,
            self.turns,
            graphs=self.config.graphs and self._can_replay,
            linear=self.facts.linear,
            before=before,
        )

    def read_ids(
        self, given: TextOrIds, name: str = "ids", *, special_tokens: bool = True
    ) -> TokenIds:
        """The token ids [n] of text or of ids; see `as_token_ids`.

        special_tokens: for text, whether it gets the tokens that begin a text, such as BOS.

        Raises:
            InvalidArgumentError: no tokens, ids that are none of the model's, or text without a
                tokenizer.
        """
        return read_ids(
            given, self.tokenizer, self.facts.vocab_size, name, special_tokens=special_tokens
        )

    def transcript(
        self, namespace: str | None = None, store: SnapshotStore | None = None
    ) -> Transcript:
        """Makes a new, empty transcript.

        Args:
            namespace: a stretched salt; None: the engine's.
            store: where its prefill looks for the beginning of its prompt; None: the engine's.
        """
        salt = self.tenant.namespace if namespace is None else namespace
        transcript = self.transcripts.adopt(self.pager.sequence(salt=salt))
        transcript.store = store
        return transcript

    def states_of(self, sequence: Sequence) -> StateCursor | None:
        """Makes the state cursor of a sequence; None for a model without recurrent layers."""
        return None if self.facts.recurrence is None else state_cursor(self.state_context, sequence)

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
            linear = self.facts.linear
            if linear is not None and linear.compressed is not None:
                steps.callback(linear.compressed.clear)
            steps.callback(self.pager.close)
            for transcript in self.transcripts:
                steps.callback(transcript.close)
            for step in reversed(first):
                steps.callback(step)
