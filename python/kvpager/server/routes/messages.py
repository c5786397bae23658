"""`POST /v1/messages`, as Anthropic's clients send it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request
from pydantic_core import from_json
from sse_starlette import ServerSentEvent

from kvpager._runtime.text.tokenizer import Rendering
from kvpager.grammar import Grammar
from kvpager.requests.request import RequestCompletion
from kvpager.server import options
from kvpager.server.answers import Answering, Parts, answering, stop_reason
from kvpager.server.errors import ApiError, bad_request
from kvpager.server.messages import SavePoint
from kvpager.server.responding import Responding, event, respond
from kvpager.server.routes.caller import Caller, JsonRoute, TheCaller
from kvpager.server.schema.chat import Function, ToolCall
from kvpager.server.schema.common import new_id
from kvpager.server.schema.messages import (
    AnthropicError,
    Count,
    CountRequest,
    MessageAnswer,
    MessagesRequest,
    MessageUsage,
    RedactedThinking,
    TextBlock,
    ThinkingBlock,
    ToolResult,
    ToolUse,
)
from kvpager.server.turn import ServedTurn, TokenPiece

router = APIRouter(
    route_class=JsonRoute,
    responses={"4XX": {"model": AnthropicError}, "5XX": {"model": AnthropicError}},
)
_DEFAULT_TTL = "5m"


@router.post("/v1/messages", response_model=None, responses={200: {"model": MessageAnswer}})
async def create(
    request: Request,
    body: MessagesRequest,
    caller: TheCaller,
    x_session_id: Annotated[str | None, Header()] = None,
) -> Any:
    """Answers a conversation; with `stream` as server-sent events."""
    caller.service.check_model(body.model)
    session = options.session_name(body.session_id, x_session_id)
    turn = await caller.read(lambda: _MessageTurn(caller, body, session))
    return await respond(request, turn, streamed=body.stream, on_error=caller.service.metrics.error)


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountRequest, caller: TheCaller) -> Count:
    """Counts the tokens of a prompt."""
    caller.service.check_model(body.model)
    tokenizer = caller.service.tokenizer
    assert tokenizer is not None  # a server has one

    def count() -> int:
        messages, _, rendering, _ = _prompt(caller, body, _answering(caller, body))
        return len(tokenizer.prompt_ids(messages, rendering))

    return Count(input_tokens=await caller.read(count))


class _MessageTurn(ServedTurn, Responding):
    """A message of Anthropic's API, as its blocks grow."""

    def __init__(self, caller: Caller, body: MessagesRequest, session: str | None) -> None:
        service = caller.service
        answers = _answering(caller, body)
        chosen = options.sampling(body) | answers.options
        if body.stop_sequences:
            chosen["stop"] = list(body.stop_sequences)
        messages, points, rendering, ignored = _prompt(caller, body, answers)
        super().__init__(
            **options.turn_fields(caller, body),
            messages=messages,
            history=body.messages,
            rendering=rendering,
            save_points=points,
            max_new_tokens=body.max_tokens,
            options=chosen,
            continues=session,
            keep_as=session,
            save=session is not None,
            headers=options.headers_of(body, session, ignored),
        )
        self._reader = answers.reader(new_id)
        self._blocks = _Blocks()
        self.message = MessageAnswer(
            id=new_id("msg_"),
            model=service.model,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=_usage(),
        )

    async def whole(self) -> MessageAnswer:
        """Returns the whole answer, once its conversation is kept."""
        async for _ in self._events():
            pass
        return self.message

    async def stream(self) -> AsyncIterator[ServerSentEvent]:
        """Yields the answer's events, the last ones once its conversation is kept."""
        async for one in self._events():
            yield event(one, one["type"])

    def failure(self, error: ApiError) -> ServerSentEvent:
        """The last event of a stream that fails."""
        return event(anthropic_error(error), "error")

    async def _events(self) -> AsyncIterator[dict[str, Any]]:
        begun = False
        async for piece in self.events():
            if not begun:  # with the first token, when the cached tokens are known
                begun = True
                yield await self._start()
            if isinstance(piece, TokenPiece):
                for one in self._blocks.add(self._reader.push(piece)):
                    yield one
        (completion,) = self.completions
        for one in [*self._blocks.add(self._reader.end(completion)), *self._blocks.close()]:
            yield one
        await self.finish(self._reader.message())
        self._complete(completion)
        message = self.message
        delta = {"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence}
        yield {"type": "message_delta", "delta": delta, "usage": message.usage.model_dump()}
        yield {"type": "message_stop"}

    async def _start(self) -> dict[str, Any]:
        """The first event, with the same tokens of the prompt as the last one."""
        usage = _usage(self.prompt_tokens, self.cached_tokens, await self.tokens_to_save(), 1)
        begun = self.message.model_copy(update={"content": [], "usage": usage})
        return {"type": "message_start", "message": begun.model_dump()}

    def _complete(self, completion: RequestCompletion) -> None:
        message = self.message
        message.content = self._blocks.items
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
        message.usage = _usage(
            completion.prompt_tokens,
            completion.cached_tokens,
            self.saved_tokens,
            len(completion.tokens),
        )


class _Blocks(Parts[dict[str, Any]]):
    """The content blocks of a message, as they grow."""

    text_type = "text"

    def empty_text(self) -> dict[str, Any]:
        """A block of text."""
        return {"type": "text", "text": ""}

    def extend(self, text: str) -> list[dict[str, Any]]:
        """Extends a text, or the JSON of a call's input."""
        block, index = self.items[-1], len(self.items) - 1
        delta = {"type": "input_json_delta", "partial_json": text}
        if block["type"] == "text":
            block["text"] += text
            delta = {"type": "text_delta", "text": text}
        return [{"type": "content_block_delta", "index": index, "delta": delta}]

    def _empty_call(self, call: ToolCall) -> dict[str, Any]:
        return {"type": "tool_use", "id": call.id, "name": call.function.name, "input": {}}

    def _begun(self, item: dict[str, Any]) -> list[dict[str, Any]]:
        index = len(self.items) - 1
        return [{"type": "content_block_start", "index": index, "content_block": dict(item)}]

    def _closed(self, item: dict[str, Any], status: str) -> list[dict[str, Any]]:
        return [{"type": "content_block_stop", "index": len(self.items) - 1}]


def _usage(prompt: int = 0, cached: int = 0, saved: int = 0, generated: int = 0) -> MessageUsage:
    """Usage of a prompt, with its cached tokens and those up to its last breakpoint."""
    written = max(0, saved - cached)
    return MessageUsage(
        input_tokens=max(0, prompt - cached - written),
        cache_creation_input_tokens=written,
        cache_read_input_tokens=cached,
        output_tokens=generated,
    )


_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """Returns an error in Anthropic's shape, with its API's type for the status."""
    kind = _ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else error.kind)
    return {"type": "error", "error": {"type": kind, "message": error.anthropic}}


def _answering(caller: Caller, body: CountRequest) -> Answering:
    given = body.tool_choice
    choice = {"any": "required", "none": "none"}.get(given.type) if given is not None else None
    forced = given.name if given is not None and given.type == "tool" else None
    if given is not None and given.type == "tool" and forced is None:
        raise bad_request("tool_choice.name is missing", "tool_choice.name")
    tools = [
        Function(name=tool.name, description=tool.description, parameters=tool.input_schema)
        for tool in body.tools or ()
    ]
    parallel = given is None or not given.disable_parallel_tool_use
    return answering(
        caller.service, tools, choice, forced, parallel=parallel, grammar=_grammar(body)
    )


def _prompt(
    caller: Caller, body: CountRequest, answers: Answering
) -> tuple[list[dict[str, Any]], list[SavePoint], Rendering, list[str]]:
    """Returns messages, breakpoints, rendering, and fields that the template has no variable for.

    The answer continues a final message of the assistant, as in Anthropic's API.
    """
    messages, points = _messages_of(body)
    options.check_prompt(caller.service, messages, answers.tools)
    thinks = None if body.thinking is None else body.thinking.type != "disabled"
    effort = None if body.output_config is None else body.output_config.effort
    asked = {
        "thinking": ("enable_thinking", thinks),
        "output_config.effort": ("reasoning_effort", effort),
    }
    variables, ignored = options.template_variables(caller.service, None, asked)
    if thinks is False and "thinking" in ignored:
        ignored.remove("thinking")  # without such a variable the model does not think
    continues = messages[-1]["role"] == "assistant"
    if continues and (messages[-1].get("tool_calls") or not messages[-1]["content"]):
        raise bad_request(
            "messages ends with a message of the assistant without text, or with a tool_use; "
            "expected text to go on with, or the tool_result",
            "messages",
        )
    rendering = caller.service.rendering(answers.tools, variables, continues=continues)
    return messages, points, rendering, ignored


def _grammar(body: CountRequest) -> Grammar | None:
    """Returns the grammar of the answer's text. Raises ApiError."""
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
    return options.grammar_of_field(name, Grammar.json_schema, form.schema_)


def _messages_of(body: CountRequest) -> tuple[list[dict[str, Any]], list[SavePoint]]:
    """Returns messages for a chat template, and the breakpoints in them."""
    messages: list[dict[str, Any]] = []
    places: list[SavePoint] = []
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
    return messages, places


def _add_blocks(
    messages: list[dict[str, Any]], places: list[SavePoint], blocks: Sequence[Any]
) -> None:
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


def _mark(messages: list[dict[str, Any]], places: list[SavePoint], block: Any) -> None:
    control = block.cache_control
    if control is not None:
        length = len(messages[-1]["content"])
        places.append(SavePoint(len(messages) - 1, length, control.ttl or _DEFAULT_TTL))


def _blocks(content: Any) -> list[Any]:
    if isinstance(content, str):
        return [TextBlock(type="text", text=content)]
    return list(content)


def _parsed(arguments: str) -> dict[str, Any]:
    """Returns the arguments of a call; of one that was cut, the complete ones."""
    try:
        values = from_json(arguments or "{}", allow_partial=True)
    except ValueError:
        return {"arguments": arguments}
    return values if isinstance(values, dict) else {"arguments": values}
