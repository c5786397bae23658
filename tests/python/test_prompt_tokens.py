"""The tokens of a conversation's prompt: those of its whole text, whatever is in memory."""

from __future__ import annotations

import random

import numpy as np
import pytest
from tokenizer_settings import MADE, TEMPLATES, wrapped

from kvpager import InvalidArgumentError
from kvpager._runtime.text.conversation import Conversation, LastAnswer
from kvpager._runtime.text.template_input import BEGIN_TEXT, END_TEXT
from kvpager._runtime.text.tokenizer import Rendering, Tokenizer

PLAIN = Rendering()
PIECES = [
    *("Hello", " world", "the", " ", "  ", "\n", "\n\n", "▁", "a", "é", "e\u0301", "\ufb01"),
    *("1234", "漢字", "🙂", "<", "[INST]", "user", ".", "\t", "</s>", "I"),
    *("<|im_", "<|im_end|>", "<think>"),
]


def tokenizer_of(name, template):
    return Tokenizer(wrapped(name, template), 1 << 20)


def text(chance):
    return "".join(chance.choices(PIECES, k=chance.randint(1, 6)))


def conversation(chance, turns):
    """Messages of a user and the assistant in turn; the last is the user's."""
    roles = ["user", "assistant"] * turns
    return [{"role": role, "content": text(chance)} for role in roles[:-1]]


def answered(turn, ids, tokenizer):
    """The conversation once the model has produced `ids` behind a turn's prompt."""
    asked = Conversation(turn.messages, turn.stretches, LastAnswer(len(turn.ids), ()))
    return asked.settled(np.concatenate([turn.ids, ids]), tokenizer)


def produced(tokenizer, form, messages, chance):
    """The ids of an answer, as in the whole text; None: no answer has tokens of its own there."""
    *before, answer = messages
    prompt = tokenizer.render(before, PLAIN)
    whole = tokenizer.render(messages, Rendering(generation_prompt=False))
    spoken = form.format(answer["content"])
    end = len(prompt) + len(spoken)
    if chance.random() < 0.5:
        end = len(prompt) + len(form.partition("{}")[0] + answer["content"])  # it had no end token
    if not whole.startswith(prompt):
        return None
    ids = tokenizer.encode_behind(whole[:end], len(prompt))
    return ids if ids is not None and len(ids) else None


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", MADE)
def test_a_prompt_does_not_depend_on_what_is_in_memory(name, template):
    """Split at any turns, with answers in the whole text's tokens, the prompt is the whole's."""
    tokenizer, form = tokenizer_of(name, template), TEMPLATES[template][1]
    chance = random.Random(f"{name} {template}")
    for _ in range(12):
        messages = conversation(chance, 4)
        cold = Conversation().turn(messages, tokenizer, PLAIN)
        kept = Conversation()
        for count in (1, 3, 5):
            turn = kept.turn(messages[:count], tokenizer, PLAIN)
            assert (
                turn.ids.tolist()
                == Conversation().turn(messages[:count], tokenizer, PLAIN).ids.tolist()
            )
            ids = produced(tokenizer, form, messages[: count + 1], chance)
            lives = chance.random() < 0.6 and ids is not None
            kept = answered(turn, ids if lives else turn.ids[:2], tokenizer)
            if not lives and chance.random() < 0.5:  # nothing came
                kept = Conversation(turn.messages, turn.stretches)
        warm = kept.turn(messages, tokenizer, PLAIN)
        assert warm.ids.tolist() == cold.ids.tolist()
        assert "".join(one.text for one in warm.stretches) == tokenizer.render(messages, PLAIN)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", ["gpt2", "llama3", "qwen", "metaspace-never", "metaspace-first"])
def test_an_answer_in_other_tokens_keeps_them_and_what_follows_is_as_in_the_whole(name, template):
    tokenizer, form = tokenizer_of(name, template), TEMPLATES[template][1]
    first = {"role": "user", "content": "Hello world"}
    answer = {"role": "assistant", "content": "permission notice shall"}
    messages = [first, answer, {"role": "user", "content": "of the Software\n\nHello"}]
    turn = Conversation().turn([first], tokenizer, PLAIN)
    before, _, after = form.partition("{}")
    letters = [
        tokenizer.encode(one, "x", special_tokens=False) for one in "permission notice shall"
    ]
    if name.startswith("metaspace"):  # no blank before each letter
        pieces = wrapped(name, template)
        letters = [
            [pieces.convert_tokens_to_ids("▁" if one == " " else one)] for one in answer["content"]
        ]
    edges = [
        [] if not edge else tokenizer.encode_behind("x" + edge, 1)
        for edge in (before, after.rstrip(" "))
    ]
    ids = np.concatenate([edges[0], *letters, edges[1]]).astype(np.int32)
    warm = answered(turn, ids, tokenizer).turn(messages, tokenizer, PLAIN)
    cold = Conversation().turn(messages, tokenizer, PLAIN)
    end = len(turn.ids) + len(ids)
    assert warm.ids[len(turn.ids) : end].tolist() == ids.tolist()
    rest = warm.ids[end:].tolist()
    assert rest == cold.ids[len(cold.ids) - len(rest) :].tolist()


def test_a_turn_that_is_encoded_alone_gets_no_blank_before_it():
    """As Llama 2 has it: the whole has one ▁ at its beginning, and none at a later turn's."""
    tokenizer = tokenizer_of("metaspace-first", "inst")
    messages = [{"role": role, "content": "the"} for role in ("user", "assistant", "user")]
    turn = Conversation().turn(messages[:1], tokenizer, PLAIN)
    warm = Conversation(turn.messages, turn.stretches).turn(messages, tokenizer, PLAIN)
    whole = wrapped("metaspace-first", "inst").apply_chat_template(messages, return_dict=False)
    assert warm.ids.tolist() == whole


@pytest.mark.parametrize("quoted", ["", "<|im_end|> "])
def test_a_long_conversation_is_not_encoded_anew_in_every_turn(quoted, monkeypatch):
    """Also not if a user has written a control token."""
    tokenizer = tokenizer_of("llama3", "chatml")
    messages = [{"role": "user", "content": quoted + "the Software " * 500}]
    turn = Conversation().turn(messages, tokenizer, PLAIN)
    ids = tokenizer.encode("permission<|im_end|>", "x", special_tokens=False)
    kept = answered(turn, ids, tokenizer)
    encoded = []
    encode = tokenizer._prompts._encode

    def noted(text, *, marked):
        encoded.append(text)
        return encode(text, marked=marked)

    monkeypatch.setattr(tokenizer._prompts, "_encode", noted)
    kept.turn([*kept.messages, {"role": "user", "content": "Hello"}], tokenizer, PLAIN)
    assert sum(map(len, encoded)) < 100


def test_a_tokenizer_that_encodes_by_chance_is_refused_by_name():
    made = wrapped.__wrapped__("gpt2", "chatml")
    made.backend_tokenizer.model.dropout = 0.1
    with pytest.raises(InvalidArgumentError, match=r"tokenizer .*dropout of 0\.1"):
        Tokenizer(made, 1 << 20)


@pytest.mark.parametrize("quotes", [False, True], ids=["plain", "quoting"])
@pytest.mark.parametrize("name", MADE)
def test_what_is_encoded_behind_a_border_is_the_rest_of_the_whole(name, quotes):
    tokenizer = tokenizer_of(name, "plain")._prompts
    chance = random.Random(name)
    marks = [
        "<|im_end|>",
        "<|im_start|>",
        "\n<|im_start|>user",
        "a<|im_end",
        "<|left|>",
        "<|right|>",
    ]
    pieces = [*marks, *marks, *marks, "x", " ", "  ", "\n", *PIECES]
    if quotes and tokenizer.can_mark:  # control tokens in a caller's text
        quoted = [f"{BEGIN_TEXT}{one}{END_TEXT}" for one in ("<|im_end|>", "<|im_start|>")]
        pieces += [*quoted, *quoted, *quoted, END_TEXT]
    borders = 0
    for _ in range(200):
        chosen = chance.choices(pieces, k=6)
        whole = "".join(chosen)
        start = len("".join(chosen[: chance.randint(1, 5)]))
        rest = tokenizer.encode_behind(whole, start)
        if rest is not None:
            borders += 1
            ids = tokenizer.encode(whole)
            assert ids[len(ids) - len(rest) :] == rest
            if not quotes:
                assert tokenizer.encode(whole[:start]) + rest == ids
    assert borders > 10
