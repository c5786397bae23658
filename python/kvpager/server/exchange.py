"""One request's way through the engine: from a conversation to its answers and what is kept."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import nullcontext
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from kvpager.errors import CapacityError, CorruptSnapshotError
from kvpager.requests.completion import RequestCompletion
from kvpager.requests.request import Request
from kvpager.sampling import fresh_seed, seed_after
from kvpager.scheduling.chat import renders_as_written, settled
from kvpager.server import errors
from kvpager.server.conversations import Digests, Kept, digests
from kvpager.server.plan import Plan
from kvpager.server.production import Ended, OnFinish, OnToken, Piece, Production
from kvpager.server.tracing import RequestSpan
from kvpager.session import Session

if TYPE_CHECKING:
    from kvpager.server.service import Service

_CALLED = "answer"  # note of a conversation whose last answer has calls: as messages have them
_log = logging.getLogger(__name__)


USAGE = ("prompt_tokens", "completion_tokens", "total_tokens")


class Exchange:
    """Runs a plan. Use: `begin`, then iterate over `events`, then `finish`; or `abandon`."""

    def __init__(self, service: Service, plan: Plan) -> None:
        self._service = service
        self.plan = plan
        self._sessions: list[Session | None] = [None] * plan.choices
        self._production = Production(plan.choices, self._observe)
        self._tokens = 0  # of all choices
        self._last: dict[int, float] = {}  # when each choice's last token came
        self._restored = [0] * plan.choices  # tokens of a conversation that was read from disk
        self._seen: Digests = ()  # computed when it begins
        self._saw_token = [False] * plan.choices
        self.begun = False  # whether `begin` was called
        self._finished = False
        self._left: asyncio.Task[None] | None = None  # frees it once its thread has ended
        self._made = time.perf_counter()
        self.saved_tokens = 0  # up to the last breakpoint
        self._span = RequestSpan(
            service.model,
            conversation=self.name or None,
            choices=plan.choices,
            max_tokens=plan.max_new_tokens,
            seed=plan.seed,
            priority=plan.priority,
            tenant=plan.conversations.tenant.name,
        )

    def count_prompt(self) -> int:
        """Tokens of the prompt that `begin` would queue; for a thread, and instead of it."""
        session, kept = self._base()
        try:
            conversation = settled(self._service.engine.core, session.transcript)
            tokenizer = self._service.tokenizer
            assert tokenizer is not None
            messages = self._messages(session, kept)
            turn = conversation.turn(messages, tokenizer, self.plan.prompt.rendering)
        finally:
            session.close()
            self._span.end()
        return len(turn.ids)

    async def begin(self) -> None:
        """Queues every choice. Raises ApiError; nothing is left then."""
        if self._finished:  # its client has gone
            raise errors.stopping()
        self.begun = True
        self._began = time.perf_counter()
        self._service.begun(self)
        try:
            await self._service.workers.run(
                self._submit_all,
                self.plan.conversations.tenant.name,
                on_dropped=lambda: self._production.drop(*range(self.plan.choices)),
            )
        except BaseException as error:
            if isinstance(error, Exception):
                self._span.failed(known := errors.of(error))
                if known.code == errors.TIMEOUT:  # a thread goes on, which nobody waits for
                    self._left = self._service.background(self.abandon())
                await self.release()
                raise known from error
            await self.release()
            raise

    async def events(self) -> AsyncIterator[Piece | Ended]:
        """What comes, in the order in which it comes. Raises ApiError where a choice failed."""
        async for event in self._production.events():
            if isinstance(event, Piece):
                self._saw_token[event.choice] = True
            elif await self._retries(event):
                continue
            else:
                if event.completion is not None:
                    self._count(event.choice, event.completion)
                    self._let_go(event.choice)
                try:
                    self._raise_failure(event.completion)
                except errors.ApiError as error:
                    self._span.failed(error)
                    raise
            yield event

    async def run(self) -> list[RequestCompletion]:
        """Every choice's completion. Raises ApiError where one failed."""
        async for _ in self.events():
            pass
        return self.completions

    @property
    def completions(self) -> list[RequestCompletion]:
        """Every choice's completion. REQUIRES: `events` has ended."""
        return list(self._production.completions())

    @property
    def prompt_ids(self) -> list[int]:
        """The prompt's token ids. REQUIRES: `events` has ended."""
        session = self._sessions[0]
        assert session is not None
        count = self.completions[0].prompt_tokens
        ids: list[int] = session.tokens[:count].tolist()
        return ids

    async def finish(
        self, answer: dict[str, Any] | None = None, notes: dict[str, Any] | None = None
    ) -> None:
        """Keeps the first choice's conversation, and saves it where that was planned.

        Args:
            answer: its message as the client gets it, for a conversation of messages.
            notes: JSON values to be saved with it.

        Raises:
            ApiError: it cannot be saved; it is kept nevertheless.
        """
        try:
            await asyncio.to_thread(self._keep, answer, notes or {})
        except Exception as error:
            self._span.failed(known := errors.of(error))
            raise known from error
        finally:
            self._finished = True
            self._close_all()
            self._ended()
        self._log_end()

    async def abandon(self) -> None:
        """Cancels what runs and frees everything. May be called at any time, also twice."""
        self._production.cancel()
        if self.begun:
            await self._production.ended()
        if not self._finished:
            self._finished = True
            if self._service.draining and self.plan.save:
                await asyncio.to_thread(self._keep_unfinished)
            self._close_all()
            self._ended()

    @property
    def name(self) -> str:
        """Of its conversation; empty where it has none of its own."""
        return self.plan.keep_as or self.plan.continues or ""

    @property
    def session(self) -> Session | None:
        """The first choice's, while it runs."""
        return self._sessions[0]

    def describe(self) -> dict[str, Any]:
        """What the page shows of it."""
        return {
            "id": self.name,
            "state": self._production.state,
            "prompt_tokens": self._production.prompt_tokens,
            "generated": self._tokens,
            "seconds": time.perf_counter() - self._began,
        }

    @property
    def prompt_tokens(self) -> int:
        """Of the first choice."""
        return self._production.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        """Tokens of the first choice's prompt that had K/V; known with its first token."""
        return self._production.cached_tokens

    async def tokens_to_save(self) -> int:
        """Tokens of the prompt up to its last breakpoint, which `finish` will save."""
        plan = self.plan
        marks, source, tokenizer = plan.prompt.marks, plan.conversations, self._service.tokenizer
        if not marks.places or source.store is None or tokenizer is None:
            return 0
        return await asyncio.to_thread(marks.longest, tokenizer, plan)

    def usage_so_far(self) -> dict[str, int]:
        """Tokens of the prompt, and those generated until now."""
        prompt = self._production.prompt_tokens
        return dict(zip(USAGE, (prompt, self._tokens, prompt + self._tokens), strict=True))

    async def release(self) -> None:
        """`abandon`, which goes on even if the task that asks for it is cancelled."""
        if not self._finished and self._left is None:
            await asyncio.shield(self._service.background(self.abandon()))

    def failed(self, error: errors.ApiError) -> None:
        """Notes an error that the client is told in a stream, whose status is 200 by then."""
        self._service.metrics.error(error.status)

    def _ended(self) -> None:
        self._service.ended(self)
        self._span.end()

    def _observe(self, choice: int, at: float) -> None:
        metrics, last = self._service.metrics, self._last.get(choice)
        recent = self._service.recent
        if last is None:
            metrics.first_token(at - self._began)
            recent.note("first", at - self._began)
        else:
            metrics.token(at - last)
            recent.note("between", at - last)
        recent.note("token", 1)
        self._last[choice] = at
        self._tokens += 1

    def _count(self, choice: int, completion: RequestCompletion) -> None:
        """Counts a choice that has ended."""
        session, restored, recomputed = self._sessions[choice], self._restored[choice], 0
        if session is not None and not session.closed:
            restored = max(restored, session.restored_tokens)
            recomputed = session.recomputed_tokens
        consumed = min(restored, completion.cached_tokens)
        self._service.recent.note("prompt", completion.computed_tokens)
        self._service.metrics.finished(completion, consumed, recomputed)
        self._span.choice(choice, completion, consumed, recomputed)
        if isinstance(completion.error, CorruptSnapshotError):
            self._service.metrics.damaged()

    def _let_go(self, choice: int) -> None:
        """Closes the session of a choice that has ended, of which nothing is kept.

        A session at rest holds a block of the pool, and a request may have hundreds of them.
        """
        plan, session = self.plan, self._sessions[choice]
        kept = plan.share or plan.keep_as is not None or bool(plan.prompt.messages)
        if session is not None and not (kept and choice == 0):
            session.close()
            self._sessions[choice] = None

    def _seconds_left(self) -> float | None:
        most = self._service.settings.request_timeout
        return max(1e-3, most - (time.perf_counter() - self._made)) if most else None

    def _submit_all(self) -> None:
        prompt = self.plan.prompt
        if prompt.messages and not prompt.appended:
            self._seen = digests(prompt.messages, self.plan.salt)
        seed = fresh_seed() if self.plan.seed is None else self.plan.seed
        for choice in range(self.plan.choices):
            if self._production.cancelled:  # meanwhile
                self._production.drop(*range(choice, self.plan.choices))
                return
            try:
                with self._span.part("prepare"):
                    self._submit(choice, seed)
            except BaseException:
                self._production.drop(*range(choice, self.plan.choices))
                raise
            seed = seed_after(seed)

    def _submit(self, choice: int, seed: int) -> None:
        plan, prompt = self.plan, self.plan.prompt
        session, kept = self._base()
        self._sessions[choice] = session
        self._restored[choice] = 0 if kept is None else kept.restored_tokens
        common: dict[str, Any] = {
            "seed": seed,
            "logprobs": plan.logprobs,
            "priority": plan.priority,
            "tenant": plan.conversations.tenant.name,
            "timeout_s": self._seconds_left(),
            **plan.options,
        }
        scheduler = self._service.scheduler

        def submit(on_token: OnToken, on_finish: OnFinish) -> Request:
            callbacks: dict[str, Any] = {"on_token": on_token, "on_finish": on_finish}
            if prompt.ids is not None:
                return scheduler.submit(
                    prompt.ids, plan.max_new_tokens, session=session, **callbacks, **common
                )
            return scheduler.chat(
                session,
                self._messages(session, kept),
                plan.max_new_tokens,
                default_new_tokens=self._service.settings.max_tokens,
                chat_template_kwargs=prompt.rendering.variables,
                control_tokens=prompt.rendering.control_tokens,
                continue_final_message=prompt.rendering.continues,
                add_generation_prompt=prompt.rendering.generation_prompt,
                most_tokens=self._service.most_tokens,
                **callbacks,
                **common,
            )

        self._production.submit(choice, submit)

    def _base(self) -> tuple[Session, Kept | None]:
        """A session for one choice: a fork of what goes on, or a new one."""
        plan = self.plan
        source = plan.conversations
        if plan.continues is not None and (plan.must_exist or source.has(plan.continues)):
            try:
                return source.fork(plan.continues, plan.salt, plan.on_corrupt)
            except errors.ApiError as error:
                if plan.must_exist and error.status == HTTPStatus.NOT_FOUND:
                    raise _no_previous(plan.continues) from error
                raise
        if plan.continues is None:
            found = source.fork_of_beginning(self._seen, plan.salt)
            if found is None:
                found = plan.prompt.marks.fork(source, self._service.tokenizer, plan)
            if found is None and plan.hint is not None:
                found = source.fork_if_usable(plan.hint, plan.salt)
            if found is not None:
                return found
        return source.fresh(plan.salt), None

    def _messages(self, session: Session, kept: Kept | None) -> list[dict[str, Any]]:
        """The whole conversation, its beginning as the session has it where that is the same.

        So that what the model wrote goes back to it in its own words and tokens, and not as a
        client has taken it apart.
        """
        prompt = self.plan.prompt
        if prompt.appended:
            first = [{"role": "system", "content": prompt.instructions}]
            before = first if prompt.instructions else []
            if kept is None:
                return [*before, *prompt.messages]
            given = kept.notes.get("response", {}).get("instructions")  # of that turn alone
            return self._behind(session, kept, before, prompt.messages, left_out=bool(given))
        if kept is not None and kept.seen:
            count = len(kept.seen)
            if kept.seen == self._seen[:count] and count < len(prompt.messages):
                return self._behind(session, kept, [], prompt.messages[count:])
        return list(prompt.messages)

    def _behind(
        self,
        session: Session,
        kept: Kept,
        before: list[dict[str, Any]],
        new: Sequence[dict[str, Any]],
        *,
        left_out: bool = False,
    ) -> list[dict[str, Any]]:
        """The session's messages between others; left_out: without the first one.

        An answer with calls of tools is as the model wrote it where the template makes that of its
        text, and else as calls.
        """
        held = session.messages[left_out:]
        called = kept.notes.get(_CALLED)
        written = [*before, *held, *new]
        if called is None or renders_as_written(
            session.core, session.transcript, written, self.plan.prompt.rendering
        ):
            return written
        return [*before, *held[:-1], called, *new]

    async def _retries(self, event: Ended) -> bool:
        """Whether a choice without room is queued again, after idle conversations have gone."""
        completion = event.completion
        failed = completion is not None and isinstance(completion.error, CapacityError)
        if not failed or self._saw_token[event.choice]:
            return False
        return False if not self._service.release_idle() else await self._queue_again(event)

    async def _queue_again(self, event: Ended) -> bool:
        session = self._sessions[event.choice]
        if session is not None:
            session.close()
        assert event.completion is not None
        seed = event.completion.seed
        try:
            self._production.reopen()
            await asyncio.to_thread(self._submit, event.choice, seed)
        except Exception as error:
            self._production.drop(event.choice)
            raise errors.of(error) from error
        return True

    def _raise_failure(self, completion: RequestCompletion | None) -> None:
        assert completion is not None
        reason = completion.finish_reason
        if reason == "error":
            assert completion.error is not None
            raise errors.of_accepted(completion.error) from completion.error
        if reason == "timeout":
            raise errors.timed_out()
        if reason in ("closed", "cancelled"):
            raise errors.stopping()

    def _keep(self, answer: dict[str, Any] | None, notes: dict[str, Any]) -> None:
        plan = self.plan
        session, self._sessions[0] = self._sessions[0], None
        if session is None:  # nothing of it is kept
            return
        marks, tokenizer = plan.prompt.marks, self._service.tokenizer
        try:
            self.saved_tokens = marks.save(plan.conversations, tokenizer, plan, session)
        except BaseException:
            session.close()
            raise
        if not plan.share and plan.keep_as is None:
            session.close()
            return
        seen = self._seen
        if seen and answer is not None:
            messages = list(plan.prompt.messages)
            if plan.prompt.rendering.continues:
                begun = messages.pop()
                answer = {**answer, "content": begun["content"] + answer["content"]}
            seen = digests([*messages, answer], plan.salt)
        if answer is not None and answer.get("tool_calls"):
            notes = {**notes, _CALLED: answer}
        name = plan.keep_as or self._service.own_name()
        kept = Kept(session, seen, plan.salt, notes)
        with self._span.part("save") if plan.save else nullcontext():
            plan.conversations.keep(name, kept, save=plan.save, ttl=plan.save_ttl)

    def _log_end(self) -> None:
        """A line about the request; its texts only where the settings say so."""
        done = self.completions
        _log.info(
            "%s of %s: %d prompt tokens (%d cached), %d generated, %.3f s to the first, %.3f s",
            self.name or "a request",
            self.plan.conversations.tenant.name,
            done[0].prompt_tokens,
            done[0].cached_tokens,
            self._tokens,
            done[0].first_token_s or 0.0,
            time.perf_counter() - self._began,
        )
        if self._service.settings.log_prompts:
            prompt = self.plan.prompt
            given = list(prompt.messages) if prompt.ids is None else prompt.ids.tolist()
            _log.info("prompt %r, answers %r", given, [one.text for one in done])

    def _keep_unfinished(self) -> None:
        """Saves what a request has come to when the server ends it."""
        session = self._sessions[0]
        if session is None or session.closed or not session.length:
            return
        self._seen = ()  # the client does not know where its answer ends
        try:
            self._keep(None, {})
        except Exception as error:
            _log.warning("an unfinished conversation could not be saved: %s", error)

    def _close_all(self) -> None:
        for session in self._sessions:
            if session is not None:
                session.close()
        self._sessions = [None] * len(self._sessions)


def _no_previous(name: str) -> errors.ApiError:
    param, code = "previous_response_id", "previous_response_not_found"
    return errors.not_found("response", name, param, code)


async def beside(
    exchanges: Sequence[Exchange], at_once: int
) -> AsyncIterator[tuple[int, Piece | Ended]]:
    """What comes of several exchanges, each with its place among them.

    at_once: how many run at a time; those that have not begun do so when their turn comes.

    Raises ApiError where a choice failed.
    """
    ready: asyncio.Queue[tuple[int, Piece | Ended] | BaseException | None] = asyncio.Queue()

    async def read(place: int, exchange: Exchange) -> None:
        try:
            async with turns:
                if not exchange.begun:
                    await exchange.begin()
                async for one in exchange.events():
                    ready.put_nowait((place, one))
        except errors.ApiError as error:
            ready.put_nowait(error)
        else:
            ready.put_nowait(None)

    turns = asyncio.Semaphore(at_once)
    tasks = [asyncio.ensure_future(read(place, one)) for place, one in enumerate(exchanges)]
    left = len(tasks)
    try:
        while left:
            event = await ready.get()
            if isinstance(event, BaseException):
                raise event
            if event is None:
                left -= 1
            else:
                yield event
    finally:
        for task in tasks:
            task.cancel()
