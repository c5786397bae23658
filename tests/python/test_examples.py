"""The examples say what is true, are short, and so are those of the guide to several caches."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

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
