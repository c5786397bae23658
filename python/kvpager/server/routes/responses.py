"""`/v1/responses`: answers that are kept as snapshots, under their ids."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from sse_starlette import ServerSentEvent

from kvpager.grammar import Grammar
from kvpager.requests.completion import RequestCompletion
from kvpager.server import options
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
from kvpager.server.response_items import Output, marks_of, messages_of
from kvpager.server.routes.caller import Caller, TheCaller
from kvpager.server.schema.chat import ChosenFunction, ChosenTool, Function, Tool
from kvpager.server.schema.common import NAME_PATTERN
from kvpager.server.schema.responses import (
    Deleted,
    InputDetails,
    JsonObject,
    JsonOfSchema,
    NamedTool,
    OutputDetails,
    Response,
    ResponseRequest,
    ResponseUsage,
)
from kvpager.server.streaming import asks_to_pad, event, stream

router = APIRouter(route_class=JsonRoute)
ResponseId = Annotated[str, Path(pattern=NAME_PATTERN)]
_NOTE = "response"
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
        caller.service.background_responses.start(caller.tenant.name, turn, exchange)
        return options.json_response(turn.response, turn.headers)
    if body.stream:
        return stream([exchange], turn.events(exchange), turn.failure, turn.headers)
    try:
        await unless_gone(request, turn.whole(exchange))
    finally:
        await exchange.release()
    return options.json_response(turn.response, turn.headers)


@router.get("/v1/responses/{response_id}", response_model=None)
async def retrieve(response_id: ResponseId, caller: TheCaller) -> Any:
    """A response that was kept, or one that is still computed."""
    running = caller.service.background_responses.get(caller.tenant.name, response_id)
    if running is not None:
        return options.json_response(running.response)
    try:
        notes = await asyncio.to_thread(caller.conversations.notes, response_id)
    except ApiError:
        notes = {}
    if _NOTE not in notes:
        raise not_found("response", response_id, "response_id", "response_not_found")
    return notes[_NOTE]


@router.delete("/v1/responses/{response_id}")
async def delete(response_id: ResponseId, caller: TheCaller) -> Deleted:
    """Deletes a response and its K/V; responses that go on from it keep what they share."""
    await retrieve(response_id, caller)
    background = caller.service.background_responses
    await background.cancel(caller.tenant.name, response_id)
    if not background.forget(caller.tenant.name, response_id):
        await asyncio.to_thread(caller.conversations.delete, response_id)
    return Deleted(id=response_id)


@router.post("/v1/responses/{response_id}/cancel", response_model=None)
async def cancel(response_id: ResponseId, caller: TheCaller) -> Any:
    """Ends a response that is computed in the background."""
    found = await caller.service.background_responses.cancel(caller.tenant.name, response_id)
    if found is None:
        await retrieve(response_id, caller)
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
        if body.background and (body.stream or not store):
            raise bad_request(
                "background is true; expected it without stream, and with store", "background"
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
        self._answering = _answering(caller, body)
        chosen = options.sampling(service, body) | dict(self._answering.options)
        if body.top_logprobs:
            chosen["top_logprobs"] = body.top_logprobs
        messages = messages_of(body.input)
        if messages[-1]["role"] == "assistant":
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
        self._number = 0

    async def whole(self, exchange: Exchange) -> None:
        """Computes all of it."""
        async for _ in self._told(exchange):
            pass

    async def events(self, exchange: Exchange) -> AsyncIterator[ServerSentEvent]:
        """The events of its stream."""
        yield self._event("response.created", {"response": self.response.model_dump()})
        yield self._event("response.in_progress", {"response": self.response.model_dump()})
        async for name, values in self._told(exchange):
            yield self._event(name, values)
        last = f"response.{self.response.status}"
        yield self._event(last, {"response": self.response.model_dump()})

    def failure(self, error: ApiError) -> ServerSentEvent:
        """The last event of one that failed."""
        self.fail(error)
        return self._event("response.failed", {"response": self.response.model_dump()})

    def fail(self, error: ApiError) -> None:
        """Notes what it failed of."""
        self.response.status = "cancelled" if error.code == "cancelled" else "failed"
        self.response.error = {"code": error.code or "server_error", "message": error.message}

    async def _told(self, exchange: Exchange) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        async for one in exchange.events():
            if isinstance(one, Piece):
                for told in self._output.push(one.text, one.token):
                    yield told
        (completion,) = exchange.completions
        for told in self._output.end(complete=completion.finish_reason != "length"):
            yield told
        self._complete(completion)
        answer = self._output.reader.message()
        await exchange.finish(answer, notes={_NOTE: self.response.model_dump()})

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

    def _event(self, name: str, values: dict[str, Any]) -> ServerSentEvent:
        padded = asks_to_pad(self._body.stream_options) and name.endswith(".delta")
        told = event({"type": name, "sequence_number": self._number, **values}, name, padded=padded)
        self._number += 1
        return told


def _answering(caller: Caller, body: ResponseRequest) -> Answering:
    form = body.text.format if body.text is not None else None
    grammar = None
    with grammar_of_field("text.format"):
        if isinstance(form, JsonObject):
            grammar = Grammar.json_object()
        elif isinstance(form, JsonOfSchema):
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
