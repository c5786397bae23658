"""Which format a model writes its calls of tools in: by name, or as its chat template does."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from hashlib import blake2b

from kvpager._runtime.text.tool_formats import (
    Gemma,
    Harmony,
    Llama3,
    Tags,
    ToolCallFormat,
    Written,
)
from kvpager.errors import InvalidArgumentError

_QWEN_ARGUMENT = ("<parameter=", ">", "</parameter>")
_DEEPSEEK_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")  # noqa: RUF001
_DEEPSEEK_CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")  # noqa: RUF001
_DEEPSEEK_NAME = "<｜tool▁sep｜>"  # noqa: RUF001
_DEEPSEEK_FENCED = rf"\s*\w*{_DEEPSEEK_NAME}\s*([^\s<]+)\s*```json"
_DEEPSEEK_PLAIN = rf"\s*([^\s<]+)\s*{_DEEPSEEK_NAME}"
_KIMI_SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_KIMI_NAME = "<|tool_call_argument_begin|>"
_MISTRAL_HEAD = r"\s*([A-Za-z0-9_.\-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?\[ARGS\]"
_HARMONY_MARKS = ("<|message|>", "<|constrain|>", "<|call|>", "<|start|>", "<|end|>", "<|return|>")
_ALL: tuple[ToolCallFormat, ...] = (
    ToolCallFormat(
        "hermes",
        Written("<tool_call>\n{call}\n</tool_call>", "\n"),
        ("<tool_call>", "</tool_call>"),
    ),
    Llama3(
        "llama3",
        Written("{call}", None),
        ("<|python_tag|>", None),
        keys=("name", "parameters"),
    ),
    *(
        ToolCallFormat(
            name,
            written,
            ("[TOOL_CALLS]", None),
            marks=("[ARGS]", "[CALL_ID]"),
            head=_MISTRAL_HEAD,
        )
        for name, written in (  # both are read
            ("mistral", Written("{call}", ", ", "[TOOL_CALLS][", "]")),
            ("mistral_args", Written("[TOOL_CALLS]{name}[ARGS]{arguments}")),
        )
    ),
    Tags(
        "qwen3_coder",
        Written("<tool_call>\n<function={name}>\n{tags}</function>\n</tool_call>", "\n"),
        ("<tool_call>", "</tool_call>"),
        ("<function=", "</function>"),
        argument=_QWEN_ARGUMENT,
        line="\n",
    ),
    Tags(
        "glm",
        Written("<tool_call>{name}\n{tags}</tool_call>", "\n"),
        ("<tool_call>", "</tool_call>"),
        argument=("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>"),
    ),
    *(
        ToolCallFormat(
            name,
            Written(call.join(_DEEPSEEK_CALL), between, *_DEEPSEEK_SECTION),
            _DEEPSEEK_CALL,
            section=_DEEPSEEK_SECTION,
            marks=(_DEEPSEEK_NAME,),
            head=f"{_DEEPSEEK_FENCED}|{plain}",
        )
        for name, call, between, plain in (  # both are read
            (
                "deepseek_v3",
                f"function{_DEEPSEEK_NAME}{{name}}\n```json\n{{arguments}}\n```",
                "\n",
                rf"{_DEEPSEEK_PLAIN}(?=\s*\{{)",
            ),
            ("deepseek_v31", f"{{name}}{_DEEPSEEK_NAME}{{arguments}}", "", _DEEPSEEK_PLAIN),
        )
    ),
    ToolCallFormat(
        "kimi_k2",
        Written(
            f"<|tool_call_begin|>functions.{{name}}:{{number}}{_KIMI_NAME}{{arguments}}"
            "<|tool_call_end|>",
            "",
            *_KIMI_SECTION,
        ),
        ("<|tool_call_begin|>", "<|tool_call_end|>"),
        section=_KIMI_SECTION,
        marks=(_KIMI_NAME,),
        head=rf"\s*(?:functions\.)?([^\s<]+?)(?::\d+)?\s*{re.escape(_KIMI_NAME)}",
    ),
    Harmony(
        "harmony",
        Written(
            "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}",
            None,
        ),
        ("<|channel|>", None),
        marks=_HARMONY_MARKS,
    ),
    ToolCallFormat(
        "granite",
        Written("{call}", ", ", "<|tool_call|>[", "]"),
        ("<|tool_call|>", None),
        ("<tool_call>", None),
    ),
    ToolCallFormat(
        "phi4_mini",
        Written("{call}", ", ", "<|tool_call|>[", "]<|/tool_call|>"),
        ("<|tool_call|>", "<|/tool_call|>"),
    ),
    ToolCallFormat(
        "command_r",
        Written("{call}", ", ", "<|START_ACTION|>[", "]<|END_ACTION|>"),
        ("<|START_ACTION|>", "<|END_ACTION|>"),
        keys=("tool_name", "parameters"),
        number="tool_call_id",
    ),
    Tags(
        "minimax",
        Written(
            '<invoke name="{name}">\n{tags}</invoke>\n',
            "",
            "<minimax:tool_call>\n",
            "</minimax:tool_call>",
        ),
        ('<invoke name="', "</invoke>"),
        section=("<minimax:tool_call>", "</minimax:tool_call>"),
        argument=('<parameter name="', '">', "</parameter>"),
    ),
    Tags(
        "seed_oss",
        Written("<seed:tool_call>\n<function={name}>\n{tags}</function>\n</seed:tool_call>", "\n"),
        ("<seed:tool_call>", "</seed:tool_call>"),
        argument=_QWEN_ARGUMENT,
    ),
    Gemma(
        "function_gemma",
        Written("<start_function_call>call:{name}{{pairs}}<end_function_call>"),
        ("<start_function_call>", "<end_function_call>"),
        marks=("<escape>",),
    ),
    Gemma(
        "gemma4",
        Written("<|tool_call>call:{name}{{pairs}}<tool_call|>"),
        ("<|tool_call>", "<tool_call|>"),
        marks=('<|"|>',),
    ),
)
FORMATS: Mapping[str, ToolCallFormat] = {one.name: one for one in _ALL}

# What a template has of a format, the first that has all of its texts; a text in each may be one of
# several.
_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("harmony", ("<|channel|>", "<|message|>")),
    ("minimax", ("<minimax:tool_call>", "<invoke")),
    ("seed_oss", ("<seed:tool_call>", "<parameter=")),
    ("glm", ("<arg_key>", "<arg_value>")),
    ("kimi_k2", ("<|tool_call_argument_begin|>",)),
    ("deepseek_v3", ("<｜tool▁call▁begin｜>", "```json")),  # noqa: RUF001
    ("deepseek_v31", ("<｜tool▁call▁begin｜>",)),  # noqa: RUF001
    ("qwen3_coder", ("<tool_call>", "<function=", "<parameter=")),
    ("function_gemma", ("<start_function_call>",)),
    ("gemma4", ("<|tool_call>", "<tool_call|>")),
    ("command_r", ("<|START_ACTION|>",)),
    ("mistral_args", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("phi4_mini", ("<|/tool_call|>",)),
    ("phi4_mini", ("<|/tool|>",)),
    ("granite", ("<|tool_call|>",)),
    ("hermes", ("<tool_call>", '"name"', '"arguments"')),
    ("hermes", ("<tool_call>", "tojson")),
    ("llama3", ('"name"', '"parameters"', "<|python_tag|>")),
    ("llama3", ('"name"', '"parameters"', "<|start_header_id|>")),
    ("llama3", ('"name"', '"parameters"', "<|header_start|>")),
)
_TAG = re.compile(
    r"<[^<>{}\s]*(?:tool|function|call|action)[^<>{}\s]*>|\[[A-Z_]*TOOL[A-Z_]*\]", re.I
)


def tool_call_format(name: str) -> ToolCallFormat:
    """A format by its name. Raises InvalidArgumentError for an unknown one."""
    if name not in FORMATS:
        raise InvalidArgumentError(f"tool_calls is {name!r}; expected {', '.join(FORMATS)}")
    return FORMATS[name]


def format_of_template(template: object) -> ToolCallFormat | None:
    """The format that a chat template teaches; None: it knows no tools, or another one.

    template: of a tokenizer: text, {name: text}, or None.
    """
    text = _text_of(template)
    if "tools" not in text:
        return None
    for name, signs in _SIGNS:
        if all(sign in text for sign in signs):
            return FORMATS[name]
    return None


def unknown_format(template: object) -> str:
    """Returns the message for a template whose format is not known."""
    text = _text_of(template)
    known = f"known formats are {', '.join(FORMATS)}"
    if "tools" not in text:
        return f"this model's chat template shows it no tools; {known}"
    tag = _TAG.search(text)
    written = f"writes {tag[0]}" if tag is not None else "has no marks of calls that are known"
    return f"this model's chat template {written}, and not in a known format; {known}"


def call_ids_of(template: object) -> Callable[[str, str, int], str] | None:
    """How a template wants ids of calls: of (id, tool, number of the call); None: as they are."""
    text = _text_of(template)
    if "<|tool_call_argument_begin|>" in text:
        return _kimi_id
    return _mistral_id if "[TOOL_CALLS]" in text else None


def _kimi_id(given: str, name: str, number: int) -> str:
    return given if re.fullmatch(r"functions\..+:\d+", given) else f"functions.{name}:{number}"


def _mistral_id(given: str, name: str, number: int) -> str:
    """Nine letters and digits, which these templates insist on."""
    if re.fullmatch(r"[A-Za-z0-9]{9}", given):
        return given
    return blake2b(given.encode(), digest_size=8).hexdigest()[:9]


def _text_of(template: object) -> str:
    """The template's text, or those of all it has, with quotes as they come out."""
    texts = template.values() if isinstance(template, Mapping) else [template]
    text = "\n".join(one for one in texts if isinstance(one, str))
    return text.replace('\\"', '"')
