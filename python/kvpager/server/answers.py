"""Answers: their text, the tool calls in it, and their usage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from kvpager._runtime.text.call_parsing import CallDelta, Event, ReasoningDelta, TextDelta, as_text
from kvpager._runtime.text.tool_formats import ToolCallFormat
from kvpager.grammar import Grammar
from kvpager.requests.request import RequestCompletion
from kvpager.server.errors import bad_request
from kvpager.server.json_limits import check_schemas
from kvpager.server.options import grammar_of_field
from kvpager.server.schema.chat import Called, Function, ToolCall
from kvpager.server.schema.common import MakeId, PromptDetails, Usage
from kvpager.server.service import Service
from kvpager.server.turn import TokenPiece

FinishReason = Literal["stop", "length", "tool_calls"]
CUT = ("length", "cancelled")  # finish reasons of answers that would have gone on
Delta = TextDelta | ReasoningDelta | ToolCall
_ApiEvent = TypeVar("_ApiEvent")
_SHOWN = set(Function.model_fields)  # to the model


class Reader:
    """Separates the text, the reasoning and the tool calls of one answer as it comes.

    Attributes:
        calls: the calls so far.
    """

    def __init__(
        self,
        calls_of: ToolCallFormat | None,
        tools: Sequence[Mapping[str, Any]],
        marks: Mapping[int, str],
        make_id: MakeId,
    ) -> None:
        """Begins an answer.

        Args:
            calls_of: the model's format of calls; None: everything is text.
            tools: functions that it may call.
            marks: control tokens around calls, which are not in the text of pieces.
            make_id: makes ids of calls.
        """
        self._parser = None if calls_of is None else calls_of.parser(tools)
        self._marks = marks
        self._make_id = make_id
        self._text: list[str] = []
        # White space held back: dropped beside calls, else part of the text. None: text has begun.
        self._space = None if calls_of is None else ""
        self._reasoning: list[str] = []
        self.calls: list[ToolCall] = []

    def push(self, piece: TokenPiece) -> list[Delta]:
        """Returns the deltas that one more piece completes."""
        if self._parser is None:
            return self._add(as_text(piece.text))
        mark = self._marks.get(piece.token_id, "")
        return self._add(self._parser.push(piece.text + mark))

    def end(self, completion: RequestCompletion | None) -> list[Delta]:
        """Returns the deltas held back until the end; None: the server ended the answer."""
        events: list[Event] = []
        if self._parser is not None:
            is_cut = completion is None or completion.finish_reason in CUT
            events = self._parser.end(cut=is_cut)
        deltas = self._add(events)
        if self._space and not self.calls:
            self._text.append(self._space)
            deltas.append(TextDelta(self._space))
        return deltas

    @property
    def content(self) -> str | None:
        """The text outside calls; None where there are only calls."""
        return None if self.calls and not self._text else "".join(self._text)

    @property
    def reasoning(self) -> str | None:
        """The text that the model marked as its reasoning."""
        return "".join(self._reasoning) or None

    def message(self) -> dict[str, Any]:
        """The answer as a message of the conversation."""
        values: dict[str, Any] = {"role": "assistant", "content": self.content or ""}
        if self.reasoning:
            values["reasoning_content"] = self.reasoning
        if self.calls:
            values["tool_calls"] = [call.model_dump() for call in self.calls]
        return values

    def _add(self, events: Iterable[Event]) -> list[Delta]:
        deltas: list[Delta] = []
        for one in events:
            if isinstance(one, CallDelta):
                self._space = ""
                function = Called(name=one.name, arguments=one.arguments)
                call = ToolCall(id=self._make_id("call_"), function=function, index=one.index)
                self.calls.append(call)
                deltas.append(call)
            elif isinstance(one, ReasoningDelta):
                self._reasoning.append(one.text)
                deltas.append(one)
            elif self._space is not None and not one.text.strip():
                self._space += one.text
            else:
                text, self._space = (self._space or "") + one.text, None
                self._text.append(text)
                deltas.append(TextDelta(text))
        return deltas


class Parts(ABC, Generic[_ApiEvent]):
    """The texts and calls of an answer, each begun, extended and closed in turn.

    Attributes:
        items: in an API's form.
    """

    text_type: str

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open = False  # whether the last item still grows

    def add(self, deltas: Iterable[Delta]) -> list[_ApiEvent]:
        """Returns the API's events of deltas."""
        events: list[_ApiEvent] = []
        for one in deltas:
            if isinstance(one, ToolCall):
                events += [*self.begin(self._empty_call(one)), *self.extend(one.function.arguments)]
            elif isinstance(one, TextDelta):
                if not self._open or self.items[-1]["type"] != self.text_type:
                    events += self.begin(self.empty_text())
                events += self.extend(one.text)
        return events

    def begin(self, item: dict[str, Any]) -> list[_ApiEvent]:
        """Closes the last item and begins a new one."""
        events = self.close()
        self.items.append(item)
        self._open = True
        return [*events, *self._begun(item)]

    def close(self, status: str = "completed") -> list[_ApiEvent]:
        """Closes the last item, if it is open."""
        was_open, self._open = self._open, False
        return self._closed(self.items[-1], status) if was_open else []

    @abstractmethod
    def extend(self, text: str) -> list[_ApiEvent]:
        """Extends the last item: a text, or the arguments of a call."""

    @abstractmethod
    def empty_text(self) -> dict[str, Any]:
        """A new item of text."""

    @abstractmethod
    def _empty_call(self, call: ToolCall) -> dict[str, Any]: ...

    @abstractmethod
    def _begun(self, item: dict[str, Any]) -> list[_ApiEvent]: ...

    @abstractmethod
    def _closed(self, item: dict[str, Any], status: str) -> list[_ApiEvent]: ...


class Answering(NamedTuple):
    """How to produce one request's answers.

    Attributes:
        options: of the generation: a grammar, where one applies.
        tools: for the chat template; None: none.
        reader: makes a reader for one answer; takes what makes ids of calls.
    """

    options: dict[str, Any]
    tools: list[dict[str, Any]] | None
    reader: Callable[[MakeId], Reader]


def answering(
    service: Service,
    functions: Sequence[Function] | None,
    choice: str | None,
    forced: str | None = None,
    *,
    parallel: bool,
    grammar: Grammar | None,
) -> Answering:
    """Checks tools and the choice among them. Raises ApiError.

    Args:
        service: knows the model's format of calls.
        functions: that the model may call.
        choice: "none", "auto" or "required".
        forced: name of the function that has to be called; then there is no `choice`.
        parallel: whether an answer may have several calls.
        grammar: of the answer's text.
    """
    names = [one.name for one in functions or ()]
    form, marks = service.tool_call_format, service.call_marks
    is_free = forced is None and choice in (None, "none", "auto")
    if not functions and not is_free:
        raise bad_request("tool_choice names a tool; expected tools with it", "tool_choice")
    if len(set(names)) != len(names):
        raise bad_request("tools has two functions of one name; expected each once", "tools")
    if functions and forced is not None and forced not in names:
        raise bad_request(
            f"tool_choice is {forced!r}; expected one of {', '.join(names)}", "tool_choice"
        )
    options = {} if grammar is None else {"grammar": grammar}
    if not functions or choice == "none":
        always = form if form is not None and form.always else None
        return Answering(options, None, lambda ids: Reader(always, (), marks, ids))
    if form is None:
        raise bad_request(
            f"tools is given, but {service.no_tools}; start the server with --tool-calls NAME if "
            "the model was trained for one of them",
            "tools",
        )
    shown = [one.model_dump(include=_SHOWN, exclude_none=True) for one in functions]
    if not is_free or grammar is not None:
        # A forced call is the whole answer: a grammar of its text does not apply.
        chosen = [one for one in shown if forced in (None, one["name"])]
        check_schemas([one.get("parameters") for one in chosen], "tools")
        tokens = {mark: number for number, mark in marks.items()}
        text = form.lark(chosen, parallel=parallel and forced is None, tokens=tokens)
        calls = grammar_of_field("tools", Grammar.lark, text)
        both = is_free and grammar is not None
        options = {"grammar": Grammar.either(grammar, calls) if both and grammar else calls}
    tools = [{"type": "function", "function": one} for one in shown]
    return Answering(options, tools, lambda ids: Reader(form, shown, marks, ids))


def finish_reason(
    completion: RequestCompletion | None, calls: Sequence[object] = ()
) -> FinishReason:
    """OpenAI's word for the end of an answer with these calls; None: nothing was generated."""
    if completion is None or completion.finish_reason == "length":
        return "length"
    return "tool_calls" if calls else "stop"


def stop_reason(completion: RequestCompletion | None) -> int | str | None:
    """VLLM's `stop_reason`: the token id or the string of `stop` that ended it, if one did."""
    stop = None if completion is None else completion.stopped_by
    return stop[-1] if isinstance(stop, tuple) else stop


def usage_of(prompts: Sequence[Sequence[RequestCompletion]]) -> Usage:
    """Usage of the choices of each prompt. A prompt counts once, as its first choice had it."""
    first = [choices[0] for choices in prompts]
    prompt = sum(one.prompt_tokens for one in first)
    generated = sum(len(one.tokens) for choices in prompts for one in choices)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=generated,
        total_tokens=prompt + generated,
        prompt_tokens_details=PromptDetails(
            cached_tokens=sum(one.cached_tokens for one in first),
            cache_write_tokens=sum(one.computed_tokens for one in first),
        ),
    )
