"""`POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from kvpager.server.schema.common import (
    MOST_MESSAGES,
    MOST_TOOLS,
    Answer,
    Body,
    Breakpoint,
    Json,
    Sampled,
    TemplateVariables,
    Usage,
)
from kvpager.server.schema.neutral import Hint, Ignored, only


class TextPart(Body):
    """A part of a message's content. Other types are refused: the models here read text."""

    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: Breakpoint | None = None


class Called(Body):
    """A function and its arguments, JSON text."""

    name: str
    arguments: str


class ToolCall(Body):
    """A call that the model made."""

    id: str
    type: Literal["function"] = "function"
    function: Called
    index: int | None = None


class Message(Body):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and not self.tool_calls:
            raise ValueError("content is missing; expected text, or tool_calls")
        return self


class Function(Body):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool."""

    type: Literal["function"]
    function: Function


class ChosenFunction(Body):
    """The name of a function."""

    name: str


class ChosenTool(Body):
    """The tool that has to be called."""

    type: Literal["function"]
    function: ChosenFunction


class JsonSchema(Body):
    """A schema that the answer has to follow."""

    name: str = "answer"
    description: str | None = None
    schema_: Annotated[Json, Field(alias="schema")]
    strict: bool | None = None


class TextFormat(Body):
    """Any text."""

    type: Literal["text"]


class ObjectFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class SchemaFormat(Body):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]
ToolChoice = Literal["none", "auto", "required"] | ChosenTool


class ChatRequest(Sampled):
    """The body of a chat completion."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    store: bool | None = None
    metadata: Annotated[dict[str, str] | None, Ignored(({},))] = None
    modalities: list[Literal["text"]] | None = None
    reasoning_effort: str | None = None  # for templates that have such a variable
    enable_thinking: bool | None = None  # likewise
    thinking: Hint[Json] = None
    reasoning: Hint[Json] = None
    verbosity: Hint[str] = None
    prediction: Hint[Json] = None
    function_call: Annotated[str | None, only("none", "auto")] = None
    echo: Annotated[bool | None, only(False)] = None
    add_special_tokens: Annotated[bool | None, only(False)] = None
    prompt_logprobs: Annotated[int | None, only(0)] = None
    mm_processor_kwargs: Hint[Json] = None


class LogprobEntry(Answer):
    """A token, its log-probability and its UTF-8 bytes."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(LogprobEntry):
    """The same, with the most likely tokens."""

    top_logprobs: list[LogprobEntry]


class Logprobs(Answer):
    """Log-probabilities of an answer's tokens."""

    content: list[TokenLogprob]
    refusal: None = None


class AnswerMessage(Answer):
    """What the model answered."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | None = None
    refusal: None = None
    tool_calls: list[ToolCall] | None = None


class Choice(Answer):
    """One of `n` answers."""

    index: int
    message: AnswerMessage
    logprobs: Logprobs | None = None
    finish_reason: str
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletion(Answer):
    """The answer of a chat completion."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    service_tier: str | None = None
    system_fingerprint: str
    session_id: str | None = None
    prompt_token_ids: list[int] | None = None
