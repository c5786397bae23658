"""`POST /v1/completions`: continues a text, or token ids."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request
from sse_starlette import ServerSentEvent

from kvpager._runtime.scheduling.chat import within
from kvpager._runtime.scheduling.score import Score
from kvpager._runtime.scheduling.stream import GeneratedToken
from kvpager._runtime.text.tokenizer import text_of
from kvpager._support.tokens import TokenIds
from kvpager.errors import ContextLengthError
from kvpager.requests.request import RequestCompletion
from kvpager.server import errors, options
from kvpager.server.answers import finish_reason, stop_reason, usage_of
from kvpager.server.errors import bad_request, unsupported
from kvpager.server.responding import Chunks, Responding, respond
from kvpager.server.routes.caller import Caller, JsonRoute, TheCaller
from kvpager.server.schema.chat import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    TextCompletion,
)
from kvpager.server.schema.common import new_id
from kvpager.server.service import Service
from kvpager.server.token_texts import TextOffsets, TokenTexts
from kvpager.server.turn import USAGE, Ended, ServedTurn, TokenPiece, merged

DEFAULT_MAX_TOKENS = 16  # of OpenAI's API, and vLLM's

router = APIRouter(route_class=JsonRoute)


@router.post(
    "/v1/completions",
    response_model=None,
    responses={200: {"model": TextCompletion}},
)
async def completions(
    request: Request,
    body: CompletionRequest,
    caller: TheCaller,
    x_session_id: Annotated[str | None, Header()] = None,
) -> Any:
    """Continues a text; with `stream` as server-sent events."""
    service = caller.service
    service.check_model(body.model)
    session = options.session_name(body.session_id, x_session_id)

    text = await caller.read(lambda: _Text(caller, body, session, _prompts(service, body)))
    return await respond(request, text, streamed=body.stream, on_error=service.metrics.error)


def _prompts(service: Service, body: CompletionRequest) -> list[TokenIds]:
    """Returns the ids of each prompt. Raises ApiError."""
    given: Any = body.prompt
    nested = isinstance(given, list) and not isinstance(given[0], int)
    prompts = given if nested else [given]
    special = body.add_special_tokens is not False
    options.check_texts(service, prompts, "prompt")
    read_ids = service.engine.core.read_ids
    return [read_ids(one, f"prompt[{i}]", special_tokens=special) for i, one in enumerate(prompts)]


class _Text(Responding):
    """A completion: a turn for each of its prompts."""

    def __init__(
        self, caller: Caller, body: CompletionRequest, session: str | None, prompts: list[TokenIds]
    ) -> None:
        service = caller.service
        self._service = service
        self._body = body
        self._session = session
        self._prompts = prompts
        self._head = service.head(body.request_id or new_id("cmpl-"))
        self._chunks = Chunks(
            {"object": "text_completion", **self._head}, body.stream_options, self._usage_so_far
        )
        most = options.most_new(body, body.max_tokens)
        self._most = DEFAULT_MAX_TOKENS if most is None else most
        self.headers = options.headers_of(body, session)
        self._choices = options.choices_of(service, body)
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
        if self._most == 0 and not body.echo:
            raise bad_request("max_tokens is 0; expected at least 1, or echo: true", "max_tokens")
        self._chosen = options.sampled(service, body)
        if body.logprobs:
            self._chosen["top_logprobs"] = body.logprobs
        grammar = options.grammar_of(body)
        if grammar is not None:
            self._chosen["grammar"] = grammar
        fields = options.turn_fields(caller, body) | options.kept_fields(body, session)
        others = fields | {"keep_as": None, "save": False}  # than the first prompt
        self._turns = [
            ServedTurn(
                **(others if number else fields),
                ids=ids,
                choices=self._choices,
                max_new_tokens=self._within(ids),
                options=self._chosen,
                logprobs=body.logprobs is not None,
                share=False,
            )
            for number, ids in enumerate(prompts)
        ]

    def _within(self, ids: TokenIds) -> int:
        """Limits the tokens to the room that a prompt leaves. Raises ApiError."""
        limit = self._service.most_tokens
        echoed = self._most == 0 and limit is not None and len(ids) <= limit
        if limit is None or echoed:
            return self._most
        try:
            return within(len(ids), self._most, limit)
        except ContextLengthError as error:
            raise errors.context_exceeded(len(ids), limit, "prompt") from error

    async def begin(self) -> None:
        """Queues the first prompts. Raises ApiError; nothing is left then."""
        try:
            for turn in self._turns[: self._at_once] if self._most else ():
                await turn.begin()
        except BaseException:
            await self.release()
            raise

    async def release(self) -> None:
        """Cancels and frees everything. May be repeated."""
        for turn in self._turns:
            await turn.release()

    @property
    def _at_once(self) -> int:
        """Number of prompts queued at once; other requests are admitted between them."""
        service = self._service
        places = min(service.scheduler.most_running, service.settings.max_waiting)
        return max(1, places // self._choices)

    async def whole(self) -> TextCompletion:
        """Returns the whole answer, once its conversation is kept."""
        async for _ in self._pieces():
            pass
        scores = await self._scores()
        choices: list[CompletionChoice] = []
        for prompt, several in enumerate(self._completions()):
            for completion in several:
                choices.append(self._choice(len(choices), prompt, completion, scores[prompt]))
        usage: Any = await self._finish()  # validated
        return TextCompletion(**self._head, choices=choices, usage=usage, session_id=self._session)

    def _pieces(self) -> AsyncIterator[tuple[int, TokenPiece | Ended]]:
        """The events of all prompts; none where they are only echoed."""
        return merged(self._turns if self._most else (), self._at_once)

    def _completions(self) -> Sequence[Sequence[RequestCompletion | None]]:
        """The choices of each prompt; None: only the prompt is echoed."""
        if self._most:
            return [turn.completions for turn in self._turns]
        return [[None] * self._choices] * len(self._prompts)

    async def _finish(self) -> dict[str, Any]:
        """Keeps the conversation; returns the usage."""
        if not self._most:
            return self._usage_of_prompts
        usage = usage_of([turn.completions for turn in self._turns]).model_dump()
        for turn in self._turns:
            await turn.finish()
        return usage

    @property
    def _usage_of_prompts(self) -> dict[str, Any]:
        """Usage of a request that generates nothing."""
        count = sum(len(ids) for ids in self._prompts)
        computed = 0 if self._body.logprobs is None else count
        return {
            "prompt_tokens": count,
            "completion_tokens": 0,
            "total_tokens": count,
            "prompt_tokens_details": {"cached_tokens": 0, "cache_write_tokens": computed},
        }

    async def _scores(self) -> list[Score | None]:
        """Scores each prompt, if the request asks for their log-probabilities."""
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
        self, index: int, prompt: int, completion: RequestCompletion | None, score: Score | None
    ) -> CompletionChoice:
        body, ids = self._body, self._prompts[prompt]
        text = "" if completion is None else completion.text or ""
        shown = completion if body.return_token_ids else None
        return CompletionChoice(
            index=index,
            text=self._decoded(ids) + text if body.echo else text,
            logprobs=None if body.logprobs is None else self._logprobs(ids, score, completion),
            finish_reason=finish_reason(completion),
            stop_reason=stop_reason(completion),
            token_ids=None if shown is None else shown.tokens.tolist(),
            prompt_token_ids=None if shown is None else ids.tolist(),
        )

    def _logprobs(
        self, ids: TokenIds, score: Score | None, completion: RequestCompletion | None
    ) -> CompletionLogprobs:
        """Log-probabilities of an echoed prompt, whose first token has none, and of its answer."""
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
        """Returns offsets of generated tokens in the text of the answer."""
        start = len(self._decoded(ids)) if self._body.echo else 0
        return TextOffsets(self._texts, ids, start)

    def _listed(
        self,
        ids: list[int],
        values: list[float | None],
        tops: list[Any] | None,
        offsets: list[int],
    ) -> CompletionLogprobs:
        """Lists the tokens of `ids`; one without a value is the first of its text."""
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

    async def stream(self) -> AsyncIterator[ServerSentEvent]:
        """Yields the answer as chunks; those of all prompts come in the order of their time."""
        if self._body.echo:
            for prompt, score in enumerate(await self._scores()):
                for number in range(self._choices):
                    echoed = self._choice(prompt * self._choices + number, prompt, None, score)
                    logprobs = echoed.logprobs and echoed.logprobs.model_dump()
                    yield self._chunk(echoed.index, echoed.text, logprobs=logprobs)
        offsets: dict[int, TextOffsets] = {}
        async for prompt, one in self._pieces():
            index = prompt * self._choices + one.choice
            if isinstance(one, Ended):
                continue
            if index not in offsets and self._body.logprobs is not None:
                offsets[index] = self._offsets(self._prompts[prompt])
            chunk = self._chunk_of(index, one, offsets.get(index))
            if chunk is not None:
                yield chunk
        ends = [one for several in self._completions() for one in several]
        usage = await self._finish()
        for index, end in enumerate(ends):  # once its conversation is saved
            reason, stopped = finish_reason(end), stop_reason(end)
            yield self._chunk(index, "", finish_reason=reason, stop_reason=stopped)
        for last in self._chunks.last(usage):
            yield last

    def _chunk_of(
        self, index: int, piece: TokenPiece, offsets: TextOffsets | None
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
        return self._chunks.of(one, is_text=bool(text))

    def _usage_so_far(self) -> dict[str, int]:
        if not self._most:
            return {name: self._usage_of_prompts[name] for name in USAGE}
        each = [turn.usage_so_far() for turn in self._turns]
        return {name: sum(one[name] for one in each) for name in USAGE}

    @property
    def _texts(self) -> TokenTexts:
        if self._service.tokenizer is None:
            raise bad_request("logprobs is given, but the model has no tokenizer", "logprobs")
        return self._service.token_texts

    def _decoded(self, ids: TokenIds) -> str:
        """Returns the text of a prompt; a character that it begins belongs to the answer."""
        tokenizer = self._service.tokenizer
        return "" if tokenizer is None else text_of(ids, None, tokenizer)
