"""A conversation that is kept in a store: turns, going back, and what is saved when."""

from __future__ import annotations

import itertools
import re
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvpager.cli.failure import CliError
from kvpager.cli.parser import closest
from kvpager.engine import Engine
from kvpager.errors import CapacityError, FingerprintMismatchError
from kvpager.session import Session
from kvpager.stores import SaveReport, StoreEntry
from kvpager.stores.opening import NamedStore

_WORDS = 6  # of the first message, which name a conversation


@dataclass
class Turn:
    """What the last answer took.

    Attributes:
        prompt_tokens: of the whole prompt.
        computed_tokens: those of them whose K/V had to be computed.
        tokens: of the answer.
        finish_reason: as of a completion; None: it was stopped.
    """

    prompt_tokens: int = 0
    computed_tokens: int = 0
    tokens: int = 0
    finish_reason: str | None = None


class Talk:
    """The session of a conversation, and its place in a store.

    Attributes:
        engine: of the session.
        session: changed by turns alone, and whole after each of them, also where one failed.
        name: of its snapshot; None: the first message will name it.
        turn: the last one.
    """

    def __init__(
        self,
        engine: Engine,
        store: NamedStore,
        options: Mapping[str, Any],
        *,
        system: str | None = None,
        on_mismatch: str = "refuse",
    ) -> None:
        """An empty conversation.

        Args:
            engine: with a tokenizer that has a chat template.
            store: that it is saved in.
            options: of `Session.chat`.
            system: its system prompt.
            on_mismatch: as for `Engine.restore`.
        """
        self.engine = engine
        self.session = engine.session()
        self.name: str | None = None
        self.turn = Turn()
        self._store = store
        self._options = dict(options)
        self._system = system
        self._on_mismatch = on_mismatch
        self._saved: str | None = None  # logical digest of its snapshot, as far as known here

    def say(self, text: str, **options: Any) -> Generator[str, None, None]:
        """Yields the answer to a user's message.

        A turn that ends before its answer has begun changes nothing.
        """
        before = len(self.session.messages)
        messages: Any = text
        if not before and self._system is not None:
            messages = [{"role": "system", "content": self._system}]
            messages.append({"role": "user", "content": text})
        try:
            yield from self._chat(self.session, messages, options)
        finally:
            if not self._is_answered():
                self.session.trim_messages(before)
        self._options.pop("seed", None)  # of the first answer; the others follow from it

    def answer_again(self, **options: Any) -> Generator[str, None, None]:
        """Yields another answer to the last message, which takes the place of the last one.

        Raises:
            CliError: there is no answer.
        """
        if not self._is_answered():
            raise CliError("there is no answer yet")
        messages = self.session.messages[:-1]
        other = self.session.fork()
        try:
            yield from self._chat(other, messages, options)
        finally:
            begun = len(other.messages) > len(messages)
            self.session, dropped = (other, self.session) if begun else (self.session, other)
            dropped.close()

    def take_back(self) -> str:
        """Drops the last turn; returns its message. Raises CliError: there is none."""
        messages = self.session.messages
        turns = [i for i, message in enumerate(messages) if message["role"] == "user"]
        if not turns:
            raise CliError("nothing has been said yet")
        start = turns[-1]
        self.session.trim_messages(start if len(turns) > 1 else 0)
        return str(messages[start]["content"])

    def save(self) -> None:
        """Saves it as it is; one from which all was taken back is deleted.

        Where another process has gone on with the snapshot, this one gets a name of its own.

        Raises:
            PagerError: it could not be saved; an older snapshot stays.
        """
        if self.name is not None and self._is_anothers(self.name):
            self.name, self._saved = self._free(self.name), None
        if not self.session.length:
            if self.name is not None and self._saved is not None:
                self._store.delete(self.name)
                self._saved = None
            return
        if self.name is None:
            said = (one["content"] for one in self.session.messages if one["role"] == "user")
            words = re.findall("[a-z0-9]+", str(next(said, "")).lower()[:80])
            self.name = self._free("-".join(words[:_WORDS]) or "conversation")
        self._saved = self._write(self.name).logical_digest

    def save_as(self, name: str) -> None:
        """Saves a copy as it is now. Raises CliError: there is another conversation of this name.

        Raises PagerError as `save`.
        """
        if name != self.name and self._store.entry(name) is not None:
            raise CliError(f"there is a conversation {name!r} already; choose another name")
        if not self.session.length:
            raise CliError("nothing has been said yet")
        if name == self.name:
            self.save()
        else:
            self._write(name)

    def load(self, name: str) -> None:
        """Goes on with a saved conversation.

        Raises:
            CliError: there is none of this name, or it has another system prompt.
            PagerError: it cannot be used, such as FingerprintMismatchError.
        """
        entry = self._store.entry(name)
        if entry is None:
            hint = closest(name, [one.name for one in self.saved()], most=3)
            raise CliError(f"there is no conversation {name!r}{hint}")
        session = self.engine.restore(
            name, store=self._store, on_mismatch=self._on_mismatch, on_corrupt="recompute"
        )
        first = next(iter(session.messages), {})
        system = first.get("content") if first.get("role") == "system" else None
        if self._system not in (None, system):
            session.close()
            raise CliError(
                f"--system is not what the conversation {name!r} began with; --new begins another"
            )
        self.session.close()
        self.session, self.name, self._saved = session, name, entry.logical_digest

    def load_last(self) -> None:
        """Goes on with the conversation that was used last, of those of this engine; if any.

        Raises:
            FingerprintMismatchError: there are some, none of this engine.
            CliError, PagerError: as `load`.
        """
        mismatch = None
        for entry in self.saved():
            mismatch = self._mismatch(entry.name)
            if mismatch is None:
                return
        if mismatch is not None:
            raise mismatch

    def saved(self) -> list[StoreEntry]:
        """The store's conversations that can be read, the last used first."""
        found = self._store.entries(latest_first=True)
        return [one for one in found if not (one.error or one.companion_of or one.segment)]

    def _write(self, name: str) -> SaveReport:
        try:
            return self.session.save(name, store=self._store)
        except CapacityError as error:
            raise CapacityError(str(error).replace("byte_budget", "--store-budget")) from error

    def _chat(self, session: Session, messages: Any, options: Mapping[str, Any]) -> Iterator[str]:
        before, turn = session.tokens_computed, Turn()
        stream = session.chat(messages, stream=True, **{**self._options, **options})
        self.turn = turn
        turn.prompt_tokens = session.length
        turn.computed_tokens = session.tokens_computed - before
        yield from stream
        if stream.completion is not None:
            turn.tokens = len(stream.completion.tokens)
            turn.finish_reason = stream.completion.finish_reason

    def _mismatch(self, name: str) -> FingerprintMismatchError | None:
        """Loads a conversation; if it is another engine's, says so instead."""
        try:
            self.load(name)
        except FingerprintMismatchError as error:
            return error
        return None

    def _is_answered(self) -> bool:
        messages = self.session.messages
        return bool(messages) and messages[-1]["role"] == "assistant"

    def _is_anothers(self, name: str) -> bool:
        """Whether the snapshot of this name is not the one that was loaded or saved here."""
        entry = self._store.entry(name)
        return entry is not None and entry.logical_digest != self._saved

    def _free(self, name: str) -> str:
        names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
        return next(one for one in names if self._store.entry(one) is None)
