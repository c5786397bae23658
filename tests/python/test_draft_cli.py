"""`kvpager generate --draft`: the same text, and what the draft held in the snapshot."""

from __future__ import annotations

import json

import pytest

from kvpager.cli import main
from kvpager.stores import DirectoryStore, FileStore

IDS = ",".join(str(7 * i % 60) for i in range(100))


def generate(capsys, model_dir, *args, code=0):
    command = ["generate", "--model", str(model_dir), "--format", "json", "--max-new-tokens", "24"]
    assert main([*command, "--rows", "16", "--chunk-tokens", "16", *map(str, args)]) == code
    out, err = capsys.readouterr()
    return json.loads(out) if code == 0 else err


def test_a_draft_on_the_command_line_changes_no_token(capsys, model_dir):
    plain = generate(capsys, model_dir, "--ids", IDS)
    drafted = generate(capsys, model_dir, "--ids", IDS, "--draft", model_dir)
    named = generate(capsys, model_dir, "--ids", IDS, "--draft", model_dir, "--speculate", "draft")
    assert plain["ids"] == drafted["ids"] == named["ids"]
    assert drafted["speculation"]["acceptance"] == 1
    assert plain.get("speculation") is None


def test_what_the_draft_held_is_saved_and_restored_with_the_session(capsys, model_dir, tmp_path):
    store = tmp_path / "store"
    more = ("--store", store, "--draft", model_dir)
    first = generate(capsys, model_dir, "--ids", IDS, "--save", "chat", *more)
    assert DirectoryStore(store).entries()[0].companions == ("chat.draft",)
    second = generate(capsys, model_dir, "--restore", "chat", *more)
    alone = generate(capsys, model_dir, "--restore", "chat", "--store", store)
    assert second["ids"] == alone["ids"]
    whole = generate(capsys, model_dir, "--ids", IDS, "--max-new-tokens", "48")
    assert whole["ids"] == first["ids"] + second["ids"]


def test_a_file_is_saved_with_a_file_beside_it(capsys, model_dir, tmp_path):
    path = tmp_path / "chat.kvsnap"
    generate(capsys, model_dir, "--ids", IDS, "--save", path, "--draft", model_dir)
    assert FileStore(tmp_path).entries()[0].companions == ("chat.kvsnap.draft",)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--speculate", "draft"), "--speculate draft: no draft model; give --draft"),
        (("--speculate", "prompt-lookup", "--draft", "M"), "--draft has no meaning with"),
        (("--draft", "M", "--exact", "reuse"), "--speculate: --exact is 'reuse'"),
    ],
)
def test_options_that_do_not_go_together_are_refused(capsys, model_dir, args, words):
    assert words in generate(capsys, model_dir, "--ids", IDS, *args, code=2)


def test_a_draft_that_is_not_there_is_named(capsys, model_dir, tmp_path):
    told = generate(capsys, model_dir, "--ids", IDS, "--draft", tmp_path / "none", code=1)
    assert f"--draft {tmp_path / 'none'}: no such folder" in told
