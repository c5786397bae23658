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


def test_documents_that_were_computed_alone_stand_in_any_order(chat_model, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["rag.py", "--model", chat_model])
    loaded("rag")
    told = re.findall(r"\((\w+ \w+ \w+): (\d+) of (\d+) tokens computed\)", capsys.readouterr().out)
    assert [order.split()[0] for order, *_ in told] == ["museum", "tea", "ferry"]
    assert all(int(computed) < int(every) / 2 for _, computed, every in told)


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


@pytest.fixture
def toy_alone(tmp_path, monkeypatch):
    """Neither the hub's cache nor a package has a model, so that the checkout's own is taken."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("kvpager.cli.models.packaged_model", lambda: None)


def test_the_checkouts_own_model_serves_when_none_is_named(toy_alone, capsys):
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
    most = 110 if path.stem == "own_store" else 40  # five methods, each of a few lines
    assert len(path.read_text(encoding="utf-8").splitlines()) <= most


# The guide to several caches.

GUIDE = (EXAMPLES.parent / "docs" / "companions.md").read_text(encoding="utf-8")


def test_the_guides_first_example_runs_and_keeps_what_it_says(capsys, tmp_path):
    from transformers import AutoModelForCausalLM

    import kvpager
    from kvpager.cli.needles import NeedleTask, shipped_model_path

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
    import torch
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    import kvpager

    heads = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "num_key_value_heads": 2}
    config = Qwen3NextConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        head_dim=64,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        mlp_only_layers=[0, 1, 2, 3],  # no experts
        **heads,
    )
    torch.manual_seed(0)
    names = {"kvpager": kvpager, "model": Qwen3NextForCausalLM(config).eval()}
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
    from kvpager._runtime.recurrent.checkpoints import CheckpointCounters

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
