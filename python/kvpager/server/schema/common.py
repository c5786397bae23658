"""What the endpoints' bodies have in common."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from kvpager.server.schema.neutral import Hint, Ignored, only
from kvpager.unicode import is_unicode

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


class Body(BaseModel):
    """A request's body: no unknown fields, and no text where a number is expected."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def without_unknown_nulls(cls, given: Any) -> Any:
        """Leaves out what nobody knows and what asks for nothing: null is as good as not there."""
        if not isinstance(given, dict) or None not in given.values():
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        return {name: one for name, one in given.items() if one is not None or name in known}

    @model_validator(mode="before")
    @classmethod
    def of_values_that_json_has(cls, given: Any) -> Any:
        """Refuses what Python's JSON reads beyond the standard, wherever in a body it is."""
        waiting: list[tuple[str, Any]] = [("", given)]
        while waiting:
            where, value = waiting.pop()
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{where} is {value}; expected a number that JSON has")
            if isinstance(value, str) and not is_unicode(value):
                raise ValueError(f"{where} has half of a surrogate pair; expected Unicode text")
            if isinstance(value, dict):
                keys = map(str, value)
                waiting += [(f"{where}.{key}" if where else key, value[key]) for key in keys]
                waiting += [
                    ("a name in the body", key) for key in value if not is_unicode(str(key))
                ]
            elif isinstance(value, list) and not all(type(item) is int for item in value):
                waiting += [(f"{where}[{place}]", item) for place, item in enumerate(value)]
        return given


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
    """VLLM's `structured_outputs`: what the text has to be, one of these."""

    json_: Annotated[Json | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: list[str] | None = None
    json_object: bool | None = None


class Common(Body):
    """Fields of every endpoint that generates, those of OpenAI's and of vLLM's."""

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


class Sampled(Common):
    """Fields of chat completions and of completions."""

    n: Annotated[int, Field(ge=1)] | None = None
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
    # llama.cpp's name of max_tokens; -1: as many as there is room for.
    n_predict: Literal[-1] | Annotated[int, Field(ge=1)] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Json | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
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
    repeat_last_n: Annotated[int | None, only(-1)] = None
    n_keep: Hint[int] = None
    n_probs: Annotated[int | None, only(0)] = None
    timings_per_token: Hint[bool] = None
    return_progress: Hint[bool] = None
    separate_reasoning: Hint[bool] = None
    stream_reasoning: Hint[bool] = None
    include_reasoning: Hint[bool] = None
    return_hidden_states: Annotated[bool | None, only(False)] = None
    rid: Hint[str] = None
    data_parallel_rank: Hint[int] = None
    extra_key: Hint[str] = None

    @model_validator(mode="after")
    def _with_one_name(self) -> Sampled:
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


class Answer(BaseModel):
    """A part of an answer; fields without a value are left out where `exclude_none` is used."""

    model_config = ConfigDict(extra="allow")


class PromptDetails(Answer):
    """Tokens of a prompt: K/V that was there, and K/V that was computed (and so written)."""

    cached_tokens: int
    cache_write_tokens: int


class Usage(Answer):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class ModelCard(Answer):
    """An entry of `GET /v1/models`."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "kvpager"
    root: str
    parent: None = None
    max_model_len: int | None


class ModelList(Answer):
    """The answer of `GET /v1/models`."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class ErrorBody(Answer):
    """What an error has."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(Answer):
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
