"""Whether the server is well, what it serves, and text as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Header, Response
from pydantic import Field

from kvpager._version import __version__
from kvpager.server.bodies import JsonRoute
from kvpager.server.errors import ApiError, bad_request
from kvpager.server.messages import as_dicts, continues_last
from kvpager.server.options import check_prompt, check_texts, json_response
from kvpager.server.routes.caller import TheCaller, TheService, tenant_of
from kvpager.server.schema.chat import Message, Tool
from kvpager.server.schema.common import (
    Answer,
    Body,
    ModelCard,
    ModelList,
    TemplateVariables,
    TokenId,
)
from kvpager.server.service import Service
from kvpager.server.threads import in_thread
from kvpager.tokens import TokenIds

router = APIRouter(route_class=JsonRoute)


class Health(Answer):
    """Whether the process lives."""

    status: str


class Version(Answer):
    """What is running."""

    version: str


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


class Tokens(Answer):
    """Token ids."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Body):
    """Token ids."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(min_length=1)]


class Text(Answer):
    """The text of token ids, special ones included."""

    prompt: str


@router.get("/health")
async def health() -> Health:
    """200 as long as the process answers."""
    return Health(status="ok")


@router.get("/ready")
async def ready(service: TheService) -> Health:
    """200 while requests are taken."""
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
    """Prometheus metrics; those of a tenant for its own key alone."""
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
    """The token ids of a text, or of what the chat template makes of messages."""
    service = caller.service
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("expected one of prompt and messages", "prompt")
    tokenizer = service.tokenizer
    if tokenizer is None:
        raise ApiError(501, "the model has no tokenizer", code="no_tokenizer")

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
        prompted = body.add_generation_prompt
        rendering = service.rendering(
            tools,
            body.chat_template_kwargs,
            continues=continues_last(
                body.messages, continued=body.continue_final_message, prompted=prompted
            ),
            generation_prompt=prompted is not False,
        )
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
    tokenizer = service.tokenizer
    if tokenizer is None:
        raise ApiError(501, "the model has no tokenizer", code="no_tokenizer")

    def decoded() -> str:
        ids = service.engine.core.read_ids(body.tokens, "tokens")
        return tokenizer.decode(ids, special_tokens=True)

    return Text(prompt=await caller.read(decoded))


def _card(service: Service, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        created=int(service.started),
        root=service.root,
        max_model_len=service.most_tokens,
    )
