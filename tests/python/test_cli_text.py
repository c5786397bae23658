"""`kvpager generate` with a tokenizer: text, messages, models of the hub's cache."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvpager.cli import main

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "model"))
import text_models
from hub_cache import keep_model

Run = Callable[..., str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a small model with a tokenizer and a chat template."""
    made = tmp_path_factory.mktemp("model")
    text_models.model().save_pretrained(made)
    text_models.byte_level().save_pretrained(made)
    return made


@pytest.fixture
def run(folder: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `kvpager generate` with 12 new tokens; returns what it printed."""

    def run(*arguments: str, model: str = str(folder), fails: str = "") -> str:
        capsys.readouterr()
        code = main(["generate", "--model", model, "--max-new-tokens", "12", *arguments])
        printed = capsys.readouterr()
        assert fails in printed.err
        assert (code != 0) == bool(fails), printed.err
        return printed.out

    return run


def as_json(printed: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(printed)
    return values


def test_a_prompt_is_continued_as_text(run: Run) -> None:
    shown = run("--prompt", "A cache keeps")
    told = as_json(run("--prompt", "A cache keeps", "--format", "json"))
    assert shown == told["text"] + "\n"
    assert told["finish_reason"] == "length"
    assert told["messages"] is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--temperature", "-1"], "--temperature is -1.0; expected a finite number"),
        (["--top-p", "2"], "--top-p is 2.0; expected"),
        (["--stop", ""], "--stop is empty"),
        (["--seed", str(1 << 64)], f"--seed is {1 << 64}; expected"),
    ],
    ids=["temperature", "top-p", "stop", "seed"],
)
def test_options_of_sampling_are_looked_at_before_a_model_is_loaded(
    run: Run, monkeypatch: pytest.MonkeyPatch, options: list[str], said: str
) -> None:
    monkeypatch.setattr("kvpager.cli.generate.load_model", None)
    run("--prompt", "A cache keeps", *options, fails=said)


def test_an_empty_prompt_is_refused_as_one(run: Run) -> None:
    run("--prompt", "", fails="the prompt is empty")


def test_a_value_of_the_environment_is_named_by_its_variable(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPAGER_POOL_TOKENS", "abc")
    run("--prompt", "A cache keeps", fails="KVPAGER_POOL_TOKENS is 'abc'")
    run("--prompt", "A cache keeps", "--pool-tokens", "x", fails="--pool-tokens is 'x'")


def test_a_stop_string_ends_the_text(run: Run) -> None:
    whole = as_json(run("--prompt", "A cache keeps", "--format", "json"))["text"]
    stop = whole[4:6]
    told = as_json(run("--prompt", "A cache keeps", "--stop", stop, "--format", "json"))
    assert told["finish_reason"] == "stop"
    assert told["text"] == whole[: whole.index(stop)]


def test_a_conversation_goes_on_where_it_was_saved(run: Run, tmp_path: Path) -> None:
    saved = str(tmp_path / "talk.kvsnap")
    first = as_json(run("--message", "Hello", "--save", saved, "--format", "json"))
    roles = [message["role"] for message in first["messages"]]
    assert roles == ["user", "assistant"]
    assert first["messages"][1]["content"] == first["text"]
    going_on = ("--message", "Again", "--restore", saved, "--format", "json")
    second = as_json(run(*going_on))
    assert second["messages"][:2] == first["messages"]
    assert second["reused_tokens"] == len(first["prompt_ids"]) + 12 - 1  # but the pending one
    assert second["restored_tokens_consumed"] == second["restored_tokens"]
    whole = tmp_path / "messages.json"
    whole.write_text(json.dumps(second["messages"][:3]), encoding="utf-8")
    third = as_json(run("--messages", str(whole), "--restore", saved, "--format", "json"))
    assert {name for name in second if third[name] != second[name]} <= {
        "time_to_first_token_s",
        "generate_s",
    }


def test_a_mark_of_the_encoding_at_the_head_of_a_file_is_no_text(run: Run, tmp_path: Path) -> None:
    for name, given in (
        ("--prompt-file", "A cache keeps"),
        ("--messages", '[{"role": "user", "content": "x"}]'),
    ):
        answers = []
        for encoding in ("utf-8", "utf-8-sig"):
            file = tmp_path / encoding
            file.write_text(given, encoding=encoding)
            answers.append(as_json(run(name, str(file), "--format", "json"))["prompt_ids"])
        assert answers[0] == answers[1]


def test_a_last_message_of_the_assistant_is_refused_or_continued(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "messages.json"
    begun = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "one two"}]
    file.write_text(json.dumps(begun), encoding="utf-8")
    run("--messages", str(file), fails="messages[1] is the assistant's")
    run("--message", "x", "--continue-final-message", fails="no meaning without --messages")
    told = as_json(run("--messages", str(file), "--continue-final-message", "--format", "json"))
    assert told["messages"] == [begun[0], {**begun[1], "content": "one two" + told["text"]}]


def test_a_model_is_found_in_the_cache_of_the_hub(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_model(monkeypatch, tmp_path, "somebody/small", folder)
    assert run("--prompt", "A cache", model="somebody/small") == run("--prompt", "A cache")
    run("--prompt", "A cache", model="somebody/else", fails="hf download somebody/else")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "a prompt is missing; give --prompt, --prompt-file, --ids, --message, --messages"),
        (("--messages", "MISSING"), "--messages MISSING: No such file"),
        (("--messages", "NO JSON"), "NO JSON: no JSON"),
        (("--messages", "NO LIST"), "NO LIST: messages is {}; expected a list"),
        (("--messages", "NO ROLE"), "messages[0] is {'content': 'x'}"),
        (("--prompt", "x", "--message", "y"), "not allowed with argument --prompt"),
        (("--message", "y", "--segment", "a", "--store", "."), "--segment"),
    ],
)
def test_what_cannot_be_a_conversation_is_refused_before_a_model_is_loaded(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "NO JSON").write_text("[", encoding="utf-8")
    (tmp_path / "NO LIST").write_text("{}", encoding="utf-8")
    (tmp_path / "NO ROLE").write_text('[{"content": "x"}]', encoding="utf-8")
    monkeypatch.setattr("kvpager.cli.generate.load_model", None)
    run(*arguments, fails=message)


def test_a_model_without_a_tokenizer_says_what_needs_one(run: Run, tmp_path: Path) -> None:
    text_models.model().save_pretrained(tmp_path)
    silent = str(tmp_path)
    run("--message", "Hello", model=silent, fails="has no tokenizer, which messages need")
    run("--ids", "5", "--stop", "x", model=silent, fails="has no tokenizer, which --stop needs")
    assert len(run("--ids", "5,6", model=silent).split()) == 12
