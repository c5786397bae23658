"""One request's way through the engine: from its checked fields to its answers and what is kept."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from http import HTTPStatus
from typing import Any, NamedTuple

import numpy as np

from kvpager._runtime.scheduling.chat import PlannedTurn, plan_turn, renders_as_written, settled
from kvpager._runtime.scheduling.stream import GeneratedToken
from kvpager._runtime.text.conversation import ASSISTANT
from kvpager._runtime.text.tokenizer import Message, Rendering
from kvpager._support.tokens import TokenIds
from kvpager.errors import CapacityError, CorruptSnapshotError, PagerError, StorageError
from kvpager.requests.request import Request, RequestCompletion, Token
from kvpager.requests.waiting import Queueing
from kvpager.sampling import fresh_seed, seed_after
from kvpager.server import errors
from kvpager.server.conversations import (
    Conversations,
    Digests,
    Kept,
    UnderWay,
    canonical,
    digests,
    unnamed,
)
from kvpager.server.histories import History
from kvpager.server.messages import Prefix, SavePoint, prefixes
from kvpager.server.schema.common import new_id
from kvpager.server.service import Service
from kvpager.server.tracing import RequestSpan
from kvpager.session import Session
from kvpager.stores.bucket import UnreachableError

USAGE = ("prompt_tokens", "completion_tokens", "total_tokens")
CALLED = "answer"  # note with the last answer as a message, where that has calls of tools
_log = logging.getLogger(__name__)


class TokenPiece(NamedTuple):
    """The text that one token completed, which may be empty; choices count from 0.

    The token has its log-probability where the request asks for it.
    """

    choice: int
    text: str
    token: Token

    @property
    def token_id(self) -> int:
        """The token's id."""
        return self.token.id if isinstance(self.token, GeneratedToken) else self.token


class Ended(NamedTuple):
    """The end of one choice; one that could not be submitted has no completion."""

    choice: int
    completion: RequestCompletion | None


@dataclass
class _Choice:
    """One answer while it is computed.

    Attributes:
        session: its own.
        restored: tokens of the conversation it continues that were read from disk.
        apart: its session is apart from the store and other conversations, and is not kept.
        request: once it is submitted.
        completion: once it has ended.
        last_token: time of its last token.
    """

    session: Session | None = None
    restored: int = 0
    apart: bool = False
    request: Request | None = None
    completion: RequestCompletion | None = None
    last_token: float | None = None

    def close(self) -> None:
        """Closes its session. May be called twice."""
        if self.session is not None:
            self.session.close()
        self.session = None


@dataclass(kw_only=True, eq=False)
class ServedTurn(UnderWay):
    """A checked request while it runs: `begin`, then `events`, then `finish`; or `release`.

    Any thread may make it; the event loop uses it.

    Attributes:
        service: runs it.
        conversations: of the tenant.
        salt: of its chunks; None: the engine's.
        options: of the generation, as `Scheduler.submit` takes them.
        max_new_tokens: of each choice; None: the server's default.
        seed: of the first choice; None: a fresh one.
        priority: of admission.
        on_corrupt: see `Engine.restore`.
        choices: number of answers.
        logprobs: whether tokens carry log-probabilities.
        ids: the prompt as token ids; None: `messages` are the prompt.
        messages: the whole conversation as the client knows it; with `appended`, its new messages.
        history: the request's own messages, a `History` where it is known.
        appended: whether `messages` follow those of the conversation that `continues` names.
        instructions: with `appended`, this turn's system message; those of earlier turns no longer
            apply, as in OpenAI's Responses.
        rendering: arguments of the chat template.
        save_points: places in `messages` up to which the prompt is saved.
        continues: name of the conversation to continue; None: whichever fits.
        must_exist: whether an unknown name is an error.
        replaces: whether the conversation that `continues` names may be dropped.
        hint: name of a saved conversation that may share a beginning.
        keep_as: name of the conversation afterwards; None: one that the server makes.
        save: whether it is saved before the request ends.
        save_ttl: lifetime after its last use; None: the store's default.
        share: whether later requests without a name may continue it.
        headers: of the response.
        saved_tokens: tokens that `finish` saved up to the last breakpoint.
    """

    service: Service
    conversations: Conversations
    salt: str | None
    seed: int | None
    priority: int
    on_corrupt: str
    options: dict[str, Any]
    max_new_tokens: int | None
    choices: int = 1
    logprobs: bool = False
    ids: TokenIds | None = None
    messages: Sequence[dict[str, Any]] = ()
    history: Sequence[Any] = ()
    appended: bool = False
    instructions: str | None = None
    rendering: Rendering = field(default_factory=Rendering)
    save_points: Sequence[SavePoint] = ()
    continues: str | None = None
    must_exist: bool = False
    replaces: bool = False
    hint: str | None = None
    keep_as: str | None = None
    save: bool = False
    save_ttl: str | None = None
    share: bool = True
    headers: dict[str, str] = field(default_factory=dict)
    saved_tokens: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._made = time.perf_counter()
        self._loop: asyncio.AbstractEventLoop | None = None  # once it begins
        self._began = 0.0
        self._span: RequestSpan  # once it begins
        self._choices = [_Choice() for _ in range(self.choices)]
        self._seen: Digests = ()  # of the conversation with them
        self._follows = False  # `messages` is one new message behind the conversation's
        self._ready: asyncio.Queue[TokenPiece | Ended] = asyncio.Queue()
        self._running = self.choices
        self._idle = asyncio.Event()  # every choice has ended
        self._cancelled = self._stopped = False
        self._finished = False
        self._apart = False  # the choices that are submitted from now on
        self._tokens = 0  # of all choices
        self._abandoning: asyncio.Task[None] | None = None  # frees it once its thread has ended

    @property
    def begun(self) -> bool:
        """Whether `begin` was called."""
        return self._loop is not None

    @property
    def name(self) -> str:
        """Name of its conversation; empty where it has none of its own."""
        return self.keep_as or self.continues or ""

    @property
    def session(self) -> Session | None:
        """The first choice's session, while it runs."""
        return self._choices[0].session

    @property
    def completions(self) -> list[RequestCompletion]:
        """Every choice's completion. REQUIRES: `events` has ended."""
        return [one.completion for one in self._choices if one.completion is not None]

    @property
    def prompt_ids(self) -> list[int]:
        """The prompt's token ids. REQUIRES: `events` has ended."""
        session = self.session
        assert session is not None
        ids: list[int] = session.tokens[: self.completions[0].prompt_tokens].tolist()
        return ids

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the first choice's prompt; 0 before it is submitted."""
        request = self._choices[0].request
        return 0 if request is None else request.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        """Tokens of the first choice's prompt that had K/V; known with its first token."""
        request = self._choices[0].request
        return 0 if request is None else request.cached_tokens

    @property
    def response_id(self) -> str | None:
        """The id that `/v1/responses` knows it by; None: it is no such response."""
        return None

    def usage_so_far(self) -> dict[str, int]:
        """Tokens of the prompt, and those generated until now."""
        prompt = self.prompt_tokens
        return dict(zip(USAGE, (prompt, self._tokens, prompt + self._tokens), strict=True))

    def describe(self) -> dict[str, Any]:
        """Fields of the page's list of requests."""
        request = self._choices[0].request
        return {
            "id": self.name,
            "response_id": self.response_id,
            "state": "waiting" if request is None else request.state,
            "prompt_tokens": self.prompt_tokens,
            "generated": self._tokens,
            "seconds": time.perf_counter() - self._began,
        }

    def count_prompt(self) -> int:
        """Counts the prompt's tokens, instead of `begin`; for a thread."""
        self._digest()
        session, kept = self._base()
        with session:
            conversation = settled(self.service.engine.core, session.transcript)
            tokenizer = self.service.tokenizer
            assert tokenizer is not None
            turn = conversation.turn(self._whole_prompt(session, kept), tokenizer, self.rendering)
        return len(turn.ids)

    async def begin(self) -> None:
        """Queues every choice. Raises ApiError; nothing is left then."""
        if self._finished:  # its client has gone
            raise errors.stopping()
        self._check_alone()
        self._loop = asyncio.get_running_loop()
        self._began = time.perf_counter()
        tenant = self.conversations.tenant.name
        self._span = RequestSpan(
            self.service.model,
            conversation=self.name or None,
            choices=self.choices,
            max_tokens=self.max_new_tokens,
            seed=self.seed,
            priority=self.priority,
            tenant=tenant,
        )
        self.conversations.begin(self.keep_as, self)
        try:
            await self.service.workers.run(
                self._submit_all, tenant, on_dropped=lambda: self._drop(0)
            )
        except BaseException as error:
            known = errors.of(error) if isinstance(error, Exception) else None
            if known is not None:
                self._span.failed(known)
                if known.code == errors.TIMEOUT:  # nobody waits for the thread, which continues
                    self._abandoning = self.service.background(self._abandon())
            await self.release()
            if known is None:
                raise
            raise known from error

    async def events(self) -> AsyncIterator[TokenPiece | Ended]:
        """Pieces and ends in the order of their time. Raises ApiError where a choice failed."""
        saw_token: set[int] = set()
        while self._running or not self._ready.empty():
            one = await self._ready.get()
            if isinstance(one, TokenPiece):
                saw_token.add(one.choice)
            elif one.choice not in saw_token and await self._retries(one):
                continue
            else:
                self._check_end(one)
            yield one

    async def finish(
        self, answer: dict[str, Any] | None = None, notes: dict[str, Any] | None = None
    ) -> None:
        """Keeps the first choice's conversation, and saves it where that was planned.

        Args:
            answer: its message as the client gets it, for a conversation of messages.
            notes: JSON values to save with it.

        Raises:
            ApiError: it cannot be saved; it is kept nevertheless.
        """
        try:
            await asyncio.to_thread(self._keep, answer, notes or {})
        except Exception as error:
            self._span.failed(known := errors.of(error))
            raise known from error
        finally:
            self._end()
        self._log_end()

    async def release(self) -> None:
        """Cancels and frees everything, also if the calling task is cancelled. May be repeated."""
        if not self._finished and self._abandoning is None:
            await asyncio.shield(self.service.background(self._abandon()))

    def stop(self) -> None:
        """Ends it as if its answer were complete; before the first token, cancels it."""
        self._stopped = True
        self._cancel()

    async def tokens_to_save(self) -> int:
        """Tokens of the prompt up to its last breakpoint, which `finish` will save."""
        if self.conversations.store is None:
            return 0
        found = await asyncio.to_thread(lambda: self._prefixes)
        return max((len(one.ids) for one in found), default=0)

    async def _abandon(self) -> None:
        self._cancel()
        if self.begun and self._running:
            await self._idle.wait()  # their sessions are the engine's until then
        if not self._finished:
            if self.service.draining and self.save:
                await asyncio.to_thread(self._keep_unfinished)
            self._end()

    def _end(self) -> None:
        """Closes the sessions that are left, and forgets the request."""
        self._finished = True
        for one in self._choices:
            one.close()
        self.conversations.end(self.keep_as, self)
        if self.begun:
            self._span.end()

    def _cancel(self) -> None:
        self._cancelled = True
        for request in [one.request for one in self._choices]:
            if request is not None and request.completion is None:
                request.cancel()

    def _drop(self, first: int) -> None:
        """Ends the choices from this one on, which could not be submitted."""
        for choice in range(first, self.choices):
            self._arrive(Ended(choice, None))

    def _arrive(self, one: TokenPiece | Ended) -> None:  # in the thread that steps, mostly
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._arrived, one, time.perf_counter())

    def _arrived(self, one: TokenPiece | Ended, at: float) -> None:
        choice = self._choices[one.choice]
        if isinstance(one, TokenPiece):
            last = choice.last_token
            since = self._began if last is None else last
            self.service.metrics.token(at - since, is_first=last is None)
            choice.last_token = at
            self._tokens += 1
        else:
            choice.completion = one.completion
            self._running -= 1
            if not self._running:
                self._idle.set()
        self._ready.put_nowait(one)

    def _submit_all(self) -> None:
        self._digest()
        seed = fresh_seed() if self.seed is None else self.seed
        for choice in range(self.choices):
            if self._cancelled:
                self._drop(choice)
                return
            try:
                with self._span.part("prepare"):
                    self._submit(choice, seed)
            except BaseException:
                self._drop(choice)
                raise
            seed = seed_after(seed)

    def _digest(self) -> None:
        if self.messages and not self.appended:
            history = self.history if isinstance(self.history, History) else History()
            self._seen = history.digests(self.messages, self.salt)

    def _submit(self, choice: int, seed: int) -> None:
        session, kept = self._base()
        own = self._choices[choice]
        own.apart = self._apart
        own.session, own.restored = session, 0 if kept is None else kept.restored_tokens
        scheduler, settings = self.service.scheduler, self.service.settings
        left = None
        if settings.request_timeout:
            left = max(1e-3, settings.request_timeout - (time.perf_counter() - self._made))
        tenant = self.conversations.tenant.name
        callbacks: dict[str, Any] = {
            "on_token": lambda request, token: self._arrive(
                TokenPiece(choice, request.piece, token)
            ),
            "on_finish": lambda _, completion: self._arrive(Ended(choice, completion)),
        }
        if self.ids is not None:
            request = scheduler.submit(
                self.ids,
                self.max_new_tokens,
                session=session,
                seed=seed,
                logprobs=self.logprobs,
                priority=self.priority,
                tenant=tenant,
                timeout_s=left,
                **callbacks,
                **self.options,
            )
        else:
            planned = self._plan(session, kept, seed)
            request = scheduler.queue(
                planned,
                planned.generation,
                seed,
                session=session,
                keep_session=False,
                queueing=Queueing.checked(self.priority, left, tenant=tenant),
                produced=self._produced(),
                **callbacks,
            )
        own.request = request
        if self._cancelled:
            self._cancel()

    def _plan(self, session: Session, kept: Kept | None, seed: int) -> PlannedTurn:
        """The prompt of messages behind a session, and the options of its answer."""
        rendering = self.rendering
        return plan_turn(
            session.core,
            session.transcript,
            self._whole_prompt(session, kept),
            self.max_new_tokens,
            tools=None,
            chat_template_kwargs=rendering.variables,
            options=self.options,
            seed=seed,
            logprobs=self.logprobs,
            default_new_tokens=self.service.settings.max_tokens,
            control_tokens=rendering.control_tokens,
            continue_final_message=rendering.continues,
            add_generation_prompt=rendering.generation_prompt,
            most_tokens=self.service.most_tokens,
        )

    def _produced(self) -> list[Token]:
        """The answer's first tokens, where they are known already."""
        return []

    def _base(self) -> tuple[Session, Kept | None]:
        """A session for one choice: a fork of the conversation to continue, or a new one."""
        source, found = self.conversations, None
        if self._apart:
            return source.apart(), None
        if self.replaces and not self.must_exist:
            return source.fresh(self.salt), None
        if self.continues is None:
            found = source.fork_of_beginning(self._seen, self.salt)
            names = [one.name for one in reversed(self._prefixes)] if found is None else []
            for name in [*names, *([] if self.hint is None else [self.hint])]:
                found = found or source.fork_if_usable(name, self.salt)
        elif self.must_exist or self._is_there(self.continues):
            try:
                session, kept = source.fork(self.continues, self.salt, self.on_corrupt)
            except errors.ApiError as error:
                if self.must_exist and error.status == HTTPStatus.NOT_FOUND:
                    raise errors.bad_request(
                        f"Previous response with id '{self.continues}' not found.",
                        "previous_response_id",
                        "previous_response_not_found",
                    ) from error
                raise
            except StorageError as error:
                if not self._may_go_apart() or self._is_one_message:
                    raise
                self._go_apart(error)
                return source.apart(), None
            try:
                self._go_on(self.continues, session, kept)
            except BaseException:
                session.close()
                raise
            return session, kept
        return found or (source.fresh(self.salt), None)

    def _go_on(self, name: str, session: Session, kept: Kept) -> None:
        """Finds how the prompt follows the session that it names.

        It begins with the session's messages, asks for the last answer again, or is one new user
        message. Answers may have the client's own form: without reasoning, or cut short.

        Raises:
            ApiError: 409, the session's text would be dropped.
        """
        if self.must_exist:
            return
        if self.ids is not None:
            self._check_ids(name, session, self.ids)
            return
        held = [dict(one) for one in settled(session.core, session.transcript).messages]
        if not held:
            if session.length:
                text = f"its {session.length} tokens are no conversation of messages"
                raise errors.session_differs(name, "messages", text)
            return
        given = self.messages
        pairs = enumerate(zip(given, held))
        place = next((i for i, pair in pairs if not _is_same(*pair)), None)
        if place is None and len(given) >= len(held) - (held[-1]["role"] == ASSISTANT):
            return
        if self._is_one_message:
            self._follows = True
            self._seen = digests(given, self.salt, kept.seen or digests(held, self.salt))
            return
        text = f"messages are the first {len(given)} of its {len(held)}"
        if place is not None:
            role = given[place]["role"]
            text = f"messages[{place}] ({role}) differs from that of its {len(held)} messages"
        raise errors.session_differs(name, "messages", text)

    @property
    def _is_one_message(self) -> bool:
        """Whether the request may have a session's next message alone."""
        return [one["role"] for one in self.messages] == ["user"]

    def _check_ids(self, name: str, session: Session, ids: TokenIds) -> None:
        """Raises ApiError 409 unless a prompt begins with the text, or is its last prompt."""
        held, again = session.tokens, session.transcript.generation_start
        if np.array_equal(ids[: len(held)], held) or np.array_equal(ids, held[:again]):
            return
        tokenizer: Any = self.service.engine.tokenizer
        given, known = (tokenizer.decode(one) for one in (ids, held))
        if not given.startswith(known):  # tokens may divide the same text otherwise
            same = next((i for i, pair in enumerate(zip(given, known)) if pair[0] != pair[1]), None)
            text = "prompt is a part of its text"
            if same is not None:
                text = f"prompt differs from its text at character {same}"
            raise errors.session_differs(name, "prompt", text)

    def _may_go_apart(self) -> bool:
        """Whether the request has the whole prompt, and its client needs the answer alone."""
        return not self.must_exist and not self._follows

    def _go_apart(self, error: Exception) -> None:
        _log.warning("a prompt is computed, since its K/V cannot be read: %s", error)
        self._apart = True

    def _is_there(self, name: str) -> bool:
        """Whether the conversation to continue is known.

        Where that cannot be looked up, a request with all of its messages is computed, and one
        that may have the next message alone is an error.
        """
        try:
            return self.conversations.has(name)
        except UnreachableError as error:
            if self._is_one_message:
                raise
            _log.warning("conversation %s cannot be looked up: %s", name, error)
            return False

    @cached_property
    def _prefixes(self) -> list[Prefix]:
        """The prompt's prefixes up to its breakpoints."""
        tokenizer = self.service.tokenizer
        if not self.save_points or tokenizer is None:
            return []
        return prefixes(tokenizer, self.messages, self.rendering, self.save_points, self.salt)

    def _whole_prompt(self, session: Session, kept: Kept | None) -> list[Message]:
        """The whole conversation, with the session's own messages where it begins with them.

        The model then reads its own words and tokens, not a client's parsed form of them.
        """
        if self.appended:
            system = {"role": "system", "content": self.instructions}
            before = [system] if self.instructions else []
            if kept is None:
                return [*before, *self.messages]
            given = kept.notes.get("response", {}).get("instructions")  # for that turn only
            return self._behind(session, kept, before, self.messages, left_out=bool(given))
        if kept is not None and self._follows:
            return self._behind(session, kept, [], self.messages)
        if kept is not None and kept.seen:
            count = len(kept.seen)
            if kept.seen == self._seen[:count] and count < len(self.messages):
                return self._behind(session, kept, [], self.messages[count:])
        return list(self.messages)

    def _check_alone(self) -> None:
        """Raises ApiError 409 if its question is for a conversation that is being answered."""
        if self.continues is None or not self._is_one_message:
            return
        others = self.conversations.under_way(self.continues)
        if any(isinstance(one, ServedTurn) for one in others):
            raise errors.ApiError(
                409,
                f"session {self.continues!r} is being answered; expected its next message after "
                "that, since one of the two answers would be lost",
                kind="invalid_request_error",
                param="session_id",
                code="busy",
            )

    def _behind(
        self,
        session: Session,
        kept: Kept,
        before: list[dict[str, Any]],
        new: Sequence[dict[str, Any]],
        *,
        left_out: bool = False,
    ) -> list[Message]:
        """The session's messages between others; left_out: without the first one.

        An answer with calls of tools stays the model's text if the template renders that text
        unchanged; otherwise it becomes calls.
        """
        # The conversation's own objects: what the template gets of them is known.
        held = settled(session.core, session.transcript).messages[left_out:]
        called = kept.notes.get(CALLED)
        written: list[Message] = [*before, *held, *new]
        if called is None or renders_as_written(
            session.core, session.transcript, written, self.rendering
        ):
            return written
        return [*before, *held[:-1], called, *new]

    async def _retries(self, ended: Ended) -> bool:
        """Queues a choice that had no token yet again, if that can help.

        If there was no room, an idle conversation is evicted. If the store's K/V cannot be read,
        the whole prompt is computed by a session that reuses nothing; it is not kept.
        """
        completion = ended.completion
        if completion is None:
            return False
        own = self._choices[ended.choice]
        if isinstance(completion.error, StorageError) and self._may_go_apart() and not own.apart:
            self._go_apart(completion.error)
        elif not isinstance(completion.error, CapacityError) or not self.service.release_idle():
            return False
        own.close()
        self._running += 1
        self._idle.clear()
        try:
            await asyncio.to_thread(self._submit, ended.choice, completion.seed)
        except Exception as error:
            self._arrive(Ended(ended.choice, None))
            raise errors.of(error) from error
        return True

    def _check_end(self, ended: Ended) -> None:
        """Counts a choice that has ended. Raises ApiError if it failed."""
        completion, choice = ended.completion, ended.choice
        assert completion is not None
        own = self._choices[choice]
        session, restored, recomputed = own.session, own.restored, 0
        if session is not None and not session.closed:
            restored = max(restored, session.restored_tokens)
            recomputed = session.recomputed_tokens
        consumed = min(restored, completion.cached_tokens)
        self.service.metrics.finished(completion, consumed, recomputed)
        self._span.choice(choice, completion, consumed, recomputed)
        if isinstance(completion.error, CorruptSnapshotError):
            self.service.metrics.damaged()
        kept = choice == 0 and (self.share or self.keep_as is not None or bool(self.messages))
        if not kept:
            own.close()
        failure: errors.ApiError | None = None
        if completion.finish_reason == "error":
            assert completion.error is not None
            grammar = self.options.get("grammar")
            refused = grammar is not None and grammar.refused(completion.error)
            failure = errors.of(completion.error, accepted=not refused)
        elif completion.finish_reason == "timeout":
            failure = errors.timed_out()
        elif completion.finish_reason == "closed" or (
            completion.finish_reason == "cancelled" and not (self._stopped and self._tokens)
        ):
            failure = errors.stopping()
        if failure is not None:
            self._span.failed(failure)
            raise failure from completion.error

    def _keep(self, answer: dict[str, Any] | None, notes: dict[str, Any]) -> None:
        session, self._choices[0].session = self.session, None
        if session is None:  # nothing is kept
            return
        if self._choices[0].apart:
            session.close()
            return
        try:
            self._save_prefixes(session)
        except UnreachableError as error:
            _log.warning("the beginning of a prompt cannot be saved: %s", error)
        except BaseException:
            session.close()
            raise
        if not self.share and self.keep_as is None:
            session.close()
            return
        seen = self._seen
        if seen and answer is not None:
            if self.rendering.continues:
                begun, seen = self.messages[-1], seen[:-1]
                answer = {**answer, "content": begun["content"] + answer["content"]}
            seen = digests([answer], self.salt, seen)
        if answer is not None and answer.get("tool_calls"):
            notes = {**notes, CALLED: answer}
        kept = Kept(session, seen, self.salt, notes)
        name, saves = self.keep_as, self.save
        if name is None:
            name = unnamed(seen[-1]) if seen else new_id("conversation-")
            saves = bool(seen) and self.conversations.shared
        with self._span.part("save") if saves else nullcontext():
            try:
                self.conversations.keep(name, kept, save=saves, ttl=self.save_ttl, turn=self)
            except (OSError, PagerError) as error:
                if not self._goes_on_unsaved(error):
                    raise
                name = "a conversation without a name" if self.keep_as is None else self.keep_as
                _log.warning("%s cannot be saved: %s", name, error)

    def _goes_on_unsaved(self, error: Exception) -> bool:
        """Whether the client gets its answer though the conversation is in memory alone."""
        return self.keep_as is None or isinstance(error, UnreachableError)

    def _save_prefixes(self, session: Session) -> None:
        """Saves the prompt's prefixes from a session that holds all of it."""
        store = self.conversations.store
        found = self._prefixes if store is not None else []
        if store is None or not found:
            return
        longest = max((one.ids for one in found), key=len)
        if not np.array_equal(longest, session.tokens[: len(longest)]):
            return  # the conversation kept other tokens for the same text
        for one in found:
            if not self.conversations.has(one.name):
                session.save(one.name, store=store, upto=len(one.ids))
            store.set_ttl(one.name, one.ttl)
        self.saved_tokens = len(longest)

    def _keep_unfinished(self) -> None:
        """Saves what was generated before the server ends the request."""
        session = self.session
        if session is None or session.closed or not session.length:
            return
        self._seen = ()  # the client does not know where its answer ends
        try:
            self._keep(None, {})
        except Exception as error:
            _log.warning("an unfinished conversation could not be saved: %s", error)

    def _log_end(self) -> None:
        """Logs a line about the request, with its texts only if the settings ask for them."""
        done = self.completions
        _log.info(
            "%s of %s: %d prompt tokens (%d cached), %d generated, %.3f s to the first, %.3f s",
            self.name or "a request",
            self.conversations.tenant.name,
            done[0].prompt_tokens,
            done[0].cached_tokens,
            self._tokens,
            done[0].first_token_s or 0.0,
            time.perf_counter() - self._began,
        )
        if self.service.settings.log_prompts:
            given = list(self.messages) if self.ids is None else self.ids.tolist()
            _log.info("prompt %r, answers %r", given, [one.text for one in done])


def _is_same(given: Mapping[str, Any], held: Mapping[str, Any]) -> bool:
    """Whether a client's message is that of its session; of an answer the role decides."""
    if given["role"] != held["role"] or given["role"] == ASSISTANT:
        return bool(given["role"] == held["role"])
    return canonical(given) == canonical(held)


async def merged(
    turns: Sequence[ServedTurn], at_once: int
) -> AsyncIterator[tuple[int, TokenPiece | Ended]]:
    """The events of several turns, each with its turn's index; `at_once` of them run at a time.

    Raises ApiError where a choice failed.
    """
    ready: asyncio.Queue[tuple[int, TokenPiece | Ended] | BaseException | None] = asyncio.Queue()
    places = asyncio.Semaphore(at_once)

    async def read(index: int, turn: ServedTurn) -> None:
        try:
            async with places:
                if not turn.begun:
                    await turn.begin()
                async for one in turn.events():
                    ready.put_nowait((index, one))
        except errors.ApiError as error:
            ready.put_nowait(error)
        else:
            ready.put_nowait(None)

    tasks = [asyncio.ensure_future(read(index, one)) for index, one in enumerate(turns)]
    left = len(tasks)
    try:
        while left:
            one = await ready.get()
            if isinstance(one, BaseException):
                raise one
            if one is None:
                left -= 1
            else:
                yield one
    finally:
        for task in tasks:
            task.cancel()
