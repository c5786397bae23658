"""Which format a model writes its calls of tools in: by name, or as its chat template does."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from hashlib import blake2b

from kvpager.errors import InvalidArgumentError
from kvpager.text.tool_formats import (
    DeepSeek,
    Gemma,
    Harmony,
    Json,
    Kimi,
    Llama3,
    Mistral,
    Tags,
    ToolCallFormat,
)

_QWEN_TAGS = ("<function=", ">"), ("<parameter=", ">", "</parameter>")
_ALL: tuple[ToolCallFormat, ...] = (
    Json("hermes", "<tool_call>", "</tool_call>", blank="\n"),
    Llama3(),
    Mistral("mistral", named=False),
    Mistral("mistral_args", named=True),
    Tags(
        "qwen3_coder",
        ("<tool_call>", "</tool_call>"),
        *_QWEN_TAGS,
        others=(("<function=", "</function>"),),
    ),
    Tags(
        "glm",
        ("<tool_call>", "</tool_call>"),
        ("", ""),
        ("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>"),
        line="",
    ),
    DeepSeek("deepseek_v3", fenced=True),
    DeepSeek("deepseek_v31", fenced=False),
    Kimi(),
    Harmony(),
    Json("granite", "<|tool_call|>", None, listed=True, others=(("<tool_call>", None),)),
    Json("phi4_mini", "<|tool_call|>", "<|/tool_call|>", listed=True),
    Json(
        "command_r",
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        listed=True,
        keys=("tool_name", "parameters"),
        number="tool_call_id",
    ),
    Tags(
        "minimax",
        ("<minimax:tool_call>", "</minimax:tool_call>"),
        ('<invoke name="', '">'),
        ('<parameter name="', '">', "</parameter>"),
        sectioned=True,
        line="",
    ),
    Tags("seed_oss", ("<seed:tool_call>", "</seed:tool_call>"), *_QWEN_TAGS, line=""),
    Gemma("function_gemma", ("<start_function_call>", "<end_function_call>"), "<escape>"),
    Gemma("gemma4", ("<|tool_call>", "<tool_call|>"), '<|"|>'),
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
    """What is said of a template whose format is not known."""
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
