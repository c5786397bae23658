"""A response: its request, its events, and the journal that another process can go on from."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

from sse_starlette import ServerSentEvent

from kvpager._runtime.scheduling.chat import PlannedTurn, settled
from kvpager._runtime.scheduling.options import with_defaults
from kvpager._runtime.scheduling.stream import Generation
from kvpager._runtime.text.conversation import ASSISTANT, Conversation
from kvpager._runtime.text.tokenizer import Message
from kvpager._support.tokens import as_token_ids
from kvpager.errors import CapacityError, PagerError, StorageError
from kvpager.grammar import Grammar
from kvpager.requests.request import RequestCompletion, Token
from kvpager.server import errors, options
from kvpager.server.answers import CUT, Answering, answering
from kvpager.server.background import (
    STOPPED,
    Event,
    EventLog,
    JournalThreads,
)
from kvpager.server.conversations import Kept
from kvpager.server.errors import ApiError, bad_request
from kvpager.server.messages import as_items, messages_of, save_points_of_items
from kvpager.server.options import grammar_of_field
from kvpager.server.responding import Responding, event
from kvpager.server.response_events import Output, events_again
from kvpager.server.response_journal import RecordedResponse, ResponseJournal, part_of
from kvpager.server.routes.caller import Caller
from kvpager.server.schema.common import IdsOf, PromptDetails, new_id
from kvpager.server.schema.responses import (
    JsonObject,
    JsonOfSchema,
    NamedTool,
    OutputDetails,
    Response,
    ResponseRequest,
    ResponseUsage,
)
from kvpager.server.turn import ServedTurn, TokenPiece
from kvpager.session import Session
from kvpager.stores.base import Journal

# Notes of a conversation: the response, the items of its input, and `ItemEvents.pieces`.
NOTE, INPUT, PIECES = "response", "input_items", "pieces"
NOT_RESUMABLE = "x-kvpager-not-resumable"  # header of a response, with the reason
_LAST = ("response.completed", "response.incomplete", "response.failed")
_LOGPROBS = "message.output_text.logprobs"
_ECHOED = {"instructions", "max_output_tokens", "max_tool_calls", "prompt_cache_key", "user"}
_log = logging.getLogger(__name__)


def numbered_event(number: int, one: Event, *, padded: bool) -> ServerSentEvent:
    """An event with its number. padded: whether the length of a piece of text is hidden."""
    name, values = one
    values = {"type": name, "sequence_number": number, **values}
    return event(values, name, padded=padded and name.endswith(".delta"))


class ResponseTurn(ServedTurn, Responding):
    """A response, as its items grow.

    Attributes:
        response: so far.
        input_items: the items of its own input.
        padded: whether events hide the length of a piece of text.
        log: its events, if requests other than its own can read them.
        recorded: where another process began it.
        lost: whether another process has taken its journal.
    """

    def __init__(
        self, caller: Caller, body: ResponseRequest, recorded: RecordedResponse | None = None
    ) -> None:
        """Checks a request. Raises ApiError.

        Args:
            caller: the sender.
            body: the request.
            recorded: the response, where another process began it.
        """
        service = caller.service
        store = body.store is not False
        if body.background and not store and body.session_id is None:
            raise bad_request(
                "background is true; expected it with store or session_id", "background"
            )
        shows_logprobs = bool(body.top_logprobs) or _LOGPROBS in (body.include or ())
        effort = None if body.reasoning is None else body.reasoning.effort
        variables, ignored = options.template_variables(
            service,
            body.chat_template_kwargs,
            {"reasoning.effort": ("reasoning_effort", effort)},
        )
        if set(body.include or ()) - {_LOGPROBS}:
            ignored.append("include")
        answers = _answering(caller, body)
        chosen = options.sampled(service, body) | answers.options
        effective = with_defaults(options.sampling(body), service.engine.model)
        if body.top_logprobs:
            chosen["top_logprobs"] = body.top_logprobs
        messages = messages_of(body.input)
        if messages and messages[-1]["role"] == "assistant":
            raise bad_request(
                "input ends with a message or a call of the assistant; expected a message to "
                "answer, or the output of the call",
                "input",
            )
        previous = body.previous_response_id
        points = []
        if previous is None:
            points = save_points_of_items(body.input, body.prompt_cache_options)
            if body.instructions:
                messages.insert(0, {"role": "system", "content": body.instructions})
                points = [one._replace(message=one.message + 1) for one in points]
        options.check_prompt(service, messages, answers.tools, body.instructions)
        session = options.session_name(body.session_id, None)
        if previous is not None and session is not None:
            raise bad_request(
                "session_id is given with previous_response_id; expected one of them", "session_id"
            )
        begun = None if recorded is None else recorded.request
        response_id = new_id("resp_") if begun is None else begun["response"]["id"]
        super().__init__(
            **options.turn_fields(caller, body),
            messages=messages,
            appended=previous is not None,
            instructions=body.instructions,
            rendering=service.rendering(answers.tools, variables),
            save_points=points,
            max_new_tokens=body.max_output_tokens,
            options=chosen,
            logprobs=shows_logprobs,
            continues=session if previous is None else previous,
            must_exist=previous is not None,
            hint=options.cache_key_name(body),
            keep_as=response_id if store else session,
            save=store or session is not None,
            share=store,
            headers=options.headers_of(body, session, ignored),
        )
        self.recorded = recorded
        self.lost = False
        self._body = body
        self._begun = begun
        self._planned: PlannedTurn | None = None  # until it is recorded
        self._journal: ResponseJournal | None = None
        self._has_journal = self._is_beginning = False
        self._output = Output(
            answers.reader, IdsOf(response_id), service.token_texts if shows_logprobs else None
        )
        self.padded = bool(body.stream_options and body.stream_options.include_obfuscation)
        self.log = EventLog() if body.background or begun is not None else None
        self._number = 0
        if begun is not None:
            self.seed = begun["seed"]
            self.response = Response.model_validate(begun["response"])
            self.input_items: list[Any] = begun["input_items"]
            return
        self.input_items = as_items(body.input)
        tools = [tool.model_dump() for tool in body.tools or ()]
        self.response = Response(
            id=response_id,
            created_at=int(time.time()),
            status="in_progress",
            background=bool(body.background),
            metadata=body.metadata or {},
            model=service.model,
            output=[],
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=previous,
            reasoning={"effort": effort, "summary": None},
            service_tier="default" if body.service_tier else None,
            store=store,
            temperature=float(effective["temperature"]),
            text=(
                body.text.model_dump(by_alias=True) if body.text else {"format": {"type": "text"}}
            ),
            tool_choice=_shown(body.tool_choice),
            tools=tools,
            top_logprobs=body.top_logprobs or 0,
            top_p=float(effective["top_p"]),
            session_id=session,
            **body.model_dump(include=_ECHOED),
        )

    @property
    def goes_on_elsewhere(self) -> bool:
        """Whether another process can go on, or does, when this one ends it."""
        return self.lost or (self._has_journal and self.service.draining)

    @property
    def response_id(self) -> str:
        """Its id."""
        return self.response.id

    def notes(self) -> dict[str, Any]:
        """The notes of its conversation."""
        pieces = self._output.pieces if self.response.output else []
        return {NOTE: self.response.model_dump(), INPUT: self.input_items, PIECES: pieces}

    async def begin(self) -> None:
        """Queues it, and records the request durably. Raises ApiError; nothing is left then."""
        self._is_beginning = True
        await super().begin()
        self._is_beginning = False
        if self.recorded is None:
            await self._record()
        elif self.recorded.forced:
            raise errors.stopping()

    async def whole(self) -> Response:
        """Returns the whole response, once its conversation is kept."""
        async for one in self._events():
            if self.log is not None:
                self.log.add(one, last=one[0] in _LAST)
        return self.response

    async def stream(self) -> AsyncIterator[ServerSentEvent]:
        """Yields the response's events, the last one once its conversation is kept."""
        async for one in self._events():
            yield self._numbered(one)

    def failure(self, error: ApiError) -> ServerSentEvent | None:
        """The last event of a stream that fails; None where another process can go on."""
        if self.goes_on_elsewhere:
            return None
        self.fail(error)
        return self._numbered(("response.failed", {"response": self.response.model_dump()}))

    def fail(self, error: ApiError, *, stopped: bool = False) -> None:
        """Records its error. stopped: the server ended it, so it is incomplete."""
        response, name = self.response, "response.failed"
        if stopped:
            self._output.end(None)
            name, response.output = "response.incomplete", self._output.items
            response.status, response.incomplete_details = "incomplete", STOPPED
        else:
            response.status = "cancelled" if error.code == "cancelled" else "failed"
            response.error = {"code": error.code or "server_error", "message": error.message}
        if self.log is not None:
            self.log.add((name, {"response": response.model_dump()}), last=True)
            self.log = None  # its readers have it

    async def record_end(self) -> bool:
        """Records how it failed in its journal; False if it has none."""
        journal, self._journal = self._journal, None
        return journal is not None and await journal.end(self.response.model_dump())

    async def cancel(self) -> None:
        """Cancels it, wherever it is computed; `whole` then raises ApiError."""
        if self.recorded is not None and not self.begun:
            self.recorded.forced = True
        else:
            await super().release()

    async def release(self) -> None:
        """Cancels and frees everything, also if the calling task is cancelled. May be repeated."""
        await asyncio.shield(self.service.background(self._release()))

    async def _release(self) -> None:
        await super().release()
        await self.leave_journal(deleted=not (self.goes_on_elsewhere or self._is_beginning))

    async def leave_journal(self, *, deleted: bool) -> None:
        """Ends the writing of its journal, if it has one. deleted: nobody is to go on from it."""
        journal, self._journal = self._journal, None
        if journal is not None:
            await (journal.delete() if deleted else journal.release())

    def _numbered(self, one: Event) -> ServerSentEvent:
        self._number += 1
        return numbered_event(self._number - 1, one, padded=self.padded)

    async def _events(self) -> AsyncIterator[Event]:
        yield "response.created", {"response": self.response.model_dump()}
        yield "response.in_progress", {"response": self.response.model_dump()}
        if self.recorded is not None:
            async for known in self.recorded.followed(self._threads):
                for one in self._output.push(known):
                    yield one
            ended = await self._ended(self.recorded)
            if ended is not None:
                given = 0 if self.log is None else len(self.log)
                async for _, one in events_again(ended[NOTE], ended[PIECES], given - 1):
                    yield one
                return
            self._tokens = len(self.recorded.pieces)
            await self.begin()
        async for piece in self.events():
            if isinstance(piece, TokenPiece):
                if self._journal is not None:
                    self._journal.add(piece, self._cached)
                for one in self._output.push(piece):
                    yield one
        (completion,) = self.completions
        for one in self._output.end(completion):
            yield one
        self._complete(completion)
        await self._save()
        await self.leave_journal(deleted=True)
        yield f"response.{self.response.status}", {"response": self.response.model_dump()}

    async def _ended(self, recorded: RecordedResponse) -> dict[str, Any] | None:
        """Its notes, where another process has ended it; None: this one goes on.

        Raises ApiError if it was cancelled or deleted.
        """
        notes: dict[str, Any] = {}
        if recorded.journal is not None:
            self._has_journal = True
            self._journal = ResponseJournal(
                recorded.journal, self._threads, self._lose, len(recorded.pieces)
            )
        with contextlib.suppress(ApiError):
            notes = await asyncio.to_thread(self.conversations.notes, self.response.id)
        if recorded.end is not None:
            notes = {NOTE: recorded.end, PIECES: []}
        if NOTE in notes:
            await self.leave_journal(deleted=recorded.end is None)
            self.response = Response.model_validate(notes[NOTE])
            return notes
        if recorded.forced or recorded.gone:
            raise errors.stopping()
        return None

    async def _save(self) -> None:
        """Keeps and saves the response; one that cannot be saved is in memory alone."""
        notes = self.notes() if self.response.store else {}
        try:
            await self.finish(self._output.reader.message(), notes=notes)
        except ApiError as error:
            if not isinstance(error.__cause__, (OSError, StorageError, CapacityError)):
                raise
            _log.warning("response %s cannot be saved: %s", self.response.id, error.__cause__)
            self.response.store = False
            if notes:
                notes[NOTE]["store"] = False

    def _may_go_apart(self) -> bool:
        comes_back = self.response.store or self._body.background  # its client
        return super()._may_go_apart() and not comes_back

    def _goes_on_unsaved(self, error: Exception) -> bool:
        return False  # `_save` tells the client

    @property
    def _threads(self) -> JournalThreads:
        return self.service.background_responses.threads

    @property
    def _cached(self) -> int:
        """Tokens of the prompt that had K/V when it was first computed."""
        known = None if self.recorded is None else self.recorded.cached
        return self.cached_tokens if known is None else known

    def _lose(self) -> None:
        """Ends it because another process has taken its journal."""
        self.lost = True
        self.service.background(self.release())

    async def _record(self) -> None:
        """Makes its journal, if a client can come back for it."""
        store = self.conversations.store
        wanted = self._body.background or (self.response.store and self._body.stream)
        planned, self._planned = self._planned, None
        if store is None or planned is None or not wanted:
            return

        def create() -> Journal:
            return store.journals.create(self.response.id, part_of(self._request(planned)))

        try:
            journal = await self._threads.run(create)
        except (OSError, PagerError) as error:
            _log.warning("no other process can go on with %s: %s", self.response.id, error)
            self.headers[NOT_RESUMABLE] = errors.of(error).code or "error"
            return
        self._has_journal = True
        self._journal = ResponseJournal(journal, self._threads, self._lose)

    def _request(self, planned: PlannedTurn) -> dict[str, Any]:
        """All that its events depend on, as JSON values; for a thread."""
        return {
            "body": self._body.model_dump(mode="json", by_alias=True, exclude_unset=True),
            "response": self.response.model_dump(),
            "input_items": self.input_items,
            "fingerprint": self.service.fingerprint,
            "seed": self.seed,
            "seen": list(self._seen),
            "max_new_tokens": planned.generation.max_new_tokens,
            "ids": planned.ids.tolist(),
            "conversation": planned.conversation.to_json(planned.ids, self.service.tokenizer),
        }

    def _plan(self, session: Session, kept: Kept | None, seed: int) -> PlannedTurn:
        if self._begun is None:
            self.seed = seed
            self._planned = super()._plan(session, kept, seed)
            return self._planned
        core, begun = session.core, self._begun
        vocab, self._seen = core.facts.vocab_size, tuple(begun.get("seen", self._seen))
        ids = as_token_ids(begun["ids"], vocab, "ids")
        return PlannedTurn(
            ids,
            Generation.checked(core, begun["max_new_tokens"], self.options, logprobs=self.logprobs),
            Conversation.from_json(begun["conversation"], ids, self.response.id, vocab),
        )

    def _produced(self) -> list[Token]:
        return [] if self.recorded is None else [piece.token for piece in self.recorded.pieces]

    def _base(self) -> tuple[Session, Kept | None]:
        if self._begun is None:
            return super()._base()
        for name in (self.response.id, self.continues):  # a server that stopped has saved the first
            found = None if name is None else self.conversations.fork_if_usable(name, self.salt)
            if found is not None:
                self._check_not_gone_on(found[0], self._begun["conversation"]["messages"])
                return found
        return self.conversations.fresh(self.salt), None

    def _check_not_gone_on(self, session: Session, asked: list[Message]) -> None:
        """Raises ApiError 409 if the answer would replace messages that came after `asked`."""
        if self.keep_as != self.continues:
            return
        held = list(settled(session.core, session.transcript).messages)
        before, begun = asked[: len(held)], held[:-1]  # `held` may end with what a drain has saved
        if held == before or (begun == asked and held[-1]["role"] == ASSISTANT):
            return
        session.close()
        raise ApiError(
            409,
            f"session {self.keep_as!r} has gone on since response {self.response.id} was begun, "
            "which would drop its last messages; ask again",
            param="session_id",
            code="session_differs",
            headers={"x-should-retry": "false"},
        )

    def _complete(self, completion: RequestCompletion) -> None:
        response = self.response
        response.output = self._output.items
        response.status = "completed"
        if completion.finish_reason in CUT:
            stopped = completion.finish_reason == "cancelled"
            response.status = "incomplete"
            response.incomplete_details = {"reason": "stopped" if stopped else "max_output_tokens"}
        response.completed_at = int(time.time())
        prompt, generated = completion.prompt_tokens, len(completion.tokens)
        response.usage = ResponseUsage(
            input_tokens=prompt,
            input_tokens_details=PromptDetails(
                cached_tokens=self._cached, cache_write_tokens=prompt - self._cached
            ),
            output_tokens=generated,
            output_tokens_details=OutputDetails(),
            total_tokens=prompt + generated,
        )


def _answering(caller: Caller, body: ResponseRequest) -> Answering:
    form = body.text.format if body.text is not None else None
    grammar = None
    if isinstance(form, (JsonObject, JsonOfSchema)):
        schema = form.schema_ if isinstance(form, JsonOfSchema) else {"type": "object"}
        grammar = grammar_of_field("text.format", Grammar.json_schema, schema)
    choice = body.tool_choice
    return answering(
        caller.service,
        body.tools,
        None if isinstance(choice, NamedTool) else choice,
        choice.name if isinstance(choice, NamedTool) else None,
        parallel=body.parallel_tool_calls is not False,
        grammar=grammar,
    )


def _shown(choice: Any) -> Any:
    return choice.model_dump() if isinstance(choice, NamedTool) else choice or "auto"
