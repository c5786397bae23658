"""How the text of an answer is told: as text, and as calls of tools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from kvpager.grammar import Grammar
from kvpager.requests.completion import RequestCompletion
from kvpager.server.errors import bad_request
from kvpager.server.ids import new_id
from kvpager.server.options import grammar_of, grammar_of_field
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
from kvpager.text.tool_calls import Event, TextDelta, ToolCallFormat

FinishReason = Literal["stop", "length", "tool_calls"]


class Delta(NamedTuple):
    """A piece of an answer, as a chunk of a chat completion has it."""

    values: dict[str, Any]


class Reader:
    """Takes the text of one answer apart as it comes.

    Attributes:
        calls: of tools, so far.
    """

    def __init__(self, calls_of: ToolCallFormat | None) -> None:
        """calls_of: how the model writes calls; None: everything is text."""
        self._parser = None if calls_of is None else calls_of.parser()
        self._text: list[str] = []
        self.calls: list[ToolCall] = []

    def push(self, text: str) -> list[Delta]:
        """What a further piece of text tells."""
        if self._parser is None:
            return self._told_text(text)
        return self._told(self._parser.push(text))

    def end(self) -> list[Delta]:
        """What was held back until the end."""
        return [] if self._parser is None else self._told(self._parser.end())

    @property
    def content(self) -> str | None:
        """The text beside the calls; None where there are only calls."""
        text = "".join(self._text)
        return None if self.calls and not text.strip() else text

    def message(self) -> dict[str, Any]:
        """The answer as a message of the conversation."""
        values: dict[str, Any] = {"role": "assistant", "content": self.content or ""}
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
    """

    options: Mapping[str, Any]
    tools: tuple[dict[str, Any], ...] | None = None
    calls_of: ToolCallFormat | None = None

    def reader(self) -> Reader:
        """For one answer."""
        return Reader(self.calls_of)


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
        return Answering({} if grammar is None else {"grammar": grammar})
    names = [tool.function.name for tool in tools]
    if len(set(names)) != len(names):
        raise bad_request("tools has two functions of one name; expected each once", "tools")
    if isinstance(choice, ChosenTool) and choice.function.name not in names:
        raise bad_request(
            f"tool_choice is {choice.function.name!r}; expected one of {', '.join(names)}",
            "tool_choice",
        )
    if choice == "none":
        return Answering({} if grammar is None else {"grammar": grammar})
    form = service.tool_call_format
    if form is None:
        raise bad_request(
            "tools is given, but this model's chat template knows none; start the server with "
            "--tool-calls hermes if the model was trained for that format",
            "tools",
        )
    shown = tuple(tool.model_dump(exclude_none=True) for tool in tools)
    if choice in (None, "auto"):
        return Answering({} if grammar is None else {"grammar": grammar}, shown, form)
    # A call that is forced is the whole answer: a grammar of its text has nothing to say.
    chosen = [one["function"] for one in shown]
    if isinstance(choice, ChosenTool):
        chosen = [one for one in chosen if one["name"] == choice.function.name]
        parallel = False
    check_schemas([one.get("parameters") for one in chosen], "tools")
    with grammar_of_field("tools"):
        forced = Grammar.lark(form.lark(chosen, parallel=parallel))
    return Answering({"grammar": forced}, shown, form)


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
