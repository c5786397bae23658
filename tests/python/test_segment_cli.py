"""`kvpager segment add | ls | rm`, and segments in `kvpager generate`."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cli_snapshots import files_below, flip, refused, told, told_json

from kvpager.cli import main
from kvpager.errors import InvalidArgumentError
from kvpager.stores import DirectoryStore

C = 16  # tokens of a chunk


def ids(count, start=0):
    """Token ids as an option takes them, of a vocabulary of 64."""
    return ",".join(str((i * i + 7 * i + start) % 61) for i in range(count))


@pytest.fixture
def add(capsys, model_dir, tmp_path):
    """Runs `segment add` on the store, with the model; returns what it told as JSON."""

    def run(*arguments):
        return told_json(capsys, *command(model_dir, tmp_path, *arguments), "-q")["segments"]

    return run


def command(model_dir, tmp_path, *arguments):
    store = ("--store", tmp_path / "store", "--model", model_dir)
    return ("segment", "add", *store, "--chunk-tokens", C, "--pool", 16 * C, *arguments)


@pytest.fixture(scope="module")
def made_store(model_dir, tmp_path_factory):
    """The folder of a store with segments a (50 tokens) and b (40 tokens)."""
    folder = tmp_path_factory.mktemp("made")
    for name, text in (("a", ids(50)), ("b", ids(40, start=5))):
        arguments = command(model_dir, folder, "-q", "--name", name, "--ids", text)
        assert main([*map(str, arguments), "--output", str(folder / "told")]) == 0
    return folder / "store"


@pytest.fixture
def store(made_store, tmp_path):
    """A copy of it, at the place where `add` and `generate` look."""
    return shutil.copytree(made_store, tmp_path / "store")


@pytest.fixture
def generate(capsys, model_dir, tmp_path):
    """Runs `generate` on the store, with the model; returns what it told as JSON."""

    def run(*arguments):
        return told_json(capsys, *generating(model_dir, tmp_path, *arguments), "-q")

    return run


def generating(model_dir, tmp_path, *arguments):
    store = ("--store", tmp_path / "store", "--model", model_dir, "--max-new-tokens", 5)
    return ("generate", *store, "--chunk-tokens", C, "--pool", 16 * C, *arguments)


def listed(capsys, store):
    segments = told_json(capsys, "segment", "ls", "--store", store)["segments"]
    return {segment["name"]: segment for segment in segments}


def pack_of(store, name):
    """The file that the chunks of a segment lie in."""
    ((pack, _),) = DirectoryStore(store).open(f"segment-{name}").packs
    return store / "packs" / f"{pack}.kvsnap"


# add.


def test_add_computes_a_text_and_ls_shows_it(add, capsys, tmp_path):
    (added,) = add("--name", "a", "--ids", ids(50))
    assert (added["name"], added["tokens"], added["computed"]) == ("a", 50, 50)
    assert added["was_there"] is False
    shown = listed(capsys, tmp_path / "store")["a"]
    assert (shown["tokens"], shown["chunks"], shown["problem"]) == (50, 4, None)
    assert shown["bytes_own"] >= added["bytes_written"] > 0  # and what is noted of it
    assert shown["snapshot"] == "segment-a"
    text = told(capsys, "segment", "ls", "--store", tmp_path / "store")
    assert "1 segment, 50 tokens" in text
    assert max(map(len, text.splitlines())) <= 100


def test_adding_the_same_text_again_computes_and_writes_nothing(
    add, capsys, model_dir, store, tmp_path
):
    before = files_below(store)
    (again,) = add("--name", "a", "--ids", ids(50))
    assert again["was_there"] is True
    assert (again["computed"], again["bytes_written"]) == (0, 0)
    assert files_below(store) == before
    text = told(capsys, *command(model_dir, tmp_path, "--name", "a", "--ids", ids(50)))
    assert text == "a: 50 tokens, was there already\n"


def test_the_same_text_under_another_name_is_not_computed_again(add, store):
    (other,) = add("--name", "copy", "--ids", ids(50))
    assert other["was_there"] is False
    assert other["computed"] == 0
    assert other["bytes_shared"] > other["bytes_written"]


def test_several_files_are_a_segment_each_called_as_the_files(
    add, capsys, model_dir, tmp_path, store
):
    files = [tmp_path / f"{name}.txt" for name in ("a", "c", "d")]
    for file, count in zip(files, (50, 20, 33)):
        file.write_text(ids(count))
    added = add("--as-ids", *files)
    assert [(one["name"], one["tokens"], one["computed"]) for one in added] == [
        ("a", 50, 0),
        ("c", 20, 4),  # its first chunk is that of a
        ("d", 33, 1),
    ]
    assert list(listed(capsys, store)) == ["a", "b", "c", "d"]
    assert main([*map(str, command(model_dir, tmp_path, "--as-ids", *files))]) == 0
    out, err = capsys.readouterr()
    assert err.splitlines() == ["1 of 3: a", "2 of 3: c", "3 of 3: d"]
    assert out.count("was there already") == 3


def test_another_text_under_a_taken_name_is_refused_with_the_remedy(
    add, capsys, model_dir, store, tmp_path
):
    before = files_below(store)
    arguments = command(model_dir, tmp_path, "--name", "a", "--ids", ids(30, start=9))
    err = refused(capsys, *arguments)
    assert "another text, of 50 tokens" in err
    assert "--replace" in err
    assert files_below(store) == before
    (replaced,) = add("--name", "a", "--ids", ids(30, start=9), "--replace")
    assert (replaced["tokens"], replaced["computed"]) == (30, 30)
    assert listed(capsys, store)["a"]["tokens"] == 30


def test_nothing_is_added_where_one_of_the_names_is_taken(capsys, model_dir, store, tmp_path):
    for name, count in (("c", 20), ("b", 20)):
        (tmp_path / f"{name}.txt").write_text(ids(count, start=9))
    files = (tmp_path / "c.txt", tmp_path / "b.txt")
    before = files_below(store)
    err = refused(capsys, *command(model_dir, tmp_path, "-q", "--as-ids", *files))
    assert "Nothing was added" in err
    assert files_below(store) == before


def test_a_segment_of_other_numerics_is_refused_until_it_is_replaced(
    add, capsys, model_dir, store, tmp_path
):
    arguments = ("--name", "a", "--ids", ids(50), "--kv-dtype", "bfloat16")
    err = refused(capsys, *command(model_dir, tmp_path, *arguments))
    assert "kv_dtype" in err
    assert "--replace" in err
    (replaced,) = add(*arguments, "--replace")
    assert replaced["computed"] == 50


def test_a_damaged_segment_is_put_right_by_adding_its_text_again(add, capsys, store):
    flip(pack_of(store, "a"), 4096 + 10)
    main(["snapshot", "verify", str(store)])  # the store remembers what it finds
    capsys.readouterr()
    assert [name for name, one in listed(capsys, store).items() if one["problem"]] == ["a"]
    (again,) = add("--name", "a", "--ids", ids(50))
    assert again["was_there"] is False
    assert again["computed"] > 0
    assert [name for name, one in listed(capsys, store).items() if one["problem"]] == []
    told(capsys, "segment", "rm", "--store", store, "a")


def test_text_goes_through_the_tokenizer(capsys, spoken_model_dir, tmp_path, generate):
    file = tmp_path / "notes.txt"
    file.write_text("the cache keeps every chunk")
    told(capsys, *command(spoken_model_dir, tmp_path, file))
    spoken = told_json(
        capsys,
        *generating(
            spoken_model_dir, tmp_path, "--segment", "notes", "--prefix", "pool page", "-q"
        ),
        *("--prompt", "turn needle"),
    )
    assert spoken["prompt_ids"] == [6, 7, 1, 2, 3, 4, 5, 8, 9]
    numbers = generate("--segment", "notes", "--prefix-ids", "6,7", "--ids", "8,9")
    assert spoken["ids"] == numbers["ids"]


def test_a_tokenizer_begins_the_text_and_no_segment_of_it(capsys, spoken_model_dir, tmp_path):
    from tokenizers import Tokenizer, processors

    begun = shutil.copytree(spoken_model_dir, tmp_path / "begun")
    tokenizer = Tokenizer.from_file(str(begun / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<unk> $A", special_tokens=[("<unk>", 0)]
    )
    tokenizer.save(str(begun / "tokenizer.json"))
    told(capsys, *command(begun, tmp_path, "--name", "notes", "--prompt", "the cache"))
    parts = generating(begun, tmp_path, "-q", "--segment", "notes", "--prompt", "turn needle")
    assert told_json(capsys, *parts)["prompt_ids"] == [0, 1, 2, 8, 9]
    assert told_json(capsys, *parts, "--prefix", "pool")["prompt_ids"] == [0, 6, 1, 2, 8, 9]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, "a text is missing"),
        (("--ids", "1,2"), 2, "--name is missing"),
        (("--ids", "1,2", "--name", "no spaces please"), 2, "expected 1 to 200 letters"),
        (("--ids", "1,x", "--name", "c"), 2, "'x' is no token id"),
        (("--ids", "1", "FILE", "--name", "c"), 2, "expected one of them"),
        (("--as-ids", "--ids", "1", "--name", "c"), 2, "--as-ids has no meaning without FILE"),
        (("one.txt", "two.txt", "--name", "c"), 2, "one name for 2 FILEs"),
        (("no/such/one.txt",), 1, "FILE no/such/one.txt: No such file"),
        (("--prompt", "words", "--name", "c"), 1, "has no tokenizer"),
        (("--ids", "1,64", "--name", "c"), 1, "ids[1] is 64; expected a token id from 0 to 63"),
    ],
)
def test_what_cannot_be_added_is_one_line(
    capsys, model_dir, tmp_path, monkeypatch, arguments, code, words
):
    assert words in refused(capsys, *command(model_dir, tmp_path, *arguments), code=code)


def test_two_files_of_one_name_and_an_empty_text_are_refused(capsys, spoken_model_dir, tmp_path):
    (tmp_path / "sub").mkdir()
    for file in (tmp_path / "c.txt", tmp_path / "sub" / "c.md"):
        file.write_text("")
    arguments = command(spoken_model_dir, tmp_path, tmp_path / "c.txt")
    err = refused(capsys, *arguments, tmp_path / "sub" / "c.md", code=2)
    assert "would be called c" in err
    assert "c: its text has no tokens" in refused(capsys, *arguments)


def test_a_model_or_a_store_that_is_missing_is_named(capsys, model_dir, tmp_path):
    text = ("--name", "a", "--ids", "1,2")
    err = refused(capsys, "segment", "add", "--store", tmp_path / "s", *text, code=2)
    assert "--model is missing" in err
    err = refused(capsys, "segment", "add", "--model", model_dir, *text, code=2)
    assert "--store" in err
    assert "no such folder" in refused(capsys, "segment", "ls", "--store", tmp_path / "none")
    assert "no store" in refused(capsys, "segment", "rm", "--store", tmp_path, "a")
    err = refused(capsys, "segment", "lss", "--store", tmp_path, code=2)
    assert "did you mean ls?" in err


@pytest.mark.parametrize("place", ["while it is computed", "while it is written"])
def test_an_interrupted_add_leaves_no_half_segment(
    add, capsys, model_dir, store, tmp_path, monkeypatch, place
):
    from kvpager.segments.shelf import Segments

    for name in ("c", "d"):
        (tmp_path / f"{name}.txt").write_text(ids(60, start=ord(name)))
    arguments = command(model_dir, tmp_path, "--as-ids", tmp_path / "c.txt", tmp_path / "d.txt")
    cache, save = Segments.cache, DirectoryStore.save

    def stop(*progress):
        raise KeyboardInterrupt

    def cached(self, ids, name=None, *, progress=None):
        return cache(self, ids, name, progress=stop if name == "d" else progress)

    def saved(self, name, content, **options):
        if name == "segment-d":
            options["progress"] = stop
        return save(self, name, content, **options)

    if place == "while it is computed":
        monkeypatch.setattr(Segments, "cache", cached)
    else:
        monkeypatch.setattr(DirectoryStore, "save", saved)
    assert main([*map(str, arguments), "-q"]) == 130
    assert capsys.readouterr() == ("", "kvpager: interrupted\n")
    monkeypatch.undo()
    assert list(listed(capsys, store)) == ["a", "b", "c"]  # what was whole stays
    assert not [file for file in files_below(store) if file.endswith(".tmp")]
    told(capsys, "snapshot", "verify", store)
    added = add("--as-ids", tmp_path / "c.txt", tmp_path / "d.txt")
    assert [one["was_there"] for one in added] == [True, False]


# ls.


def test_ls_tells_segments_from_sessions_and_snapshot_ls_marks_them(capsys, generate, store):
    generate("--ids", "1,2,3", "--save", "segment-of-a-talk")
    assert list(listed(capsys, store)) == ["a", "b"]
    text = told(capsys, "snapshot", "ls", store)
    lines = {line.split()[0]: line for line in text.splitlines() if "segment-" in line}
    assert [name for name, line in lines.items() if " segment " in line] == [
        "segment-a",
        "segment-b",
    ]
    entries = told_json(capsys, "snapshot", "ls", store)["snapshots"]
    notes = {entry["name"]: entry["segment"] for entry in entries}
    assert notes["segment-of-a-talk"] is None
    assert (notes["segment-a"]["name"], notes["segment-a"]["tokens"]) == ("a", 50)


def test_ls_shows_pins_and_damage(capsys, store):
    told(capsys, "snapshot", "pin", f"{store}/segment-b")
    manifest = store / "snapshots" / "segment-a.kvsnap"
    manifest.write_bytes(manifest.read_bytes()[:100])
    shown = listed(capsys, store)
    assert (shown["a"]["tokens"], shown["a"]["pinned"]) == (0, False)
    assert str(manifest) in shown["a"]["problem"]
    assert (shown["b"]["tokens"], shown["b"]["pinned"], shown["b"]["problem"]) == (40, True, None)
    text = told(capsys, "segment", "ls", "--store", store)
    (a,) = [line for line in text.splitlines() if line.startswith(" a ")]
    (b,) = [line for line in text.splitlines() if line.startswith(" b ")]
    assert "DAMAGED" in a
    assert "pinned" in b
    assert "a: " in text.splitlines()[-1] or str(manifest.name) in text


def test_a_note_that_no_release_has_written_is_a_problem_and_not_a_crash(capsys, store):
    from cli_snapshots import sequence

    saved = {"pending": None, "segment": {"version": 2, "name": "c", "tokens": 3, "digest": "0"}}
    with sequence(20) as made:
        DirectoryStore(store).save(
            "segment-c",
            made.freeze(),
            fingerprint=made.pager.fingerprint_json,
            session=json.dumps(saved),
        )
    problem = listed(capsys, store)["c"]["problem"]
    assert "session.segment.version is 2; this release reads 1" in problem
    entries = told_json(capsys, "snapshot", "ls", store)["snapshots"]
    (entry,) = [entry for entry in entries if entry["name"] == "segment-c"]
    assert (entry["tokens"], entry["error"]) == (20, None)  # as a snapshot it is sound


def test_an_empty_store_has_no_segments(capsys, tmp_path):
    DirectoryStore(tmp_path / "store")
    assert told(capsys, "segment", "ls", "--store", tmp_path / "store") == "0 segments, 0 tokens\n"


def test_ls_and_rm_need_no_torch(store):
    code = (
        "import sys; from kvpager.cli import main; store = sys.argv[1];"
        "main(['segment', 'ls', '--store', store]);"
        "main(['segment', 'rm', '--store', store, 'a']);"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(store)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "2 segments" in done.stdout
    assert "removed 1 segment" in done.stdout


# rm.


def test_rm_takes_segments_out_and_says_what_that_freed(capsys, store):
    before = sum(file.stat().st_size for file in store.glob("*/*"))
    values = told_json(capsys, "segment", "rm", "--store", store, "a", "b", "a")
    assert values["removed"] == ["a", "b"]
    assert values["bytes_freed"] == before - sum(f.stat().st_size for f in store.glob("*/*")) > 0
    assert listed(capsys, store) == {}


def test_a_mistyped_name_offers_the_closest_and_removes_nothing(capsys, generate, store):
    assert "did you mean b?" in refused(capsys, "segment", "rm", "--store", store, "a", "bb")
    generate("--ids", "1,2,3", "--save", "segment-talk")
    err = refused(capsys, "segment", "rm", "--store", store, "talk")  # a session
    assert "no such segment" in err
    assert list(listed(capsys, store)) == ["a", "b"]


def test_a_pinned_segment_needs_force(capsys, store):
    told(capsys, "snapshot", "pin", f"{store}/segment-b")
    assert "--force" in refused(capsys, "segment", "rm", "--store", store, "a", "b")
    assert list(listed(capsys, store)) == ["a", "b"]
    told(capsys, "segment", "rm", "--store", store, "a", "b", "--force")
    assert listed(capsys, store) == {}


# generate.


def test_segments_stand_in_the_order_they_are_given_between_prefix_and_prompt(generate, store):
    values = generate("--segment", "b", "--segment", "a", "--prefix-ids", "1,2", "--ids", "3,4,5")
    a, b = ([int(word) for word in ids(*text).split(",")] for text in ((50,), (40, 5)))
    assert values["prompt_ids"] == [1, 2, *b, *a, 3, 4, 5]
    made = values["assembly"]
    assert made["exact"] >= 2
    assert (
        made["exact"] + made["moved"] + made["recomputed"] + made["fresh"] == made["tokens"] == 95
    )
    assert values["prefilled_tokens"] == made["rows"]
    assert values["reused_tokens"] + values["prefilled_tokens"] == 95
    assert values["reused_tokens"] >= made["moved"] > 0


def test_what_was_exact_moved_and_recomputed_is_told_after_the_answer(
    capsys, model_dir, store, tmp_path
):
    parts = ("--segment", "a", "--segment", "b", "--ids", "3,4,5", "--repair", "head:6")
    assert main([*map(str, generating(model_dir, tmp_path, *parts))]) == 0
    out, err = capsys.readouterr()
    assert len(out.split()) == 5
    # a is at the beginning, and what is computed right behind it as exact; then 34 of b's 40.
    assert "84 tokens reused, 9 prefilled; 56 tokens exact, 34 moved, 0 recomputed, 3 new" in err


def test_repairing_everything_gives_the_answer_of_a_full_prefill(generate, store):
    parts = ("--segment", "b", "--segment", "a", "--ids", "3,4,5", "--logprobs")
    full = generate(*parts, "--repair", "full")
    whole = ",".join((ids(40, start=5), ids(50), "3,4,5"))
    plain = generate("--ids", whole, "--logprobs")
    assert (full["assembly"]["moved"], full["assembly"]["exact"]) == (0, 93)
    assert plain["assembly"] is None
    assert full["ids"] == plain["ids"]
    assert full["logprobs"] == plain["logprobs"]
    none = generate(*parts, "--repair", "none")
    assert none["assembly"]["moved"] == 50
    assert none["logprobs"] != plain["logprobs"]


def test_an_assembled_session_is_saved_and_goes_on(generate, store):
    parts = ("--segment", "b", "--segment", "a", "--ids", "3,4,5", "--repair", "head:4")
    whole = generate(*parts, "--max-new-tokens", 9)
    first = generate(*parts, "--max-new-tokens", 4, "--save", "talk")
    second = generate("--restore", "talk")
    assert second["assembly"] is None
    assert first["ids"] + second["ids"] == whole["ids"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--segment", "aa"), 1, "aa: no such segment in the store"),
        (("--segment", "a", "--repair", "hed:4"), 2, "--repair is 'hed:4': there is no policy"),
        (("--segment", "a", "--restore", "x"), 2, "--segment has no meaning with --restore"),
        (("--segment", "a", "--prefix-ids", "1,x"), 2, "--prefix-ids: 'x' is no token id"),
        (("--segment", "a", "--prefix", "words"), 1, "has no tokenizer"),
        (("--repair", "none"), 2, "--repair has no meaning without --segment"),
        (("--prefix-file", "x"), 2, "--prefix-file has no meaning without --segment"),
    ],
)
def test_what_cannot_be_put_together_is_one_line(
    capsys, model_dir, store, tmp_path, arguments, code, words
):
    err = refused(capsys, *generating(model_dir, tmp_path, "--ids", "1,2", *arguments), code=code)
    assert words in err


def test_segments_need_a_store_that_is_there(capsys, model_dir, tmp_path):
    common = ("generate", "--model", model_dir, "--ids", "1,2", "--segment", "a")
    assert "give --store DIR" in refused(capsys, *common, code=2)
    missing = tmp_path / "missing"
    assert "no such folder" in refused(capsys, *common, "--store", missing)
    assert not missing.exists()


def test_a_segment_of_other_numerics_is_refused_without_advice_that_nobody_can_follow(
    capsys, model_dir, store, tmp_path
):
    arguments = generating(model_dir, tmp_path, "--segment", "a", "--ids", "1,2")
    assert "kv_dtype" in refused(capsys, *arguments, "--kv-dtype", "bfloat16")
    err = refused(capsys, *arguments, "--exact", "false")
    assert "with exact 'rows'" in err
    assert "on_mismatch" not in err


def test_a_damaged_chunk_of_a_segment_is_computed_again(generate, store):
    parts = ("--segment", "b", "--segment", "a", "--ids", "3,4,5", "--repair", "head:4")
    sound = generate(*parts)
    for name in ("a", "b"):
        flip(pack_of(store, name), 4096 + 10)
    assert generate(*parts)["ids"] == sound["ids"]


# Policies as text.


def test_every_policy_has_a_text():
    from kvpager.segments import (
        Combined,
        Deviation,
        FullRepair,
        NoRepair,
        QueryGuided,
        SeamTail,
        SegmentHead,
    )
    from kvpager.segments.policy_text import parse_policy

    assert parse_policy("none") == NoRepair()
    assert parse_policy("full") == FullRepair()
    assert parse_policy("head:8") == SegmentHead(8)
    assert parse_policy("tail:0") == SeamTail(0)
    assert parse_policy("deviation:0.25") == Deviation(0.25)
    assert parse_policy("query:1") == QueryGuided(1.0)
    assert parse_policy("head:4 + query:0.12") == Combined(SegmentHead(4), QueryGuided(0.12))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "there is no policy ''; expected none, full, head:N"),
        ("haed:4", "there is no policy 'haed'"),
        ("head", "head needs a number of tokens, such as head:16"),
        ("head:0.5", "head needs a number of tokens"),
        ("head:-1", "tokens is -1; expected an integer, 0 or more"),
        ("query:x", "query needs a share of the tokens, such as query:0.15"),
        ("query:1.5", "fraction is 1.5; expected a number from 0 to 1"),
        ("deviation:nan", "fraction is nan"),
        ("none:1", "none takes no number"),
        ("head:4+", "there is no policy ''"),
    ],
)
def test_a_text_that_is_no_policy_says_what_would_be(text, words):
    from kvpager.segments.policy_text import parse_policy

    with pytest.raises(InvalidArgumentError) as raised:
        parse_policy(text)
    assert words in str(raised.value)
    assert f"repair is {text!r}" in str(raised.value)


# The guide.

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "segments.md").read_text(encoding="utf-8")


def test_the_guides_example_runs_and_says_what_came_from_segments(model_dir, tmp_path, capsys):
    from transformers import AutoModelForCausalLM

    import kvpager

    example = re.findall(r"```python\n(.*?)```", GUIDE, flags=re.DOTALL)[0]
    names = {
        "kvpager": kvpager,
        "model": AutoModelForCausalLM.from_pretrained(model_dir).eval(),
        "store": DirectoryStore(tmp_path / "store"),
        **{f"{name}_ids": [i % 50 for i in range(90)] for name in ("system", "question")},
        "ids_a": [i % 60 for i in range(100)],
        "ids_b": [i % 59 for i in range(200)],
    }
    exec(compile(example, "guide", "exec"), names)
    with names["engine"]:
        made = names["session"].assembly
        assert made.tokens == 480
        assert f"{made.moved} of 480 tokens came from segments" in capsys.readouterr().out
        assert len(names["answer"].tokens) == 64
    assert list(listed(capsys, tmp_path / "store")) == ["a"]


def test_the_guides_policies_and_options_exist(capsys):
    import kvpager
    from kvpager.segments.policy_text import parse_policy

    rows = re.findall(r"^\| `(\w+)\(\w*\)` \| `([a-z0-9:.]+)` \|", GUIDE, flags=re.MULTILINE)
    assert len(rows) == 6
    for name, text in rows:
        assert type(parse_policy(text)) is getattr(kvpager.segments, name)
    shown = ""
    for words in (("segment", "add"), ("segment", "ls"), ("segment", "rm"), ("generate",)):
        with pytest.raises(SystemExit):
            main([*words, "--help"])
        shown += capsys.readouterr().out
    for option in re.findall(r"(?<!-)--[a-z][a-z-]+", GUIDE):
        assert option in shown, option
