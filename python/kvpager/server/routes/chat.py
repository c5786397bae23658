"""`POST /v1/chat/completions`."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request
from sse_starlette import ServerSentEvent

from kvpager.requests.completion import RequestCompletion
from kvpager.scheduling.stream import GeneratedToken
from kvpager.server import options
from kvpager.server.answers import Delta, Reader, answering_of, finish_reason, stop_reason
from kvpager.server.bodies import JsonRoute
from kvpager.server.disconnects import unless_gone
from kvpager.server.errors import bad_request
from kvpager.server.exchange import Exchange
from kvpager.server.ids import new_id
from kvpager.server.messages import as_dicts, continues_last, marks_of
from kvpager.server.plan import Plan, Prompt
from kvpager.server.production import Ended, Piece
from kvpager.server.routes.caller import Caller, TheCaller
from kvpager.server.schema.chat import (
    AnswerMessage,
    ChatCompletion,
    ChatRequest,
    Choice,
    Logprobs,
)
from kvpager.server.schema.common import NAME_PATTERN
from kvpager.server.streaming import asks_to_pad, done, event, head_usage, stream
from kvpager.server.usage import usage_of

router = APIRouter(route_class=JsonRoute)


@router.post(
    "/v1/chat/completions",
    response_model=None,
    responses={200: {"model": ChatCompletion}},
)
async def chat_completions(
    request: Request,
    body: ChatRequest,
    caller: TheCaller,
    x_session_id: Annotated[str | None, Header()] = None,
) -> Any:
    """Answers a conversation; with `stream` as server-sent events."""
    caller.service.check_model(body.model)
    session = options.session_name(body.session_id, x_session_id)
    turn = await caller.read(lambda: _Turn(caller, body, session))
    exchange = Exchange(caller.service, turn.plan)
    if body.stream:
        await exchange.begin()
        return stream(
            [exchange], turn.chunks(exchange), lambda error: event(error.body()), turn.headers
        )

    async def whole() -> ChatCompletion:
        await exchange.begin()
        return await turn.finish(exchange)

    try:
        answer = await unless_gone(request, whole())
    finally:
        await exchange.release()
    return turn.respond(answer)


class _Turn:
    """One request and how its answer is told."""

    def __init__(self, caller: Caller, body: ChatRequest, session: str | None) -> None:
        service = caller.service
        self._service = service
        self._body = body
        self._session = session
        self.id = body.request_id or new_id("chatcmpl-")
        self._created = int(time.time())
        self._answering = answering_of(service, body)
        if body.stream_options is not None and not body.stream:
            raise bad_request(
                "stream_options is given; expected it with stream only", "stream_options"
            )
        if body.top_logprobs and not body.logprobs:
            raise bad_request(
                f"top_logprobs is {body.top_logprobs}; expected logprobs: true with it",
                "top_logprobs",
            )
        most = options.most_new(body, body.max_completion_tokens, body.max_tokens)
        variables, ignored = options.template_variables(
            service,
            body.chat_template_kwargs,
            {
                "reasoning_effort": ("reasoning_effort", body.reasoning_effort),
                "enable_thinking": ("enable_thinking", body.enable_thinking),
            },
        )
        self.headers = options.headers_of(body, session, ignored)
        chosen = options.sampled(service, body) | dict(self._answering.options)
        if body.top_logprobs:
            chosen["top_logprobs"] = body.top_logprobs
        explicit = body.prompt_cache_options is not None and (
            body.prompt_cache_options.mode == "explicit"
        )
        key, ttl = options.cache_key_name(body), options.cache_ttl(body)
        stored = self.id if body.store else None
        if stored is not None and not re.fullmatch(NAME_PATTERN, stored):
            raise bad_request(
                f"request_id is {stored!r}; expected up to 200 letters, digits, '.', '_' and '-' "
                "with store, which keeps the conversation under that name",
                "request_id",
            )
        keep_as = session or (key if ttl is not None else None) or stored
        messages = as_dicts(body.messages)
        options.check_prompt(service, messages, self._answering.tools)
        self.plan = Plan(
            conversations=caller.conversations,
            salt=service.salt(caller.tenant, body.cache_salt),
            prompt=Prompt(
                messages=messages,
                rendering=service.rendering(
                    self._answering.tools,
                    variables,
                    continues=continues_last(
                        body.messages,
                        continued=body.continue_final_message,
                        prompted=body.add_generation_prompt,
                    ),
                    generation_prompt=body.add_generation_prompt is not False,
                ),
                marks=marks_of(body.messages, body.prompt_cache_options),
            ),
            choices=options.choices_of(service, body),
            max_new_tokens=most,
            options=chosen,
            seed=options.seed_of(body),
            logprobs=bool(body.logprobs),
            priority=options.priority_of(caller, body),
            continues=session,
            hint=key,
            keep_as=keep_as,
            save=keep_as is not None,
            save_ttl=ttl if keep_as == key and key is not None else None,
            share=not explicit,
            on_corrupt=body.on_corrupt or service.settings.on_corrupt,
        )

    def respond(self, answer: ChatCompletion) -> Any:
        """The whole answer as JSON."""
        return options.json_response(answer, self.headers)

    async def finish(self, exchange: Exchange) -> ChatCompletion:
        """The whole answer, once its conversation is kept."""
        readers = [self._answering.reader() for _ in range(self.plan.choices)]
        async for one in exchange.events():
            if isinstance(one, Piece):
                readers[one.choice].push(one)
            else:
                readers[one.choice].end()
        completions = exchange.completions
        choices = [
            self._choice(number, *each) for number, each in enumerate(zip(completions, readers))
        ]
        prompt_ids = exchange.prompt_ids if self._body.return_token_ids else None
        await exchange.finish(readers[0].message())
        return ChatCompletion(
            id=self.id,
            created=self._created,
            model=self._service.model,
            choices=choices,
            usage=usage_of([completions]),
            service_tier="default" if self._body.service_tier else None,
            system_fingerprint=self._service.fingerprint,
            session_id=self._session,
            prompt_token_ids=prompt_ids,
        )

    def _choice(self, number: int, completion: RequestCompletion, reader: Reader) -> Choice:
        ids: list[int] = completion.tokens.tolist()
        logprobs = None
        if completion.logprobs is not None:
            top = completion.top_logprobs or [()] * len(ids)
            texts = self._service.token_texts
            logprobs = Logprobs(
                content=[
                    texts.chosen(GeneratedToken(*one))
                    for one in zip(ids, completion.logprobs.tolist(), top)
                ]
            )
        return Choice(
            index=number,
            message=AnswerMessage(
                content=reader.content,
                reasoning_content=reader.reasoning,
                tool_calls=reader.calls or None,
            ),
            logprobs=logprobs,
            finish_reason=finish_reason(completion, reader),
            stop_reason=stop_reason(completion),
            token_ids=ids if self._body.return_token_ids else None,
        )

    async def chunks(self, exchange: Exchange) -> AsyncIterator[ServerSentEvent]:
        """The answer as chunks."""
        self._exchange = exchange
        readers = [self._answering.reader() for _ in range(self.plan.choices)]
        for number in range(self.plan.choices):
            yield self._chunk(number, {"role": "assistant", "content": ""})
        ends: list[Ended] = []
        async for one in exchange.events():
            if isinstance(one, Piece):
                for chunk in self._told(one, readers[one.choice]):
                    yield chunk
            else:
                assert one.completion is not None
                for delta in readers[one.choice].end():
                    yield self._chunk(one.choice, delta.values)
                ends.append(one)
        completions = exchange.completions
        await exchange.finish(readers[0].message())
        for end in ends:  # once what they tell of is saved
            yield self._end(end, readers[end.choice])
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            usage = usage_of([completions]).model_dump()
            yield event({**self._head, "choices": [], "usage": usage})
        yield done()

    def _told(self, piece: Piece, reader: Reader) -> list[ServerSentEvent]:
        deltas: list[Delta] = reader.push(piece)
        more: dict[str, Any] = {}
        if isinstance(piece.token, GeneratedToken):
            content = self._service.token_texts.chosen(piece.token).model_dump()
            more["logprobs"] = {"content": [content], "refusal": None}
        if self._body.return_token_ids:
            more["token_ids"] = [piece.token_id]
        if not deltas and more:
            return [self._chunk(piece.choice, {"content": ""}, **more)]
        chunks = []
        for delta in deltas:
            chunks.append(self._chunk(piece.choice, delta.values, **more))
            more = {}
        return chunks

    def _end(self, ended: Ended, reader: Reader) -> ServerSentEvent:
        completion = ended.completion
        assert completion is not None
        return self._chunk(
            ended.choice,
            {},
            reason=finish_reason(completion, reader),
            stop_reason=stop_reason(completion),
        )

    @property
    def _head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._service.model,
            "system_fingerprint": self._service.fingerprint,
            **head_usage(self._exchange.usage_so_far, self._body.stream_options),
        }

    def _chunk(
        self, choice: int, delta: dict[str, Any], *, reason: str | None = None, **more: Any
    ) -> ServerSentEvent:
        one = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": reason, **more}
        padded = asks_to_pad(self._body.stream_options) and "content" in delta
        return event({**self._head, "choices": [one]}, padded=padded)
