"""Runs many requests in common forwards: admission, turns, cancellation, isolation of errors."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvpager import _core
from kvpager._runtime.execution.core import EngineCore
from kvpager._runtime.scheduling.chat import MOST_NEW_TOKENS, PlannedTurn, check_keeps, plan_turn
from kvpager._runtime.scheduling.completion import FinishReason
from kvpager._runtime.scheduling.feed import Account, runnable
from kvpager._runtime.scheduling.options import repeatable
from kvpager._runtime.scheduling.packing import advance
from kvpager._runtime.scheduling.stream import Generation
from kvpager._runtime.text.template_input import ControlTokensAs
from kvpager._runtime.text.tokenizer import Message
from kvpager._support.arguments import Integer, as_flag, as_integer, takes
from kvpager._support.tokens import TextOrIds, TokenIds
from kvpager.errors import CapacityError, InvalidArgumentError, ModelChangedError, QueueFullError
from kvpager.requests.request import OnFinish, OnToken, Request, Token
from kvpager.requests.waiting import Queueing, RequestHeap, WaitingRequests
from kvpager.sampling import fresh_seed
from kvpager.session import Session, require_own

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from kvpager._runtime.scheduling.options import GenerationOptions

_PLAIN = Queueing()


class Scheduler:
    """Runs requests together, a forward at a time; made by `Engine.scheduler`.

    Every forward holds a row of each decoding request (in turns, if there are more than rows), then
    rows of prompts, shared fairly, then speculation. The other requests of a forward change no bit
    of a request. Requests are admitted by priority, then in the order of their submission, while
    the tiers below the pool have room for all tokens they may produce and the pool for their
    unsealed chunks. Requests of one priority are admitted in turns of their tenants, by tokens, and
    prompts of several tenants share rows likewise. Later ones that fit overtake one that does not,
    a bounded number of times. A request that does not fit even alone ends with CapacityError.

    Any thread may call `submit`, `close` and `Request.cancel`; only one thread at a time may call
    `step`. If a forward fails with a request and succeeds without it, that request alone ends, with
    finish "error". If it fails with each request alone, all of them end.

    Attributes:
        clock: monotonic seconds, for `timeout_s` and `queue_s`; may be replaced before the first
            request.
        most_of_one: most requests of one tenant that run at once. May be changed at any time.

    Example:
        >>> with engine.scheduler() as scheduler:
        ...     request = scheduler.submit(ids, 100)
        ...     while not scheduler.idle:
        ...         for request, token in scheduler.step():
        ...             print(request.index, token)
    """

    def __init__(
        self,
        core: EngineCore,
        make_session: Callable[[str | None], Session],
        max_sessions: Integer | None = None,
        max_waiting: Integer | None = None,
    ) -> None:
        """Makes a scheduler.

        Args:
            core: the engine's.
            make_session: makes an empty session of a stretched salt; None: the engine's.
            max_sessions: most requests that run at once; by default one per row of a forward.
            max_waiting: most requests of one tenant that wait; None: any number.
        """
        most = core.rows if max_sessions is None else as_integer(max_sessions, "max_sessions", 1)
        self._core = core
        self._make_session = make_session
        self._limit = min(most, _open_chunks(core))
        self.most_of_one = self._limit
        self._most_waiting = (
            None if max_waiting is None else as_integer(max_waiting, "max_waiting", 1)
        )
        self.clock: Callable[[], float] = time.monotonic
        self._waiting = WaitingRequests()
        self._deadlines = RequestHeap()
        self._prefilling: list[Request] = []
        self._decoding: deque[Request] = deque()
        self._unfinished: dict[int, Request] = {}  # by index
        self._submitted = 0
        self._cut_short = False  # the last step did not come to its end
        self._full = False  # a request had to release its chunks: admit none until one ends
        self._past = 0  # tokens that finished requests computed
        self._planned = 0  # tokens that unfinished requests may compute in all
        self._cancelled: deque[Request] = deque()
        self._blocked: list[tuple[Request, CapacityError]] = []  # of this step
        self._ending: FinishReason | None = None  # the finish of all requests, once it is closed
        self._stepping = _core.Place()
        self._queues = threading.Lock()  # other threads submit during a step
        self.changed = threading.Condition()  # notified of submissions and of its end

    def submit(
        self,
        prompt: TextOrIds | Session,
        max_new_tokens: Integer | None = None,
        *,
        session: Session | None = None,
        seed: Integer | None = None,
        logprobs: bool = False,
        keep_session: bool = False,
        on_token: OnToken | None = None,
        on_finish: OnFinish | None = None,
        priority: Integer = 0,
        timeout_s: float | None = None,
        salt: str | None = None,
        tenant: str = "",
        **options: Unpack[GenerationOptions],
    ) -> Request:
        """Queues a prompt; `step` computes it.

        Args:
            prompt: text, token ids, [n] or [1, n], or a session to continue.
            session: with text or ids: the session that is to hold them and go on, as
                `Session.update` does; nothing else may use it meanwhile.
            max_new_tokens: as for `Session.generate`.
            seed: likewise; for token ids by default a fresh one, see `Request.seed`.
            logprobs: likewise.
            keep_session: keep the session that is made for the prompt open, in the completion.
            on_token: called with (request, token) as each token is produced; may cancel.
            on_finish: called with (request, completion) once, when the request has ended. What it
                raises is logged.
            priority: requests with a lower number are admitted earlier; those with the same in the
                order of their submission. It changes no bit.
            timeout_s: seconds after which it ends with finish "timeout", waiting or running, and
                keeps the tokens it has; checked at each step. None: no limit.
            salt: of the session that is made for the prompt, as for `Engine.session`. A salt that
                is new to the process costs this call some 50 ms.
            tenant: whose it is: requests of one priority are admitted in turns of their tenants. It
                changes no bit.
            **options: `kvpager.GenerationOptions`: temperature, top_k, top_p, min_p, penalties,
                logit_bias, logits_processor, generation_config, eos, stop, speculate and others.

        Raises:
            InvalidArgumentError: an argument is invalid, or the session is in another request.
            QueueFullError: `max_waiting` requests wait already.
        """
        given = session is not None or isinstance(prompt, Session)
        queueing = Queueing.checked(priority, timeout_s, salt, tenant=tenant, session_given=given)
        generation = Generation.checked(self._core, max_new_tokens, options, logprobs=logprobs)
        return self.queue(
            prompt,
            generation,
            seed,
            session=session,
            keep_session=keep_session,
            on_token=on_token,
            on_finish=on_finish,
            queueing=queueing,
        )

    def chat(
        self,
        session: Session,
        messages: str | SequenceOf[Message],
        max_new_tokens: Integer | None = None,
        *,
        tools: SequenceOf[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        control_tokens: ControlTokensAs = "text",
        continue_final_message: bool = False,
        add_generation_prompt: bool = True,
        seed: Integer | None = None,
        logprobs: bool = False,
        on_token: OnToken | None = None,
        on_finish: OnFinish | None = None,
        priority: Integer = 0,
        timeout_s: float | None = None,
        tenant: str = "",
        default_new_tokens: Integer = MOST_NEW_TOKENS,
        most_tokens: Integer | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Request:
        """Queues a turn of a session's conversation; `Session.chat` together with other requests.

        Nothing else may use the session before the request is finished.

        Args:
            session: of this engine.
            messages: as for `Session.chat`.
            max_new_tokens: most tokens of the answer.
            tools: as for `Session.chat`.
            chat_template_kwargs: likewise.
            control_tokens: likewise.
            continue_final_message: likewise.
            add_generation_prompt: whether the template begins an answer; without, the model goes on
                behind the last message.
            seed: as for `submit`.
            logprobs: likewise.
            on_token: likewise.
            on_finish: likewise.
            priority: likewise.
            timeout_s: likewise.
            tenant: likewise.
            default_new_tokens: most tokens of the answer where `max_new_tokens` is None.
            most_tokens: most tokens of the prompt and the answer, which is cut to what the prompt
                leaves; None: what is beyond the model's positions is refused.
            **options: `kvpager.GenerationOptions`.

        Raises:
            InvalidArgumentError: an argument is invalid, or the session is in another request.
            ContextLengthError: the prompt has `most_tokens` or more.
            QueueFullError: `max_waiting` requests wait already.
        """
        require_own(self._core, session)
        queueing = Queueing.checked(priority, timeout_s, tenant=tenant)
        read = repeatable(options)
        turn = plan_turn(
            self._core,
            session.transcript,
            messages,
            max_new_tokens,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            control_tokens=control_tokens,
            continue_final_message=continue_final_message,
            add_generation_prompt=as_flag(add_generation_prompt, "add_generation_prompt"),
            options=read,
            seed=seed,
            logprobs=logprobs,
            default_new_tokens=as_integer(default_new_tokens, "default_new_tokens", 1),
            most_tokens=None if most_tokens is None else as_integer(most_tokens, "most_tokens", 1),
        )
        check_keeps(self._core, session.transcript, turn)
        return self.queue(
            turn,
            turn.generation,
            seed,
            session=session,
            keep_session=False,
            on_token=on_token,
            on_finish=on_finish,
            queueing=queueing,
        )

    def queue(
        self,
        prompt: TextOrIds | Session | PlannedTurn,
        generation: Generation,
        seed: Integer | None,
        *,
        session: Session | None = None,
        keep_session: bool,
        on_token: OnToken | None,
        on_finish: OnFinish | None = None,
        queueing: Queueing = _PLAIN,
        name: str = "prompt",
        among_others: bool = False,
        produced: SequenceOf[Token] = (),
    ) -> Request:
        """`submit` with checked arguments, for the server and `run`; not for users.

        Args:
            prompt: as for `submit`, or a turn that was planned.
            generation: the options and `max_new_tokens`.
            seed: as for `submit`.
            session: likewise.
            keep_session: likewise.
            on_token: likewise.
            on_finish: likewise.
            queueing: its priority, timeout and salt.
            name: of the prompt, in error messages.
            among_others: a text beyond the model's positions is no error here; the request ends
                with it.
            produced: the first tokens of its answer, where an earlier request of the same arguments
                was cut off; `on_token` is not called with them. With `logprobs` they have theirs.
        """
        core = self._core
        core.check_open()
        whole, session = _prompt_of(core, prompt, session, name)
        if seed is not None:
            draws = as_integer(seed, "seed", 0)
        elif session is not None:
            behind = whole.ids if isinstance(whole, PlannedTurn) else whole
            draws = session.transcript.seed_for(generation.sampling, behind)
        else:
            draws = fresh_seed()
        generation.sampling_with(draws)  # raises for an invalid seed
        as_flag(keep_session, "keep_session")
        callbacks: tuple[tuple[str, object, str], ...] = (
            ("on_token", on_token, "token"),
            ("on_finish", on_finish, "completion"),
        )
        for callback, value, given in callbacks:
            if value is not None and not takes(value, 2):
                raise InvalidArgumentError(
                    f"{callback} is {value!r}; expected a callable (request, {given})"
                )
        ids = whole.ids if isinstance(whole, PlannedTurn) else whole
        if ids is None:
            assert session is not None
            ids = session.tokens
        too_long = None
        try:
            core.positions.check(
                len(ids) + generation.max_new_tokens, f"{name} with max_new_tokens"
            )
        except InvalidArgumentError as error:
            if not among_others:
                raise
            too_long = error
        with self._queues:
            if self._ending is not None:
                raise InvalidArgumentError(
                    "the scheduler is closed; make another with engine.scheduler()"
                )
            other = None if session is None else session.transcript.scheduled_by
            if other is not None:
                whose = "another request of this" if other is self else "a request of another"
                raise InvalidArgumentError(
                    f"{name}: the session is in {whose} scheduler; give a fork"
                )
            waiting = self._waiting.of(queueing.tenant)
            if self._most_waiting is not None and waiting >= self._most_waiting:
                raise QueueFullError(
                    f"max_waiting is {self._most_waiting}, and {waiting} requests wait already; "
                    "submit again later"
                )
            request = Request(
                self._submitted,
                whole,
                session,
                generation,
                draws,
                queueing=queueing,
                keep_session=keep_session,
                on_token=on_token,
                on_finish=on_finish,
                cancelled=self._cancelled,
                clock=self.clock,
                produced=produced,
            )
            self._submitted += 1
            self._planned += request.planned
            self._unfinished[request.index] = request
            self._waiting.add(request)
            if request.deadline is not None:
                self._deadlines.push(request, request.deadline)
            if session is not None:
                session.transcript.scheduled_by = self
        if too_long is not None:
            self._finish(request, "error", too_long)
        with self.changed:
            self.changed.notify_all()
        return request

    @property
    def idle(self) -> bool:
        """Whether every request is finished."""
        return not self._unfinished

    @property
    def waiting(self) -> int:
        """Number of requests that wait for their admission."""
        return len(self._waiting)

    @property
    def most_running(self) -> int:
        """How many requests run at once, at most."""
        return self._limit

    @property
    def running(self) -> int:
        """Number of requests that were admitted and go on."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def work(self) -> tuple[int, int]:
        """Tokens done and tokens in all, prompts included, of everything submitted so far."""
        try:
            running = sum(request.done for request in (*self._prefilling, *self._decoding))
        except InvalidArgumentError:  # sessions that are being closed right now
            if not self._is_over():
                raise
            running = 0
        return self._past + running, self._past + self._planned

    def step(self) -> list[tuple[Request, Token]]:
        """Admits requests, runs one forward and returns the tokens it produced, in order.

        With speculation a request may have several. An error that one request causes ends that
        request with finish "error", also an Exception of the model, a proposer or `on_token`.
        Requests that end have a `completion` when this returns.

        Raises:
            InvalidArgumentError: the scheduler or the engine is closed, something that bits depend
                on was changed (torch's threads, for example), or another step runs. A later step
                goes on.
        """
        self._core.check_open()
        if self._ending is not None:
            raise InvalidArgumentError(
                "the scheduler is closed; make another with engine.scheduler()"
            )
        return self.step_if_open()

    def step_if_open(self) -> list[tuple[Request, Token]]:
        """`step`, which returns [] if the scheduler or its engine is closed."""
        try:
            with _core.Claim(self._stepping) as alone:
                if not alone:
                    raise InvalidArgumentError("step: another step of this scheduler is running")
                try:
                    return [] if self._is_over() else self._step()
                except InvalidArgumentError:  # sessions that are being closed right now
                    if self._is_over():
                        return []
                    raise
        finally:
            self._end_if_idle()

    def _step(self) -> list[tuple[Request, Token]]:
        self._core.runner.unchanged.check_settings()
        if self._cut_short:
            self._gather()
        self._cut_short = True
        made = self._advance()
        self._cut_short = False
        return made

    def _gather(self) -> None:
        """Moves every request to the queue of its state, after a step that was interrupted."""
        with self._queues:
            requests = list(self._unfinished.values())
            self._waiting = WaitingRequests()
            for request in requests:
                if request.state == "waiting":
                    self._waiting.add(request)
            for queue, state in ((self._prefilling, "prefilling"), (self._decoding, "decoding")):
                placed = [request for request in dict.fromkeys(queue) if request.state == state]
                lost = [
                    request
                    for request in requests
                    if request.state == state and request not in placed
                ]
                queue.clear()
                queue.extend([*placed, *lost])
        for request in requests:
            if request.completion is not None:
                self._settle(request)
        for request in list(self._decoding):
            try:
                request.catch_up()
            except Exception as error:  # noqa: PERF203  # only this request ends
                self._finish(request, "error", error)

    def _advance(self) -> list[tuple[Request, Token]]:
        self._finish_ended()
        self._finish_closed()
        self._admit()
        turn = list(islice(self._decoding, self._core.rows))
        self._decoding.rotate(-len(turn))
        size = self._core.facts.layout.chunk_tokens
        chosen = runnable((request.feed for request in self._prefilling), size)
        prompts = [request for request in self._prefilling if request.feed in chosen]
        self._blocked.clear()
        if (turn or prompts) and not self._forward(turn, prompts):
            self._make_room()
        if self._is_over():
            return []
        for request in [request for request in self._prefilling if not request.feed.left]:
            self._prefilling.remove(request)
            request.fed()
            self._decoding.append(request)
            turn.append(request)
        return [(request, token) for request in turn for token in self._emit(request)]

    def close(self) -> None:
        """Cancels unfinished requests and closes the sessions made for them.

        Nothing can be submitted afterwards. If a step runs, its requests end when it returns.
        """
        self.end("cancelled")

    def end(self, reason: FinishReason) -> None:
        """`close`, with another finish than "cancelled"."""
        if self._core.made_in.forked:
            return
        with self._queues:
            self._ending = self._ending or reason
        self._end_if_idle()
        with self.changed:
            self.changed.notify_all()

    @property
    def closed(self) -> bool:
        """Whether it or its engine was closed."""
        return self._is_over()

    def fail(self, error: BaseException) -> None:
        """Ends all unfinished requests with finish "error". REQUIRES: no step runs."""
        if isinstance(error, Exception):
            failure = error
        else:  # such as SystemExit, of a callback
            failure = RuntimeError(f"a step ended with {type(error).__name__}: {error}")
            failure.__cause__ = error
        for request in list(self._unfinished.values()):
            self._finish(request, "error", failure)

    def _is_over(self) -> bool:
        """Whether the scheduler or its engine is closed, perhaps by another thread."""
        if self._ending is None and self._core.turns.ended:
            with self._queues:
                self._ending = self._ending or "closed"
        return self._ending is not None

    def _end_if_idle(self) -> None:
        """Ends unfinished requests; if a step runs, that does it when it returns."""
        if self._ending is None:
            return
        with _core.Claim(self._stepping) as alone:
            for request in list(self._unfinished.values()) if alone else ():
                self._finish(request, self._ending)

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _finish_ended(self) -> None:
        """Ends cancelled and late requests, and those with all tokens before an interrupt."""
        while self._cancelled:
            self._finish(self._cancelled.popleft(), "cancelled")
        while (late := self._late()) is not None:
            self._finish(late, "timeout")
        for request in list(self._decoding):
            if request.stream.finish is not None:
                self._finish(request, request.stream.finish)

    def _finish_closed(self) -> None:
        """Ends requests whose session its owner has closed.

        Of a session that was made here, an interrupt has come behind the close: it is computed
        again.
        """
        for request in [
            request for request in self._running_requests() if request.has_closed_session
        ]:
            if self._is_over():
                return
            if request.cancelled:
                self._finish(request, "cancelled")
            elif request.suspend():
                with self._queues:
                    self._remove(request)
                    self._waiting.add(request)
            else:
                message = "the session is closed; use engine.session() or restore()"
                self._finish(request, "error", InvalidArgumentError(message))

    def _running_requests(self) -> list[Request]:
        return [*self._prefilling, *self._decoding]

    def _late(self) -> Request | None:
        """A request whose time is over."""
        with self._queues:
            request = self._deadlines.first()
        if request is None or request.deadline is None or request.deadline > self.clock():
            return None
        return request

    def _admit(self) -> None:
        """Admits requests in the order of `WaitingRequests`."""
        self._waiting.begin()
        while True:
            running = self.running
            if running and (self._full or running >= self._limit):
                return
            full = self._full_tenants()
            with self._queues:
                request = self._waiting.next(full)
            if request is None:
                return
            try:
                request.admit(self._core, self._make_session)
            except CapacityError as error:
                if running:
                    with self._queues:
                        self._waiting.pass_over(request)
                    continue
                self._finish(request, "error", error)
            except ModelChangedError:
                raise
            except Exception as error:  # only this request ends
                if self._is_over():
                    return
                self._finish(request, "error", error)
            else:
                with self._queues:
                    self._waiting.admitted(request)
                if request.state == "prefilling":
                    self._join_prompts(request)
                else:
                    self._decoding.append(request)

    def _full_tenants(self) -> set[str]:
        """Tenants that run as many requests as they may."""
        if self.most_of_one >= self._limit:
            return set()
        running = Counter(request.queueing.tenant for request in self._running_requests())
        return {tenant for tenant, count in running.items() if count >= self.most_of_one}

    def _join_prompts(self, request: Request) -> None:
        """Adds a prompt to those that share rows, as one that was served the least."""
        feed, others = request.feed, self._prefilling
        feed.served = min((other.feed.served for other in others), default=0)
        own = (
            other.feed.account
            for other in others
            if other.queueing.tenant == request.queueing.tenant
        )
        least = min((other.feed.account.served for other in others), default=0)
        feed.account = next(own, None) or Account(least)
        others.append(request)

    def _forward(
        self, decoding: list[Request], prompts: list[Request], room: int | None = None
    ) -> bool:
        """Advances these, in one forward or in smaller ones. False if none advanced."""
        try:
            advance(
                self._core,
                [request.stream for request in decoding],
                [request.feed for request in prompts],
                room=room,
            )
        except CapacityError as error:
            if len(decoding) + len(prompts) > 1:
                return self._split(decoding, prompts)
            if prompts and room is None:
                return self._forward([], prompts, self._core.facts.layout.chunk_tokens)
            self._blocked.append(((decoding or prompts)[0], error))
            return False
        except ModelChangedError:
            raise
        except Exception as error:  # one of these requests causes it
            if self._is_over():
                return True  # all requests end with the step
            if len(decoding) + len(prompts) > 1:
                return self._split(decoding, prompts)
            self._finish((decoding or prompts)[0], "error", error)
        return True

    def _split(self, decoding: list[Request], prompts: list[Request]) -> bool:
        """Advances these in two forwards, decode first; a few splits isolate a failing request."""
        if decoding and prompts:
            parts = [(decoding, []), ([], prompts)]
        elif decoding:
            half = len(decoding) // 2
            parts = [(decoding[:half], []), (decoding[half:], [])]
        else:
            half = len(prompts) // 2
            parts = [([], prompts[:half]), ([], prompts[half:])]
        done = [self._forward(*part) for part in parts]
        return any(done)

    def _make_room(self) -> None:
        """Suspends the request admitted last, because no request can advance."""
        running = sorted(self._running_requests(), key=lambda request: request.index)
        if len(running) > 1:
            for request in reversed(running):
                if request.suspend():
                    with self._queues:
                        self._remove(request)
                        self._waiting.add(request)
                    self._full = True
                    return
        request, error = self._blocked[-1]
        self._finish(request, "error", error)

    def _emit(self, request: Request) -> Iterator[Token]:
        """Samples and emits the tokens of one request that a forward has made ready."""
        while request.state == "decoding" and request.stream.live:
            transcript = request.stream.transcript
            if transcript.closed or not transcript.ready:
                return
            if request.cancelled:
                break
            try:
                token = request.sample()
                request.emit(token)
            except Exception as error:  # of sampling, or of `on_token`
                if not self._is_over():
                    self._finish(request, "error", error)
                return
            yield token
            if self._is_over():
                return
            if request.stream.live and not transcript.closed:
                transcript.advance()
        if request.state == "decoding":
            self._finish(request, request.stream.finish or "cancelled")

    def _finish(
        self, request: Request, reason: FinishReason, error: Exception | None = None
    ) -> None:
        if request.completion is None:
            with self._queues:
                self._remove(request)
            request.finish(reason, error)
        self._settle(request)

    def _settle(self, request: Request) -> None:
        """Forgets a finished request and calls its `on_finish`. May be called again."""
        self._full = False
        with self._queues:
            if request.index not in self._unfinished:
                return
            self._deadlines.discard(request)
            if request.given_session is not None:
                request.given_session.transcript.scheduled_by = None
            self._waiting.room_released()
            self._past += request.done
            self._planned -= request.planned
            del self._unfinished[request.index]
        request.notify()

    def _remove(self, request: Request) -> None:
        if self._waiting.discard(request):
            return
        for queue in (self._decoding, self._prefilling):
            if request in queue:
                queue.remove(request)
                return


def _open_chunks(core: EngineCore) -> int:
    """How many sessions' unsealed chunks the pool can hold next to a forward's own; at least 1."""
    size = core.facts.layout.chunk_tokens
    forward = -(-(size - 1 + core.rows) // size)
    return max(1, core.config.pool_blocks - forward)


def _prompt_of(
    core: EngineCore,
    prompt: TextOrIds | Session | PlannedTurn,
    session: Session | None,
    name: str,
) -> tuple[TokenIds | PlannedTurn | None, Session | None]:
    """The text of a request (None: the session's own), and its session (None: none yet).

    Raises InvalidArgumentError: `name` is no prompt, or is for another session.
    """
    whole: TokenIds | PlannedTurn | None = None
    if isinstance(prompt, Session):
        if session is not None:
            raise InvalidArgumentError(
                f"{name} is a session, and session is given too; expected one of them"
            )
        session = prompt
    elif isinstance(prompt, PlannedTurn):
        whole = prompt
    else:
        whole = core.read_ids(prompt, name)
    if session is not None:
        require_own(core, session)
        if whole is None and not session.length:
            raise InvalidArgumentError(
                f"{name}: the session is empty; give token ids, or call prefill(ids) first"
            )
    return whole, session
