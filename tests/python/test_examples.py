"""The examples say what is true, are short, and so are those of the guide to several caches."""

from __future__ import annotations

import asyncio
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "model"))
import text_models

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def run(capsys):
    """Runs an example in a process that has torch; returns the lines it prints."""

    def run(name):
        capsys.readouterr()
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return run


def test_an_agents_turn_computes_what_is_new_also_after_a_restart(run):
    *lines, another = run("agent_loop")
    messages = [re.fullmatch(r"turn \d: ([\d,]+) of ([\d,]+) .*", line) for line in lines[::2]]
    numbers = [[int(n.replace(",", "")) for n in found.groups()] for found in messages]
    assert numbers[0][0] == numbers[0][1]
    # The text of the turn before without its thoughts: from its question on.
    assert [computed for computed, _ in numbers[1:]] == [4 + 4 + 64] * 3
    calls = [
        re.fullmatch(r" +(\d+) of .*; the answer is right: True", line) for line in lines[1::2]
    ]
    assert [int(found[1]) for found in calls] == [5] * 4  # the question, behind the last thought
    assert another.startswith("another answer: [")


def test_documents_that_were_read_alone_answer_together_in_any_order(run):
    lines = run("rag")
    orders = [re.fullmatch(r"(.*): (\d+) of 4,228 tokens computed;", line) for line in lines[::2]]
    assert len({found[1] for found in orders}) == 4
    assert all(int(found[2]) < 4228 / 6 for found in orders)
    assert [line.strip() for line in lines[1::2]] == ["the answer is right: True"] * 4


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    """The folder of a small model with a tokenizer and a chat template of its own."""
    folder = tmp_path_factory.mktemp("model")
    text_models.model().save_pretrained(folder)
    text_models.byte_level().save_pretrained(folder)
    return str(folder)


def loaded(name):
    """An example as a module, of which nothing has run."""
    return SimpleNamespace(**runpy.run_path(str(EXAMPLES / f"{name}.py")))


def test_a_chat_goes_on_after_a_restart(chat_model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    told = []
    for message in ("Hello", "And again"):
        capsys.readouterr()
        loaded("chat").main(chat_model, message)
        told.append(capsys.readouterr().out)
    first, second = (text.rpartition("\n(")[0] for text in told)
    counts = [re.findall(r"\((\d+) tokens restored, (\d+) computed\)", text)[0] for text in told]
    assert second.startswith(first)
    (none, prompt), (restored, new) = (map(int, count) for count in counts)
    assert none == 0
    assert restored > prompt
    assert new < prompt + 10


def test_a_service_answers_sixteen_clients_as_if_each_were_alone(chat_model, capsys):
    lines = ("Hello", "And again")

    async def client(port, number):
        reader, writer = await asyncio.open_connection("localhost", port)
        writer.write("".join(f"{line} {number}\n" for line in lines).encode() + b"\n")
        answers = await reader.read()
        writer.close()
        return answers

    async def leave(port):
        reader, writer = await asyncio.open_connection("localhost", port)
        writer.write(b"Hello\n")
        await reader.read(1)
        writer.close()

    async def run():
        service = asyncio.ensure_future(loaded("service").main(chat_model, "0"))
        while not (found := re.search(r"listening on port (\d+)", capsys.readouterr().out)):
            await asyncio.sleep(0.01)
            assert not service.done(), service.result()
        port = int(found[1])
        await leave(port)
        together = await asyncio.gather(*(client(port, n) for n in range(16)))
        alone = [await client(port, n) for n in (3, 11)]
        assert [together[3], together[11]] == alone
        service.cancel()
        with pytest.raises(asyncio.CancelledError):
            await service

    asyncio.run(asyncio.wait_for(run(), 120))


def test_the_checkouts_own_model_chats_when_none_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["chat.py", "What does `close` do?"])
    runpy.run_path(str(EXAMPLES / "chat.py"), run_name="__main__")
    told = capsys.readouterr().out
    assert re.search(r"assistant: .*\w", told)
    assert "(0 tokens restored" in told


def test_the_checkouts_own_model_serves_when_none_is_named(capsys):
    async def run():
        service = asyncio.ensure_future(loaded("service").main(port="0"))
        while not (found := re.search(r"listening on port (\d+)", capsys.readouterr().out)):
            await asyncio.sleep(0.01)
            assert not service.done(), service.result()
        reader, writer = await asyncio.open_connection("localhost", int(found[1]))
        writer.write(b"What does `close` do?\n\n")
        answer = await reader.read()
        writer.close()
        service.cancel()
        with pytest.raises(asyncio.CancelledError):
            await service
        return answer.decode()

    assert re.search(r"\w", asyncio.run(asyncio.wait_for(run(), 120)))


def test_a_model_over_the_pager_computes_what_full_attention_does(capsys):
    made = loaded("own_model")
    assert re.match(r"[1-4] of 10 chunks are in the pool\n", capsys.readouterr().out)
    x = made.embed[made.ids]
    n = len(made.ids)
    for queries, keys_values in zip(made.queries, made.keys_values):
        q = (x @ queries).view(n, made.HEADS, made.DIM).transpose(0, 1)
        k, v = (x @ keys_values).view(n, 2, made.KV_HEADS, made.DIM).unbind(1)
        seen = torch.nn.functional.scaled_dot_product_attention(
            q, k.transpose(0, 1), v.transpose(0, 1), is_causal=True, enable_gqa=True
        )
        x = x + torch.nn.functional.silu(seen.transpose(0, 1).reshape(n, -1))
    torch.testing.assert_close(made.paged, x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_has_at_most_forty_lines(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 40


# The guide to several caches.

GUIDE = (EXAMPLES.parent / "docs" / "companions.md").read_text(encoding="utf-8")


def test_the_guides_first_example_runs_and_keeps_what_it_says(capsys, tmp_path):
    from transformers import AutoModelForCausalLM

    import kvpager
    from kvpager.needles import NeedleTask, shipped_model_path

    load = AutoModelForCausalLM.from_pretrained
    ids = NeedleTask(seed=3).document(512, 4).ids
    edited = ids.copy()
    edited[300] += 1
    names = {
        "kvpager": kvpager,
        "model": load(shipped_model_path()).eval(),
        "small_model": load(shipped_model_path()).eval(),
        "ids": ids,
        "edited_ids": edited,
        "store": kvpager.DirectoryStore(tmp_path),
    }
    code = re.findall(r"```python\n(.*?)```", GUIDE, flags=re.DOTALL)[0]
    try:
        exec(compile(code.replace("256", "16"), "guide", "exec"), names)
        assert capsys.readouterr().out == "300 of 512 tokens were there\n"
        assert names["session"].length == 512
    finally:
        names["engine"].close()


def test_the_guides_engine_for_recurrent_layers_is_one():
    hybrid = pytest.importorskip("kvpager_bench.questions.hybrid")
    import kvpager

    names = {"kvpager": kvpager, "model": hybrid.load_model(4)}
    code = re.findall(r"```python\n(.*?)```", GUIDE, flags=re.DOTALL)[1]
    exec(compile(code, "guide", "exec"), names)
    with names["engine"] as engine:
        session = engine.session()
        session.prefill(range(8, 8 + 300))
        session.trim(290)
        assert engine.stats()["tokens_reprefilled"] == 290 - 256
        assert engine.stats()["checkpoint_states"] == 1


def test_the_guide_names_options_counters_and_attributes_that_exist():
    from dataclasses import fields

    import kvpager
    from kvpager.recurrent.checkpoints import CheckpointCounters

    counters = {
        *(field.name for field in fields(kvpager.companions.TrimCounters)),
        *(field.name for field in fields(CheckpointCounters)),
    }
    options = {field.name for field in fields(kvpager.PagerConfig)}
    told = set(re.findall(r"`((?:trim|tokens|checkpoints?|state|rewind)_[a-z_]+)", GUIDE))
    assert told <= counters | options | {"tokens_per_forward"}
    assert counters <= told
    assert {"rewind_tokens", "checkpoint_chunks", "checkpoint_bytes"} <= told


def test_the_guide_to_many_at_once_runs(chat_model, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import kvpager

    guide = (EXAMPLES.parent / "docs" / "how_to" / "serving.md").read_text(encoding="utf-8")
    names = {
        "kvpager": kvpager,
        "model": AutoModelForCausalLM.from_pretrained(chat_model).eval(),
        "tokenizer": AutoTokenizer.from_pretrained(chat_model),
    }
    blocks = re.findall(r"```python\n(.*?)```", guide, flags=re.DOTALL)
    exec(compile("\n".join(blocks), "guide", "exec"), names)
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 1 + 2 * 20 + 1
    assert names["completions"][0].finish_reason == "length"
