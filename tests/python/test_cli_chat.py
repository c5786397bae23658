"""`kvpager chat`: a conversation that a pipe, a person at a terminal and a restart go on with."""

from __future__ import annotations

import io
import os
import re
import signal
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_snapshots import FRONT, flip, refused, told
from pseudo_terminal import CTRL_C, CTRL_D, TAB, UP, Terminal

from kvpager import Engine
from kvpager.cli import main
from kvpager.stores import DirectoryStore

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "model"))
import text_models

GREEDY = ("--temperature", "0", "--threads", str(torch.get_num_threads()))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a small model with a tokenizer and a chat template of its own."""
    folder = tmp_path_factory.mktemp("model")
    text_models.model().save_pretrained(folder)
    text_models.byte_level().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def data(tmp_path, monkeypatch):
    """The user's data folder."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path / "data" / "kvpager"


@pytest.fixture
def store(tmp_path):
    return DirectoryStore(tmp_path / "store")


@pytest.fixture
def piped(capsys, monkeypatch, model, store):
    """Runs the command with lines in a pipe; returns what it writes to stdout and to stderr."""

    def run(*lines, options=(), tokens=12, code=0):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        arguments = ["--model", model, "--store", store.path, *GREEDY, "--max-new-tokens", tokens]
        assert main(["chat", *map(str, [*arguments, *options])]) == code
        return capsys.readouterr()

    return run


@pytest.fixture
def terminal(model, store):
    """Begins the command in a terminal."""

    def begin(*options, tokens=12):
        env = {**os.environ, "TERM": "xterm", "PYTHONUNBUFFERED": "1"}
        arguments = ["--model", model, "--store", store.path, *GREEDY, "--max-new-tokens", tokens]
        command = [sys.executable, "-m", "kvpager", "chat", *map(str, [*arguments, *options])]
        return Terminal(command, env)

    return begin


def answered(shell: Terminal, message: str, note: str = "first token after") -> Any:
    """Types a message at the prompt, and waits for the end of its answer; returns the match."""
    shell.wait_for("> ")
    shell.type(f"{message}\r")
    return shell.wait_for(note)


def uninterrupted(store, name: str, *turns: Any, tokens: int = 12) -> list[dict[str, Any]]:
    """Saves a conversation of the Python API that was never interrupted; returns its messages."""
    with Engine(text_models.model(), tokenizer=text_models.byte_level()) as engine:
        session = engine.session()
        for turn in turns:
            session.chat(turn, tokens, temperature=0)
        session.save(name, store=store)
        return session.messages


def messages_of(store, name: str) -> list[dict[str, Any]]:
    with Engine(text_models.model(), tokenizer=text_models.byte_level()) as engine:
        return engine.restore(name, store=store).messages


def assert_same_bits(capsys, store, one: str, other: str) -> None:
    told(capsys, "snapshot", "diff", f"{store.path}/{one}", f"{store.path}/{other}")


# Lines of a pipe.


def test_a_conversation_goes_on_after_a_restart_with_the_bits_of_one_that_did_not_end(
    capsys, piped, store
):
    first = piped("Hello", "And again")
    second = piped("A third time")
    messages = uninterrupted(store, "whole", "Hello", "And again", "A third time")
    answers = [one["content"] for one in messages if one["role"] == "assistant"]
    assert first.out == f"{answers[0]}\n{answers[1]}\n"
    assert second.out == f"{answers[2]}\n"
    assert "saved as hello;" in first.err
    assert "goes on with hello: 4 messages, " in second.err
    assert " tokens restored in " in second.err
    assert_same_bits(capsys, store, "hello", "whole")


def test_a_line_of_a_pipe_is_a_message_also_where_it_looks_like_a_command(piped, store):
    piped("/help", "", "  ", "A line \\")
    said = [one["content"] for one in messages_of(store, "help") if one["role"] == "user"]
    assert said == ["/help", "A line \\"]


def test_conversations_have_names_and_the_last_one_goes_on(piped, store):
    piped("Hello there, you", options=["--name", "ada"])
    piped("What is a KV cache and why do I want one?", options=["--new"])
    piped("Hello there, you", options=["--new"])
    piped("Hello there, you", options=["--new"])
    assert {entry.name for entry in store.entries()} == {
        *("ada", "what-is-a-kv-cache-and", "hello-there-you", "hello-there-you-2")
    }
    assert "goes on with hello-there-you-2: 2 messages" in piped("More").err
    assert "goes on with ada: 2 messages" in piped("More", options=["--name", "ada"]).err
    assert "goes on with ada: 4 messages" in piped("More").err
    again = piped(options=["--new", "--name", "ada"], code=1)
    assert "there is a conversation of this name" in again.err


def test_a_system_prompt_begins_a_conversation_and_is_not_forgotten_silently(piped, store):
    piped("Hello", options=["--system", "Be brief."])
    assert messages_of(store, "hello")[0] == {"role": "system", "content": "Be brief."}
    assert "4 messages" not in piped("More").err
    assert "goes on with hello: 5 messages" in piped("", options=["--system", "Be brief."]).err
    other = piped("More", options=["--system", "Be long."], code=1)
    assert other.err == (
        "kvpager: --system is not what the conversation 'hello' began with; --new begins another\n"
    )


def test_a_conversation_of_another_model_is_neither_gone_on_with_nor_lost(
    capsys, piped, monkeypatch, store, tmp_path
):
    piped("Hello")
    other = text_models.model()
    before = other.lm_head.weight.detach().clone()
    try:
        with torch.no_grad():
            other.lm_head.weight[5] += 1
        other.save_pretrained(tmp_path / "other")
    finally:
        with torch.no_grad():
            other.lm_head.weight.copy_(before)
    text_models.byte_level().save_pretrained(tmp_path / "other")
    shown = piped("Hello", options=["--model", tmp_path / "other"])
    assert "begins a new conversation, as the last one was of another model" in shown.err
    assert {entry.name for entry in store.entries()} == {"hello", "hello-2"}
    named = piped(options=["--model", tmp_path / "other", "--name", "hello"], code=1)
    assert named.err.count("\n") == 1
    assert "weights" in named.err
    assert "goes on with hello: 2 messages" in piped("More").err


def test_by_default_conversations_are_kept_in_the_users_data_folder(
    capsys, monkeypatch, model, data
):
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    assert main(["chat", "--model", str(model), "--max-new-tokens", "3", "-q"]) == 0
    assert capsys.readouterr().err == ""
    folder = data / "chat" / model.name
    assert [entry.name for entry in DirectoryStore(folder).entries()] == ["hello"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_store_has_a_budget_that_is_kept_until_another_one_is_given(
    capsys, monkeypatch, model, data
):
    def budget_after(*options):
        monkeypatch.setattr("sys.stdin", io.StringIO())
        assert main(["chat", "-q", "--model", str(model), *options]) == 0
        return DirectoryStore(data / "chat" / model.name).byte_budget

    assert budget_after() == 10 << 30
    assert budget_after("--store-budget", "1GiB") == 1 << 30
    assert budget_after() == 1 << 30
    assert budget_after("--store-budget", "unlimited") is None
    assert budget_after() is None


def test_the_least_recently_used_conversation_goes_where_the_budget_is_too_small(piped, store):
    piped("Hello", options=["--name", "first"])
    piped("Hello", options=["--name", "second"])
    budget = store.stats()["bytes"] + 1000
    piped("Hello", options=["--name", "third", "--store-budget", str(budget)])
    assert {entry.name for entry in store.entries()} == {"second", "third"}
    shown = piped("And more", options=["--name", "third", "--store-budget", "1000"], code=1)
    assert re.search(r"^kvpager: --store-budget is 1000; \d+ bytes are needed", shown.err, re.M)


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--store-budget", "5x"], 2, "--store-budget is '5x'; expected a number of bytes"),
        (["--name", "a/b"], 2, "--name is 'a/b'"),
        (["--temperature", "-1"], 2, "--temperature is -1"),
        (["--top-p", "3"], 2, "--top-p is 3"),
        (["--format", "json"], 2, "--format json has no meaning for chat"),
        (["--output", "file"], 2, "--output has no meaning for chat"),
        (["--model", "/no/such"], 1, "no such folder"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(capsys, model, store, options, code, words):
    arguments = ["--model", model, "--store", store.path, *options]
    assert words in refused(capsys, "chat", *arguments, code=code)


def test_a_model_without_a_chat_template_is_refused(capsys, model_dir, data):
    assert "has no chat template" in refused(capsys, "chat", "--model", model_dir)
    assert not data.exists()  # no folder for a model that cannot talk


def test_lines_that_are_no_text_are_refused(capsys, monkeypatch, model, store):
    lines = io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", lines)
    arguments = ("chat", "-q", "--model", model, "--store", store.path)
    assert "stdin: not UTF-8" in refused(capsys, *arguments)


# Keys of a terminal.


def test_ctrl_c_stops_an_answer_and_keeps_what_was_said_of_it(capsys, terminal, store):
    with terminal(tokens=3000) as shell:
        shell.wait_for("> ")
        shell.type("Hello\r")
        shell.wait_for(r"Hello\s+\S")  # a piece of the answer
        shell.type(CTRL_C)
        shell.wait_for("stopped")
        shell.interrupt_at_prompt()  # the second one leaves
        assert shell.wait() == 0
    part = messages_of(store, "hello")
    whole = uninterrupted(store, "whole", "Hello", tokens=3000)
    assert [one["role"] for one in part] == ["user", "assistant"]
    assert 0 < len(part[1]["content"]) < len(whole[1]["content"])
    assert whole[1]["content"].startswith(part[1]["content"].rstrip("\N{REPLACEMENT CHARACTER}"))
    with terminal("--name", "hello") as shell:
        shell.wait_for("goes on with hello: 2 messages, [0-9,]+ tokens? restored in")
        shell.wait_for("> Hello\n")  # its last turn, before the prompt
        answered(shell, "More")
        shell.wait_for("> ")
        shell.type(CTRL_D)
        assert shell.wait() == 0
    assert messages_of(store, "hello")[:2] == part


def test_another_answer_and_a_message_taken_back_reuse_the_text_before(capsys, terminal, store):
    with terminal() as shell:
        answered(shell, "Hello")
        answered(shell, "No, not this")
        answered(shell, "/undo", "took back 'No, not this'; 2 messages left")
        found = answered(shell, "And again", r"(\d+) of (\d+) prompt tokens computed")
        computed, total = map(int, found.groups())
        assert computed < 40 < total
        answered(shell, "/regenerate", "0 of .* prompt tokens computed")
        shell.wait_for("the same answer: it is the likeliest")
        answered(shell, "/regenerate 3", "0 of .* prompt tokens computed")
        answered(shell, "/undo", "took back 'And again'; 2 messages left")
        answered(shell, "And again")
        shell.wait_for("> ")
        shell.type(CTRL_D)
        assert shell.wait() == 0
    uninterrupted(store, "whole", "Hello", "And again")
    assert_same_bits(capsys, store, "hello", "whole")


def test_commands_save_copies_list_and_load_conversations(capsys, terminal, store):
    with terminal("--system", "Be brief.") as shell:
        answered(shell, "/undo", "kvpager: nothing has been said yet")
        answered(shell, "/regenerate", "kvpager: there is no answer yet")
        answered(shell, "/save early", "kvpager: nothing has been said yet")
        answered(shell, "/load", "no conversation is saved yet")
        answered(shell, "Hello")
        answered(shell, "/save copy", "saved as copy")
        answered(shell, "/save copy", "kvpager: there is a conversation 'copy' already")
        answered(shell, "/save a/b", "kvpager: name is 'a/b'; expected")
        answered(shell, "More")
        answered(shell, "/load", r"\* hello +\d+ tokens +\S+ \w+ +\w+ ago\n  copy +\d+ tokens")
        answered(shell, "/load cpoy", "kvpager: there is no conversation 'cpoy'; did you mean copy")
        answered(shell, "/load copy", "goes on with copy: 3 messages, .*\n> Hello\n")
        answered(shell, "/ledger", r"\d+ tokens in \d+ chunks?, .* of K/V\n  [#s]+\n")
        answered(shell, "/leger", "kvpager: unknown command /leger; did you mean /ledger")
        answered(shell, "/help", "/regenerate")
        answered(shell, f"/led{TAB}", "of K/V")
        answered(shell, "two \\\rlines")
        answered(shell, "/undo", r"took back 'two lines'; 3 messages left")
        answered(shell, "/undo", r"took back 'Hello'; 0 messages left")
        answered(shell, " /help")
        shell.type("unfinished")
        shell.interrupt_at_prompt()
        shell.wait_for("Ctrl-C again leaves")
        shell.interrupt_at_prompt()
        assert shell.wait() == 0
    assert [one["content"] for one in messages_of(store, "hello")[1::2]] == ["Hello", "More"]
    said = messages_of(store, "copy")
    assert [one["content"] for one in said[:2]] == ["Be brief.", " /help"]


@pytest.mark.parametrize("how", ["a closed window", "SIGTERM"])
def test_an_answer_that_is_cut_off_is_saved(terminal, store, how):
    with terminal(tokens=3000) as shell:
        answered(shell, "Hello", r"Hello\s+\S")
        if how == "SIGTERM":
            shell.process.send_signal(signal.SIGTERM)
            assert shell.wait() == 143
        else:
            shell.hang_up()
            shell.process.wait(60)
    said = messages_of(store, "hello")
    assert [one["role"] for one in said] == ["user", "assistant"]
    assert said[1]["content"]


def test_a_killed_conversation_has_every_turn_that_ended(terminal, store):
    with terminal() as shell:
        answered(shell, "Hello")
        answered(shell, "More")
        shell.wait_for("> ")
        shell.process.kill()
        shell.process.wait()
    with terminal() as shell:
        shell.wait_for("goes on with hello: 4 messages")
        shell.wait_for("> More\n")  # its last turn


def test_what_was_typed_is_there_again_and_nobody_elses_to_read(terminal, data):
    with terminal() as shell:
        answered(shell, "Hello")
        shell.wait_for("> ")
        shell.type(CTRL_D)
        assert shell.wait() == 0
    assert stat.S_IMODE((data / "chat-history").stat().st_mode) == 0o600
    with terminal() as shell:
        answered(shell, UP, "first token after")
        assert shell.plain.count("> Hello") == 2  # of the last turn, and typed


def test_a_damaged_conversation_is_computed_again_to_the_bit_and_says_so(
    capsys, piped, terminal, store, tmp_path
):
    text = "Hello, " * 30
    piped(text, options=["--name", "ada"])
    (pack,) = Path(store.path, "packs").glob("*.kvsnap")
    flip(pack, FRONT + 100)
    with terminal("--name", "ada") as shell:
        shell.wait_for("goes on with ada: 2 messages")
        answered(shell, "More", "64 tokens of the saved conversation were damaged: computed again")
        answered(shell, "And more")
        shell.wait_for("> ")
        shell.type(CTRL_D)
        assert shell.wait() == 0
    other = DirectoryStore(tmp_path / "other")
    uninterrupted(other, "whole", text, "More", "And more")
    told(capsys, "snapshot", "diff", f"{store.path}/ada", f"{other.path}/whole")
    assert "computed again" not in piped("Once more", options=["--name", "ada"]).err


# What is saved when.


def test_two_that_go_on_with_one_conversation_lose_nothing(store):
    from kvpager.cli.chat.talk import Talk

    with Engine(text_models.model(), tokenizer=text_models.byte_level()) as engine:
        talks = [Talk(engine, store, {"max_new_tokens": 5, "temperature": 0}) for _ in range(2)]
        list(talks[0].say("Hello"))
        talks[0].save()
        talks[1].load("hello")
        for talk, text in zip(talks, ("one", "other")):
            list(talk.say(text))
            talk.save()
        assert [talk.name for talk in talks] == ["hello", "hello-2"]
        for talk, text in zip(talks, ("one", "other")):
            assert engine.restore(talk.name, store=store).messages[2]["content"] == text


def test_a_turn_that_ends_before_its_answer_changes_nothing(store):
    from kvpager.cli.chat.talk import Talk

    with Engine(text_models.model(), tokenizer=text_models.byte_level()) as engine:
        talk = Talk(engine, store, {"max_new_tokens": 5, "temperature": 0}, system="Be brief.")
        for said in ([], ["Hello"]):
            for text in said:
                list(talk.say(text))
            messages, tokens = talk.session.messages, talk.session.tokens.tolist()

            def interrupt(done: int, total: int) -> None:
                raise KeyboardInterrupt

            with pytest.raises(KeyboardInterrupt):
                list(talk.say("More", progress=interrupt))
            assert talk.session.messages == messages
            if said:
                with pytest.raises(KeyboardInterrupt):
                    list(talk.answer_again(logits_processor=[_interrupting]))
                assert talk.session.tokens.tolist() == tokens
            with pytest.raises(KeyboardInterrupt):
                list(talk.say("More", logits_processor=[_interrupting]))
            assert talk.session.messages == messages


def _interrupting(ids: Any, scores: Any) -> Any:
    raise KeyboardInterrupt
