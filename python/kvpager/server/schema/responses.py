"""`POST /v1/responses`: OpenAI's Responses, of text and functions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from kvpager.server.schema.chat import Function
from kvpager.server.schema.common import (
    MOST_MESSAGES,
    MOST_TOOLS,
    AnswerPart,
    Body,
    Breakpoint,
    Common,
    Hint,
    Ignored,
    Json,
    JsonSchema,
    Metadata,
    PromptDetails,
    StreamOptions,
    TemplateVariables,
    TextFormat,
    only,
)

Status = Literal["completed", "incomplete", "in_progress", "failed", "cancelled"]


class InputText(Body):
    """Text of a user, a developer or a system."""

    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: Breakpoint | None = None


class OutputText(Body):
    """Text of an earlier answer."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


MessagePart = Annotated[InputText | OutputText, Field(discriminator="type")]


class InputMessage(Body):
    """A message; `type` may be left out."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[MessagePart], Field(fail_fast=True)]
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class InputCall(Body):
    """A call of a function, from an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None
    caller: Json | None = None
    namespace: str | None = None


class InputCallOutput(Body):
    """What a function returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Annotated[list[InputText], Field(fail_fast=True)]
    id: str | None = None
    status: str | None = None
    caller: Json | None = None


class ReasoningText(Body):
    """A piece of an earlier answer's reasoning."""

    type: Literal["summary_text", "reasoning_text"]
    text: str


class InputReasoning(Body):
    """The reasoning before the next item of an earlier answer; templates may drop it."""

    type: Literal["reasoning"]
    summary: Annotated[list[ReasoningText], Field(fail_fast=True)] | None = None
    content: Annotated[list[ReasoningText], Field(fail_fast=True)] | None = None
    encrypted_content: str | None = None  # ignored
    id: str | None = None
    status: str | None = None


Item = InputCall | InputCallOutput | InputReasoning | InputMessage


class FunctionTool(Function):
    """A function that the model may call."""

    type: Literal["function"]
    output_schema: Hint[Json] = None
    defer_loading: Annotated[bool | None, only(False)] = None
    allowed_callers: Annotated[list[str] | None, only(["direct"], [])] = None


class NamedTool(Body):
    """The function that has to be called."""

    type: Literal["function"]
    name: str


class JsonObject(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonOfSchema(JsonSchema):
    """JSON of a schema."""

    type: Literal["json_schema"]
    name: str


class TextConfig(Body):
    """The form of the answer's text."""

    format: (
        Annotated[TextFormat | JsonObject | JsonOfSchema, Field(discriminator="type")] | None
    ) = None
    verbosity: Hint[str] = None


class Reasoning(Body):
    """How much the model reasons; `effort` is for templates that have such a variable."""

    effort: str | None = None
    summary: Hint[str] = None
    generate_summary: Hint[str] = None
    mode: Hint[str] = None
    context: Hint[str] = None


class ResponseRequest(Common):
    """The body of a response."""

    input: (
        Annotated[str, Field(min_length=1)]
        | Annotated[list[Item], Field(min_length=1, max_length=MOST_MESSAGES)]
    )
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    metadata: Metadata | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: Annotated[list[str], Field(fail_fast=True)] | None = None
    truncation: Annotated[Literal["disabled", "auto"] | None, Ignored(("disabled",))] = None
    stream_options: StreamOptions | None = None
    max_tool_calls: Annotated[int | None, Field(ge=1), Ignored()] = None  # of tools built in
    reasoning: Reasoning | None = None
    personality: Hint[str] = None
    client_metadata: Hint[Json] = None
    context_management: Annotated[list[Any] | None, only([])] = None
    chat_template_kwargs: TemplateVariables | None = None


class InputTokensRequest(ResponseRequest):
    """The body of a count: that of a response, whose input may be missing."""

    input: str | Annotated[list[Item], Field(fail_fast=True)] = ""

    @field_validator("input", mode="before")
    @classmethod
    def _without_null(cls, given: Any) -> Any:
        return "" if given is None else given


class InputTokens(AnswerPart):
    """Number of a prompt's tokens."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class InputItems(AnswerPart):
    """A page of the items of a response's input."""

    object: Literal["list"] = "list"
    data: list[Json]
    first_id: str | None
    last_id: str | None
    has_more: bool


class OutputDetails(AnswerPart):
    """Tokens of the output."""

    reasoning_tokens: int = 0


class ResponseUsage(AnswerPart):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: PromptDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Response(AnswerPart):
    """A response."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    background: bool = False
    error: Json | None = None
    incomplete_details: Json | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str]
    model: str
    output: list[Json]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None = None
    reasoning: Json | None = None
    service_tier: str | None = None
    store: bool
    temperature: float | None
    text: Json
    tool_choice: Any
    tools: list[Json]
    top_logprobs: int = 0
    top_p: float | None
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None
    session_id: str | None = None
