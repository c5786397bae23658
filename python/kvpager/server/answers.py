"""How the text of an answer is told: as text, and as calls of tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from kvpager.grammar import Grammar
from kvpager.requests.completion import RequestCompletion
from kvpager.server.errors import bad_request
from kvpager.server.ids import new_id
from kvpager.server.options import grammar_of, grammar_of_field
from kvpager.server.production import Piece
from kvpager.server.schema.chat import (
    Called,
    ChatRequest,
    ChosenTool,
    ObjectFormat,
    SchemaFormat,
    Tool,
    ToolCall,
    ToolChoice,
)
from kvpager.server.schema_limits import check_schemas
from kvpager.server.service import Service
from kvpager.text.call_parsing import Event, ReasoningDelta, TextDelta
from kvpager.text.tool_formats import ToolCallFormat

FinishReason = Literal["stop", "length", "tool_calls"]


class Delta(NamedTuple):
    """A piece of an answer, as a chunk of a chat completion has it."""

    values: dict[str, Any]


class Reader:
    """Takes the text of one answer apart as it comes.

    Attributes:
        calls: of tools, so far.
    """

    def __init__(
        self,
        calls_of: ToolCallFormat | None,
        tools: Sequence[Mapping[str, Any]],
        marks: Mapping[int, str],
    ) -> None:
        """Begins an answer.

        Args:
            calls_of: how the model writes calls; None: everything is text.
            tools: functions that it may call.
            marks: control tokens around calls, which are not in the text of pieces.
        """
        self._parser = None if calls_of is None else calls_of.parser(tools)
        self._marks = marks
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self.calls: list[ToolCall] = []

    def push(self, piece: Piece) -> list[Delta]:
        """What a further piece tells."""
        if self._parser is None:
            return self._told_text(piece.text)
        mark = self._marks.get(piece.token_id, "")
        return self._told(self._parser.push(piece.text + mark))

    def end(self) -> list[Delta]:
        """What was held back until the end."""
        return [] if self._parser is None else self._told(self._parser.end())

    @property
    def content(self) -> str | None:
        """The text beside the calls; None where there are only calls."""
        text = "".join(self._text)
        return None if self.calls and not text.strip() else text

    @property
    def reasoning(self) -> str | None:
        """What the model has marked as its reasoning."""
        return "".join(self._reasoning) or None

    def message(self) -> dict[str, Any]:
        """The answer as a message of the conversation."""
        values: dict[str, Any] = {"role": "assistant", "content": self.content or ""}
        if self.reasoning:
            values["reasoning_content"] = self.reasoning
        if self.calls:
            values["tool_calls"] = [call.model_dump() for call in self.calls]
        return values

    def _told_text(self, text: str) -> list[Delta]:
        if not text:
            return []
        self._text.append(text)
        return [Delta({"content": text})]

    def _told(self, events: list[Event]) -> list[Delta]:
        deltas: list[Delta] = []
        for one in events:
            if isinstance(one, TextDelta):
                deltas += self._told_text(one.text)
                continue
            if isinstance(one, ReasoningDelta):
                self._reasoning.append(one.text)
                deltas.append(Delta({"reasoning_content": one.text}))
                continue
            function = Called(name=one.name, arguments=one.arguments)
            call = ToolCall(id=new_id("call_"), function=function, index=one.index)
            self.calls.append(call)
            begun = call.model_copy(update={"function": Called(name=one.name, arguments="")})
            deltas.append(Delta({"tool_calls": [begun.model_dump()]}))
            arguments = {"index": one.index, "function": {"arguments": one.arguments}}
            deltas.append(Delta({"tool_calls": [arguments]}))
        return deltas


@dataclass(frozen=True)
class Answering:
    """How one request's answers are made and told.

    Attributes:
        options: of the generation: a grammar, where one holds.
        tools: for the chat template; None: none.
        calls_of: how calls are written; None: nothing is taken for a call.
        marks: control tokens around calls.
    """

    options: Mapping[str, Any]
    tools: tuple[dict[str, Any], ...] | None = None
    calls_of: ToolCallFormat | None = None
    marks: Mapping[int, str] = field(default_factory=dict)

    def reader(self) -> Reader:
        """For one answer."""
        functions = [tool["function"] for tool in self.tools or ()]
        return Reader(self.calls_of, functions, self.marks)


def answering_of(service: Service, body: ChatRequest) -> Answering:
    """Of a chat completion. Raises ApiError."""
    return answering(
        service,
        tools=body.tools,
        choice=body.tool_choice,
        parallel=body.parallel_tool_calls is not False,
        grammar=_grammar(body),
    )


def answering(
    service: Service,
    *,
    tools: list[Tool] | None,
    choice: ToolChoice | None,
    parallel: bool,
    grammar: Grammar | None,
) -> Answering:
    """Of these tools, this choice among them, and this grammar of the answer."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise bad_request("tool_choice names a tool; expected tools with it", "tool_choice")
        return _without_tools(service, grammar)
    names = [tool.function.name for tool in tools]
    if len(set(names)) != len(names):
        raise bad_request("tools has two functions of one name; expected each once", "tools")
    if isinstance(choice, ChosenTool) and choice.function.name not in names:
        raise bad_request(
            f"tool_choice is {choice.function.name!r}; expected one of {', '.join(names)}",
            "tool_choice",
        )
    if choice == "none":
        return _without_tools(service, grammar)
    form, marks = service.tool_call_format, service.call_marks
    if form is None:
        raise bad_request(
            f"tools is given, but {service.no_tools}; start the server with --tool-calls NAME if "
            "the model was trained for one of them",
            "tools",
        )
    shown = tuple(tool.model_dump(exclude_none=True) for tool in tools)
    if choice in (None, "auto"):
        return Answering({} if grammar is None else {"grammar": grammar}, shown, form, marks)
    # A call that is forced is the whole answer: a grammar of its text has nothing to say.
    chosen = [one["function"] for one in shown]
    if isinstance(choice, ChosenTool):
        chosen = [one for one in chosen if one["name"] == choice.function.name]
        parallel = False
    check_schemas([one.get("parameters") for one in chosen], "tools")
    with grammar_of_field("tools"):
        tokens = {mark: number for number, mark in marks.items()}
        forced = Grammar.lark(form.lark(chosen, parallel=parallel, tokens=tokens))
    return Answering({"grammar": forced}, shown, form, marks)


def _without_tools(service: Service, grammar: Grammar | None) -> Answering:
    form = service.tool_call_format
    if form is None or not form.always:
        form = None
    options = {} if grammar is None else {"grammar": grammar}
    return Answering(options, None, form, service.call_marks)


def _grammar(body: ChatRequest) -> Grammar | None:
    form = body.response_format
    with grammar_of_field("response_format"):
        if isinstance(form, ObjectFormat):
            return Grammar.json_object()
        if isinstance(form, SchemaFormat):
            check_schemas([form.json_schema.schema_], "response_format")
            return Grammar.json_schema(form.json_schema.schema_)
    return grammar_of(body)


def finish_reason(completion: RequestCompletion, reader: Reader) -> FinishReason:
    """OpenAI's word for how an answer ended."""
    if completion.finish_reason == "length":
        return "length"
    return "tool_calls" if reader.calls else "stop"


def stop_reason(completion: RequestCompletion) -> int | str | None:
    """VLLM's `stop_reason`: the token id or the string of `stop` that ended it, if one did."""
    stop = completion.stopped_by
    return stop[-1] if isinstance(stop, tuple) else stop
