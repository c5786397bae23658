"""`POST /v1/messages`: Anthropic's Messages, of text and tools."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from kvpager.server.schema.common import (
    MOST_MESSAGES,
    MOST_STOPS,
    MOST_TOOLS,
    AnswerPart,
    Body,
    Hint,
    Ignored,
    Json,
    Name,
    ShortText,
    StopText,
    only,
)


class CacheControl(Body):
    """A breakpoint: the prompt up to the end of this block is saved."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(Body):
    """Text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: list[Any] | None = None


class ToolUse(Body):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Json
    cache_control: CacheControl | None = None
    caller: Json | None = None
    toolset_name: str | None = None


class ToolResult(Body):
    """What a tool returned."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[TextBlock], Field(fail_fast=True)] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    toolset_name: str | None = None


class ThinkingBlock(Body):
    """The reasoning of an earlier answer; templates may drop it."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None
    cache_control: None = None


class RedactedThinking(Body):
    """Encrypted reasoning, which is ignored."""

    type: Literal["redacted_thinking"]
    data: str
    cache_control: None = None


Block = Annotated[
    TextBlock | ToolUse | ToolResult | ThinkingBlock | RedactedThinking,
    Field(discriminator="type"),
]


class MessageParam(Body):
    """A message of the conversation."""

    role: Literal["user", "assistant"]
    content: str | Annotated[list[Block], Field(min_length=1, fail_fast=True)]


class ToolParam(Body):
    """A tool that the model may call."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    input_schema: Json
    description: str | None = None
    type: Literal["custom"] | None = None
    cache_control: Hint[CacheControl] = None
    strict: Hint[bool] = None
    eager_input_streaming: Hint[bool] = None
    input_examples: Hint[list[Any]] = None
    defer_loading: Annotated[bool | None, only(False)] = None
    allowed_callers: Annotated[list[str] | None, only(["direct"], [])] = None


class ToolChoiceParam(Body):
    """Which tool has to be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class MessageMetadata(Body):
    """The client's user."""

    user_id: ShortText | None = None


class Thinking(Body):
    """Whether the model thinks first, for templates that have such a variable."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Hint[int] = None
    display: Hint[str] = None


class OutputFormat(Body):
    """JSON of a schema."""

    type: Literal["json_schema"]
    schema_: Annotated[Json, Field(alias="schema")]
    name: str | None = None


class OutputConfig(Body):
    """The form of the answer; `effort` is for templates that have `reasoning_effort`."""

    format: OutputFormat | None = None
    effort: str | None = None
    task_budget: Hint[Json] = None


class CountRequest(Body):
    """The body of a count."""

    model: ShortText | None = None
    messages: Annotated[list[MessageParam], Field(min_length=1, max_length=MOST_MESSAGES)]
    system: str | Annotated[list[TextBlock], Field(fail_fast=True)] | None = None
    tools: Annotated[list[ToolParam], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: ToolChoiceParam | None = None
    cache_control: CacheControl | None = None  # as on the last block
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # its name before output_config
    context_management: Hint[Json] = None
    mcp_servers: Annotated[list[Any] | None, only([])] = None
    speed: Annotated[str | None, Ignored(("standard",))] = None
    betas: Hint[list[str]] = None
    user_profile_id: Hint[str] = None
    workspace_id: Hint[str] = None


class MessagesRequest(CountRequest):
    """The body of a message."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Annotated[list[StopText], Field(max_length=MOST_STOPS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    stream: bool | None = None
    metadata: MessageMetadata | None = None
    service_tier: Annotated[str | None, Ignored(("auto", "standard_only"))] = None
    inference_geo: Hint[str] = None
    diagnostics: Hint[Json] = None
    session_id: Name | None = None
    session_replace: bool | None = None
    cache_salt: ShortText | None = None
    seed: Annotated[int, Field(ge=0)] | None = None
    on_corrupt: Literal["fail", "recompute"] | None = None


class MessageUsage(AnswerPart):
    """Tokens: the three of the input add up to all of it."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageAnswer(AnswerPart):
    """The answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage


class AnthropicErrorBody(AnswerPart):
    """Fields of an error."""

    type: str
    message: str


class AnthropicError(AnswerPart):
    """An error, as Anthropic's API has it."""

    type: Literal["error"]
    error: AnthropicErrorBody


class Count(AnswerPart):
    """Number of a prompt's tokens."""

    input_tokens: int
