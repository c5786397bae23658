"""What a process that dies leaves of a response: its request, and then its tokens as they came.

A process that finds the journal of a dead one goes on from there; others read along.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from kvpager._runtime.scheduling.stream import GeneratedToken
from kvpager.errors import StorageError
from kvpager.server.background import JournalThreads
from kvpager.server.turn import TokenPiece
from kvpager.stores.base import Journal, Journals
from kvpager.stores.journals import LEASE_SECONDS

_log = logging.getLogger(__name__)


def part_of(values: dict[str, Any]) -> bytes:
    """Returns JSON values as a part of a journal."""
    return json.dumps(values, separators=(",", ":")).encode()


class ResponseJournal:
    """The journal of a response that this process computes. Used by the event loop."""

    def __init__(
        self,
        journal: Journal,
        threads: JournalThreads,
        on_lost: Callable[[], object],
        tokens: int = 0,
    ) -> None:
        """Begins to write.

        Args:
            journal: held by this process.
            threads: write it.
            on_lost: called once another process has taken it.
            tokens: number of those that it has.
        """
        self._journal = journal
        self._threads = threads
        self._on_lost = on_lost
        self._written = tokens
        self._held: list[list[Any]] = []
        self._cached: int | None = None
        self._open = True
        self._work: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._renewal = asyncio.ensure_future(self._renew())

    def add(self, piece: TokenPiece, cached: int) -> None:
        """Appends a token soon. cached: tokens of the prompt that had K/V."""
        if not self._open:
            return
        token = piece.token
        more = [token.logprob, token.top] if isinstance(token, GeneratedToken) else []
        self._held.append([piece.token_id, piece.text, *more])
        self._cached = cached
        if len(self._held) >= self._journal.batch_tokens:
            self._write_soon()
        elif self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._journal.batch_seconds, self._write_soon)

    async def end(self, response: dict[str, Any]) -> bool:
        """Records how it ended, as its last part; returns False if that fails."""
        await self._flush()
        if self._open:
            await self._try(self._journal.append, part_of({"end": response}))
        done = self._open
        await self._leave(self._journal.release if done else self._journal.delete)
        return done

    async def release(self) -> None:
        """Lets another process go on from here. Nothing is written afterwards."""
        await self._flush()
        await self._leave(self._journal.release)

    async def delete(self) -> None:
        """Removes it. Nothing is written afterwards."""
        await self._leave(self._journal.delete)

    def _write_soon(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._work is None or self._work.done():
            self._work = asyncio.ensure_future(self._write())

    async def _write(self) -> None:
        while self._held and self._open:
            tokens, self._held = self._held, []
            part = {"at": self._written, "tokens": tokens, "cached": self._cached}
            self._written += len(tokens)
            await self._try(self._journal.append, part_of(part))

    async def _flush(self) -> None:
        self._write_soon()
        assert self._work is not None
        await self._work

    async def _try(self, work: Callable[..., bool | None], *arguments: Any) -> None:
        """Writes; ends the writing where that fails, or the journal is another process's."""
        try:
            lost = await self._threads.run(work, *arguments) is False
        except (OSError, StorageError) as error:  # what it lacks is computed again
            _log.warning("a response's journal cannot be written: %s", error)
            self._open = False
            return
        if lost and self._open:
            self._open = False
            self._on_lost()

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(LEASE_SECONDS / 4)
            try:
                await self._threads.run(self._journal.renew)
            except (OSError, StorageError) as error:
                _log.warning("a response's journal cannot be renewed: %s", error)

    async def _leave(self, how: Callable[[], None]) -> None:
        self._open = False
        self._renewal.cancel()
        if self._timer is not None:
            self._timer.cancel()
        if self._work is not None:
            await asyncio.wait({self._work})
        try:
            await self._threads.run(how)
        except (OSError, StorageError) as error:  # it is removed later, or nobody asks for it
            _log.warning("a response's journal cannot be left: %s", error)


class RecordedResponse:
    """A response that another process computes, or did until it died, as its journal has it.

    Attributes:
        request: the journal's first part, see `ResponseTurn`.
        pieces: its tokens so far.
        cached: tokens of the prompt that had K/V; None: unknown yet.
        end: the response, if it failed or was cancelled.
        journal: once this process holds it.
        gone: whether it was removed: the response is saved, or deleted.
        forced: whether to take the journal from a process that lives.
    """

    def __init__(self, journals: Journals, name: str) -> None:
        self._journals = journals
        self._name = name
        self._cursor = 0
        self.request: dict[str, Any] = {}
        self.pieces: list[TokenPiece] = []
        self.cached: int | None = None
        self.end: dict[str, Any] | None = None
        self.journal: Journal | None = None
        self.gone = self.forced = False

    def read(self) -> bool:
        """Reads on; for a thread. Returns whether there is such a journal. Raises OSError."""
        found = self._journals.read(self._name, self._cursor)
        if found is None:
            self.gone = True
            return False
        parts, self._cursor = found
        for text in parts:
            part = json.loads(text)
            if not self.request:
                self.request = part
            elif "end" in part:
                self.end = part["end"]
            else:
                self._add(part)
        return bool(self.request)

    def _add(self, part: dict[str, Any]) -> None:
        known = len(self.pieces) - part["at"]
        if known < 0:
            return
        if self.cached is None:
            self.cached = part["cached"]
        for number, text, *more in part["tokens"][known:]:
            token: int | GeneratedToken = number
            if more:
                top = tuple((one, logprob) for one, logprob in more[1])
                token = GeneratedToken(number, more[0], top)
            self.pieces.append(TokenPiece(0, text, token))

    async def followed(self, threads: JournalThreads) -> AsyncIterator[TokenPiece]:
        """Yields its tokens until this process holds the journal, or the response has ended."""
        given = 0
        while True:
            for piece in self.pieces[given:]:
                yield piece
            given = len(self.pieces)
            if self.journal is not None or self.end is not None or self.gone:
                return
            await threads.run(self._advance)
            if len(self.pieces) == given and self.journal is None:
                await asyncio.sleep(self._journals.poll_seconds)

    def _advance(self) -> None:
        self.journal = self._journals.take(self._name, force=self.forced)
        self.read()  # also what was written before it was taken
