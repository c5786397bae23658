"""`POST /v1/chat/completions`."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request
from sse_starlette import ServerSentEvent

from kvpager._runtime.scheduling.stream import GeneratedToken
from kvpager._runtime.text.call_parsing import ReasoningDelta, TextDelta
from kvpager.requests.request import RequestCompletion
from kvpager.server import options
from kvpager.server.answers import Delta, Reader, answering, finish_reason, stop_reason, usage_of
from kvpager.server.errors import bad_request
from kvpager.server.messages import as_dicts, ending, save_points
from kvpager.server.responding import Chunks, Responding, respond
from kvpager.server.routes.caller import Caller, JsonRoute, TheCaller
from kvpager.server.schema.chat import (
    AnswerMessage,
    ChatCompletion,
    ChatRequest,
    Choice,
    ChosenTool,
    Logprobs,
)
from kvpager.server.schema.common import NAME_PATTERN, new_id
from kvpager.server.turn import ServedTurn, TokenPiece

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
    turn = await caller.read(lambda: _ChatTurn(caller, body, session))
    return await respond(request, turn, streamed=body.stream, on_error=caller.service.metrics.error)


class _ChatTurn(ServedTurn, Responding):
    """A chat completion."""

    def __init__(self, caller: Caller, body: ChatRequest, session: str | None) -> None:
        service = caller.service
        self._body = body
        self._session = session
        self.id = body.request_id or new_id("chatcmpl-")
        self._head = service.head(self.id)
        self._chunks = Chunks(
            {"object": "chat.completion.chunk", **self._head},
            body.stream_options,
            self.usage_so_far,
        )
        choice = body.tool_choice
        answers = answering(
            service,
            [tool.function for tool in body.tools or ()],
            None if isinstance(choice, ChosenTool) else choice,
            choice.function.name if isinstance(choice, ChosenTool) else None,
            parallel=body.parallel_tool_calls is not False,
            grammar=options.grammar_of(body),
        )
        self._reader = answers.reader
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
        chosen = options.sampled(service, body) | answers.options
        if body.top_logprobs:
            chosen["top_logprobs"] = body.top_logprobs
        cache = body.prompt_cache_options
        stored = self.id if body.store else None
        if stored is not None and not re.fullmatch(NAME_PATTERN, stored):
            raise bad_request(
                f"request_id is {stored!r}; expected up to 200 letters, digits, '.', '_' and '-' "
                "with store, which keeps the conversation under that name",
                "request_id",
            )
        messages = as_dicts(body.messages)
        options.check_prompt(service, messages, answers.tools)
        super().__init__(
            **options.turn_fields(caller, body),
            **options.kept_fields(body, session, stored),
            messages=messages,
            history=body.messages,
            rendering=service.rendering(answers.tools, variables, **ending(body)),
            save_points=save_points((one.content for one in body.messages), cache),
            choices=options.choices_of(service, body),
            max_new_tokens=most,
            options=chosen,
            logprobs=bool(body.logprobs),
            share=cache is None or cache.mode != "explicit",
            headers=options.headers_of(body, session, ignored),
        )

    async def whole(self) -> ChatCompletion:
        """Returns the whole answer, once its conversation is kept."""
        readers = [self._reader(new_id) for _ in range(self.choices)]
        async for one in self.events():
            if isinstance(one, TokenPiece):
                readers[one.choice].push(one)
            else:
                readers[one.choice].end(one.completion)
        completions = self.completions
        choices = [
            self._choice(number, *each) for number, each in enumerate(zip(completions, readers))
        ]
        prompt_ids = self.prompt_ids if self._body.return_token_ids else None
        await self.finish(readers[0].message())
        return ChatCompletion(
            **self._head,
            choices=choices,
            usage=usage_of([completions]),
            service_tier="default" if self._body.service_tier else None,
            session_id=self._session,
            prompt_token_ids=prompt_ids,
        )

    def _choice(self, number: int, completion: RequestCompletion, reader: Reader) -> Choice:
        ids: list[int] = completion.tokens.tolist()
        logprobs = None
        if completion.logprobs is not None:
            top = completion.top_logprobs or [()] * len(ids)
            texts = self.service.token_texts
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
            finish_reason=finish_reason(completion, reader.calls),
            stop_reason=stop_reason(completion),
            token_ids=ids if self._body.return_token_ids else None,
        )

    async def stream(self) -> AsyncIterator[ServerSentEvent]:
        """Yields the answer as chunks, the last ones once its conversation is kept."""
        readers = [self._reader(new_id) for _ in range(self.choices)]
        for number in range(self.choices):
            yield self._chunk(number, {"role": "assistant", "content": ""})
        ended: list[int] = []
        async for one in self.events():
            reader, more = readers[one.choice], {}
            if isinstance(one, TokenPiece):
                deltas = [delta for each in reader.push(one) for delta in _deltas(each)]
                more = self._of_token(one)
                if not deltas and more:
                    deltas = [{"content": ""}]
            else:
                deltas = [delta for each in reader.end(one.completion) for delta in _deltas(each)]
                ended.append(one.choice)
            for delta in deltas:
                yield self._chunk(one.choice, delta, **more)
                more = {}
        completions = self.completions
        await self.finish(readers[0].message())
        for choice in ended:
            completion = completions[choice]
            reason = finish_reason(completion, readers[choice].calls)
            stopped = stop_reason(completion)
            yield self._chunk(choice, {}, finish_reason=reason, stop_reason=stopped)
        for last in self._chunks.last(usage_of([completions]).model_dump()):
            yield last

    def _of_token(self, piece: TokenPiece) -> dict[str, Any]:
        """Fields of the chunk of a token, where the request asks for them."""
        more: dict[str, Any] = {}
        if isinstance(piece.token, GeneratedToken):
            content = self.service.token_texts.chosen(piece.token).model_dump()
            more["logprobs"] = {"content": [content], "refusal": None}
        if self._body.return_token_ids:
            more["token_ids"] = [piece.token_id]
        return more

    def _chunk(self, choice: int, delta: dict[str, Any], **more: Any) -> ServerSentEvent:
        values = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        return self._chunks.of(values, is_text="content" in delta)


def _deltas(one: Delta) -> list[dict[str, Any]]:
    """Returns the deltas of chunks: a call begins in one, and its arguments follow."""
    if isinstance(one, TextDelta):
        return [{"content": one.text}]
    if isinstance(one, ReasoningDelta):
        return [{"reasoning_content": one.text}]
    arguments = {"index": one.index, "function": {"arguments": one.function.arguments}}
    begun = one.model_dump()
    begun["function"]["arguments"] = ""
    return [{"tool_calls": [begun]}, {"tool_calls": [arguments]}]
