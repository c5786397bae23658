"""Takes an answer apart, as it comes, into text and calls of tools.

A call is returned once it is complete, so that what only looks like one stays text. If the answer
was cut within a call, the known part of that call is returned.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

BLANK = " \t\r\n"


@dataclass(frozen=True)
class TextDelta:
    """Text outside calls."""

    text: str


@dataclass(frozen=True)
class ReasoningDelta:
    """Text that the model marks as its reasoning."""

    text: str


@dataclass(frozen=True)
class CallDelta:
    """A call of a tool.

    Attributes:
        index: from 0, within the answer.
        name: of the tool.
        arguments: JSON text of an object; its beginning in an answer that was cut.
    """

    index: int
    name: str
    arguments: str


Event: TypeAlias = TextDelta | ReasoningDelta | CallDelta
Found: TypeAlias = list[tuple[str, str]]  # names and arguments
Span: TypeAlias = tuple[str, str | None]  # opening and closing mark; None: to the answer's end


class Reading(Enum):
    """How to treat a span that is no call."""

    NOT_A_CALL = 0
    MORE = 1  # the closing mark is within the call


# The calls of a span, its marks included; of one that was cut (True), those that are known.
Read: TypeAlias = Callable[[str, bool], Found | Reading]


class CallParser(ABC):
    """Takes an answer apart as it comes."""

    def __init__(self) -> None:
        self._held = ""
        self._events: list[Event] = []
        self._calls = 0

    def push(self, text: str) -> list[Event]:
        """Takes a further piece of text; returns the events that are certain with it."""
        self._held += text
        while self._step():
            pass
        return self._taken()

    def end(self, *, cut: bool = False) -> list[Event]:
        """The rest, when no text follows; cut: because no more tokens were allowed."""
        held, self._held = self._held, ""
        self._finish(held, cut=cut)
        return self._taken()

    @abstractmethod
    def _step(self) -> bool:
        """Goes one mark further; whether another step may follow."""

    @abstractmethod
    def _finish(self, held: str, *, cut: bool) -> None:
        """Adds the events of the text that was held."""

    def _until(self, marks: Sequence[str]) -> tuple[str, str]:
        """Takes the text before the first mark, and that mark.

        Without one the mark is "", and what may be the beginning of one is held.
        """
        found = [(at, mark) for mark in marks if (at := self._held.find(mark)) >= 0]
        if found:
            at, mark = min(found, key=lambda one: one[0])
        else:
            at, mark = len(self._held) - max(overlap(self._held, one) for one in marks), ""
        before, self._held = self._held[:at], self._held[at + len(mark) :]
        return before, mark

    def _add(self, found: Found | Reading, text: str) -> None:
        """Adds calls, or the text that was none."""
        if isinstance(found, Reading):
            self._events += as_text(text)
        else:
            self._events += [
                CallDelta(self._calls + number, *one) for number, one in enumerate(found)
            ]
            self._calls += len(found)

    def _taken(self) -> list[Event]:
        """The events since the last ones, with text that follows text in one piece."""
        merged: list[Event] = []
        for event in self._events:
            last: Any = merged[-1] if merged else None
            if not isinstance(event, CallDelta) and type(event) is type(last):
                merged[-1] = type(event)(last.text + event.text)
            else:
                merged.append(event)
        self._events = []
        return merged


class SpanParser(CallParser):
    """Calls between marks, amid text."""

    def __init__(self, spans: Sequence[Span], section: tuple[str, str] | None, read: Read) -> None:
        """Begins with no text.

        Args:
            spans: marks of one call or a list of them.
            section: marks around all calls, if there are any.
            read: takes a span apart; one may lack the closing mark.
        """
        super().__init__()
        self._spans = dict(spans)
        self._section = section or ("", "")
        self._marks = [*self._spans, *([section[0]] if section else [])]
        self._read = read
        self._pending = ""  # the section's mark and blanks, before its first call
        self._in_section = False
        self._opening: str | None = None  # of the span that the text is in
        self._searched = 0

    def _step(self) -> bool:
        if self._opening is not None:
            return self._step_inside(self._spans[self._opening])
        return self._step_section() if self._in_section else self._step_outside()

    def _step_outside(self) -> bool:
        before, mark = self._until(self._marks)
        self._events += as_text(before)
        if mark in self._spans:
            self._open(mark, self._held)
        elif mark:
            self._in_section, self._pending = True, mark
        return bool(mark)

    def _step_section(self) -> bool:
        rest = self._held.lstrip(BLANK)
        gap = self._held[: len(self._held) - len(rest)]
        closing = self._section[1]
        for opening in self._spans:
            if rest.startswith(opening):
                self._pending += gap if self._pending else ""
                self._open(opening, rest.removeprefix(opening))
                return True
        if any(one.startswith(rest) and one != rest for one in [*self._spans, closing]):
            return False
        self._in_section, ended = False, rest.startswith(closing)
        if self._pending or not ended:
            self._events += as_text(self._pending + gap + closing * ended)
        self._pending, self._held = "", rest[len(closing) * ended :]
        return True

    def _open(self, opening: str, behind: str) -> None:
        self._opening, self._held, self._searched = opening, opening + behind, len(opening)

    def _step_inside(self, closing: str | None) -> bool:
        if closing is None:
            return False
        at = self._held.find(closing, self._searched)
        if at < 0:
            self._searched = max(self._searched, len(self._held) - len(closing) + 1)
            return False
        end = at + len(closing)
        found = self._read(self._held[:end], False)
        if found is Reading.MORE:
            self._searched = end
            return True
        self._take(found, self._held[:end])
        self._held = self._held[end:]
        return True

    def _take(self, found: Found | Reading, span: str) -> None:
        """Ends a span; behind one that is no call there is no section."""
        self._add(found, self._pending + span)
        self._in_section = self._in_section and not isinstance(found, Reading)
        self._opening, self._pending = None, ""

    def _finish(self, held: str, *, cut: bool) -> None:
        if self._opening is not None:  # some models end right behind the call
            self._take(self._read(held, cut), held)
        elif not cut:
            self._events += as_text(self._pending + held)
        elif not self._in_section and len(held) < 2:  # more of them are the beginning of a mark
            self._events += as_text(held)
        self._pending = ""


class WholeParser(CallParser):
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
        super().__init__()
        self._beginnings = beginnings
        self._read = read
        self._is_other = is_other
        self._is_text = False

    def _step(self) -> bool:
        seen = self._held.lstrip(BLANK)
        begins = any(seen.startswith(one) or one.startswith(seen) for one in self._beginnings)
        if self._is_text or not begins or self._is_other(seen):
            self._is_text = True
            self._events += as_text(self._held)
            self._held = ""
        return False

    def _finish(self, held: str, *, cut: bool) -> None:
        body = held.strip(BLANK)
        cut = cut and body.startswith(self._beginnings)
        self._add(self._read(body, cut) if body else Reading.NOT_A_CALL, held)


def overlap(text: str, tag: str) -> int:
    """The length of the longest end of `text` with which `tag` begins, less than all of it."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0


def as_text(text: str) -> list[Event]:
    """The event of some text; none of no text."""
    return [TextDelta(text)] if text else []
