"""Messages that an earlier request had too: recognized exactly, validated and hashed once."""

from __future__ import annotations

import copy
import json
import random
import tracemalloc

import pytest
from pydantic import TypeAdapter, ValidationError

from kvpager.server import histories
from kvpager.server.conversations import digests
from kvpager.server.histories import Histories, History
from kvpager.server.messages import as_dicts
from kvpager.server.schema.chat import ChatRequest
from kvpager.server.schema.messages import MessagesRequest

CHAT = TypeAdapter(ChatRequest)
TEXTS = ["Hello", "", "a\n", "漢🙂", [{"type": "text", "text": "part"}], None]
VALUES = ["1", "true", '{"a": 1}', '{"a": true}', '{"a": 1.0}', ""]


def message(chance):
    made = {"role": chance.choice(["user", "assistant", "tool"]), "content": chance.choice(TEXTS)}
    if made["content"] is None or chance.random() < 0.3:
        function = {"name": "f", "arguments": chance.choice(VALUES)}
        made["tool_calls"] = [{"id": chance.choice("ab"), "function": function}]
    if chance.random() < 0.2:
        made["reasoning"] = "Hm."
    items = list(made.items())
    chance.shuffle(items)
    return dict(items)


def edited(messages, chance):
    messages = copy.deepcopy(messages)
    for _ in range(chance.randint(0, 1)):
        at = chance.randrange(len(messages) + 1)
        messages[at : at + chance.randint(0, 2)] = [message(chance)] * chance.randint(0, 2)
    return [*messages, *(message(chance) for _ in range(chance.randint(0, 3)))] or [message(chance)]


def said(*texts):
    roles = ("user", "assistant")
    return [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]


@pytest.fixture
def validated():
    """Validates a request, and returns how many messages the model was given."""
    model = Counting()

    def request(known, messages, owner="me", **fields):
        begun = model.count
        known.validated(model, owner, json.loads(json.dumps({"messages": messages, **fields})))
        return model.count - begun

    return request


class Counting:
    """The model of a chat completion, which counts messages."""

    count = 0

    def validate_python(self, given):
        self.count += len(given["messages"])
        return CHAT.validate_python(given)


@pytest.mark.parametrize("seed", range(8))
def test_requests_edited_at_random_are_what_the_model_makes_of_the_whole(seed):
    known, chance = Histories(), random.Random(seed)
    messages = []
    for _ in range(60):
        messages = edited(messages, chance) if chance.random() < 0.9 else [message(chance)]
        body = {"messages": messages, "cache_salt": chance.choice([None, "x"]), "n": 1}
        salt = chance.choice(["s", None])
        value = known.validated(CHAT, "me", json.loads(json.dumps(body)))
        whole = CHAT.validate_python(body)
        assert value.model_dump() == whole.model_dump()
        dicts = as_dicts(value.messages)
        expected = as_dicts(whole.messages)
        assert json.dumps(dicts) == json.dumps(expected)
        assert value.messages.digests(dicts, salt) == digests(expected, salt)


def test_a_turn_validates_its_new_messages_alone(validated):
    known, texts = Histories(), ["a", "b", "c"]
    assert validated(known, said(*texts)) == 3
    for _ in range(3):
        texts += ["d", "e"]
        assert validated(known, said(*texts)) == 2
    assert validated(known, said(*texts)) == 1  # the same again


@pytest.mark.parametrize(
    "change",
    [
        {"owner": "you"},
        {"cache_salt": "x"},
        {"messages": [{"content": "a", "role": "user"}, *said("a", "b", "c", "d")[1:]]},
        {"messages": said("A", "b", "c", "d")},
    ],
    ids=["owner", "salt", "order of names", "text"],
)
def test_what_another_has_sent_or_what_differs_is_not_recognized(validated, change):
    """Else the time of a request would tell what others have sent."""
    known = Histories()
    validated(known, said("a", "b", "c"))
    request = {"messages": said("a", "b", "c", "d"), **change}
    assert validated(known, **request) == 4


def test_numbers_and_truth_values_that_are_equal_in_python_are_not_the_same():
    """In Anthropic's form, where the input of a tool is any JSON."""
    model, known = TypeAdapter(MessagesRequest), Histories()
    for value in (1, True, 1.0, False, 0, -0.0, 0.0):
        use = {"type": "tool_use", "id": "t", "name": "f", "input": {"a": value}}
        messages = [{"role": "assistant", "content": [use]}, *said("a", "b")]
        body = {"messages": messages, "max_tokens": 1}
        found = known.validated(model, "me", body).messages[0].content[0].input["a"]
        assert json.dumps(found) == json.dumps(value)


def test_an_error_names_the_message_by_its_place_in_the_request(validated):
    known = Histories()
    validated(known, said("a", "b", "c"))
    with pytest.raises(ValidationError) as refused:
        validated(known, [*said("a", "b", "c"), {"role": "user"}])
    assert refused.value.errors()[0]["loc"][:2] == ("messages", 3)


def test_digests_are_made_again_under_another_salt():
    messages = tuple(said("a", "b"))
    first = History()
    first.digests(messages, "one")
    assert History((), first).digests(messages, "two") == digests(messages, "two")


def test_what_is_remembered_has_a_bound(validated, monkeypatch):
    monkeypatch.setattr(histories, "_MOST_BYTES", 5000)
    known = Histories()
    for text in "abcdef":
        validated(known, said(text * 300, "x"))
    assert validated(known, said("f" * 300, "x", "y")) == 1
    assert validated(known, said("a" * 300, "x", "y")) == 3
    assert known._size <= 5000
    assert known._size == sum(one.size for one in known._entries.values())


@pytest.mark.parametrize("kind", ["messages", "parts", "calls"])
def test_the_bound_counts_what_small_messages_and_parts_take(kind):
    function = {"name": "f", "arguments": "{}"}
    given = {
        "messages": [{"role": "user", "content": str(i)} for i in range(2000)],
        "parts": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 2000}],
        "calls": [
            {
                "role": "assistant",
                "tool_calls": [
                    {"id": str(i), "type": "function", "function": function} for i in range(2000)
                ],
            }
        ],
    }[kind]
    body, known = json.dumps({"model": "m", "messages": given}), Histories()
    model = TypeAdapter(ChatRequest)
    model.validate_json(body)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        made = known.validated(model, "owner", json.loads(body)).messages
        made.digests(as_dicts(made), None)
        del made
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert taken / 2 < known._size < 10 * taken
