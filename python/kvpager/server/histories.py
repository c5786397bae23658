"""Messages that a request has in common with an earlier one, which are validated and hashed once.

Clients send the whole conversation in every request. Its beginning is recognized by the bytes of
its values, which differ wherever two values do: `1`, `True` and `1.0`, or two orders of names.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from operator import is_
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from kvpager._runtime.text.json_values import exact
from kvpager.server.conversations import Digests, digests
from kvpager.server.schema.common import MOST_MESSAGES

_HEAD = len(exact([]))  # of the bytes of a list, before those of what is in it
_MOST_BYTES = 64 << 20  # of the remembered messages
_OBJECT_BYTES = 1024  # of each message, part and call, beside its values
_MOST_ENTRIES = 1024
_MOST_NEW = 64  # messages behind a beginning that is looked for


class _Seen(NamedTuple):
    """Digests of a chat template's messages."""

    salt: str | None = None
    messages: tuple[dict[str, Any], ...] = ()
    digests: Digests = ()


class History(list[Any]):
    """A request's validated messages, with what is known of their beginning.

    Attributes:
        dicts: of its first messages, for a chat template; nobody changes them.
        seen: digests of an earlier request's messages, or of its own.
    """

    def __init__(self, messages: Sequence[Any] = (), before: History | None = None) -> None:
        """before: of an earlier request, whose messages these begin with."""
        super().__init__(messages)
        self.dicts: tuple[dict[str, Any], ...] = ()
        self.seen = _Seen()
        if before is not None:
            self.dicts, self.seen = before.dicts[: len(messages) - 1], before.seen

    def digests(self, messages: Sequence[dict[str, Any]], salt: str | None) -> Digests:
        """Returns `digests` of the messages for a chat template."""
        known = self.seen
        if known.salt != salt or not _alike(known.messages, messages[: len(known.messages)]):
            known = _Seen()
        found = digests(messages[len(known.messages) :], salt, known.digests)
        self.seen = _Seen(salt, tuple(messages), found)
        return found


@dataclass(frozen=True)
class _Entry:
    digest: bytes  # of the messages' values
    size: int
    history: History


class Histories:
    """The last requests' histories. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[object, ...], _Entry] = OrderedDict()
        self._size = 0

    def validated(self, model: TypeAdapter[Any], owner: str, given: Any) -> Any:
        """Returns `model.validate_python(given)`, with a `History` as its messages if it has any.

        Args:
            model: of a body.
            owner: only what this one sent is recognized; so is the body's `cache_salt`.
            given: the body.
        """
        messages = given.get("messages") if isinstance(given, dict) else None
        if not isinstance(messages, list) or not 0 < len(messages) <= MOST_MESSAGES:
            return model.validate_python(given)
        salt = given.get("cache_salt")
        scope = (id(model), owner, salt if isinstance(salt, str) else None)
        before, digest, size = self._found(scope, messages)
        known = [] if before is None else before[: len(messages) - 1]
        try:
            value = model.validate_python({**given, "messages": messages[len(known) :]})
        except ValidationError:
            if not known:
                raise
            return model.validate_python(given)  # whose errors have the messages' own places
        value.messages = History([*known, *value.messages], before)
        self._put(_key(scope, len(messages), messages[-1]), _Entry(digest, size, value.messages))
        return value

    def _found(
        self, scope: tuple[object, ...], messages: Sequence[Any]
    ) -> tuple[History | None, bytes, int]:
        """The longest known beginning; and the digest and the size of all messages."""
        count = len(messages)
        for end in range(count, max(0, count - _MOST_NEW), -1):
            key = _key(scope, end, messages[end - 1])
            with self._lock:
                entry = self._entries.get(key)
            if entry is None:
                continue
            hashed = blake2b(digest_size=32)
            size = _add(hashed, messages[:end])
            if hashed.digest() != entry.digest:
                continue
            with self._lock:
                self._drop(key)
            size += _add(hashed, messages[end:])
            return entry.history, hashed.digest(), size
        hashed = blake2b(digest_size=32)
        size = _add(hashed, messages)
        return None, hashed.digest(), size

    def _put(self, key: tuple[object, ...], entry: _Entry) -> None:
        with self._lock:
            self._drop(key)
            self._entries[key] = entry
            self._size += entry.size
            while self._size > _MOST_BYTES or len(self._entries) > _MOST_ENTRIES:
                self._drop(next(iter(self._entries)))

    def _drop(self, key: tuple[object, ...]) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._size -= entry.size


def _key(scope: tuple[object, ...], count: int, last: object) -> tuple[object, ...]:
    return (*scope, count, blake2b(exact(last), digest_size=16).digest())


def _add(hashed: Any, messages: Sequence[Any]) -> int:
    """Hashes messages after others, and returns the bytes that they take in memory, about."""
    values = exact(list(messages))[_HEAD:]
    hashed.update(values)
    objects = len(messages)
    for message in messages:
        if isinstance(message, dict):  # it is not validated yet
            lists = (message.get("content"), message.get("tool_calls"))
            objects += sum(len(one) for one in lists if isinstance(one, list))
    return len(values) + objects * _OBJECT_BYTES


def _alike(known: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]]) -> bool:
    return len(known) == len(found) and (
        all(map(is_, known, found)) or exact(list(known)) == exact(list(found))
    )
