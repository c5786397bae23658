"""Token after token, of one text or of several in common forwards."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from kvpager._runtime.execution.core import EngineCore
from kvpager._runtime.scheduling.completion import Completion
from kvpager._runtime.scheduling.packing import advance
from kvpager._runtime.scheduling.stream import GeneratedToken, Generation, Stream, seeds_of
from kvpager._runtime.text.transcript import Transcript
from kvpager._support.arguments import Integer
from kvpager.errors import InvalidArgumentError

_Token = TypeVar("_Token")
_Step = tuple[Transcript, int | GeneratedToken]


def begin_streams(
    core: EngineCore,
    transcripts: list[Transcript],
    max_new_tokens: Integer | None,
    seed: Integer | Iterable[Integer] | None,
    logprobs: bool,
    options: Mapping[str, Any],
    *,
    as_text: bool = False,
) -> list[Stream]:
    """The streams of a generation, with room for all of it. Arguments: as for `generate`.

    as_text: whether each token's text is wanted as it comes.
    """
    core.check_open()
    if len(set(transcripts)) != len(transcripts):
        raise InvalidArgumentError("a session is named twice; expected each once")
    generation = Generation.checked(core, max_new_tokens, options, logprobs=logprobs)
    for transcript in transcripts:
        core.check_open(transcript)
        if not transcript.length:
            raise InvalidArgumentError("generate: the session is empty; call prefill(ids) first")
        core.positions.check(
            transcript.length + generation.max_new_tokens, "the text with max_new_tokens"
        )
    seeds = seeds_of(seed, [one.seed_for(generation.sampling) for one in transcripts])
    streams = [
        generation.stream(one, its_seed, one.tokens, as_text=as_text)
        for one, its_seed in zip(transcripts, seeds)
    ]
    try:
        for stream in streams:
            stream.reserve()
    except BaseException:
        for stream in streams:
            stream.leave()
        raise
    for transcript in transcripts:
        transcript.generation_start = transcript.length
    return streams


class TokenIterator(Iterator[_Token], Generic[_Token]):
    """Tokens as they are produced. May be abandoned at any point, even before the first token.

    Each text's reserved room is released as soon as that text ends; all of it when the iterator
    fails, is closed, or is no longer referenced.
    """

    def __init__(
        self, core: EngineCore, streams: list[Stream], pick: Callable[[_Step], _Token]
    ) -> None:
        """`pick`: makes the iterator's item from (transcript, token)."""
        self._steps = _decode(core, streams)
        self._pick = pick
        self._finalizer = weakref.finalize(self, _end, streams)
        self._finalizer.atexit = False

    def __next__(self) -> _Token:
        try:
            return self._pick(next(self._steps))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends it. May be called twice."""
        try:
            self._steps.close()
        finally:
            self._finalizer()


class _SingleIterator(TokenIterator[_Token]):
    """Iterates over the tokens of one text, and has its completion."""

    def __init__(self, core: EngineCore, stream: Stream, pick: Callable[[_Step], _Token]) -> None:
        super().__init__(core, [stream], pick)
        self._stream = stream
        self._failed = False
        self._completion: Completion | None = None

    @property
    def completion(self) -> Completion | None:
        """The result, once it has ended or was closed; None before, and after an error."""
        return self._completion

    def __next__(self) -> _Token:
        try:
            return self._pick(next(self._steps))
        except (StopIteration, GeneratorExit):
            self.close()
            raise
        except BaseException:
            self._failed = True
            self.close()
            raise

    def close(self) -> None:
        """Ends it; a generation that goes on ends as "cancelled". May be called twice."""
        if self._completion is None and not self._failed:
            reason = self._stream.finish or "cancelled"
            self._completion = Completion(finish_reason=reason, **self._stream.result())
        super().close()

    def run(self) -> Completion:
        """Produces the rest of it."""
        for _ in self:
            pass
        assert self._completion is not None
        return self._completion


class TokenStream(_SingleIterator[_Token]):
    """Yields a session's tokens as they are produced; may be abandoned at any point."""

    def __init__(self, core: EngineCore, stream: Stream) -> None:
        super().__init__(core, stream, _token_of)


class TextStream(_SingleIterator[str]):
    """Yields a session's text as it is complete; may be abandoned at any point.

    A piece has at least one character, and comes as soon as it is certain: it may be of a part of a
    token or of several.
    """

    def __init__(self, core: EngineCore, stream: Stream) -> None:
        super().__init__(core, stream, lambda _: stream.piece)

    def __next__(self) -> str:
        while not (piece := super().__next__()):
            pass
        return piece


def require_text(*, has_text: bool) -> None:
    """Raises InvalidArgumentError if an engine without a tokenizer is to stream text."""
    if not has_text:
        raise InvalidArgumentError(
            "stream is True, but the engine has no tokenizer; give Engine(model, tokenizer=...), "
            'or stream="tokens"'
        )


def _token_of(step: _Step) -> Any:
    return step[1]


def _end(streams: list[Stream]) -> None:
    for stream in streams:
        stream.leave()


def _decode(core: EngineCore, streams: list[Stream]) -> Generator[_Step, None, None]:
    """Yields (transcript, token) as tokens are produced, in turn.

    All state between tokens is in the transcripts, so a caller may append to one, trim it or save
    it while its stream is suspended.
    """
    waiting = deque(streams)
    while waiting:
        turn = [waiting.popleft() for _ in range(min(len(waiting), core.rows))]
        advance(core, turn)
        for stream in turn:
            transcript, finish = stream.transcript, None
            # Not ready: its owner changed it in the meantime, or it needs another forward.
            while not transcript.closed and transcript.ready:
                token = stream.sample()
                finish = stream.finish
                if finish is not None:
                    stream.leave()
                yield transcript, token
                if finish is not None or transcript.closed or not transcript.advance():
                    break
            if finish is None:
                waiting.append(stream)
