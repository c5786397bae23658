"""`kvpager generate`: ids and text, saved and restored, from files and stores."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_snapshots import flip, refused, told, told_json
from hub_cache import keep_model

from kvpager.cli import main
from kvpager.cli.needles import shipped_model_path
from kvpager.stores import DirectoryStore, FileStore

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "model"))
import text_models

Generate = Callable[..., dict[str, Any]]
SMALL = ("--pool", 256, "--rows", 16, "--small-rows", "fixed", "--threads", 1)


@pytest.fixture
def generate(capsys, model_dir) -> Generate:
    """Runs `kvpager generate` with a model of 64 token ids; returns its JSON."""

    def run(*arguments: object) -> dict[str, Any]:
        return told_json(capsys, "generate", "-q", "--model", model_dir, *arguments)

    return run


def ids(count: int, start: int = 0) -> str:
    return ",".join(str((i * 7 + start) % 60) for i in range(count))


def test_ids_are_printed_as_they_come_and_a_summary_on_stderr(capsys, model_dir):
    loop = ",".join(str(5 + i % 7) for i in range(70))
    arguments = ["generate", "--model", str(model_dir), "--ids", loop, "--max-new-tokens", "40"]
    assert main([*arguments, "--speculate", "--logprobs"]) == 0
    out, err = capsys.readouterr()
    assert len([int(word) for word in out.split()]) == 40
    assert "0 tokens reused, 70 prefilled" in err
    assert "first token after" in err
    assert re.search(r"\d\.\d\d tokens per forward, \d+ of \d+ proposed ones accepted", err)
    assert re.search(r"mean log-probability -\d+\.\d{4}", err)
    assert main([*arguments, "-q"]) == 0
    assert capsys.readouterr() == (out, "")


def test_a_misspelt_model_leaves_no_store(capsys, tmp_path):
    arguments = ("--ids", "1,2", "--store", tmp_path / "store", "--save", "a")
    refused(capsys, "generate", "--model", tmp_path / "modle", *arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_restored_generation_goes_on_as_if_never_interrupted(generate, tmp_path):
    path, again = tmp_path / "turn.kvsnap", tmp_path / "again.kvsnap"
    common = ("--pool", "256", "--chunks", "2", "--temperature", "0.8")
    prompt = ("--ids", ids(700), "--seed", 5)
    whole = generate(*common, *prompt, "--max-new-tokens", 12)
    first = generate(*common, *prompt, "--max-new-tokens", 4, "--save", path)
    assert first["saved_bytes"] == path.stat().st_size
    second = generate(*common, "--restore", path, "--max-new-tokens", 8, "--save", again)
    assert first["ids"] + second["ids"] == whole["ids"]
    assert (first["reused_tokens"], first["prefilled_tokens"]) == (0, 700)
    assert (second["reused_tokens"], second["prefilled_tokens"]) == (704, 0)
    more = ("--ids", "7 8", "--max-new-tokens", 1, "--logprobs")
    third = generate(*common, "--restore", again, *more)
    assert (third["reused_tokens"], third["prefilled_tokens"]) == (712, 2)
    # All that scoring it again needs.
    assert third["prompt_ids"] == [*whole["prompt_ids"], *whole["ids"], 7, 8]
    assert all(np.float32(value) == value < 0 for value in third["logprobs"])
    assert third["fingerprint"] == first["fingerprint"]
    assert third["fingerprint"]["architecture"] == "LlamaForCausalLM"


@pytest.mark.parametrize("how", ["--speculate", "--speculate prompt-lookup", "--draft MODEL"])
def test_speculation_changes_how_fast_and_not_what(generate, model_dir, how):
    common = ("--ids", ",".join(str(5 + i % 7) for i in range(70)), "--max-new-tokens", 60)
    plain = generate(*common, "--logprobs")
    guessed = generate(*common, "--logprobs", *how.replace("MODEL", str(model_dir)).split())
    assert plain["speculation"] is None
    assert guessed["ids"] == plain["ids"]
    assert guessed["logprobs"] == plain["logprobs"]
    stats = guessed["speculation"]
    assert stats["tokens"] == stats["forwards"] + stats["accepted"] >= 59
    assert stats["tokens_per_forward"] > 1.1
    assert stats["acceptance"] == stats["accepted"] / stats["proposed"]


def test_penalties_and_biases_change_the_tokens(generate):
    common = ("--ids", "1,2,3", "--max-new-tokens", 12)
    plain = generate(*common)["ids"]
    forbidden = generate(*common, "--logit-bias", f"{plain[0]}=-inf", "--logit-bias", "9=0.5")
    assert plain[0] not in forbidden["ids"]
    penalties = ("--presence-penalty", "100", "--frequency-penalty", "1")
    assert len(set(generate(*common, *penalties)["ids"])) == 12
    assert generate(*common, "--repetition-penalty", "9")["ids"] != plain
    sampled = ("--temperature", "5", "--seed", "3")
    assert generate(*common, *sampled)["ids"] != plain
    assert generate(*common, *sampled, "--min-p", "1")["ids"] == plain


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--ids 900", "0 to 63"),
        ("--prompt hello", "give token ids with --ids"),
        ("--message Hello", "has no tokenizer, which messages need"),
        ("--ids 5 --stop x", "has no tokenizer, which --stop needs"),
        ("--ids 5 --regex x", "has no tokenizer, which --regex needs"),
        ("--ids 5 --draft none", "--draft none: no such folder"),
    ],
)
def test_what_the_model_cannot_do_is_refused(capsys, model_dir, line, words):
    arguments = ("generate", "-q", "--model", model_dir, *line.split())
    assert words in refused(capsys, *arguments)


# Files and stores.


def test_a_session_saved_in_a_store_goes_on_by_name(capsys, generate, model_dir, tmp_path):
    store, other = tmp_path / "store", tmp_path / "other"
    prompt = ("--pool", "256", "--ids", ids(300))
    on = ("--pool", "256", "--max-new-tokens", 5)
    whole = generate(*prompt, "--max-new-tokens", 9)
    first = generate(*prompt, "--max-new-tokens", 4, "--store", store, "--save", "turn1")
    second = generate(*on, "--store", store, "--restore", "turn1", "--save", "turn2")
    assert first["ids"] + second["ids"] == whole["ids"]
    assert (second["reused_tokens"], second["prefilled_tokens"]) == (304, 0)
    assert second["restored_tokens_consumed"] == second["restored_tokens"] == 303
    assert second["saved_shared_bytes"] > 0
    assert second["saved_bytes"] < first["saved_bytes"]
    third = generate(*on, "--restore", f"{store}/turn1")
    fourth = generate(*on, "--restore", f"{store}/turn1", "--store", other, "--save", "copy")
    assert third["ids"] == fourth["ids"] == second["ids"]
    told(capsys, "snapshot", "diff", store / "turn2", other / "copy")
    mistyped = ("generate", "--model", model_dir, "--store", store, "--restore", "trun1")
    assert "did you mean turn1 or turn2?" in refused(capsys, *mistyped)


def test_a_prompt_that_a_store_knows_starts_from_there_without_being_told(
    capsys, generate, model_dir, tmp_path
):
    store = tmp_path / "store"
    common = ("--pool", "256", "--max-new-tokens", 6)
    generate(*common, "--ids", ids(300), "--store", store, "--save", "other")
    prompt = ("--ids", ids(300) + "," + ids(50, start=3))
    cold = generate(*common, *prompt)
    warm = generate(*common, *prompt, "--store", store)
    assert warm["ids"] == cold["ids"]
    assert (cold["reused_tokens"], cold["prefilled_tokens"]) == (0, 350)
    assert (warm["reused_tokens"], warm["prefilled_tokens"]) == (256, 94)
    assert warm["restored_tokens_consumed"] == 256
    arguments = ("--model", model_dir, *common, *prompt, "--store", store)
    assert main(["generate", *map(str, arguments)]) == 0
    err = capsys.readouterr().err
    assert "256 tokens reused, 94 prefilled; 256 of 256 restored tokens consumed" in err


def test_a_damaged_snapshot_fails_or_is_computed_again_as_told(
    capsys, generate, model_dir, tmp_path
):
    path = tmp_path / "turn.kvsnap"
    common = ("--pool", "256", "--max-new-tokens", 6)
    saved = generate(*common, "--ids", ids(300), "--save", path)
    whole = generate(*common, "--restore", path)
    flip(path, 4096 + 100)
    on = (*common, "--restore", path)
    assert "chunk 0" in refused(capsys, "generate", "-q", "--model", model_dir, *on)
    healed = generate(*on, "--on-corrupt", "recompute")
    assert healed["ids"] == whole["ids"]
    assert healed["recomputed_tokens"] == 64
    assert saved["recomputed_tokens"] == 0


def test_a_store_keeps_to_the_budget_and_ttl_it_was_given(capsys, generate, model_dir, tmp_path):
    store = tmp_path / "store"
    common = ("--max-new-tokens", 1, "--store", store)
    limits = ("--store-budget", "2MiB", "--store-ttl", "12h")
    generate(*common, *limits, "--ids", "1", "--save", "small")
    values = told_json(capsys, "snapshot", "ls", store)
    assert values["totals"]["byte_budget"] == 2 * 2**20
    assert values["snapshots"][0]["ttl_seconds"] == 12 * 3600
    generate(*common, "--store-budget", "200KiB", "--ids", "1", "--save", "small")
    large = (*common, "--ids", ids(900), "--save", "large", "--format", "json")
    assert "bytes" in refused(capsys, "generate", "-q", "--model", model_dir, *large)


def test_a_file_in_fewer_bits_is_smaller_and_taken_only_where_that_is_said(
    capsys, generate, model_dir, tmp_path
):
    common = ("--pool", "256", "--max-new-tokens", 2)
    paths = [tmp_path / "whole.kvsnap", tmp_path / "coded.kvsnap"]
    generate(*common, "--ids", ids(300), "--save", paths[0])
    generate(*common, "--ids", ids(300), "--save", paths[1], "--save-kv-dtype", "q8")
    assert paths[1].stat().st_size < 0.6 * paths[0].stat().st_size
    on = (*common, "--restore", paths[1])
    err = refused(capsys, "generate", "-q", "--model", model_dir, *on)
    assert 'on_mismatch="convert"' in err
    assert len(generate(*on, "--on-mismatch", "convert")["ids"]) == 2


def test_what_a_draft_held_is_saved_and_restored_with_the_session(generate, model_dir, tmp_path):
    store = tmp_path / "store"
    common = ("--chunk-tokens", 16, "--max-new-tokens", 24)
    drafted = (*common, "--draft", model_dir)
    first = generate(*drafted, "--ids", ids(100), "--store", store, "--save", "chat")
    assert DirectoryStore(store).entries()[0].companions == ("chat.draft",)
    second = generate(*drafted, "--store", store, "--restore", "chat")
    alone = generate(*common, "--store", store, "--restore", "chat")
    assert second["ids"] == alone["ids"]
    whole = generate(*common[:2], "--ids", ids(100), "--max-new-tokens", 48)
    assert whole["ids"] == first["ids"] + second["ids"]
    generate(*drafted, "--ids", ids(100), "--save", tmp_path / "chat.kvsnap")
    assert FileStore(tmp_path).entries()[0].companions == ("chat.kvsnap.draft",)


# Text.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a small model with a tokenizer and a chat template."""
    made = tmp_path_factory.mktemp("model")
    text_models.model().save_pretrained(made)
    text_models.byte_level().save_pretrained(made)
    return made


@pytest.fixture
def speak(capsys, folder) -> Generate:
    """Runs `kvpager generate` with that model and 12 new tokens; returns its JSON."""

    def run(*arguments: object, model: object = folder) -> dict[str, Any]:
        common = ("generate", "-q", "--model", model, "--max-new-tokens", 12)
        return told_json(capsys, *common, *arguments)

    return run


def test_text_goes_through_the_tokenizer_both_ways_and_ends_at_a_stop_string(
    capsys, speak, folder, tmp_path
):
    text = "A cache keeps"
    spoken = speak("--prompt", text)
    assert (spoken["finish_reason"], spoken["messages"]) == ("length", None)
    common = ("generate", "-q", "--model", folder, "--max-new-tokens", 12)
    assert told(capsys, *common, "--prompt", text) == spoken["text"] + "\n"
    prompt = ",".join(map(str, spoken["prompt_ids"]))
    assert speak("--ids", prompt)["ids"] == spoken["ids"]
    file = tmp_path / "prompt.txt"
    for encoding in ("utf-8", "utf-8-sig"):
        file.write_text(text, encoding=encoding)
        assert speak("--prompt-file", file)["prompt_ids"] == spoken["prompt_ids"]
    stop = spoken["text"][4:6]
    stopped = speak("--prompt", text, "--stop", stop)
    assert stopped["finish_reason"] == "stop"
    assert stopped["text"] == spoken["text"][: spoken["text"].index(stop)]
    assert "the prompt is empty" in refused(capsys, *common, "--prompt", "")


def test_a_conversation_goes_on_where_it_was_saved(speak, tmp_path):
    saved = tmp_path / "talk.kvsnap"
    first = speak("--message", "Hello", "--save", saved)
    assert [message["role"] for message in first["messages"]] == ["user", "assistant"]
    assert first["messages"][1]["content"] == first["text"]
    second = speak("--message", "Again", "--restore", saved)
    assert second["messages"][:2] == first["messages"]
    assert second["reused_tokens"] == len(first["prompt_ids"]) + 12 - 1  # but the pending one
    assert second["restored_tokens_consumed"] == second["restored_tokens"]
    whole = tmp_path / "messages.json"
    whole.write_text(json.dumps(second["messages"][:3]), encoding="utf-8")
    third = speak("--messages", whole, "--restore", saved)
    assert {name for name in second if third[name] != second[name]} <= {
        "time_to_first_token_s",
        "generate_s",
    }


def test_a_last_message_of_the_assistant_is_refused_or_continued(capsys, speak, folder, tmp_path):
    file = tmp_path / "messages.json"
    begun = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "one two"}]
    file.write_text(json.dumps(begun), encoding="utf-8-sig")
    err = refused(capsys, "generate", "-q", "--model", folder, "--messages", file)
    assert "messages[1] is the assistant's" in err
    told = speak("--messages", file, "--continue-final-message")
    assert told["messages"] == [begun[0], {**begun[1], "content": "one two" + told["text"]}]


def test_a_model_is_found_in_the_cache_of_the_hub(capsys, speak, folder, tmp_path, monkeypatch):
    keep_model(monkeypatch, tmp_path, "somebody/small", folder)
    cached = speak("--prompt", "A cache", model="somebody/small")
    assert cached["text"] == speak("--prompt", "A cache")["text"]
    err = refused(capsys, "generate", "--model", "somebody/else", "--prompt", "A cache")
    assert "hf download somebody/else" in err


def test_text_is_of_the_grammar_that_is_given(capsys, tmp_path):
    path = tmp_path / "schema.json"
    path.write_text(json.dumps({"enum": ["left", "right"]}))
    model = ("--model", shipped_model_path("tiny-coder"), *SMALL, "--pool", 1024)
    common = ("generate", "-q", *model, "--prompt", "x =")
    values = told_json(capsys, *common, "--json-schema", path)
    assert json.loads(values["text"]) in ("left", "right")
    assert "--regex:" in refused(capsys, *common, "--regex", "(")
