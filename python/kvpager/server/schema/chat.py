"""`POST /v1/chat/completions` and `POST /v1/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from kvpager.server.schema.common import (
    MOST_MESSAGES,
    MOST_TOOLS,
    AnswerPart,
    Body,
    Breakpoint,
    Hint,
    Ignored,
    Json,
    MostTokens,
    Sampled,
    TemplateVariables,
    TokenId,
    Usage,
    only,
)

Ids = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
PromptText = Annotated[str, Field(min_length=1)]


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
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
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


ToolChoice = Literal["none", "auto", "required"] | ChosenTool


class ChatRequest(Sampled):
    """The body of a chat completion."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_tokens: MostTokens | None = None
    max_completion_tokens: MostTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
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
    functions: Annotated[list[Any] | None, only([])] = None
    function_call: Annotated[str | None, only("none", "auto")] = None
    documents: Annotated[list[Any] | None, only([])] = None
    reasoning_format: Hint[str] = None
    parse_tool_calls: Annotated[bool | None, only(True)] = None
    echo: Annotated[bool | None, only(False)] = None
    add_special_tokens: Annotated[bool | None, only(False)] = None
    prompt_logprobs: Annotated[int | None, only(0)] = None
    mm_processor_kwargs: Hint[Json] = None
    media_io_kwargs: Hint[Json] = None


class TokenizeRequest(Body):
    """Text, or messages of a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: TemplateVariables | None = None
    add_special_tokens: bool | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class LogprobEntry(AnswerPart):
    """A token, its log-probability and its UTF-8 bytes."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(LogprobEntry):
    """The same, with the most likely tokens."""

    top_logprobs: list[LogprobEntry]


class Logprobs(AnswerPart):
    """Log-probabilities of an answer's tokens."""

    content: list[TokenLogprob]
    refusal: None = None


class AnswerMessage(AnswerPart):
    """What the model answered."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | None = None
    refusal: None = None
    tool_calls: list[ToolCall] | None = None


class Choice(AnswerPart):
    """One of `n` answers."""

    index: int
    message: AnswerMessage
    logprobs: Logprobs | None = None
    finish_reason: str
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletion(AnswerPart):
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


class CompletionRequest(Sampled):
    """The body of a completion."""

    prompt: (
        PromptText
        | Ids
        | Annotated[list[PromptText], Field(min_length=1, fail_fast=True)]
        | Annotated[list[Ids], Field(min_length=1, fail_fast=True)]
    )
    max_tokens: Annotated[int, Field(ge=-1)] | None = None  # 0: with echo alone
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    suffix: Annotated[str | None, only("")] = None
    add_special_tokens: bool | None = None
    prompt_logprobs: Annotated[int | None, only(0)] = None


class CompletionLogprobs(AnswerPart):
    """Log-probabilities of tokens, as lists of equal length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(AnswerPart):
    """One completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class TextCompletion(AnswerPart):
    """The answer of a completion."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    system_fingerprint: str
    session_id: str | None = None
