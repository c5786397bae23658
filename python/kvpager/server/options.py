"""The fields of a request as options of a generation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from pydantic import BaseModel

from kvpager._runtime.text.json_values import exact
from kvpager.errors import InvalidArgumentError
from kvpager.grammar import Grammar
from kvpager.server.errors import bad_request, context_exceeded_in_characters
from kvpager.server.json_limits import check_gbnf, check_schemas, texts_in
from kvpager.server.routes.caller import Caller
from kvpager.server.schema.common import (
    HEADER,
    Common,
    Sampled,
    SchemaFormat,
    StructuredOutputs,
    TextFormat,
    ignored_fields,
)
from kvpager.server.schema.messages import MessagesRequest
from kvpager.server.service import Service
from kvpager.stores.names import check_name

_SEEDS = 1 << 64
_ANY_OBJECT = {"type": "object"}
_UNLIMITED = (1 << 31) - 1  # tokens; the context limits them


def sampling(body: Common | MessagesRequest) -> dict[str, Any]:
    """Returns the temperature, top_p, top_k and min_p that a request gives."""
    given = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": None if body.top_k is None else max(0, body.top_k),
        "min_p": getattr(body, "min_p", None),
    }
    return {name: value for name, value in given.items() if value is not None}


def sampled(service: Service, body: Common) -> dict[str, Any]:
    """Returns `sampling` with stops and penalties."""
    if isinstance(body, Sampled) and body.stream_options is not None and not body.stream:
        raise bad_request("stream_options is given; expected it with stream only", "stream_options")
    options = sampling(body)
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
    """Returns headers of a response: its session, and the ignored fields."""
    headers = {} if session is None else {"x-session-id": session}
    if ignored := [*ignored_fields(body), *also_ignored]:
        headers[HEADER] = ", ".join(ignored)
    return headers


def template_variables(
    service: Service, given: Mapping[str, Any] | None, asked: Mapping[str, tuple[str, Any]]
) -> tuple[dict[str, Any], list[str]]:
    """Returns variables of the chat template, and the fields that it has no variable for.

    Args:
        service: has the template.
        given: the request's own variables, which take precedence.
        asked: for each field, the variable's name and its value.
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
    """Returns the most tokens of an answer from these fields; None: the server's default."""
    named = next((one for one in (*given, body.n_predict) if one is not None), None)
    return _UNLIMITED if named == -1 else named


def grammar_of(body: Sampled) -> Grammar | None:
    """Returns the grammar that one of several servers' fields asks for. Raises ApiError."""
    asked = body.structured_outputs or StructuredOutputs()
    form: Any = body.response_format
    if isinstance(form, SchemaFormat):
        form = form.json_schema.schema_
    elif form is not None:
        form = None if isinstance(form, TextFormat) else form.schema_ or _ANY_OBJECT
    wanted: tuple[tuple[str, Callable[[Any], Grammar], Any], ...] = (
        ("response_format", Grammar.json_schema, form),
        ("json_schema", Grammar.json_schema, body.json_schema),
        ("regex", Grammar.regex, body.regex),
        ("grammar", Grammar.gbnf, body.grammar or None),  # "" is llama.cpp's default
        ("ebnf", Grammar.gbnf, body.ebnf),
        ("guided_json", Grammar.json_schema, body.guided_json),
        ("guided_regex", Grammar.regex, body.guided_regex),
        ("guided_choice", Grammar.choice, body.guided_choice),
        ("guided_grammar", Grammar.gbnf, body.guided_grammar),
        ("structured_outputs.json", Grammar.json_schema, asked.json_),
        ("structured_outputs.regex", Grammar.regex, asked.regex),
        ("structured_outputs.choice", Grammar.choice, asked.choice),
        ("structured_outputs.grammar", Grammar.gbnf, asked.grammar),
        (
            "structured_outputs.json_object",
            Grammar.json_schema,
            _ANY_OBJECT if asked.json_object else None,
        ),
    )
    given = [one for one in wanted if one[2] is not None]
    if len(given) > 1:
        names = [name for name, *_ in given]
        raise bad_request(f"{' and '.join(names)} are given; expected one of them", names[0])
    for name, make, value in given:
        return grammar_of_field(name, make, value)
    return None


def grammar_of_field(name: str, make: Callable[[Any], Grammar], value: Any) -> Grammar:
    """Returns a grammar whose errors name the field. Raises ApiError if it is too large or bad.

    make: Grammar.json_schema, regex, choice, gbnf or lark.
    """
    if make == Grammar.gbnf:
        check_gbnf(value, name)
    elif make != Grammar.lark:
        keyword = {Grammar.regex: "pattern", Grammar.choice: "enum"}.get(make)
        check_schemas([value if keyword is None else {keyword: value}], name)
    try:
        return replace(make(value), name=name)
    except InvalidArgumentError as error:
        raise bad_request(str(error).replace("grammar", name, 1), name) from error


def turn_fields(caller: Caller, body: Common | MessagesRequest) -> dict[str, Any]:
    """Fields of `ServedTurn` that every endpoint sets alike. Raises ApiError."""
    return {
        "service": caller.service,
        "conversations": caller.conversations,
        "salt": caller.service.salt(caller.tenant, body.cache_salt),
        "seed": None if body.seed is None else body.seed % _SEEDS,
        "priority": _priority(caller, getattr(body, "priority", None)),
        "replaces": bool(body.session_replace),
        "on_corrupt": body.on_corrupt or caller.service.settings.on_corrupt,
    }


def choices_of(service: Service, body: Sampled) -> int:
    """Returns the number of answers. Raises ApiError."""
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
    """Raises ApiError if messages and tools have too many characters for a prompt."""
    values = [list(messages), tools, instructions]
    if len(exact(values)) > service.most_characters:  # each character has a byte in it, or several
        _check_characters(service, sum(map(len, texts_in(values))), "messages")


def check_texts(service: Service, texts: Sequence[Any], name: str) -> None:
    """Raises ApiError for a text that is too long; ignores lists of token ids."""
    for number, text in enumerate(texts):
        if isinstance(text, str):
            where = f"{name}[{number}]" if len(texts) > 1 else name
            _check_characters(service, len(text), where)


def _check_characters(service: Service, count: int, name: str) -> None:
    most = service.most_characters
    if count > most:
        raise context_exceeded_in_characters(count, most, name)


def kept_fields(body: Common, session: str | None, stored: str | None = None) -> dict[str, Any]:
    """Fields of `ServedTurn` about the conversation that goes on, and is kept.

    Args:
        body: names one by a `prompt_cache_key`.
        session: a name, which comes first.
        stored: a name, which comes last.
    """
    key, ttl = cache_key_name(body), _cache_ttl(body)
    keep_as = session or (key if ttl is not None else None) or stored
    return {
        "continues": session,
        "hint": key,
        "keep_as": keep_as,
        "save": keep_as is not None,
        "save_ttl": ttl if keep_as == key else None,
    }


def cache_key_name(body: Common) -> str | None:
    """Returns the name of the saved conversation of a `prompt_cache_key`."""
    if body.prompt_cache_key is None:
        return None
    digest = blake2b(body.prompt_cache_key.encode(), digest_size=16, person=b"kvp-cache-key")
    return "key-" + digest.hexdigest()


def _cache_ttl(body: Common) -> str | None:
    """Returns the lifetime of a `prompt_cache_key`'s conversation; None: it is not saved."""
    options = body.prompt_cache_options
    if options is not None and options.mode == "explicit":
        return None
    if options is not None and options.ttl is not None:
        return options.ttl
    kept = {None: "30m", "24h": "24h", "in_memory": None, "in-memory": None}
    return kept[body.prompt_cache_retention]


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
    """Returns the session's name, from the body or `X-Session-ID`. Raises ApiError."""
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


def _priority(caller: Caller, given: int | None) -> int:
    """Returns the request's priority, or its tenant's. Raises ApiError if it is lower.

    vllm-router adds 0 to responses, so that it is no claim to come before the tenant's own.
    """
    own = caller.tenant.priority
    if given == 0 < own:
        return own
    if given is not None and caller.service.tenants.needs_keys and given < own:
        raise bad_request(f"priority is {given}; expected at least {own}, the tenant's", "priority")
    return own if given is None else given
