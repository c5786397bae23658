"""The examples run, tell what they compare, and fail in one line."""

from __future__ import annotations

import importlib.util
import re
import sys
import tempfile
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = ("--system-tokens", "512", "--turns", "2", "--draft", "none")
ROW = re.compile(r" *(\d+|all)  (.*?) +([\d,]+) +([\d,]+) +([\d,]+) +(\d+) +[\d.]+ +([\d,]+)")


def loaded(name):
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[name]


@pytest.fixture(scope="module")
def agent_loop():
    yield from loaded("agent_loop")


@pytest.fixture(scope="module")
def rag():
    yield from loaded("rag")


@pytest.fixture
def scratch(monkeypatch, tmp_path):
    """Where temporary folders are made; empty again after a clean end."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def rows_of(text):
    """Of each prompt: its name, tokens, reused, computed, forwards and what the wiped run does."""
    rows = []
    for line in text.splitlines():
        if found := ROW.match(line):
            _, prompt, *numbers = found.groups()
            rows.append((prompt, *(int(number.replace(",", "")) for number in numbers)))
    return rows


def test_a_kept_cache_computes_only_what_is_new_where_a_wiped_one_begins_anew(
    agent_loop, capsys, scratch
):
    assert agent_loop.main(SMALL) == 0
    out = capsys.readouterr().out
    *rows, total = rows_of(out)
    names = [row[0] for row in rows]
    assert names == [
        *("user", "tool call", "tool result"),
        *("edited message, restarted", "tool call", "tool result"),
        *("user", "tool call", "tool result", "another answer"),
    ]
    for prompt, tokens, reused, computed, _, wiped in rows:
        assert reused + computed == tokens
        begins_anew = prompt in ("user", "edited message, restarted", "another answer")
        assert wiped == (tokens if begins_anew else computed)
    assert [row[3] for row in rows if row[0] == "another answer"] == [0]
    # Of the turns after the first: a message alone, or what came after the dropped thoughts.
    assert max(row[3] for row in rows[1:]) < 256
    assert total[1:] == tuple(map(sum, zip(*(row[1:] for row in rows))))
    assert "6 of 6 look-ups are right" in out
    assert "both runs generated the same" in out
    assert "draft model" not in out
    assert not list(scratch.iterdir())


def test_a_draft_model_guesses_and_changes_no_token(agent_loop, capsys, scratch):
    from kvpager.needles import shipped_model_path

    draft = ("--draft", str(shipped_model_path()))
    assert agent_loop.main([*SMALL[:-2], *draft]) == 0
    out = capsys.readouterr().out
    (told,) = re.findall(r"draft model: ([\d.]+) tokens per forward, (\d+)% of (\d+) guesses", out)
    assert float(told[0]) > 1
    assert int(told[1]) > 50
    assert "both runs generated the same" in out


def test_other_tokens_are_said_and_are_a_failure(agent_loop, capsys, monkeypatch):
    def again(self, text, count, **options):
        return self.update(text), self.session.generate(count, **{**options, "temperature": 9.0})

    monkeypatch.setattr(agent_loop.Wiper, "again", again)
    assert agent_loop.main(SMALL) == 1
    assert "DIFFERENT" in capsys.readouterr().out


def test_a_picture_is_drawn_where_it_is_asked_for(agent_loop, capsys, scratch):
    picture = scratch / "loop.png"
    assert agent_loop.main([*SMALL, "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"wrote {picture}" in capsys.readouterr().out


def test_ctrl_c_ends_it_with_one_line_and_leaves_model_and_disk_as_they_were(
    agent_loop, capsys, monkeypatch, scratch
):
    models = []
    load = agent_loop.load

    def remembered(path):
        models.append(load(path))
        return models[-1]

    def interrupted(self, *arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(agent_loop, "load", remembered)
    monkeypatch.setattr(agent_loop.Keeper, "restart", interrupted)
    assert agent_loop.main(SMALL) == 130
    out, err = capsys.readouterr()
    assert (out, err) == ("", "agent_loop: interrupted\n")
    assert not list(scratch.iterdir())
    (model,) = models
    assert "kvpager" not in model.config._attn_implementation


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "no/such/folder"), "no/such/folder has no config.json"),
        (("--chunk-tokens", "48"), "chunk_tokens is 48; expected"),
        (("--threads", "0"), "threads is 0; expected an integer, 1 or more"),
    ],
)
def test_what_cannot_be_done_is_one_line_on_stderr(agent_loop, capsys, arguments, words):
    assert agent_loop.main([*SMALL, *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("agent_loop: ")
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--turns", "1"), "--turns is 1; expected 2 or more"),
        (("--system-tokens", "100"), "--system-tokens is 100; expected at least 512"),
        (("--seed", "-1"), "--seed is -1; expected 0 or more"),
        (("--plot", "no/such/folder/x.png"), "its folder does not exist"),
    ],
)
def test_a_wrong_command_line_is_refused_before_anything_is_loaded(
    agent_loop, capsys, monkeypatch, arguments, words
):
    monkeypatch.setattr(agent_loop, "load", None)
    with pytest.raises(SystemExit) as told:
        agent_loop.main([*SMALL, *arguments])
    assert told.value.code == 2
    assert words in capsys.readouterr().err


# Retrieved documents.

FEW = (
    *("--documents", "8", "--document-tokens", "128", "--retrieved", "4"),
    *("--questions", "4", "--system-tokens", "64", "--threads", "1"),
)
QUESTION = re.compile(r"(\d+) +((?:\d+ )+) *([\d,]+)" + r" +(yes|no) +([\d,]+) +\d+" * 3)


def questions_of(text):
    """Of each question: the documents' numbers, tokens, and of each way (right, computed)."""
    rows = []
    for line in text.splitlines():
        if found := QUESTION.fullmatch(line):
            numbers = [int(found[i].replace(",", "")) for i in (3, 5, 7, 9)]
            rights = [found[i] == "yes" for i in (4, 6, 8)]
            documents = [int(number) for number in found[2].split()]
            rows.append((documents, numbers[0], list(zip(rights, numbers[1:]))))
    return rows


def test_stitched_documents_answer_as_a_full_prefill_does_for_fewer_tokens(rag, capsys, scratch):
    assert rag.main(FEW) == 0
    out = capsys.readouterr().out
    rows = questions_of(out)
    assert len(rows) == 4
    assert len({tuple(documents) for documents, _, _ in rows}) == 4
    for documents, tokens, (cold, prefix, stitched) in rows:
        assert len(set(documents)) == 4
        assert tokens == 64 + 4 * 128 + 4
        assert cold == (True, tokens)
        assert prefix[1] <= tokens - 64 or documents == rows[0][0]
        assert stitched[1] < tokens / 3
    stitched_right = sum(ways[2][0] for _, _, ways in rows)
    assert f"stitched:  {stitched_right:>2} of 4 right" in out
    assert stitched_right == 4
    assert "read once: 1,024 tokens" in out
    assert "cold and prefix said the same" in out
    assert not list(scratch.iterdir())


def test_without_repair_what_documents_say_of_one_another_is_lost(rag, capsys, scratch):
    picture = scratch / "rag.png"
    assert rag.main([*FEW, "--repair", "none", "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    assert [ways[2][0] for _, _, ways in questions_of(out)] == [False] * 4
    assert "repair: 0 of 2,048 moved tokens, by NoRepair()" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_what_is_retrieved_is_named_and_referred_to_and_in_that_order(rag):
    from kvpager_bench.two_hop import TwoHopTask

    drawn = TwoHopTask(seed=4).text([128] * 8, facts=6, system=16)
    corpus, orders = rag.Corpus(drawn.documents), set()
    for seed, fact in enumerate(drawn.facts):
        rng = rag.np.random.default_rng(seed)
        numbers = corpus.retrieve(fact.key, 4, rng)
        assert numbers.index(fact.definition[0]) < numbers.index(fact.reference[0])
        assert len(set(numbers)) == 4
        orders.add(tuple(numbers))
    assert len(orders) > 3


def test_exact_ways_that_differ_are_a_failure(rag, capsys, monkeypatch):
    prefix = rag.Reader.prefix

    def wrong(self, text):
        session = prefix(self, text)
        if len(session.tokens) != session.tokens_computed:  # something was there already
            session.append([9])
        return session

    monkeypatch.setattr(rag.Reader, "prefix", wrong)
    assert rag.main(FEW) == 1
    assert "DIFFERENT" in capsys.readouterr().out


def test_ctrl_c_ends_the_reading_with_one_line(rag, capsys, monkeypatch, scratch):
    def interrupted(self, text):
        raise KeyboardInterrupt

    monkeypatch.setattr(rag.Reader, "stitched", interrupted)
    assert rag.main(FEW) == 130
    assert capsys.readouterr() == ("", "rag: interrupted\n")
    assert not list(scratch.iterdir())


def test_a_model_without_a_folder_is_one_line_on_stderr(rag, capsys):
    assert rag.main([*FEW, "--model", "no/such/folder"]) == 1
    assert capsys.readouterr() == (
        "",
        "rag: no/such/folder has no config.json; expected the folder of a causal LM\n",
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--documents", "1"), "--documents is 1; expected 2 or more"),
        (("--document-tokens", "64"), "--document-tokens is 64; expected 128 or more"),
        (("--retrieved", "9"), "--retrieved is 9; expected at most the 8 that there are"),
        (("--repair", "hed:4"), "--repair is 'hed:4': there is no policy 'hed'"),
        (("--plot", "no/such/folder/x.png"), "its folder does not exist"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_anything_is_loaded(
    rag, capsys, monkeypatch, arguments, words
):
    monkeypatch.setattr(rag, "load", None)
    with pytest.raises(SystemExit) as told:
        rag.main([*FEW, *arguments])
    assert told.value.code == 2
    assert words in " ".join(capsys.readouterr().err.split())


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
    from kvpager.runtime.checkpoints import CheckpointCounters

    counters = {
        *(field.name for field in fields(kvpager.TrimCounters)),
        *(field.name for field in fields(CheckpointCounters)),
    }
    options = {field.name for field in fields(kvpager.PagerConfig)}
    told = set(re.findall(r"`((?:trim|tokens|checkpoints?|state|rewind)_[a-z_]+)", GUIDE))
    assert told <= counters | options | {"tokens_per_forward"}
    assert counters <= told
    assert {"rewind_tokens", "checkpoint_chunks", "checkpoint_bytes"} <= told
