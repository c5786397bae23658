"""`/v1/responses`: answers that are kept as snapshots, under their ids."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request
from sse_starlette import EventSourceResponse, ServerSentEvent

from kvpager.grammar import Grammar
from kvpager.requests.completion import RequestCompletion
from kvpager.server import options
from kvpager.server.accepted import STOPPED
from kvpager.server.answers import Answering, answering
from kvpager.server.bodies import JsonRoute
from kvpager.server.breakpoints import Marks
from kvpager.server.disconnects import unless_gone
from kvpager.server.errors import ApiError, bad_request, not_found
from kvpager.server.exchange import Exchange
from kvpager.server.ids import new_id
from kvpager.server.options import grammar_of_field
from kvpager.server.plan import Plan, Prompt
from kvpager.server.production import Piece
from kvpager.server.replay import Event, Replay, events_again
from kvpager.server.response_items import Output, as_items, marks_of, messages_of
from kvpager.server.routes.caller import Caller, TheCaller
from kvpager.server.schema.chat import ChosenFunction, ChosenTool, Function, Tool
from kvpager.server.schema.common import NAME_PATTERN
from kvpager.server.schema.responses import (
    Deleted,
    InputDetails,
    InputItems,
    InputTokens,
    InputTokensRequest,
    JsonObject,
    JsonOfSchema,
    NamedTool,
    OutputDetails,
    Response,
    ResponseRequest,
    ResponseUsage,
)
from kvpager.server.schema_limits import check_schemas
from kvpager.server.streaming import asks_to_pad, event
from kvpager.server.streaming import stream as stream_of

router = APIRouter(route_class=JsonRoute)
ResponseId = Annotated[str, Path(pattern=NAME_PATTERN)]
_NOTE = "response"
_INPUT = "input_items"
_LAST = ("response.completed", "response.incomplete")
_LOGPROBS = "message.output_text.logprobs"


@router.post(
    "/v1/responses",
    response_model=None,
    responses={200: {"model": Response}},
)
async def create(request: Request, body: ResponseRequest, caller: TheCaller) -> Any:
    """Answers an input; with `stream` as server-sent events, with `background` later."""
    caller.service.check_model(body.model)
    turn = await caller.read(lambda: _Turn(caller, body))
    exchange = Exchange(caller.service, turn.plan)
    await exchange.begin()
    if body.background:
        await caller.service.background_responses.start(caller.tenant.name, turn, exchange)
        if body.stream and turn.replay is not None:
            return _replayed(turn.replay.events(), turn.padded, turn.headers)
        return options.json_response(turn.response, turn.headers)
    if body.stream:
        return stream_of([exchange], turn.events(exchange), turn.failure, turn.headers)
    try:
        await unless_gone(request, turn.whole(exchange))
    finally:
        await exchange.release()
    return options.json_response(turn.response, turn.headers)


@router.post("/v1/responses/input_tokens")
async def count_input_tokens(body: InputTokensRequest, caller: TheCaller) -> InputTokens:
    """How many tokens the prompt of a response would have."""
    caller.service.check_model(body.model)
    turn = await caller.read(lambda: _Turn(caller, body))
    exchange = Exchange(caller.service, turn.plan)
    return InputTokens(input_tokens=await caller.read(exchange.count_prompt))


@router.get("/v1/responses/{response_id}", response_model=None)
async def retrieve(
    response_id: ResponseId,
    caller: TheCaller,
    *,
    stream: Annotated[bool, Query()] = False,
    starting_after: Annotated[int, Query(ge=-1)] = -1,
    include_obfuscation: Annotated[bool, Query()] = False,
) -> Any:
    """A response that was kept, or one that is still computed; with `stream` as its events."""
    running = caller.service.background_responses.get(caller.tenant.name, response_id)
    if running is None:
        found = (await _notes(response_id, caller))[_NOTE]
    else:
        found = running.response.model_dump()
        if stream and running.replay is not None:
            return _replayed(running.replay.events(starting_after), padded=include_obfuscation)
    if stream:
        return _replayed(events_again(found, starting_after), padded=include_obfuscation)
    return found


@router.get("/v1/responses/{response_id}/input_items")
async def input_items(
    response_id: ResponseId,
    caller: TheCaller,
    *,
    after: Annotated[str | None, Query()] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Annotated[Literal["asc", "desc"], Query()] = "desc",
) -> InputItems:
    """The items of a response's own input; those of the responses before it are with them."""
    running = caller.service.background_responses.get(caller.tenant.name, response_id)
    if running is None:
        items = (await _notes(response_id, caller)).get(_INPUT, [])
    else:
        items = running.input_items
    items = items if order == "asc" else items[::-1]
    if after is not None:
        place = next((i for i, item in enumerate(items) if item["id"] == after), None)
        if place is None:
            raise not_found("item", after, "after")
        items = items[place + 1 :]
    shown = items[:limit]
    return InputItems(
        data=shown,
        first_id=shown[0]["id"] if shown else None,
        last_id=shown[-1]["id"] if shown else None,
        has_more=len(items) > limit,
    )


async def _notes(response_id: str, caller: Caller) -> dict[str, Any]:
    """What was saved with a response. Raises ApiError 404."""
    try:
        notes = await asyncio.to_thread(caller.conversations.notes, response_id)
    except ApiError:
        notes = {}
    if _NOTE in notes:
        return notes
    background = caller.service.background_responses
    recorded = await background.recorded(caller.tenant.name, response_id)
    if recorded is None:
        raise not_found("response", response_id, "response_id", "response_not_found")
    return recorded


def _replayed(
    events: AsyncIterator[tuple[int, Event]],
    padded: bool,
    headers: Mapping[str, str] | None = None,
) -> EventSourceResponse:
    """A stream of events that have numbers."""

    async def told() -> AsyncIterator[ServerSentEvent]:
        async for number, one in events:
            yield _event(number, one, padded=padded)

    return stream_of((), told(), lambda error: event(error.body()), headers)


def _event(number: int, one: Event, *, padded: bool) -> ServerSentEvent:
    name, values = one
    told = {"type": name, "sequence_number": number, **values}
    return event(told, name, padded=padded and name.endswith(".delta"))


@router.delete("/v1/responses/{response_id}")
async def delete(response_id: ResponseId, caller: TheCaller) -> Deleted:
    """Deletes a response and its K/V; responses that go on from it keep what they share."""
    background = caller.service.background_responses
    if background.get(caller.tenant.name, response_id) is None:
        await _notes(response_id, caller)
    await background.cancel(caller.tenant.name, response_id)
    known = background.forget(caller.tenant.name, response_id)
    try:
        await asyncio.to_thread(caller.conversations.delete, response_id)
    except ApiError:
        if not known:
            raise
    return Deleted(id=response_id)


@router.post("/v1/responses/{response_id}/cancel", response_model=None)
async def cancel(response_id: ResponseId, caller: TheCaller) -> Any:
    """Ends a response that is computed in the background."""
    background = caller.service.background_responses
    found = await background.cancel(caller.tenant.name, response_id)
    if found is None:
        if background.get(caller.tenant.name, response_id) is None:
            await _notes(response_id, caller)
        raise bad_request(
            f"response_id is {response_id!r}, which is not computed in the background any more",
            "response_id",
        )
    return options.json_response(found.response)


class _Turn:
    """One response, as it comes into being."""

    def __init__(self, caller: Caller, body: ResponseRequest) -> None:
        service = caller.service
        self._service = service
        self._body = body
        store = body.store is not False
        if body.background and not store:
            raise bad_request("background is true; expected it with store", "background")
        shows_logprobs = bool(body.top_logprobs) or _LOGPROBS in (body.include or ())
        effort = None if body.reasoning is None else body.reasoning.effort
        variables, ignored = options.template_variables(
            service,
            body.chat_template_kwargs,
            {"reasoning.effort": ("reasoning_effort", effort)},
        )
        if set(body.include or ()) - {_LOGPROBS}:
            ignored.append("include")
        self._answering = _answering(caller, body)
        chosen = options.sampling(service, body) | dict(self._answering.options)
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
        if body.instructions and previous is None:
            messages.insert(0, {"role": "system", "content": body.instructions})
        options.check_prompt(service, messages, self._answering.tools, body.instructions)
        session = options.session_name(body.session_id, None)
        if previous is not None and session is not None:
            raise bad_request(
                "session_id is given with previous_response_id; expected one of them", "session_id"
            )
        self.headers = options.headers_of(body, session, ignored)
        response_id = new_id("resp_")
        first = 1 if body.instructions and previous is None else 0
        marks = marks_of(body.input, body.prompt_cache_options) if previous is None else Marks()
        self.plan = Plan(
            conversations=caller.conversations,
            salt=service.salt(caller.tenant, body.cache_salt),
            prompt=Prompt(
                messages=tuple(messages),
                appended=previous is not None,
                instructions=body.instructions,
                rendering=service.rendering(self._answering.tools, variables),
                marks=marks.behind(first),
            ),
            choices=1,
            max_new_tokens=body.max_output_tokens,
            options=chosen,
            seed=options.seed_of(body),
            logprobs=shows_logprobs,
            priority=options.priority_of(caller, body),
            continues=session if previous is None else previous,
            must_exist=previous is not None,
            hint=options.cache_key_name(body),
            keep_as=response_id if store else session,
            save=store or session is not None,
            share=store,
            on_corrupt=body.on_corrupt or service.settings.on_corrupt,
        )
        self._output = Output(
            self._answering.reader(), service.token_texts if shows_logprobs else None
        )
        tools = [tool.model_dump() for tool in body.tools or ()]
        self.response = Response(
            id=response_id,
            created_at=int(time.time()),
            status="in_progress",
            background=bool(body.background),
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=service.model,
            output=[],
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=previous,
            prompt_cache_key=body.prompt_cache_key,
            reasoning={"effort": effort, "summary": None},
            max_tool_calls=body.max_tool_calls,
            service_tier="default" if body.service_tier else None,
            store=store,
            temperature=chosen.get("temperature"),
            text=(
                body.text.model_dump(by_alias=True) if body.text else {"format": {"type": "text"}}
            ),
            tool_choice=_shown(body.tool_choice),
            tools=tools,
            top_logprobs=body.top_logprobs or 0,
            top_p=chosen.get("top_p", 1.0),
            user=body.user,
            session_id=session,
        )
        self.padded = asks_to_pad(body.stream_options)
        self.input_items = as_items(body.input)
        self.replay: Replay | None = Replay() if body.background else None
        self._number = 0

    async def whole(self, exchange: Exchange) -> None:
        """Computes all of it."""
        async for one in self._all(exchange):
            if self.replay is not None:
                self.replay.add(one, last=one[0] in _LAST)

    async def events(self, exchange: Exchange) -> AsyncIterator[ServerSentEvent]:
        """The events of its stream."""
        async for one in self._all(exchange):
            yield self._numbered(one)

    def failure(self, error: ApiError) -> ServerSentEvent:
        """The last event of one that failed."""
        self.fail(error)
        return self._numbered(("response.failed", {"response": self.response.model_dump()}))

    def fail(self, error: ApiError, *, stopped: bool = False) -> None:
        """Notes what it failed of. stopped: by the end of the server, so that it is incomplete."""
        response, name = self.response, "response.failed"
        if stopped:
            for _ in self._output.end(complete=False):
                pass
            name, response.output = "response.incomplete", self._output.items
            response.status, response.incomplete_details = "incomplete", STOPPED
        else:
            response.status = "cancelled" if error.code == "cancelled" else "failed"
            response.error = {"code": error.code or "server_error", "message": error.message}
        if self.replay is not None:
            self.replay.add((name, {"response": response.model_dump()}), last=True)
            self.replay = None  # its readers have it

    def _numbered(self, one: Event) -> ServerSentEvent:
        self._number += 1
        return _event(self._number - 1, one, padded=self.padded)

    async def _all(self, exchange: Exchange) -> AsyncIterator[Event]:
        yield "response.created", {"response": self.response.model_dump()}
        yield "response.in_progress", {"response": self.response.model_dump()}
        async for one in self._told(exchange):
            yield one
        yield f"response.{self.response.status}", {"response": self.response.model_dump()}

    async def _told(self, exchange: Exchange) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        async for one in exchange.events():
            if isinstance(one, Piece):
                for told in self._output.push(one):
                    yield told
        (completion,) = exchange.completions
        for told in self._output.end(complete=completion.finish_reason != "length"):
            yield told
        self._complete(completion)
        answer = self._output.reader.message()
        await exchange.finish(
            answer, notes={_NOTE: self.response.model_dump(), _INPUT: self.input_items}
        )

    def _complete(self, completion: RequestCompletion) -> None:
        response = self.response
        response.output = self._output.items
        response.status = "completed"
        if completion.finish_reason == "length":
            response.status = "incomplete"
            response.incomplete_details = {"reason": "max_output_tokens"}
        response.completed_at = int(time.time())
        generated = len(completion.tokens)
        response.usage = ResponseUsage(
            input_tokens=completion.prompt_tokens,
            input_tokens_details=InputDetails(
                cached_tokens=completion.cached_tokens,
                cache_write_tokens=completion.computed_tokens,
            ),
            output_tokens=generated,
            output_tokens_details=OutputDetails(),
            total_tokens=completion.prompt_tokens + generated,
        )


def _answering(caller: Caller, body: ResponseRequest) -> Answering:
    form = body.text.format if body.text is not None else None
    grammar = None
    with grammar_of_field("text.format"):
        if isinstance(form, JsonObject):
            grammar = Grammar.json_object()
        elif isinstance(form, JsonOfSchema):
            check_schemas([form.schema_], "text.format")
            grammar = Grammar.json_schema(form.schema_)
    tools = None
    if body.tools is not None:
        tools = [
            Tool(
                type="function",
                function=Function(
                    name=tool.name,
                    description=tool.description,
                    parameters=tool.parameters,
                    strict=tool.strict,
                ),
            )
            for tool in body.tools
        ]
    choice: Any = body.tool_choice
    if isinstance(choice, NamedTool):
        choice = ChosenTool(type="function", function=ChosenFunction(name=choice.name))
    return answering(
        caller.service,
        tools=tools,
        choice=choice,
        parallel=body.parallel_tool_calls is not False,
        grammar=grammar,
    )


def _shown(choice: Any) -> Any:
    return choice.model_dump() if isinstance(choice, NamedTool) else choice or "auto"
