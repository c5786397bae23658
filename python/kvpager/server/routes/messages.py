"""`POST /v1/messages`, as Anthropic's clients send it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request
from sse_starlette import ServerSentEvent

from kvpager.grammar import Grammar
from kvpager.requests.completion import RequestCompletion
from kvpager.server import options
from kvpager.server.answers import Answering, Reader, answering, stop_reason
from kvpager.server.bodies import JsonRoute
from kvpager.server.breakpoints import Mark, Marks
from kvpager.server.disconnects import unless_gone
from kvpager.server.errors import ApiError, bad_request
from kvpager.server.exchange import Exchange
from kvpager.server.ids import new_id
from kvpager.server.plan import Plan, Prompt
from kvpager.server.production import Piece
from kvpager.server.routes.caller import Caller, TheCaller
from kvpager.server.schema.chat import ChosenFunction, ChosenTool, Function, Tool
from kvpager.server.schema.messages import (
    AnswerMessage,
    Count,
    CountRequest,
    Error,
    MessagesRequest,
    RedactedThinking,
    TextBlock,
    ThinkingBlock,
    ToolResult,
    ToolUse,
    Usage,
)
from kvpager.server.schema_limits import check_schemas
from kvpager.server.streaming import event, stream
from kvpager.text.tokenizer import Rendering

router = APIRouter(
    route_class=JsonRoute, responses={"4XX": {"model": Error}, "5XX": {"model": Error}}
)
_DEFAULT_TTL = "5m"


@router.post("/v1/messages", response_model=None, responses={200: {"model": AnswerMessage}})
async def create(
    request: Request,
    body: MessagesRequest,
    caller: TheCaller,
    x_session_id: Annotated[str | None, Header()] = None,
) -> Any:
    """Answers a conversation; with `stream` as server-sent events."""
    caller.service.check_model(body.model)
    session = options.session_name(body.session_id, x_session_id)
    turn = await caller.read(lambda: _Turn(caller, body, session))
    exchange = Exchange(caller.service, turn.plan)
    if body.stream:
        await exchange.begin()
        return stream([exchange], turn.events(exchange), _failure, turn.headers)

    async def whole() -> AnswerMessage:
        await exchange.begin()
        async for _ in turn.told(exchange):
            pass
        return turn.message

    try:
        answer = await unless_gone(request, whole())
    finally:
        await exchange.release()
    return options.json_response(answer, turn.headers)


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountRequest, caller: TheCaller) -> Count:
    """How many tokens a prompt has."""
    caller.service.check_model(body.model)
    tokenizer = caller.service.tokenizer
    assert tokenizer is not None  # a server has one

    def count() -> int:
        messages, _ = _messages_of(body)
        tools = _answering(caller, body).tools
        options.check_prompt(caller.service, messages, tools)
        rendering, _ = _rendering(caller, body, messages, tools)
        return len(tokenizer.prompt_ids(messages, rendering))

    return Count(input_tokens=await caller.read(count))


class _Turn:
    """One request and how its answer is told."""

    def __init__(self, caller: Caller, body: MessagesRequest, session: str | None) -> None:
        service = caller.service
        self._answering = _answering(caller, body)
        chosen = options.sampling(service, body) | dict(self._answering.options)
        if body.stop_sequences:
            chosen["stop"] = list(body.stop_sequences)
        messages, marks = _messages_of(body)
        options.check_prompt(service, messages, self._answering.tools)
        rendering, ignored = _rendering(caller, body, messages, self._answering.tools)
        self.headers = options.headers_of(body, session, ignored)
        self.plan = Plan(
            conversations=caller.conversations,
            salt=service.salt(caller.tenant, body.cache_salt),
            prompt=Prompt(
                messages=tuple(messages),
                rendering=rendering,
                marks=marks,
            ),
            choices=1,
            max_new_tokens=body.max_tokens,
            options=chosen,
            seed=options.seed_of(body),
            logprobs=False,
            priority=caller.tenant.priority,
            continues=session,
            keep_as=session,
            save=session is not None,
            on_corrupt=body.on_corrupt or service.settings.on_corrupt,
        )
        self._reader: Reader = self._answering.reader()
        self.message = AnswerMessage(
            id=new_id("msg_"),
            model=service.model,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=Usage(
                input_tokens=0,
                cache_creation_input_tokens=0,
                cache_read_input_tokens=0,
                output_tokens=0,
            ),
        )
        self._open = False

    async def events(self, exchange: Exchange) -> AsyncIterator[ServerSentEvent]:
        """The events of its stream."""
        begun = False
        async for told in self.told(exchange):
            if not begun:  # with the first token: what was found of the prompt is known then
                begun = True
                yield await self._start(exchange)
            yield event(told, told["type"])
        if not begun:  # an answer without text
            yield await self._start(exchange)
        message = self.message
        delta = {"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence}
        end = {"type": "message_delta", "delta": delta, "usage": message.usage.model_dump()}
        yield event(end, "message_delta")
        yield event({"type": "message_stop"}, "message_stop")

    async def _start(self, exchange: Exchange) -> ServerSentEvent:
        """The first event, with the tokens of the prompt as the last one has them."""
        prompt, cached = exchange.prompt_tokens, exchange.cached_tokens
        written = max(0, await exchange.tokens_to_save() - cached)
        usage = Usage(
            input_tokens=max(0, prompt - cached - written),
            cache_creation_input_tokens=written,
            cache_read_input_tokens=cached,
            output_tokens=1,
        )
        begun = self.message.model_copy(update={"content": [], "usage": usage})
        start = {"type": "message_start", "message": begun.model_dump()}
        return event(start, "message_start")

    async def told(self, exchange: Exchange) -> AsyncIterator[dict[str, Any]]:
        """What blocks become, until the conversation is kept."""
        async for one in exchange.events():
            if isinstance(one, Piece):
                for told in self._told(self._reader.push(one)):
                    yield told
        for told in [*self._told(self._reader.end()), *self._close()]:
            yield told
        (completion,) = exchange.completions
        await exchange.finish(self._reader.message())
        self._complete(completion, exchange.saved_tokens)

    def _told(self, deltas: Sequence[Any]) -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = []
        for delta in deltas:
            if "content" in delta.values:
                told += self._add_text(delta.values["content"])
                continue
            if "reasoning_content" in delta.values:
                continue
            (call,) = delta.values["tool_calls"]
            if "id" in call:
                block = {
                    "type": "tool_use",
                    "id": call["id"],
                    "name": call["function"]["name"],
                    "input": {},
                }
                told += [*self._close(), *self._begin(block)]
            else:
                text = call["function"]["arguments"]
                told.append(self._delta({"type": "input_json_delta", "partial_json": text}))
        return told

    def _add_text(self, text: str) -> list[dict[str, Any]]:
        content = self.message.content
        told = []
        if not self._open or content[-1]["type"] != "text":
            if content and not text.strip():
                return []  # between calls
            told = [*self._close(), *self._begin({"type": "text", "text": ""})]
        content[-1]["text"] += text
        return [*told, self._delta({"type": "text_delta", "text": text})]

    def _begin(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        self.message.content.append(block)
        self._open = True
        index = len(self.message.content) - 1
        return [{"type": "content_block_start", "index": index, "content_block": dict(block)}]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        index = len(self.message.content) - 1
        return {"type": "content_block_delta", "index": index, "delta": delta}

    def _close(self) -> list[dict[str, Any]]:
        if not self._open:
            return []
        self._open = False
        return [{"type": "content_block_stop", "index": len(self.message.content) - 1}]

    def _complete(self, completion: RequestCompletion, saved: int) -> None:
        message = self.message
        uses = [block for block in message.content if block["type"] == "tool_use"]
        for block, call in zip(uses, self._reader.calls):
            block["input"] = _parsed(call.function.arguments)
        stopped = stop_reason(completion)
        if completion.finish_reason == "length":
            message.stop_reason = "max_tokens"
        elif uses:
            message.stop_reason = "tool_use"
        elif isinstance(stopped, str):
            message.stop_reason = "stop_sequence"
            message.stop_sequence = stopped
        else:
            message.stop_reason = "end_turn"
        written = max(0, saved - completion.cached_tokens)
        message.usage = Usage(
            input_tokens=completion.computed_tokens - written,
            cache_creation_input_tokens=written,
            cache_read_input_tokens=completion.cached_tokens,
            output_tokens=len(completion.tokens),
        )


def _failure(error: ApiError) -> ServerSentEvent:
    return event(anthropic_error(error), "error")


_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """An error in Anthropic's shape, with the type that its API has for the status."""
    kind = _ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else error.kind)
    return {"type": "error", "error": {"type": kind, "message": error.anthropic}}


def _answering(caller: Caller, body: CountRequest) -> Answering:
    choice: Any = None
    given = body.tool_choice
    if given is not None:
        choice = {"auto": "auto", "any": "required", "none": "none"}.get(given.type)
        if given.type == "tool":
            if given.name is None:
                raise bad_request("tool_choice.name is missing", "tool_choice.name")
            choice = ChosenTool(type="function", function=ChosenFunction(name=given.name))
    tools = [
        Tool(
            type="function",
            function=Function(
                name=tool.name, description=tool.description, parameters=tool.input_schema
            ),
        )
        for tool in body.tools or ()
    ]
    parallel = given is None or not given.disable_parallel_tool_use
    return answering(
        caller.service,
        tools=tools or None,
        choice=choice,
        parallel=parallel,
        grammar=_grammar(body),
    )


def _rendering(
    caller: Caller,
    body: CountRequest,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] | None,
) -> tuple[Rendering, list[str]]:
    """How the prompt is rendered, and the fields that the template has no variable for.

    A last message of the assistant is gone on with, as Anthropic's API does.
    """
    thinks = None if body.thinking is None else body.thinking.type != "disabled"
    effort = None if body.output_config is None else body.output_config.effort
    asked = {
        "thinking": ("enable_thinking", thinks),
        "output_config.effort": ("reasoning_effort", effort),
    }
    variables, ignored = options.template_variables(caller.service, None, asked)
    if thinks is False and "thinking" in ignored:
        ignored.remove("thinking")  # a template that knows no thinking does none
    continues = messages[-1]["role"] == "assistant"
    if continues and (messages[-1].get("tool_calls") or not messages[-1]["content"]):
        raise bad_request(
            "messages ends with a message of the assistant without text, or with a tool_use; "
            "expected text to go on with, or the tool_result",
            "messages",
        )
    return caller.service.rendering(tools, variables, continues=continues), ignored


def _grammar(body: CountRequest) -> Grammar | None:
    """Of the answer's text. Raises ApiError."""
    config = body.output_config
    new, old = None if config is None else config.format, body.output_format
    if new is not None and old is not None:
        raise bad_request(
            "output_format is given with output_config.format; expected one of them",
            "output_format",
        )
    form = new or old
    if form is None:
        return None
    name = "output_format" if new is None else "output_config.format"
    check_schemas([form.schema_], name)
    with options.grammar_of_field(name):
        return Grammar.json_schema(form.schema_)


def _messages_of(body: CountRequest) -> tuple[list[dict[str, Any]], Marks]:
    """Messages for a chat template, and the breakpoints in them."""
    messages: list[dict[str, Any]] = []
    places: list[Mark] = []
    if body.system:
        messages.append({"role": "system", "content": ""})
        _add_blocks(messages, places, _blocks(body.system))
    for message in body.messages:
        blocks = _blocks(message.content)
        results = [block for block in blocks if isinstance(block, ToolResult)]
        for result in results:
            content = "".join(one.text for one in _blocks(result.content or ""))
            messages.append(
                {"role": "tool", "content": content, "tool_call_id": result.tool_use_id}
            )
            _mark(messages, places, result)
        rest = [block for block in blocks if not isinstance(block, ToolResult)]
        if rest:
            messages.append({"role": message.role, "content": ""})
            _add_blocks(messages, places, rest)
    if body.cache_control is not None:
        _mark(messages, places, body)
    return messages, Marks(tuple(places))


def _add_blocks(messages: list[dict[str, Any]], places: list[Mark], blocks: Sequence[Any]) -> None:
    message = messages[-1]
    for block in blocks:
        if isinstance(block, RedactedThinking):
            continue
        if isinstance(block, ThinkingBlock):
            message["reasoning_content"] = message.get("reasoning_content", "") + block.thinking
        elif isinstance(block, ToolUse):
            function = {"name": block.name, "arguments": block.input}
            call = {"id": block.id, "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
        else:
            message["content"] += block.text
        _mark(messages, places, block)


def _mark(messages: list[dict[str, Any]], places: list[Mark], block: Any) -> None:
    control = block.cache_control
    if control is not None:
        length = len(messages[-1]["content"])
        places.append(Mark(len(messages) - 1, length, control.ttl or _DEFAULT_TTL))


def _blocks(content: Any) -> list[Any]:
    if isinstance(content, str):
        return [TextBlock(type="text", text=content)]
    return list(content)


def _parsed(arguments: str) -> dict[str, Any]:
    try:
        values = json.loads(arguments or "{}")
    except ValueError:
        return {"arguments": arguments}
    return values if isinstance(values, dict) else {"arguments": values}
