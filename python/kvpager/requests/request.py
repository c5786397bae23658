"""One request of a scheduler, and its result."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from kvpager._runtime.execution.core import EngineCore
from kvpager._runtime.scheduling.chat import PlannedTurn, settled
from kvpager._runtime.scheduling.completion import Completion, FinishReason
from kvpager._runtime.scheduling.feed import Feed
from kvpager._runtime.scheduling.stream import GeneratedToken, Generation, Stream
from kvpager._runtime.scheduling.trim import trim_to_common
from kvpager._runtime.text.conversation import Conversation
from kvpager._runtime.text.transcript import Transcript
from kvpager._support.tokens import TokenIds
from kvpager.requests.waiting import Queueing
from kvpager.session import Session
from kvpager.speculation.speculation import SpeculationStats

Token: TypeAlias = int | GeneratedToken
OnToken: TypeAlias = "Callable[[Request, Token], object]"
OnFinish: TypeAlias = "Callable[[Request, RequestCompletion], object]"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, kw_only=True)
class RequestCompletion(Completion):
    """The result of a request of `Engine.run` or of a `Scheduler`.

    Attributes:
        index: number of the prompt, or of the submission, from 0.
        choice: which of the `n` completions of its prompt, from 0.
        error: the exception, if `finish_reason` is "error".
        cached_tokens: prompt tokens that were not computed for this request: shared with other
            texts, from a store, or held by the given session.
        computed_tokens: prompt tokens that were, each counted once, also if they were computed
            again. The two add up to `prompt_tokens` unless it ended before its prompt was computed.
        queue_s: seconds from its submission to its first admission; to its end if there was none.
        session: the one given as prompt, or with `keep_session` the one made for the request.
    """

    index: int
    error: Exception | None
    session: Session | None
    cached_tokens: int = 0
    computed_tokens: int = 0
    queue_s: float = 0.0
    choice: int = 0


class PromptCount:
    """Counts positions of a prompt whose K/V were computed, each once.

    A position may be computed more than once: after a suspension, because its chunk is damaged, or
    because a recurrent state is missing.
    """

    def __init__(self, prompt_tokens: int) -> None:
        self._computed = np.zeros(prompt_tokens, dtype=bool)
        self._ready = 0

    def mark(self, start: int, count: int) -> None:
        """Notes that positions [start, start + count) were computed; ignores those behind it."""
        self._computed[start : start + count] = True

    def reached(self, length: int) -> None:
        """Notes that K/V of the first `length` positions exist."""
        self._ready = max(self._ready, min(length, len(self._computed)))

    @property
    def computed(self) -> int:
        """Number of positions computed."""
        return int(np.count_nonzero(self._computed))

    @property
    def cached(self) -> int:
        """Number of positions whose K/V existed already."""
        return self._ready - int(np.count_nonzero(self._computed[: self._ready]))


class Request:
    """Made by `Scheduler.submit`. Any thread may call `cancel`; the rest is for the owner's thread.

        waiting --admitted--> prefilling --the prompt's last row--> decoding --> finished
           ^                      |                                    |
           +------- the pool has no room for it any more --------------+

    A request that went back to waiting computes its tokens again and goes on with the same bits.

    Attributes:
        index: number of the submission, from 0.
        prompt_tokens: tokens of the prompt.
        seed: of its draws.
        completion: its result; None until it is finished.
        cancelled: whether `cancel` was called.

    Everything behind `cancel` is for its scheduler.
    """

    def __init__(
        self,
        index: int,
        prompt: TokenIds | PlannedTurn | None,
        session: Session | None,
        generation: Generation,
        seed: int,
        *,
        queueing: Queueing,
        keep_session: bool,
        on_token: OnToken | None,
        on_finish: OnFinish | None,
        cancelled: deque[Request],
        clock: Callable[[], float],
        produced: Sequence[Token] = (),
    ) -> None:
        """Makes a request; nothing is computed before `admit`.

        Args:
            index: number of the submission.
            prompt: the whole text, or a turn of the session's conversation; None: the session's.
            session: whose text goes on; None: one is made for the request.
            generation: of the request.
            seed: of its draws.
            queueing: its priority, tenant, salt and timeout.
            keep_session: see `Scheduler.submit`.
            on_token: likewise.
            on_finish: likewise.
            cancelled: gets the request when `cancel` is called.
            clock: seconds; measures how long it waits.
            produced: tokens of its answer that an earlier request of the same arguments produced.
        """
        self.index = index
        self.seed = seed
        self.completion: RequestCompletion | None = None
        self.cancelled = False
        self.queueing = queueing
        self.rank = (queueing.priority, 0, index)  # see `WaitingRequests`
        self.given_session = session
        self._conversation: Conversation | None = None  # that the turn leads to, until it is taken
        self._before: Conversation | None = None  # of a given session, when it was admitted
        self._ids: TokenIds | None
        if isinstance(prompt, PlannedTurn):
            self._ids, self._conversation = prompt.ids, prompt.conversation
        else:
            self._ids = prompt
        self._generation = generation
        self._keep = keep_session
        self._on_token = on_token
        self._on_finish = on_finish
        self._submitted = time.perf_counter()
        self._clock = clock
        self._queued_at = clock()
        timeout = queueing.timeout_s
        self.deadline = None if timeout is None else self._queued_at + timeout  # by `clock`
        self._queue_s: float | None = None
        self._prompt: PromptCount | None = None
        self._held = 0  # tokens with K/V when it was admitted
        self._cancellations = cancelled
        self._known = produced
        self._emitted = len(produced)  # tokens that `on_token` was called with, or need not be
        self._done = 0  # tokens computed, once it is finished
        self._session: Session | None = None
        self._feed: Feed | None = None
        self._fed: Feed | None = None  # the finished feed, which holds the room
        self._stream: Stream | None = None
        if self._ids is not None:
            self.prompt_tokens = self._to_compute = len(self._ids)
        else:
            assert session is not None
            self.prompt_tokens, self._to_compute = session.length, 0

    def __repr__(self) -> str:
        return (
            f"Request({self.index}, {self.state}, {self.prompt_tokens} prompt tokens, "
            f"{len(self.tokens)} produced)"
        )

    @property
    def state(self) -> str:
        """One of "waiting", "prefilling", "decoding", "finished"."""
        if self.completion is not None:
            return "finished"
        if self._session is None:
            return "waiting"
        return "decoding" if self._feed is None else "prefilling"

    @property
    def tokens(self) -> TokenIds:
        """The tokens produced so far, [n] int32."""
        if self.completion is not None:
            return self.completion.tokens
        return np.array([] if self._stream is None else self._stream.produced, dtype=np.int32)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found with K/V so far, not computed; see `RequestCompletion`."""
        if self.completion is not None:
            return self.completion.cached_tokens
        prompt = self._prompt
        return 0 if prompt is None else prompt.cached

    @property
    def piece(self) -> str:
        """The text that its last token completed, if it has an `on_token` and a tokenizer."""
        return "" if self._stream is None else self._stream.piece

    def cancel(self) -> None:
        """Ends it before another token is produced; the scheduler's next step finishes it."""
        self.cancelled = True
        self._cancellations.append(self)

    @property
    def feed(self) -> Feed:
        """Its prompt's feed. REQUIRES: state is prefilling."""
        assert self._feed is not None
        return self._feed

    @property
    def stream(self) -> Stream:
        """Its stream. REQUIRES: state is prefilling or decoding."""
        assert self._stream is not None
        return self._stream

    @property
    def planned(self) -> int:
        """Tokens to compute in all, if it produces as many as it may."""
        return self._to_compute + self._generation.max_new_tokens

    @property
    def done(self) -> int:
        """Tokens computed so far, of `planned`."""
        if self.completion is not None:
            return self._done
        if self._session is None:
            return 0
        if self._feed is not None:
            return 0 if self._session.closed else min(self._feed.done, self._to_compute)
        return self._to_compute + len(self.stream.produced)

    def admit(self, core: EngineCore, make_session: Callable[[str | None], Session]) -> None:
        """Starts it, or starts it again after `suspend`, and reserves room for all it may produce.

        Args:
            core: of the engine that runs it.
            make_session: makes an empty session for a salt.

        Raises:
            CapacityError: there is no room; nothing was changed.
        """
        session = self.given_session or make_session(self.queueing.salt)
        transcript = session.transcript
        prompt = self._prompt or PromptCount(self.prompt_tokens)
        transcript.mark_computed = prompt.mark
        try:
            stream = self._stream or self._new_stream(transcript)
            feed = None
            if self._ids is not None:
                feed = self._feed_of(core, transcript, stream)
            else:
                stream.transcript = transcript
                stream.reserve()
        except BaseException:
            transcript.mark_computed = None
            self._undo_turn(transcript)
            if session is not self.given_session:
                session.close()
            raise
        self._held = transcript.committed
        prompt.reached(self._held)
        self._prompt = prompt
        self._note_wait()
        stream.transcript = transcript
        if feed is None:
            transcript.generation_start = transcript.length
        self._stream, self._feed, self._session = stream, feed, session

    def _feed_of(self, core: EngineCore, transcript: Transcript, stream: Stream) -> Feed:
        """The admitted feed of the prompt; a given session's text is cut to what they share."""
        assert self._ids is not None
        ids = np.append(self._ids, np.array(stream.produced, dtype=np.int32))
        total = len(ids) + stream.remaining
        feed = Feed(transcript, ids)
        if self.given_session is None:
            feed.admit(core, total)
            return feed
        with transcript.reserve(max(total, transcript.length)):  # before anything is cut
            transcript.conversation = self._before = settled(core, transcript)
            trim_to_common(core, transcript, ids)
            feed.admit(core, total)
        return feed

    @property
    def has_closed_session(self) -> bool:
        """Whether it runs in a session that was closed: by its owner, or by an interrupted step."""
        return self._session is not None and self._session.closed

    def suspend(self) -> bool:
        """Releases its chunks, which it computes again later; False for a given session."""
        if self._session is None or self.given_session is not None:
            return False
        self._note_prompt()
        self._session.close()
        self._leave()
        self._session = self._feed = None
        return True

    def fed(self) -> None:
        """Call when the prompt is prefilled: the request is decoding from now on."""
        transcript = self.feed.transcript
        transcript.mark_used()
        transcript.generation_start = self.prompt_tokens
        if self._conversation is not None:
            transcript.conversation = self._conversation
            self._conversation = None
        self._note_prompt()
        self._fed, self._feed = self._feed, None

    def sample(self) -> Token:
        """Samples the next token and adds it to `tokens`. REQUIRES: the session is ready."""
        return self._note(self.stream.sample())

    def catch_up(self) -> None:
        """Adds and emits the tokens of a step that was interrupted. REQUIRES: it is decoding."""
        token = self.stream.sampled_before()
        if token is not None:
            self._note(token)
        for index in range(self._emitted, len(self.stream.produced)):
            self.emit(self.stream.token(index))

    def _note(self, token: Token) -> Token:
        if self._ids is None and self._prompt is not None:
            # A decode row has computed the pending token with which the session may begin.
            self._prompt.mark(self._held, self.prompt_tokens - self._held)
            self._prompt.reached(self.prompt_tokens)
        return token

    def emit(self, token: Token) -> None:
        """Calls `on_token` with a token, once even if it is interrupted."""
        self._emitted += 1
        if self._on_token is not None:
            self._on_token(self, token)

    def finish(self, reason: FinishReason, error: Exception | None = None) -> None:
        """Finishes it for a `reason`, with the `error` of a failure.

        Closes a session made for it unless that is to be kept.
        """
        self._done = self.done
        self._note_prompt()
        self._note_wait()
        session = self._session
        if session is not None:
            session.transcript.mark_computed = None
            self._undo_turn(session.transcript)
        unwanted = self.given_session is None and (error is not None or not self._keep)
        if session is not None and unwanted:
            session.close()
        self._leave()
        kept = session if session is not None and not session.closed else self.given_session
        self.completion = RequestCompletion(
            **self._result(),
            index=self.index,
            finish_reason=reason,
            error=error,
            session=kept,
            cached_tokens=0 if self._prompt is None else self._prompt.cached,
            computed_tokens=0 if self._prompt is None else self._prompt.computed,
            queue_s=self._queue_s or 0.0,
        )
        # A session holds logits, and there may be many requests.
        self._session = self._feed = self._fed = self._stream = self._prompt = None

    def _undo_turn(self, transcript: Transcript) -> None:
        """Gives a session the conversation that it had, if its turn was not taken."""
        if self._conversation is not None and self._before is not None:
            transcript.conversation = replace(self._before, untaken=True)

    def _note_wait(self) -> None:
        """Notes how long it waited, at its first admission or its end."""
        if self._queue_s is None:
            self._queue_s = self._clock() - self._queued_at

    def _note_prompt(self) -> None:
        """Notes how much of the prompt has K/V."""
        if self._session is not None and self._prompt is not None and not self._session.closed:
            self._prompt.reached(self._session.transcript.committed)

    def notify(self) -> None:
        """Calls `on_finish`. REQUIRES: it is finished."""
        assert self.completion is not None
        if self._on_finish is not None:
            try:
                self._on_finish(self, self.completion)
            except Exception:
                _log.exception("on_finish of request %d", self.index)

    def _new_stream(self, transcript: Transcript) -> Stream:
        before = transcript.tokens if self._ids is None else self._ids
        as_text = self._on_token is not None
        stream = self._generation.stream(transcript, self.seed, before, as_text=as_text)
        stream.begun = self._submitted
        stream.begin_with(self._known)
        return stream

    def _result(self) -> dict[str, Any]:
        """The fields of its completion that a stream has; without one, those of no tokens."""
        if self._stream is not None:
            return self._stream.result()
        return {
            "prompt_tokens": self.prompt_tokens,
            "tokens": np.zeros(0, dtype=np.int32),
            "text": None if self._generation.tokenizer is None else "",
            "logprobs": np.zeros(0, dtype=np.float32) if self._generation.logprobs else None,
            "top_logprobs": [] if self._generation.top_logprobs else None,
            "seed": self.seed,
            "speculation": SpeculationStats(),
            "first_token_s": None,
            "total_s": time.perf_counter() - self._submitted,
        }

    def _leave(self) -> None:
        """Releases the room reserved for it."""
        for holder in (self._feed, self._fed, self._stream):
            if holder is not None:
                holder.leave()

    def discard(self) -> None:
        """Closes the session that was made for it, even if it was to be kept."""
        session = self._session if self.completion is None else self.completion.session
        if session is not None and session is not self.given_session:
            session.close()
