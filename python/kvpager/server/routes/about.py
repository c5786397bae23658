"""Health, models, metrics, and conversion between text and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Header, Response
from pydantic import Field

from kvpager import __version__
from kvpager._runtime.text.tokenizer import Tokenizer
from kvpager._support.tokens import TokenIds
from kvpager.server.bodies import in_thread
from kvpager.server.errors import ApiError, bad_request
from kvpager.server.messages import as_dicts, ending
from kvpager.server.options import check_prompt, check_texts
from kvpager.server.responding import json_response
from kvpager.server.routes.caller import JsonRoute, TheCaller, TheService, tenant_of
from kvpager.server.schema.chat import TokenizeRequest
from kvpager.server.schema.common import (
    AnswerPart,
    Body,
    ModelCard,
    ModelList,
    TokenId,
)
from kvpager.server.service import Service

router = APIRouter(route_class=JsonRoute)


class Health(AnswerPart):
    """Status of the process."""

    status: str


class Version(AnswerPart):
    """Version of kvpager."""

    version: str


class Tokens(AnswerPart):
    """Token ids."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Body):
    """Token ids."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(min_length=1)]


class Text(AnswerPart):
    """The text of token ids, special ones included."""

    prompt: str


@router.get("/health")
async def health() -> Health:
    """Returns 200 while the process answers."""
    return Health(status="ok")


@router.get("/ready")
async def ready(service: TheService) -> Health:
    """Returns 200 while requests are accepted."""
    service.check_open()
    return Health(status="ready")


@router.get("/version")
def show_version() -> Version:
    """The version of kvpager."""
    return Version(version=__version__)


@router.get("/v1/models")
def models(caller: TheCaller) -> ModelList:
    """The model, by each of its names."""
    return ModelList(data=[_card(caller.service, name) for name in caller.service.names])


@router.get("/v1/models/{model:path}")
def model(model: str, caller: TheCaller) -> ModelCard:
    """One model."""
    caller.service.check_model(model)
    return _card(caller.service, model)


@router.get("/metrics", response_class=Response)
async def metrics(
    service: TheService,
    authorization: Annotated[str | None, Header()] = None,
    x_api_key: Annotated[str | None, Header()] = None,
) -> Response:
    """Returns Prometheus metrics; a tenant's only with its own key."""
    tenants = [one.name for one in service.tenants.all()]
    if service.tenants.needs_keys:
        try:
            tenants = [tenant_of(service, authorization, x_api_key).name]
        except ApiError:
            tenants = []
    return Response(
        await in_thread(lambda: service.metrics.text(tenants)),
        media_type="text/plain; version=0.0.4; charset=utf-8",
    )


@router.post("/tokenize", response_model=None, responses={200: {"model": Tokens}})
async def tokenize(body: TokenizeRequest, caller: TheCaller) -> Response:
    """Returns the token ids of a text, or of messages in the chat template."""
    service = caller.service
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("expected one of prompt and messages", "prompt")
    tokenizer = _tokenizer(service)

    def encoded() -> Sequence[int] | TokenIds:
        if body.prompt is not None:
            if not body.prompt:
                return []
            special = body.add_special_tokens is not False
            check_texts(service, [body.prompt], "prompt")
            return tokenizer.encode(body.prompt, "prompt", special_tokens=special)
        assert body.messages is not None
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()] or None
        messages = as_dicts(body.messages)
        check_prompt(service, messages, tools)
        rendering = service.rendering(tools, body.chat_template_kwargs, **ending(body))
        return tokenizer.prompt_ids(messages, rendering)

    def answer() -> Response:
        ids = [int(token) for token in encoded()]
        texts = [service.token_texts.text(one) for one in ids] if body.return_token_strs else None
        most = service.most_tokens
        tokens = Tokens(count=len(ids), max_model_len=most, tokens=ids, token_strs=texts)
        return json_response(tokens)

    return await caller.read(answer)


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, caller: TheCaller) -> Text:
    """The text of token ids."""
    service = caller.service
    service.check_model(body.model)
    tokenizer = _tokenizer(service)

    def decoded() -> str:
        ids = service.engine.core.read_ids(body.tokens, "tokens")
        return tokenizer.decode(ids, special_tokens=True)

    return Text(prompt=await caller.read(decoded))


def _tokenizer(service: Service) -> Tokenizer:
    if service.tokenizer is None:
        text, kind = "the model has no tokenizer", "invalid_request_error"
        raise ApiError(501, text, kind=kind, code="no_tokenizer")
    return service.tokenizer


def _card(service: Service, name: str) -> ModelCard:
    created, most = int(service.started), service.most_tokens
    return ModelCard(id=name, created=created, root=service.root, max_model_len=most)
