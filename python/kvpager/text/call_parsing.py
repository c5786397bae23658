"""Takes an answer apart, as it comes, into text and calls of tools.

A call is told once all of it has come, so that what only looks like one stays text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, TypeAlias

BLANK = " \t\r\n"


@dataclass(frozen=True)
class TextDelta:
    """Text beside calls."""

    text: str


@dataclass(frozen=True)
class ReasoningDelta:
    """Text that the model marks as its reasoning."""

    text: str


@dataclass(frozen=True)
class Call:
    """A call of a tool.

    Attributes:
        index: from 0, within the answer.
        name: of the tool.
        arguments: JSON text of an object.
    """

    index: int
    name: str
    arguments: str


Event: TypeAlias = TextDelta | ReasoningDelta | Call
Found: TypeAlias = list[tuple[str, str]]  # names and arguments


class Reading(Enum):
    """What becomes of a span that is no call."""

    NOT_A_CALL = 0
    MORE = 1  # the closing mark is within the call


Read: TypeAlias = Callable[[str], Found | Reading]


class CallParser(Protocol):
    """Takes an answer apart as it comes."""

    def push(self, text: str) -> list[Event]:
        """What is certain with a further piece of text."""
        ...

    def end(self) -> list[Event]:
        """The rest, when no text follows."""
        ...


@dataclass(frozen=True)
class Marks:
    """Texts around calls.

    Attributes:
        spans: opening and closing mark of one call or a list of them; without a closing one it ends
            with the answer.
        section: marks around all calls, if there are any.
    """

    spans: tuple[tuple[str, str | None], ...]
    section: tuple[str, str] | None = None


class SpanParser:
    """Calls between marks, amid text."""

    def __init__(self, marks: Marks, read: Read) -> None:
        """read: takes a span apart, its marks included; one may lack the closing mark."""
        self._marks = marks
        self._read = read
        self._held = ""
        self._pending = ""  # the section's mark and blanks, before its first call
        self._in_section = False
        self._closing: str | None = None
        self._inside = False
        self._searched = 0
        self._calls = 0

    def push(self, text: str) -> list[Event]:
        """See `CallParser`."""
        self._held += text
        events: list[Event] = []
        while self._step(events):
            pass
        return joined(events)

    def end(self) -> list[Event]:
        """See `CallParser`."""
        events: list[Event] = []
        held, self._held = self._held, ""
        if self._inside:  # some models end right behind the call
            self._inside = False
            self._take(held, events)
        else:
            events += as_text(self._pending + held)
        self._pending = ""
        return joined(events)

    def _step(self, events: list[Event]) -> bool:
        """Goes one mark further; whether another step may follow."""
        if self._inside:
            return self._step_inside(events)
        return self._step_section(events) if self._in_section else self._step_outside(events)

    def _step_outside(self, events: list[Event]) -> bool:
        section = self._marks.section
        marks: list[tuple[str, str | None]] = list(self._marks.spans)
        if section is not None:
            marks.append(section)
        found = [(at, mark) for mark in marks if (at := self._held.find(mark[0])) >= 0]
        if not found:
            kept = max(overlap(self._held, opening) for opening, _ in marks)
            events += as_text(self._held[: len(self._held) - kept])
            self._held = self._held[len(self._held) - kept :]
            return False
        at, mark = min(found, key=lambda one: one[0])
        events += as_text(self._held[:at])
        self._held = self._held[at:]
        if mark == section:
            self._in_section = True
            self._pending, self._held = mark[0], self._held[len(mark[0]) :]
        else:
            self._open(mark)
        return True

    def _step_section(self, events: list[Event]) -> bool:
        assert self._marks.section is not None
        blanks = len(self._held) - len(self._held.lstrip(BLANK))
        gap, rest = self._held[:blanks], self._held[blanks:]
        closing = self._marks.section[1]
        for mark in self._marks.spans:
            if rest.startswith(mark[0]):
                self._pending, self._held = self._pending + gap if self._pending else "", rest
                self._open(mark)
                return True
        openings = [opening for opening, _ in self._marks.spans]
        if any(one.startswith(rest) and one != rest for one in [*openings, closing]):
            return False
        self._in_section = False
        if rest.startswith(closing):
            if self._pending:
                events += as_text(self._pending + gap + closing)
            rest = rest[len(closing) :]
        else:
            events += as_text(self._pending + gap)
        self._pending, self._held = "", rest
        return True

    def _open(self, mark: tuple[str, str | None]) -> None:
        self._inside, self._closing, self._searched = True, mark[1], len(mark[0])

    def _step_inside(self, events: list[Event]) -> bool:
        closing = self._closing
        at = -1 if closing is None else self._held.find(closing, self._searched)
        if closing is None or at < 0:
            if closing is not None:
                self._searched = max(self._searched, len(self._held) - len(closing) + 1)
            return False
        end = at + len(closing)
        if not self._take(self._held[:end], events, may_go_on=True):
            self._searched = end
            return True
        self._held = self._held[end:]
        self._inside = False
        return True

    def _take(self, span: str, events: list[Event], *, may_go_on: bool = False) -> bool:
        """Adds what a span is; False if more of it has to come."""
        found = self._read(span)
        if found is Reading.MORE and may_go_on:
            return False
        if isinstance(found, Reading):
            events += as_text(self._pending + span)
            self._in_section = False
        for name, arguments in [] if isinstance(found, Reading) else found:
            events.append(Call(self._calls, name, arguments))
            self._calls += 1
        self._pending = ""
        return True


class WholeParser:
    """Calls that are a whole answer; held back until its end where it begins like one."""

    def __init__(
        self, beginnings: tuple[str, ...], read: Read, is_other: Callable[[str], bool]
    ) -> None:
        """Begins with no text.

        Args:
            beginnings: of an answer of calls.
            read: takes a whole answer apart.
            is_other: whether an answer that begins like calls has turned out not to be.
        """
        self._beginnings = beginnings
        self._read = read
        self._is_other = is_other
        self._held = ""
        self._is_text = False

    def push(self, text: str) -> list[Event]:
        """See `CallParser`."""
        if self._is_text:
            return as_text(text)
        self._held += text
        seen = self._held.lstrip(BLANK)
        begins = any(seen.startswith(one) or one.startswith(seen) for one in self._beginnings)
        if begins and not self._is_other(seen):
            return []
        self._is_text = True
        held, self._held = self._held, ""
        return as_text(held)

    def end(self) -> list[Event]:
        """See `CallParser`."""
        held, self._held = self._held, ""
        found = self._read(held.strip(BLANK)) if held.strip(BLANK) else Reading.NOT_A_CALL
        if isinstance(found, Reading):
            return as_text(held)
        return [Call(index, *one) for index, one in enumerate(found)]


def overlap(text: str, tag: str) -> int:
    """The length of the longest end of `text` with which `tag` begins, less than all of it."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0


def as_text(text: str) -> list[Event]:
    """The event of some text; none of no text."""
    return [TextDelta(text)] if text else []


def joined(events: list[Event]) -> list[Event]:
    """The events, with text that follows text in one piece."""
    merged: list[Event] = []
    for event in events:
        last: Any = merged[-1] if merged else None
        if not isinstance(event, Call) and type(event) is type(last):
            merged[-1] = type(event)(last.text + event.text)
        else:
            merged.append(event)
    return merged
