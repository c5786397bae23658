"""Token after token, of one text or of several in common forwards."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from kvpager.errors import InvalidArgumentError
from kvpager.execution.core import EngineCore
from kvpager.scheduling.packing import advance
from kvpager.scheduling.stream import GeneratedToken, Generation, Stream, seeds_of
from kvpager.text.transcript import Transcript

_Token = TypeVar("_Token")
_Step = tuple[Transcript, int | GeneratedToken]


def begin_streams(
    core: EngineCore,
    transcripts: list[Transcript],
    max_new_tokens: int,
    seed: int | Iterable[int] | None,
    logprobs: bool,
    options: Mapping[str, Any],
) -> list[Stream]:
    """The streams of a generation, with room for all of it. Arguments: as for `generate`."""
    core.check_open()
    if len(set(transcripts)) != len(transcripts):
        raise InvalidArgumentError("a session is named twice; expected each once")
    generation = Generation.checked(core, max_new_tokens, options, logprobs=logprobs)
    seeds = seeds_of(seed, [one.seed_for(generation.sampling) for one in transcripts])
    streams = [generation.stream(one, its_seed) for one, its_seed in zip(transcripts, seeds)]
    for transcript in transcripts:
        core.check_open(transcript)
        if not transcript.length:
            raise InvalidArgumentError("generate: the session is empty; call prefill(ids) first")
        core.positions.check(transcript.length + max_new_tokens, "the text with max_new_tokens")
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
