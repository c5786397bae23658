"""Conversations rendered from what is known of earlier turns: the text is that of the whole."""

from __future__ import annotations

import copy
import random

import pytest
from tokenizer_settings import CHATML, INST, wrapped

from call_templates import TEMPLATES as CALLING
from kvpager import InvalidArgumentError
from kvpager._runtime.text.conversation import Conversation, checked_messages
from kvpager._runtime.text.template_input import template_messages
from kvpager._runtime.text.tokenizer import NOTHING_SHOWN, Rendering, Tokenizer
from kvpager._runtime.text.tool_calls import call_ids_of

# Templates whose text of a message depends on others: on the last one, on their number, on later
# ones, on what stands beside it.
WHOLE = {
    "last": (
        "{% for m in messages %}{{ m.role }}{{ '!' if m == messages[-1] }}{{ m.content }}"
        "{% endfor %}"
    ),
    "loop": (
        "{% for m in messages %}{{ loop.revindex }}{{ m.content if not loop.last }}{% endfor %}"
    ),
    "count": "{{ messages|length }}{% for m in messages[2:] %}{{ m.content }}{% endfor %}",
    "system-at-end": (
        "{% for m in messages if m.role != 'system' %}{{ m.content }}|{% endfor %}"
        "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    ),
    "neighbours": (
        "{% for m in messages %}{% if loop.first or messages[loop.index0 - 1].role != m.role %}"
        "<{{ m.role }}>{% endif %}{{ m.content }}{% endfor %}"
    ),
    "thinking": (  # as Qwen3 has it: the reasoning behind the last question alone
        "{% set ns = namespace(last=0) %}{% for m in messages[::-1] %}"
        "{% if ns.last == 0 and m.role == 'user' %}"
        "{% set ns.last = messages|length - loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.reasoning_content and loop.index0 >= ns.last %}({{ m.reasoning_content }})"
        "{% endif %}{{ m.content }}{{ m.tool_calls|tojson if m.tool_calls }}<|im_end|>{% endfor %}"
    ),
    "json": "{% for m in messages %}{{ m|tojson }}{% endfor %}{{ tools|tojson if tools }}",
    "refusing": (
        "{% for m in messages %}{% if m.role == 'tool' and loop.index0 % 3 == 0 %}"
        "{{ raise_exception('no tools here') }}{% endif %}{{ m.content }}{% endfor %}"
    ),
}
TEMPLATES = {"chatml": CHATML, "inst": INST, **WHOLE, **CALLING}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
TEXTS = ["Hello", "", " a\n", "x<|im_end|>y", "\ufdd0<s>\ufdd1", "<think>1</think>", "漢🙂", "</s"]
TOOLS_OF_STRANGERS = [
    {"type": "function", "function": {"name": "f", "description": "x <|im_end|></s>[/INST] y"}}
]
VALUES = [1, True, 1.0, "1", None, [1], {"b": 1, "a": 2}, {"a": 2, "b": 1}]
RENDERINGS = [
    Rendering(),
    Rendering(control_tokens="tokens"),
    Rendering({"tools": TOOLS}),
    Rendering({"tools": [], "enable_thinking": False}),
    Rendering({"note": "<|im_end|>"}, generation_prompt=False),
    Rendering({"tools": TOOLS_OF_STRANGERS}),
]


def tokenizer_of(template, name="llama3"):
    made = wrapped.__wrapped__(name, "chatml")
    made.chat_template = template
    return Tokenizer(made, 1 << 20)


def message(chance):
    made = {"role": chance.choice(["user", "assistant", "tool", "system"])}
    made["content"] = chance.choice(TEXTS)
    if chance.random() < 0.3:
        made[chance.choice(["reasoning", "reasoning_content", "thinking"])] = chance.choice(TEXTS)
    if chance.random() < 0.3:
        function = {"name": "f", "arguments": {"value": chance.choice(VALUES)}}
        made["tool_calls"] = [{"id": "call000", "type": "function", "function": function}]
    if made["role"] == "tool":
        made["tool_call_id"] = "call000"
    items = list(made.items())
    chance.shuffle(items)  # a template may write a whole message
    return dict(items)


def edited(messages, chance):
    """Another list, in which what stays is the same object."""
    messages = list(messages)
    for _ in range(chance.randint(0, 2)):
        at = chance.randrange(len(messages) + 1)
        kind = chance.randrange(4)
        if kind == 0:
            messages.insert(at, message(chance))
        elif kind == 1:
            messages[at:] = []
        elif kind == 2 and at < len(messages):
            messages[at] = copy.deepcopy(messages[at]) | {"content": chance.choice(TEXTS)}
        elif messages:
            messages.append(messages[0])
    return [*messages, message(chance), message(chance)]


def whole(tokenizer, messages, rendering):
    """The text by transformers alone, from copies; or its error."""
    given = template_messages(copy.deepcopy(messages), call_ids_of(tokenizer.wrapped.chat_template))
    variables = dict(rendering.variables)
    template = tokenizer.wrapped.chat_template
    if rendering.control_tokens == "text":
        control = tokenizer._prompts.control_tokens(template)
        given, variables = control.marked(given), control.marked_values(variables)
    try:
        return tokenizer.wrapped.apply_chat_template(
            given,
            tokenize=False,
            add_generation_prompt=rendering.generation_prompt,
            **variables,
        )
    except Exception as error:
        return error


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_that_is_edited_at_random_has_the_text_and_tokens_of_the_whole(name):
    tokenizer, chance = tokenizer_of(TEMPLATES[name]), random.Random(name)
    for _ in range(12):
        messages, known, rendering = [], NOTHING_SHOWN, RENDERINGS[0]
        for _ in range(8):
            messages = edited(messages, chance)
            if chance.random() < 0.2:
                rendering = chance.choice(RENDERINGS)
            expected = whole(tokenizer, messages, rendering)
            known = tokenizer.shown(messages, rendering, known)
            if isinstance(expected, Exception):
                with pytest.raises(InvalidArgumentError, match=type(expected).__name__):
                    tokenizer.render(messages, rendering, known)
                continue
            text = tokenizer.render(messages, rendering, known)
            assert text == expected
            if text:
                ids = tokenizer.encode_prompt(text)
                assert (
                    ids.tolist()
                    == tokenizer.prompt_ids(copy.deepcopy(messages), rendering).tolist()
                )


@pytest.mark.parametrize("name", TEMPLATES)
def test_control_tokens_in_tools_are_text_whatever_the_template(name):
    tokenizer, rendering = tokenizer_of(TEMPLATES[name]), Rendering({"tools": TOOLS_OF_STRANGERS})
    messages = [{"role": "user", "content": "a"}]
    text = tokenizer.render(messages, rendering)
    assert text == whole(tokenizer, messages, rendering)
    ends = tokenizer.wrapped.convert_tokens_to_ids("<|im_end|>")
    plain = tokenizer.prompt_ids(messages, Rendering({"tools": TOOLS})).tolist()
    assert tokenizer.encode_prompt(text).tolist().count(ends) == plain.count(ends)


def test_control_tokens_in_tools_are_text_where_a_tokenizer_renders_in_its_own_way(monkeypatch):
    tokenizer, rendering = tokenizer_of(CHATML), Rendering({"note": "<|im_end|>"})
    tokenizer.wrapped.chat_template = "{{ note }}{% for m in messages %}{{ m.content }}{% endfor %}"
    monkeypatch.setattr(tokenizer._templates, "_compile", None)
    messages, known = [], NOTHING_SHOWN
    for text in ("a", "b", "c"):
        messages = [*messages, {"role": "user", "content": text}]
        known = tokenizer.shown(messages, rendering, known)
        text = tokenizer.render(messages, rendering, known)
        assert text == whole(tokenizer, messages, rendering)
        assert "\ufdd0<|im_end|>" in text


def test_a_turn_reads_its_new_messages_alone():
    tokenizer, chance = tokenizer_of(CHATML), random.Random(1)
    messages = [message(chance) for _ in range(40)]
    kept = Conversation().turn(messages, tokenizer, Rendering())
    read = []
    apply = type(tokenizer.wrapped).apply_chat_template
    tokenizer._templates._wrapped = Noting(tokenizer.wrapped, apply, read)
    conversation = Conversation(kept.messages, kept.stretches, None, kept.shown)
    new = [message(chance), message(chance)]
    conversation.turn([*kept.messages, *new], tokenizer, Rendering())
    assert read == [2]


class Noting:
    """A tokenizer that notes how many messages `apply_chat_template` is given."""

    def __init__(self, wrapped, apply, noted):
        self._wrapped, self._apply, self._noted = wrapped, apply, noted

    def __getattr__(self, name):
        return getattr(self._wrapped, name)

    def apply_chat_template(self, messages, **options):
        self._noted.append(len(messages))
        return self._apply(self._wrapped, messages, **options)


def test_a_way_of_rendering_that_gives_another_text_is_not_taken(monkeypatch):
    """Should a release of transformers pass anything else to templates."""
    tokenizer, chance = tokenizer_of(CHATML), random.Random(2)
    other = tokenizer_of("other").wrapped.chat_template
    compiled = tokenizer._templates._compile
    monkeypatch.setattr(tokenizer._templates, "_compile", lambda _: compiled(other))
    messages, known = [], NOTHING_SHOWN
    for _ in range(3):
        messages = [*messages, message(chance)]
        known = tokenizer.shown(messages, Rendering(), known)
        expected = whole(tokenizer, messages, Rendering())
        assert tokenizer.render(messages, Rendering(), known) == expected


def test_a_tokenizer_with_a_way_of_its_own_renders_every_message():
    class Own(type(wrapped("llama3", "chatml"))):
        def apply_chat_template(self, messages, **_):
            return "|".join(one["content"] for one in messages)

    made = tokenizer_of(CHATML)
    made.wrapped.__class__ = Own
    tokenizer, messages, known = Tokenizer(made.wrapped, 1 << 20), [], NOTHING_SHOWN
    for text in ("a", "b", "c"):
        messages = [*messages, {"role": "user", "content": text}]
        known = tokenizer.shown(messages, Rendering(), known)
        assert tokenizer.render(messages, Rendering(), known) == "|".join("abc"[: len(messages)])


def test_checked_messages_are_copies_but_for_those_that_were_checked_before():
    before = checked_messages([{"role": "user", "content": "a"}])
    given = {"role": "user", "content": "b"}
    first, second = checked_messages([*before, given], before)
    assert first is before[0]
    given["content"] = "c"
    assert second == {"role": "user", "content": "b"}
    with pytest.raises(InvalidArgumentError, match=r"messages\[1\] is 'x'"):
        checked_messages([*before, "x"], before)
