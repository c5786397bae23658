"""The fields of a request as options of a generation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

from fastapi import Response
from pydantic import BaseModel

from kvpager.errors import InvalidArgumentError
from kvpager.grammar import Grammar
from kvpager.server.errors import bad_request, context_exceeded_in_characters
from kvpager.server.routes.caller import Caller
from kvpager.server.schema.common import Common, Sampled
from kvpager.server.schema.messages import MessagesRequest
from kvpager.server.schema.neutral import HEADER, ignored_fields
from kvpager.server.schema_limits import check_schemas
from kvpager.server.service import Service
from kvpager.stores.names import check_name

_SEEDS = 1 << 64
_MINUTES = "30m"
_DAY = "24h"
_UNLIMITED = (1 << 31) - 1  # tokens of an answer, which are cut to what the context leaves


def sampling(service: Service, body: Common | MessagesRequest) -> dict[str, Any]:
    """temperature, top_p, top_k and min_p; what is not given is the model's own, or plain sampling.

    As with OpenAI and vLLM the temperature is 1 where neither the request nor the model's
    generation_config says otherwise.
    """
    given = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": None if body.top_k is None else max(0, body.top_k),
        "min_p": getattr(body, "min_p", None),
    }
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    own = getattr(service.engine.model, "generation_config", None)
    if getattr(own, "do_sample", False):
        return {"generation_config": "model", **options}
    return {"temperature": 1.0, **options}


def sampled(service: Service, body: Sampled) -> dict[str, Any]:
    """Those of a chat completion or a completion, ends and penalties included."""
    options = sampling(service, body)
    stops: list[Any] = [body.stop] if isinstance(body.stop, str) else list(body.stop or ())
    if "" in stops:
        raise bad_request("stop is ''; expected text that is not empty", "stop")
    for token in body.stop_token_ids or ():
        _check_token(service, token, "stop_token_ids")
        stops.append([token])
    if stops:
        options["stop"] = stops
    if body.ignore_eos:
        options["eos"] = None
    if body.min_tokens:
        options["min_new_tokens"] = body.min_tokens
    if body.skip_special_tokens is False:
        options["skip_special_tokens"] = False
    if body.include_stop_str_in_output:
        options["include_stop"] = True
    if body.logit_bias:
        options["logit_bias"] = _biases(service, body.logit_bias)
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        value = getattr(body, name)
        if value is not None:
            options[name] = value
    return options


def headers_of(
    body: BaseModel, session: str | None = None, also_ignored: Iterable[str] = ()
) -> dict[str, str]:
    """Headers of an answer: its session, and the fields that it does not heed."""
    headers = {} if session is None else {"x-session-id": session}
    if ignored := [*ignored_fields(body), *also_ignored]:
        headers[HEADER] = ", ".join(ignored)
    return headers


def template_variables(
    service: Service, given: Mapping[str, Any] | None, asked: Mapping[str, tuple[str, Any]]
) -> tuple[dict[str, Any], list[str]]:
    """Variables of the chat template, and the fields that it has no variable for.

    Args:
        service: whose model's template it is.
        given: the request's own variables, which come first.
        asked: for each field that wants one: the variable's name and its value.
    """
    variables, ignored = dict(given or {}), []
    text = str(getattr(service.engine.tokenizer, "chat_template", None) or "")
    for field, (name, value) in asked.items():
        if value is None:
            continue
        if name in text:
            variables.setdefault(name, value)
        else:
            ignored.append(field)
    return variables, ignored


def most_new(body: Sampled, *given: int | None) -> int | None:
    """The most tokens of an answer, of the fields that name it; None: the server's."""
    named = next((one for one in (*given, body.n_predict) if one is not None), None)
    return _UNLIMITED if named == -1 else named


def grammar_of(body: Sampled) -> Grammar | None:
    """What vLLM's fields want of the text. Raises ApiError."""
    asked = body.structured_outputs
    check_schemas([body.guided_json], "guided_json")
    check_schemas([{"pattern": body.guided_regex}], "guided_regex")
    check_schemas([{"enum": body.guided_choice}], "guided_choice")
    wanted: dict[str, tuple[Callable[[Any], Grammar], Any]] = {
        "guided_json": (Grammar.json_schema, body.guided_json),
        "guided_regex": (Grammar.regex, body.guided_regex),
        "guided_choice": (Grammar.choice, body.guided_choice),
    }
    if asked is not None:
        read = {"pattern": asked.regex, "enum": asked.choice}
        check_schemas([asked.json_, read], "structured_outputs")
        wanted["structured_outputs.json"] = (Grammar.json_schema, asked.json_)
        wanted["structured_outputs.regex"] = (Grammar.regex, asked.regex)
        wanted["structured_outputs.choice"] = (Grammar.choice, asked.choice)
        any_object = asked.json_object or None
        wanted["structured_outputs.json_object"] = (lambda _: Grammar.json_object(), any_object)
    given = {name: pair for name, pair in wanted.items() if pair[1] is not None}
    if len(given) > 1:
        raise bad_request(f"{' and '.join(given)} are given; expected one of them", min(given))
    for name, (make, value) in given.items():
        with grammar_of_field(name):
            return make(value)
    return None


@contextmanager
def grammar_of_field(name: str) -> Iterator[None]:
    """Raises ApiError about the field for a grammar that is refused."""
    try:
        yield
    except InvalidArgumentError as error:
        raise bad_request(str(error).replace("grammar", name, 1), name) from error


def seed_of(body: Common | MessagesRequest) -> int | None:
    """The seed, in the range that sampling has."""
    return None if body.seed is None else body.seed % _SEEDS


def choices_of(service: Service, body: Sampled) -> int:
    """How many answers. Raises ApiError."""
    count = body.n or 1
    if count > service.settings.max_choices:
        raise bad_request(f"n is {count}; expected 1 to {service.settings.max_choices}", "n")
    return count


def check_prompt(
    service: Service,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    instructions: str | None = None,
) -> None:
    """Raises ApiError where messages and tools have more characters than a prompt may have."""
    count = len(instructions or "") + _characters(tools or ())
    _check_characters(service, count + sum(map(_characters, messages)), "messages")


def check_texts(service: Service, texts: Sequence[Any], name: str) -> None:
    """Raises ApiError for a text that is too long; lists of token ids are none."""
    for number, text in enumerate(texts):
        if isinstance(text, str):
            where = f"{name}[{number}]" if len(texts) > 1 else name
            _check_characters(service, len(text), where)


def _check_characters(service: Service, count: int, name: str) -> None:
    most = service.most_characters
    if count > most:
        raise context_exceeded_in_characters(count, most, name)


def _characters(value: Any) -> int:
    """Of all texts in a JSON value, names of fields included."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(name) + _characters(one) for name, one in value.items())
    return sum(map(_characters, value)) if isinstance(value, (list, tuple)) else 0


def cache_key_name(body: Common) -> str | None:
    """The name under which a `prompt_cache_key`'s conversation is saved."""
    if body.prompt_cache_key is None:
        return None
    digest = blake2b(body.prompt_cache_key.encode(), digest_size=16, person=b"kvp-cache-key")
    return "key-" + digest.hexdigest()


def cache_ttl(body: Common) -> str | None:
    """How long what is saved for a `prompt_cache_key` lives; None: it is not saved."""
    options = body.prompt_cache_options
    if options is not None and options.mode == "explicit":
        return None
    if options is not None and options.ttl is not None:
        return options.ttl
    kept = {"24h": _DAY, "in_memory": None, "in-memory": None}
    return kept.get(body.prompt_cache_retention or "", _MINUTES)


def _check_token(service: Service, token: int, name: str) -> None:
    size = service.engine.vocab_size
    if token >= size:
        raise bad_request(f"{name} has token id {token}; expected ids from 0 to {size - 1}", name)


def _biases(service: Service, given: dict[str, float]) -> dict[int, float]:
    biases = {}
    for text, bias in given.items():
        if not (text.isascii() and text.isdigit()):
            raise bad_request(f"logit_bias has a key {text!r}; expected token ids", "logit_bias")
        if not -100 <= bias <= 100:
            raise bad_request(f"logit_bias[{text}] is {bias}; expected -100 to 100", "logit_bias")
        _check_token(service, int(text), "logit_bias")
        biases[int(text)] = bias
    return biases


def session_name(field: str | None, header: str | None) -> str | None:
    """The conversation's name, of the body or of `X-Session-ID`. Raises ApiError."""
    if field is not None and header is not None and field != header:
        raise bad_request(
            f"session_id is {field!r}, and X-Session-ID is {header!r}; expected one of them",
            "session_id",
        )
    name = field if field is not None else header
    if name is not None:
        try:
            check_name(name)
        except InvalidArgumentError as error:
            raise bad_request(f"session_id: {error}", "session_id") from error
    return name


def priority_of(caller: Caller, body: Common) -> int:
    """Of the request, or its tenant's. Raises ApiError for one before the tenant's own."""
    own = caller.tenant.priority
    if body.priority is None:
        return own
    if caller.service.tenants.needs_keys and body.priority < own:
        raise bad_request(
            f"priority is {body.priority}; expected at least {own}, the tenant's", "priority"
        )
    return body.priority


def json_response(answer: BaseModel, headers: Mapping[str, str] | None = None) -> Response:
    """An answer as JSON, with null where a field has no value."""
    return Response(
        answer.model_dump_json(), media_type="application/json", headers=dict(headers or {})
    )
