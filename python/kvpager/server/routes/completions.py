"""`POST /v1/completions`: text, or token ids, that goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request
from sse_starlette import ServerSentEvent

from kvpager.errors import ContextLengthError
from kvpager.requests.completion import RequestCompletion
from kvpager.scheduling.chat import within
from kvpager.scheduling.score import Score
from kvpager.scheduling.stream import GeneratedToken
from kvpager.server import errors, options
from kvpager.server.answers import stop_reason
from kvpager.server.bodies import JsonRoute
from kvpager.server.disconnects import unless_gone
from kvpager.server.errors import bad_request, unsupported
from kvpager.server.exchange import USAGE, Exchange, beside
from kvpager.server.ids import new_id
from kvpager.server.plan import Plan, Prompt
from kvpager.server.production import Piece
from kvpager.server.routes.caller import Caller, TheCaller
from kvpager.server.schema.completions import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from kvpager.server.service import Service
from kvpager.server.streaming import asks_to_pad, done, event, head_usage, stream
from kvpager.server.token_texts import TextOffsets, TokenTexts
from kvpager.server.usage import usage_of
from kvpager.text.tokenizer import text_of
from kvpager.tokens import TokenIds

DEFAULT_MAX_TOKENS = 16  # of OpenAI's API, and vLLM's

router = APIRouter(route_class=JsonRoute)


@router.post(
    "/v1/completions",
    response_model=None,
    responses={200: {"model": Completion}},
)
async def completions(
    request: Request,
    body: CompletionRequest,
    caller: TheCaller,
    x_session_id: Annotated[str | None, Header()] = None,
) -> Any:
    """Goes on with a text; with `stream` as server-sent events."""
    service = caller.service
    service.check_model(body.model)
    session = options.session_name(body.session_id, x_session_id)

    def read() -> _Text:
        return _Text(caller, body, session, _prompts(service, body))

    text = await caller.read(read)
    text.exchanges = [Exchange(service, plan) for plan in text.plans]
    if body.stream:
        await text.begin()
        chunks = text.chunks()
        return stream(text.exchanges, chunks, lambda error: event(error.body()), text.headers)
    try:
        answer = await unless_gone(request, text.whole())
    finally:
        for exchange in text.exchanges:
            await exchange.release()
    return options.json_response(answer, text.headers)


def _prompts(service: Service, body: CompletionRequest) -> list[TokenIds]:
    """The ids of each prompt. Raises ApiError."""
    given: Any = body.prompt
    nested = isinstance(given, list) and not isinstance(given[0], int)
    prompts = given if nested else [given]
    special = body.add_special_tokens is not False
    options.check_texts(service, prompts, "prompt")
    read_ids = service.engine.core.read_ids
    return [read_ids(one, f"prompt[{i}]", special_tokens=special) for i, one in enumerate(prompts)]


class _Text:
    """One request and how its answer is told."""

    def __init__(
        self, caller: Caller, body: CompletionRequest, session: str | None, prompts: list[TokenIds]
    ) -> None:
        service = caller.service
        self._service = service
        self._body = body
        self._session = session
        self._prompts = prompts
        self.id = body.request_id or new_id("cmpl-")
        self._created = int(time.time())
        most = options.most_new(body, body.max_tokens)
        self.most = DEFAULT_MAX_TOKENS if most is None else most
        self.headers = options.headers_of(body, session)
        self._choices = options.choices_of(service, body)
        if body.stream_options is not None and not body.stream:
            raise bad_request(
                "stream_options is given; expected it with stream only", "stream_options"
            )
        if body.best_of not in (None, self._choices):
            raise unsupported("best_of", "give n, and choose yourself")
        if len(prompts) > 1 and session is not None:
            raise bad_request(
                "session_id is given with several prompts; expected one", "session_id"
            )
        most = service.settings.max_waiting + service.scheduler.most_running
        if len(prompts) * self._choices > most:
            raise bad_request(
                f"prompt has {len(prompts)} texts with n = {self._choices}; expected at most "
                f"{most} completions at once",
                "prompt",
            )
        if self.most == 0 and not body.echo:
            raise bad_request("max_tokens is 0; expected at least 1, or echo: true", "max_tokens")
        self._chosen = options.sampled(service, body)
        if body.logprobs:
            self._chosen["top_logprobs"] = body.logprobs
        grammar = options.grammar_of(body)
        if grammar is not None:
            self._chosen["grammar"] = grammar
        key, ttl = options.cache_key_name(body), options.cache_ttl(body)
        keep_as = session or (key if ttl is not None else None)
        seed = options.seed_of(body)
        self.exchanges: list[Exchange] = []  # made in the event loop
        self.plans = [
            Plan(
                conversations=caller.conversations,
                salt=service.salt(caller.tenant, body.cache_salt),
                prompt=Prompt(ids=ids),
                choices=self._choices,
                max_new_tokens=self._within(ids),
                options=self._chosen,
                seed=seed,
                logprobs=body.logprobs is not None,
                priority=options.priority_of(caller, body),
                continues=session,
                hint=key,
                keep_as=keep_as if number == 0 else None,
                save=keep_as is not None and number == 0,
                save_ttl=ttl if session is None else None,
                share=False,
                on_corrupt=body.on_corrupt or service.settings.on_corrupt,
            )
            for number, ids in enumerate(prompts)
        ]

    def _within(self, ids: TokenIds) -> int:
        """As many tokens as a prompt leaves room for. Raises ApiError."""
        limit = self._service.most_tokens
        echoed = self.most == 0 and limit is not None and len(ids) <= limit
        if limit is None or echoed:
            return self.most
        try:
            return within(len(ids), self.most, limit)
        except ContextLengthError as error:
            raise errors.context_exceeded(len(ids), limit, "prompt") from error

    async def begin(self) -> None:
        """Queues the first prompts. Raises ApiError; nothing is left then."""
        try:
            for exchange in self.exchanges[: self._at_once] if self.most else ():
                await exchange.begin()
        except BaseException:
            for exchange in self.exchanges:
                await exchange.release()
            raise

    @property
    def _at_once(self) -> int:
        """How many prompts are queued at once, so that other requests come between them."""
        service = self._service
        places = min(service.scheduler.most_running, service.settings.max_waiting)
        return max(1, places // self._choices)

    async def whole(self) -> Completion:
        """The whole answer."""
        if self.most == 0:
            return await self._echoed()
        await self.begin()
        async for _ in beside(self.exchanges, self._at_once):
            pass
        made = [exchange.completions for exchange in self.exchanges]
        scores = await self._scores()
        choices: list[CompletionChoice] = []
        for prompt, several in enumerate(made):
            for completion in several:
                choices.append(self._choice(len(choices), prompt, completion, scores[prompt]))
        for exchange in self.exchanges:
            await exchange.finish()
        return self._answer(choices, usage_of(made).model_dump())

    async def _echoed(self) -> Completion:
        """The prompts alone, with their log-probabilities."""
        choices = [
            CompletionChoice(
                index=i,
                text=self._decoded(ids),
                logprobs=None if self._body.logprobs is None else self._logprobs(ids, score, None),
                finish_reason="length",
            )
            for i, (ids, score) in enumerate(self._repeated(await self._scores()))
        ]
        return self._answer(choices, self._usage_of_prompts)

    @property
    def _usage_of_prompts(self) -> dict[str, Any]:
        """Where nothing is generated."""
        count = sum(len(ids) for ids in self._prompts)
        computed = 0 if self._body.logprobs is None else count
        return {
            "prompt_tokens": count,
            "completion_tokens": 0,
            "total_tokens": count,
            "prompt_tokens_details": {"cached_tokens": 0, "cache_write_tokens": computed},
        }

    async def _scores(self) -> list[Score | None]:
        """Of each prompt, where their log-probabilities are asked for."""
        if not self._body.echo or self._body.logprobs is None:
            return [None] * len(self._prompts)
        score, count = self._service.engine.score, self._body.logprobs
        try:
            return [
                await asyncio.to_thread(score, ids, top_logprobs=count) if len(ids) > 1 else None
                for ids in self._prompts
            ]
        except Exception as error:
            raise errors.of(error) from error

    def _choice(
        self, index: int, prompt: int, completion: RequestCompletion, score: Score | None
    ) -> CompletionChoice:
        body, ids = self._body, self._prompts[prompt]
        text = completion.text or ""
        logprobs = None
        if body.logprobs is not None:
            logprobs = self._logprobs(ids, score, completion)
        return CompletionChoice(
            index=index,
            text=self._decoded(ids) + text if body.echo else text,
            logprobs=logprobs,
            finish_reason="length" if completion.finish_reason == "length" else "stop",
            stop_reason=stop_reason(completion),
            token_ids=completion.tokens.tolist() if body.return_token_ids else None,
            prompt_token_ids=ids.tolist() if body.return_token_ids else None,
        )

    def _logprobs(
        self, ids: TokenIds, score: Score | None, completion: RequestCompletion | None
    ) -> CompletionLogprobs:
        """Of an echoed prompt, whose first token has none, and of what was generated."""
        shown = ids.tolist() if self._body.echo else []
        offsets = TextOffsets(self._texts).all(shown)
        values: list[float | None] = [None] * min(1, len(shown))
        tops: list[Any] = [None] * min(1, len(shown))
        if score is not None:
            values += score.logprobs.tolist()
            tops += score.top_logprobs or []
        if completion is not None:
            assert completion.logprobs is not None
            values += completion.logprobs.tolist()
            tops += completion.top_logprobs or []
            produced = completion.tokens.tolist()
            offsets += self._offsets(ids).all(produced)
            shown = shown + produced
        return self._listed(shown, values, tops if self._body.logprobs else None, offsets)

    def _offsets(self, ids: TokenIds) -> TextOffsets:
        """Of what is generated behind a prompt, in the text of the answer."""
        start = len(self._decoded(ids)) if self._body.echo else 0
        return TextOffsets(self._texts, ids, start)

    def _listed(
        self,
        ids: list[int],
        values: list[float | None],
        tops: list[Any] | None,
        offsets: list[int],
    ) -> CompletionLogprobs:
        """Lists with the tokens of `ids`; one without a value is the first of its text."""
        texts = self._service.token_texts
        first = texts.beginning(ids) if values and values[0] is None else None
        tokens = [
            texts.first(token) if place == first else texts.name(token)
            for place, token in enumerate(ids)
        ]
        named = None
        if tops is not None:
            named = [
                None if top is None or value is None else texts.named(name, token, value, top)
                for name, token, value, top in zip(tokens, ids, values, tops, strict=True)
            ]
        return CompletionLogprobs(
            tokens=tokens, token_logprobs=values, top_logprobs=named, text_offset=offsets
        )

    async def chunks(self) -> AsyncIterator[ServerSentEvent]:
        """The answer as chunks, the choices of all prompts beside each other."""
        scores = await self._scores()
        if self._body.echo:
            for index, (ids, score) in enumerate(self._repeated(scores)):
                listed = self._body.logprobs is not None and self._logprobs(ids, score, None)
                logprobs = listed.model_dump() if listed else None
                yield self._chunk(index, self._decoded(ids), logprobs=logprobs)
        offsets: dict[int, TextOffsets] = {}
        ends: dict[int, RequestCompletion | None] = {}
        async for prompt, one in beside(self.exchanges if self.most else (), self._at_once):
            index = prompt * self._choices + one.choice
            if isinstance(one, Piece):
                if index not in offsets and self._body.logprobs is not None:
                    offsets[index] = self._offsets(self._prompts[prompt])
                chunk = self._told(index, one, offsets.get(index))
                if chunk is not None:
                    yield chunk
                continue
            ends[index] = one.completion
        usage = self._usage_of_prompts
        if self.most:
            usage = usage_of([exchange.completions for exchange in self.exchanges]).model_dump()
            for exchange in self.exchanges:
                await exchange.finish()
        for index in range(len(self._prompts) * self._choices):  # once what they tell of is saved
            yield self._end(index, ends.get(index))
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            yield event({**self._head, "choices": [], "usage": usage})
        yield done()

    def _repeated(self, scores: list[Score | None]) -> Iterator[tuple[TokenIds, Score | None]]:
        """Each choice's prompt."""
        for pair in zip(self._prompts, scores, strict=True):
            yield from [pair] * self._choices

    def _end(self, index: int, completion: RequestCompletion | None) -> ServerSentEvent:
        """The last chunk of a choice; None: of an echoed prompt alone."""
        if completion is None:
            return self._chunk(index, "", finish_reason="length")
        reason = "length" if completion.finish_reason == "length" else "stop"
        return self._chunk(index, "", finish_reason=reason, stop_reason=stop_reason(completion))

    def _told(
        self, index: int, piece: Piece, offsets: TextOffsets | None
    ) -> ServerSentEvent | None:
        more: dict[str, Any] = {}
        if isinstance(piece.token, GeneratedToken):
            assert offsets is not None
            token, logprob, top = piece.token
            tops = [top] if self._body.logprobs else None
            listed = self._listed([token], [logprob], tops, [offsets.push(token)])
            more["logprobs"] = listed.model_dump()
        if self._body.return_token_ids:
            more["token_ids"] = [piece.token_id]
        if not piece.text and not more:
            return None
        return self._chunk(index, piece.text, **more)

    def _chunk(self, index: int, text: str, **more: Any) -> ServerSentEvent:
        one = {"index": index, "text": text, "logprobs": None, "finish_reason": None, **more}
        padded = asks_to_pad(self._body.stream_options) and bool(text)
        return event({**self._head, "choices": [one]}, padded=padded)

    @property
    def _head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self._created,
            "model": self._service.model,
            "system_fingerprint": self._service.fingerprint,
            **head_usage(self._usage_so_far, self._body.stream_options),
        }

    def _answer(self, choices: list[CompletionChoice], usage: dict[str, Any]) -> Completion:
        return Completion(
            id=self.id,
            created=self._created,
            model=self._service.model,
            choices=choices,
            usage=usage,  # type: ignore[arg-type]  # validated
            system_fingerprint=self._service.fingerprint,
            session_id=self._session,
        )

    def _usage_so_far(self) -> dict[str, int]:
        if not self.most:
            return {name: self._usage_of_prompts[name] for name in USAGE}
        each = [exchange.usage_so_far() for exchange in self.exchanges]
        return {name: sum(one[name] for one in each) for name in USAGE}

    @property
    def _texts(self) -> TokenTexts:
        if self._service.tokenizer is None:
            raise bad_request("logprobs is given, but the model has no tokenizer", "logprobs")
        return self._service.token_texts

    def _decoded(self, ids: TokenIds) -> str:
        """The text of a prompt; a character that it begins is of the answer."""
        tokenizer = self._service.tokenizer
        return "" if tokenizer is None else text_of(ids, None, tokenizer)
