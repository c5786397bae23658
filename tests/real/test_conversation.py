"""A conversation with a real model: one default, ten processes, and 0 differing bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from bits import assert_same_session

from kvpager import Engine
from kvpager.grammar import Grammar

QUESTIONS = (
    "My name is Ada. What is the capital of France?",
    "And of Italy?",
    "Which of them is larger?",
    "Write a haiku about the sea.",
    "What is 2 + 2?",
    "Name three colours.",
    "What is a cache?",
    "Translate 'good morning' into French.",
    "Who wrote Hamlet?",
    "Thank you.",
)
NEW = 12


def kvpager(*arguments):
    """What a command says as JSON, in a process of its own."""
    threads = str(torch.get_num_threads())
    done = subprocess.run(
        [sys.executable, "-m", "kvpager", *map(str, arguments), "--threads", threads, "-q"],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": threads},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_model_speaks(engine):
    with engine.session() as session:
        assert "Paris" in session.chat("What is the capital of France?", 30).text


def test_python_and_the_command_line_give_one_prompt_one_answer(engine, path):
    with engine.session() as session:
        expected = session.chat(QUESTIONS[0], NEW)
    options = ("--message", QUESTIONS[0], "--max-new-tokens", NEW, "--format", "json")
    told = kvpager("generate", "--model", path, *options)
    assert told["ids"] == expected.tokens.tolist()
    assert told["seed"] is None  # its generation_config does not sample, so it is greedy


def test_a_conversation_in_ten_processes_has_the_bits_of_one(engine, path, tmp_path):
    saved = tmp_path / "saved.kvsnap"
    answers = []
    for number, question in enumerate(QUESTIONS):
        restore = ("--restore", saved) if number else ()
        told = kvpager(
            *("generate", "--model", path, "--message", question, "--max-new-tokens", NEW),
            *(*restore, "--save", saved, "--format", "json"),
        )
        answers.append(told["ids"])
        assert told["reused_tokens"] > 0 or not number
    with engine.session() as live:
        expected = [live.chat(question, NEW).tokens.tolist() for question in QUESTIONS]
        assert answers == expected
        with engine.restore(saved) as restored:
            assert restored.messages == live.messages
            for session in (live, restored):
                session.append(" Goodbye.")
            assert_same_session(restored, live, "after ten processes")


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "q8", "q4"])
def test_a_small_pool_and_a_restart_change_no_bit(loaded, kv_dtype, tmp_path):
    model, tokenizer = loaded
    document = "The sea is wide, and the ship is small. " * 120
    messages = [
        {"role": "system", "content": document},
        {"role": "user", "content": "How wide is the sea?"},
    ]

    def engine(pool):
        return Engine(model, tokenizer=tokenizer, pool_tokens=pool, kv_dtype=kv_dtype)

    with engine(512) as small, small.session() as session:
        first = session.chat(messages, 8)
        assert len(session.tokens) > 2 * small.config.pool_tokens
        session.save(tmp_path / "saved")
    with engine(4096) as large, large.session() as live:
        assert live.chat(messages, 8).tokens.tolist() == first.tokens.tolist()
        with large.restore(tmp_path / "saved") as restored:
            for each in (live, restored):
                each.chat("And the ship?", 8)
            assert_same_session(restored, live, kv_dtype)


def test_json_follows_its_schema(engine):
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "large": {"type": "boolean"}},
        "required": ["city", "large"],
        "additionalProperties": False,
    }
    with engine.session() as session:
        done = session.chat(
            "Describe Paris as JSON.", 60, grammar=Grammar.json_schema(json.dumps(schema))
        )
    found = json.loads(done.text)
    assert set(found) == {"city", "large"}
    assert isinstance(found["large"], bool)
