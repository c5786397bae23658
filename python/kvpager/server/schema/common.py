"""Common parts of the endpoints' bodies."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

HEADER = "x-kvpager-ignored"
_Value = TypeVar("_Value")
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$"
MOST_MESSAGES = 8192  # messages, items or parts of one
MOST_TOOLS = 512
MOST_STOPS = 64
MOST_TOKEN_IDS = 4096  # of stops or biases
MOST_NAME = 4096  # characters of what names something
MOST_METADATA = 64
ShortText = Annotated[str, Field(max_length=MOST_NAME)]
StopText = Annotated[str, Field(min_length=1, max_length=MOST_NAME)]
Metadata = Annotated[dict[ShortText, ShortText], Field(max_length=MOST_METADATA)]
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
Json = dict[str, Any]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
MostTokens = Literal[-1] | Annotated[int, Field(ge=1)]  # -1: as many as there is room for


@dataclass(frozen=True)
class Ignored:
    """Marks a field that is accepted and ignored; neutral values are not reported."""

    neutral: tuple[Any, ...] = ()


Hint = Annotated[_Value | None, Ignored()]


def only(*values: Any) -> AfterValidator:
    """Restricts a field to None and these values, which change nothing."""

    def checked(given: Any) -> Any:
        if given is not None and given not in values:
            allowed = " or ".join(repr(one) for one in (*values, None))
            raise ValueError(f"expected {allowed}: this server does nothing else")
        return given

    return AfterValidator(checked)


def ignored_fields(body: BaseModel) -> list[str]:
    """Returns the paths of the fields that a request sets and the server ignores."""
    found = []
    for name, field in type(body).model_fields.items():
        value = getattr(body, name)
        if value is None or name not in body.model_fields_set:
            continue
        mark = next((one for one in field.metadata if isinstance(one, Ignored)), None)
        if mark is not None:
            found += [] if value in mark.neutral else [name]
        elif isinstance(value, BaseModel):
            found += [f"{name}.{inner}" for inner in ignored_fields(value)]
        elif name == "tools":
            found += {f"{name}.{inner}": 0 for tool in value for inner in ignored_fields(tool)}
    return found


class Body(BaseModel):
    """A request's body, without unknown fields and without text for a number."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def without_unknown_nulls(cls, given: Any) -> Any:
        """Drops unknown fields that are null: null means absent."""
        if not isinstance(given, dict) or None not in given.values():
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        return {name: one for name, one in given.items() if one is not None or name in known}


_SAMPLERS = ["penalties", "temperature", "top_k", "top_p", "min_p"]  # as sampling has them


class StreamOptions(Body):
    """`include_usage`: a last chunk says how many tokens there were.

    `include_obfuscation`: pieces of text are padded, so that their lengths on the wire tell little.
    `continuous_usage_stats`, which vLLM has: with it, every chunk says how many there are so far.
    """

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class CacheOptions(Body):
    """OpenAI's `prompt_cache_options`; `ttl` is the least time that a breakpoint lives."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m", "12h"] | None = None


class Breakpoint(Body):
    """OpenAI's `prompt_cache_breakpoint`: the prompt up to the end of this part is saved."""

    mode: Literal["explicit"] = "explicit"
    ttl: Literal["30m", "12h"] | None = None


class StructuredOutputs(Body):
    """VLLM's `structured_outputs`: one constraint of the text."""

    json_: Annotated[Json | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    grammar: str | None = None
    json_object: bool | None = None


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
    """Any JSON object, or with llama.cpp's `schema` one of that."""

    type: Literal["json_object"]
    schema_: Annotated[Json | None, Field(alias="schema")] = None


class SchemaFormat(Body):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]


class Common(Body):
    """Fields of OpenAI's endpoints that generate, those of vLLM's and of routers included."""

    model: ShortText | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stream: bool | None = None
    user: ShortText | None = None
    # What follows is no part of OpenAI's API, but for the cache's fields.
    cache_salt: ShortText | None = None
    session_id: Name | None = None
    session_replace: bool | None = None
    request_id: ShortText | None = None
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] | None = None
    prompt_cache_key: ShortText | None = None
    prompt_cache_options: CacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    service_tier: Annotated[str | None, Ignored(("auto", "default"))] = None
    safety_identifier: ShortText | None = None
    cache_prompt: Annotated[bool | None, Ignored((True,))] = None  # llama.cpp's, as the next one
    id_slot: Annotated[int | None, Ignored((-1,))] = None
    on_corrupt: Literal["fail", "recompute"] | None = None
    stop: ShortText | Annotated[list[StopText], Field(max_length=MOST_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MOST_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MOST_TOKEN_IDS)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=100)] | None = None  # llama.cpp's name of it
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None  # SGLang's name of it
    separate_reasoning: Hint[bool] = None
    stream_reasoning: Hint[bool] = None
    include_reasoning: Hint[bool] = None
    return_hidden_states: Annotated[bool | None, only(False)] = None

    @model_validator(mode="after")
    def _with_one_name(self) -> Common:
        for name, other in (
            ("repetition_penalty", "repeat_penalty"),
            ("include_stop_str_in_output", "no_stop_trim"),
        ):
            value, same = getattr(self, name), getattr(self, other)
            if value is not None and same is not None and value != same:
                raise ValueError(f"{other} is {same}, and {name} is {value}; expected one of them")
            if value is None and same is not None:
                setattr(self, name, same)
        return self


class Sampled(Common):
    """Fields of chat completions and of completions."""

    n: Annotated[int, Field(ge=1)] | None = None
    n_predict: MostTokens | None = None  # llama.cpp's name of max_tokens
    response_format: ResponseFormat | None = None
    json_schema: Json | str | None = None  # of llama.cpp and SGLang, as the next ones
    grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Json | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    guided_grammar: str | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    # What vLLM, llama.cpp, SGLang and their routers have, where it asks for nothing.
    spaces_between_special_tokens: Hint[bool] = None
    length_penalty: Hint[float] = None  # of beams alone
    early_stopping: Hint[bool] = None
    use_beam_search: Annotated[bool | None, only(False)] = None
    detokenize: Annotated[bool | None, only(True)] = None
    return_tokens_as_token_ids: Annotated[bool | None, only(False)] = None
    bad_words: Annotated[list[str] | None, only([])] = None
    stop_regex: Annotated[list[str] | None, only([])] = None
    typical_p: Annotated[float | None, only(1)] = None
    typ_p: Annotated[float | None, only(1)] = None
    tfs_z: Annotated[float | None, only(1)] = None
    top_n_sigma: Annotated[float | None, only(-1, 0)] = None
    mirostat: Annotated[int | None, only(0)] = None
    mirostat_tau: Hint[float] = None  # of mirostat alone
    mirostat_eta: Hint[float] = None
    dynatemp_range: Annotated[float | None, only(0)] = None
    dynatemp_exponent: Hint[float] = None  # of dynatemp_range alone
    xtc_probability: Annotated[float | None, only(0)] = None
    xtc_threshold: Hint[float] = None  # of xtc_probability alone
    dry_multiplier: Annotated[float | None, only(0)] = None
    dry_base: Hint[float] = None  # of dry_multiplier alone, as the next ones
    dry_allowed_length: Hint[int] = None
    dry_penalty_last_n: Hint[int] = None
    dry_sequence_breakers: Hint[list[str]] = None
    adaptive_target: Annotated[float | None, only(-1)] = None
    adaptive_decay: Hint[float] = None  # of adaptive_target alone
    samplers: Annotated[list[str] | str | None, Ignored((_SAMPLERS,))] = None
    backend_sampling: Hint[bool] = None
    min_keep: Annotated[int | None, only(0)] = None
    allowed_token_ids: Annotated[list[int] | None, only([])] = None
    logits_processors: Annotated[list[Any] | None, only([])] = None
    lora: Annotated[list[Any] | None, only([])] = None
    penalize_nl: Annotated[bool | None, only(False)] = None
    t_max_predict_ms: Annotated[int | None, only(0, -1)] = None
    post_sampling_probs: Annotated[bool | None, only(False)] = None
    return_tokens: Annotated[bool | None, only(False)] = None
    response_fields: Annotated[list[str] | None, only([])] = None
    n_indent: Annotated[int | None, only(0)] = None
    n_discard: Hint[int] = None
    verbose: Hint[bool] = None
    guided_decoding_backend: Hint[str] = None
    vllm_xargs: Hint[Json] = None
    return_cached_tokens_details: Hint[bool] = None
    repeat_last_n: Annotated[int | None, only(-1)] = None
    n_keep: Hint[int] = None
    n_probs: Annotated[int | None, only(0)] = None
    timings_per_token: Hint[bool] = None
    return_progress: Hint[bool] = None
    rid: Hint[str] = None
    data_parallel_rank: Hint[int] = None
    extra_key: Hint[str] = None


class AnswerPart(BaseModel):
    """A part of an answer."""

    model_config = ConfigDict(extra="allow")


class PromptDetails(AnswerPart):
    """Tokens of a prompt: K/V that was there, and K/V that was computed (and so written)."""

    cached_tokens: int
    cache_write_tokens: int


class Usage(AnswerPart):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Deleted(AnswerPart):
    """The answer of a deletion."""

    id: str
    object: Literal["response", "session"]
    deleted: Literal[True] = True


class ModelCard(AnswerPart):
    """An entry of `GET /v1/models`."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "kvpager"
    root: str
    parent: None = None
    max_model_len: int | None


class ModelList(AnswerPart):
    """The answer of `GET /v1/models`."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class ErrorBody(AnswerPart):
    """Fields of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(AnswerPart):
    """An error, as OpenAI's API has it."""

    error: ErrorBody


# What `apply_chat_template` takes beside a template's own variables. A template is a program, whose
# time and memory nothing bounds.
_NOT_OF_A_TEMPLATE = frozenset(
    {"chat_template", "tokenize", "add_generation_prompt", "continue_final_message", "conversation"}
    | {"padding", "truncation", "max_length", "return_tensors", "return_dict", "tools"}
    | {"return_assistant_tokens_mask", "tokenizer_kwargs", "processor_kwargs", "messages"}
)


def _variables(given: Json) -> Json:
    for name in sorted(given):
        if name in _NOT_OF_A_TEMPLATE:
            raise ValueError(
                f"{name} cannot be set; expected variables of the model's own template, such as "
                "enable_thinking"
            )
    return given


TemplateVariables = Annotated[Json, AfterValidator(_variables)]


MakeId = Callable[[str], str]  # takes a prefix


def new_id(prefix: str) -> str:
    """Returns a name that cannot be guessed."""
    return prefix + secrets.token_hex(16)


class IdsOf:
    """Makes the names of a response's parts: the same ones in the same order in every process."""

    def __init__(self, response_id: str) -> None:
        self._of = response_id
        self._made = 0

    def __call__(self, prefix: str) -> str:
        """Returns the next name."""
        text, self._made = f"{self._of}/{self._made}", self._made + 1
        return prefix + blake2b(text.encode(), digest_size=16).hexdigest()
