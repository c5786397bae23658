"""Answers to "is this chunk stored?" for a scheduler that must not wait for a disk."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

_log = logging.getLogger(__name__)

_Key = TypeVar("_Key", bound=Hashable)


@dataclass
class _Answer:
    """What is known of a key. stored: None until the store has answered."""

    stored: bool | None = None
    requests: set[str] = field(default_factory=set)


class Lookups(Generic[_Key]):
    """Remembers which keys are stored while requests need the answer; asks on a thread.

    A request's keys are asked for with `ask`, sent to the thread with `send`, and forgotten with
    `forget`. All methods but `close` return at once, and may be called from any thread.
    """

    def __init__(self, stored: Callable[[Sequence[_Key]], Sequence[bool]]) -> None:
        """Starts the thread.

        Args:
            stored: called on the thread; returns which of the keys are stored. If it raises, none
                is.
        """
        self._stored = stored
        self._lock = threading.Condition()
        self._answers: dict[_Key, _Answer] = {}
        self._keys: dict[str, set[_Key]] = {}  # of each request
        self._asked: list[_Key] = []  # not sent yet
        self._sent: list[_Key] = []
        self._work: list[Callable[[], object]] = []
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvpager-lookups", daemon=True)
        self._thread.start()

    def ask(self, key: _Key, request: str) -> bool | None:
        """Returns whether a key is stored; None: not known yet, ask again after `send`."""
        with self._lock:
            answer = self._answers.get(key)
            if answer is None:
                answer = self._answers[key] = _Answer()
                self._asked.append(key)
            answer.requests.add(request)
            self._keys.setdefault(request, set()).add(key)
            return answer.stored

    def send(self) -> None:
        """Has the thread find out what has been asked."""
        with self._lock:
            if self._asked:
                self._sent += self._asked
                self._asked = []
                self._lock.notify()

    def do(self, work: Callable[[], object]) -> None:
        """Has the thread call a function after what was sent; an error is logged."""
        with self._lock:
            self._work.append(work)
            self._lock.notify()

    def missed(self, keys: Collection[_Key]) -> None:
        """Keys are not stored after all: their load failed.

        Without it a scheduler would try the same load forever.
        """
        with self._lock:
            for key in keys:
                if key in self._answers:
                    self._answers[key].stored = False

    def forget(self, request: str) -> None:
        """Ends a request; a key that no other request has asked for is forgotten."""
        with self._lock:
            for key in self._keys.pop(request, ()):
                answer = self._answers[key]
                answer.requests.discard(request)
                if not answer.requests:
                    del self._answers[key]

    def close(self) -> None:
        """Ends the thread, after what it is doing."""
        with self._lock:
            self._closed = True
            self._lock.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._sent or self._work or self._closed)
                if self._closed:
                    return
                keys = [key for key in self._sent if key in self._answers]
                work = self._work
                self._sent, self._work = [], []
            found = self._found(keys) if keys else ()
            with self._lock:
                for key, stored in zip(keys, found):
                    answer = self._answers.get(key)
                    if answer is not None and answer.stored is None:  # not missed meanwhile
                        answer.stored = stored
            for call in work:
                self._do(call)

    def _do(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception:
            _log.exception("the store could not be kept up to date")

    def _found(self, keys: Sequence[_Key]) -> Sequence[bool]:
        try:
            return self._stored(keys)
        except Exception:
            _log.exception("the store could not be asked for %d chunks: they are misses", len(keys))
            return [False] * len(keys)
