"""The command line apart from the demo: options, errors, generate, info, snapshot inspect."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from kvpager.cli import main
from kvpager.cli.commands import parse
from kvpager.cli.failure import UsageError
from kvpager.cli.output import write_file
from kvpager.cli.pager_options import config_from_json, config_to_json, pager_config
from kvpager.config import Dense, PagerConfig, TopK, Window

LOOP = ",".join(str(5 + i % 7) for i in range(70))


def generate(capsys, *arguments):
    code = main(["generate", "--format", "json", "-q", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert code == 0, err
    assert err == ""
    return json.loads(out)


def refused(capsys, *arguments):
    code = main(list(map(str, arguments)))
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvpager: ")
    assert err.count("\n") == 1, err
    return code, err


def test_a_mistyped_command_names_the_closest_one(capsys):
    code, err = refused(capsys, "genrate")
    assert code == 2
    assert "did you mean generate?" in err


def test_a_mistyped_verb_names_the_closest_one(capsys):
    code, err = refused(capsys, "snapshot", "inspct", "file")
    assert code == 2
    assert "did you mean inspect?" in err


def test_a_mistyped_option_names_the_closest_one_even_where_another_is_missing(capsys):
    code, err = refused(capsys, "generate", "--modle", "somewhere")
    assert code == 2
    assert "--modle" in err
    assert "did you mean --model?" in err


def test_an_abbreviated_option_is_not_guessed(capsys):
    code, err = refused(capsys, "info", "--form", "json")
    assert code == 2
    assert "did you mean --format?" in err


def test_a_mistyped_choice_names_the_closest_one(capsys):
    code, err = refused(capsys, "info", "--format", "jsn")
    assert code == 2
    assert "did you mean json?" in err


def test_no_command_at_all_is_a_usage_error(capsys):
    assert refused(capsys)[0] == 2


def test_version_prints_the_package_version(capsys):
    import kvpager

    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"kvpager {kvpager.__version__}\n"


@pytest.mark.parametrize("command", ["demo", "generate"])
def test_help_documents_every_pager_option_and_its_variable(capsys, command):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    out = " ".join(capsys.readouterr().out.split())
    for option in (*PagerConfig.options(), *TopK.options(), *Window.options()):
        assert "--" + option.name.replace("_", "-") in out
        assert f"[KVPAGER_{option.name.upper()}]" in out


def test_info_tells_the_same_in_both_formats(capsys):
    assert main(["info", "--format", "json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["backend"] == "CPU"
    assert values["default_scorer"] in values["scorers"]
    assert all(0 < scorer["share_of_kv"] <= 1 for scorer in values["scorers"].values())
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    for name, scorer in values["scorers"].items():
        assert name in text
        assert scorer["description"] in text


def test_output_goes_to_the_file_and_nowhere_else(capsys, tmp_path):
    path = tmp_path / "info.json"
    assert main(["info", "--format", "json", "--output", str(path)]) == 0
    out, err = capsys.readouterr()
    assert (out, err) == ("", "")
    assert json.loads(path.read_text())["backend"] == "CPU"
    assert [file.name for file in tmp_path.iterdir()] == ["info.json"]


def test_a_file_that_cannot_be_written_whole_leaves_the_old_one(tmp_path, monkeypatch):
    from pathlib import Path

    from kvpager.cli.failure import CliError

    path = tmp_path / "result"
    path.write_bytes(b"old")

    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(CliError, match="No space left"):
        write_file(path, b"new")
    assert [file.name for file in tmp_path.iterdir()] == ["result"]
    assert path.read_bytes() == b"old"


# Options of the pager.


def options(*arguments):
    return pager_config(parse(["generate", *arguments]))


def test_an_option_goes_before_the_environment_and_that_before_the_default(monkeypatch):
    assert options().pool_tokens == 2048
    monkeypatch.setenv("KVPAGER_POOL_TOKENS", "4096")
    monkeypatch.setenv("KVPAGER_POLICY", "lru")
    assert options().pool_tokens == 4096
    assert options("--pool", "1024").pool_tokens == 1024
    assert options("--pool", "1024").policy == "lru"


def test_every_option_reaches_the_configuration(tmp_path):
    config = options(
        *("--pool-tokens", "8192", "--chunk-tokens", "128", "--rows", "32"),
        *("--selection", "topk", "--chunks", "7", "--sinks", "128", "--recent", "512"),
        *("--scorer", "mean", "--always", "0:64,128:256", "--host-bytes", "1GiB"),
        *("--disk-path", str(tmp_path), "--disk-bytes", "2GiB", "--summary-bytes", "64MiB"),
        *("--policy", "lru", "--recall-chunks", "2", "--hysteresis", "0.5"),
        *("--kv-dtype", "bfloat16", "--debug-shuffle-seed", "3", "--debug-poison"),
        *("--exact", "false", "--small-rows", "4,16"),
    )
    assert config == PagerConfig(
        pool_tokens=8192,
        chunk_tokens=128,
        rows=32,
        small_rows=(4, 16),
        exact=False,
        selection=TopK(
            chunks=7, sinks=128, recent=512, scorer="mean", always=((0, 64), (128, 256))
        ),
        host_bytes=2**30,
        disk_path=str(tmp_path),
        disk_bytes=2**31,
        summary_bytes=64 * 2**20,
        policy="lru",
        recall_chunks=2,
        hysteresis=0.5,
        kv_dtype="bfloat16",
        debug_shuffle_seed=3,
        debug_poison=True,
    )
    assert config_from_json(json.loads(json.dumps(config_to_json(config)))) == config


def test_selection_is_dense_unless_chunks_or_a_name_say_otherwise(monkeypatch):
    assert options().selection == Dense()
    assert options("--chunks", "5").selection == TopK(chunks=5)
    assert options("--selection", "topk").selection == TopK(chunks=32)
    assert options("--selection", "window", "--recent", "512").selection == Window(recent=512)
    assert options("--scorer", "mean").scorer_name == "mean"
    monkeypatch.setenv("KVPAGER_SELECTION", "topk")
    assert options("--dense").selection == Dense()
    assert options("--rows", "none").rows is None


@pytest.mark.parametrize(
    ("text", "exact"), [("all", "all"), ("reuse", "reuse"), ("false", False), ("False", False)]
)
def test_exactness_is_a_word_or_false_in_an_option_and_in_the_environment(monkeypatch, text, exact):
    assert options("--exact", text).exact == exact
    monkeypatch.setenv("KVPAGER_EXACT", text)
    assert options().exact == exact
    assert options("--exact", "all").exact == "all"


@pytest.mark.parametrize(
    ("text", "rows"), [("proven", "proven"), ("fixed", "fixed"), ("4,16", (4, 16)), ("8", (8,))]
)
def test_small_row_counts_are_a_word_or_numbers_in_an_option_and_in_the_environment(
    monkeypatch, text, rows
):
    assert options("--small-rows", text).small_rows == rows
    monkeypatch.setenv("KVPAGER_SMALL_ROWS", text)
    assert options().small_rows == rows
    assert options("--small-rows", "proven").small_rows == "proven"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--exact", "sometimes"), '--exact is \'sometimes\'; expected "all", "reuse" or False'),
        (("--exact", "true"), "--exact is True; expected"),
        (("--small-rows", "some"), "--small-rows is 'some'; expected"),
        (("--small-rows", "16,4"), "--small-rows is (16, 4); expected"),
        (("--small-rows", "4,x"), "--small-rows is '4,x'; expected"),
        (("--pool", "many"), "--pool-tokens is 'many'"),
        (("--pool", "100"), "a multiple of chunk_tokens"),
        (("--pool", "64", "--rows", "64"), "--pool-tokens is 64; expected at least 192"),
        (("--host", "4GB4"), "--host-bytes is '4GB4'"),
        (("--policy", "lrru"), "--policy is 'lrru'"),
        (("--always", "5:1"), "--always"),
        (("--always", "abc", "--chunks", "3"), "--always"),
        (("--dense", "--chunks", "3"), "--chunks has no meaning with --selection dense"),
        (("--selection", "window"), "expected --recent with it"),
        (("--scorer", "bits3"), "did you mean bits"),
        (("--recent", "32", "--chunks", "3", "--rows", "64"), "--recent is 32"),
    ],
)
def test_a_refused_value_is_named_by_its_option(arguments, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        options(*arguments)


def test_a_refused_variable_is_a_usage_error(capsys, monkeypatch):
    monkeypatch.setenv("KVPAGER_SELECTION", "best")
    code, err = refused(capsys, "generate", "--model", "x", "--ids", "1")
    assert code == 2
    assert "KVPAGER_SELECTION" in err


# generate.


def test_generate_prints_ids_as_they_come_and_a_summary_on_stderr(capsys, model_dir):
    arguments = ["--model", str(model_dir), "--ids", "1,2,3", "--max-new-tokens", "5"]
    assert main(["generate", *arguments]) == 0
    out, err = capsys.readouterr()
    assert len([int(word) for word in out.split()]) == 5
    assert "0 tokens reused, 3 prefilled" in err
    assert "first token after" in err
    assert main(["generate", "-q", *arguments]) == 0
    quiet_out, quiet_err = capsys.readouterr()
    assert quiet_out == out
    assert quiet_err == ""


def test_a_restored_generation_goes_on_as_if_never_interrupted(capsys, model_dir, tmp_path):
    path, again = tmp_path / "turn.kvsnap", tmp_path / "again.kvsnap"
    ids = ",".join(str(i % 60) for i in range(700))
    common = ("--model", model_dir, "--pool", "256", "--chunks", "2", "--temperature", "0.8")
    whole = generate(capsys, *common, "--ids", ids, "--max-new-tokens", 12, "--seed", 5)
    first = generate(
        capsys, *common, "--ids", ids, "--max-new-tokens", 4, "--seed", 5, "--save", path
    )
    assert first["saved_bytes"] == path.stat().st_size
    second = generate(capsys, *common, "--restore", path, "--max-new-tokens", 8, "--save", again)
    assert first["ids"] + second["ids"] == whole["ids"]
    assert (first["reused_tokens"], first["prefilled_tokens"]) == (0, 700)
    assert (second["reused_tokens"], second["prefilled_tokens"]) == (704, 0)
    third = generate(capsys, *common, "--restore", again, "--ids", "7 8", "--max-new-tokens", 1)
    assert (third["reused_tokens"], third["prefilled_tokens"]) == (712, 2)


def test_speculation_changes_how_fast_and_not_what(capsys, model_dir):
    common = ("--model", model_dir, "--ids", LOOP, "--max-new-tokens", 60)
    plain = generate(capsys, *common, "--logprobs")
    guessed = generate(capsys, *common, "--logprobs", "--speculate")
    named = generate(capsys, *common, "--speculate", "prompt-lookup")
    assert plain["speculation"] is None
    assert named["logprobs"] is None
    assert guessed["ids"] == plain["ids"] == named["ids"]
    assert guessed["logprobs"] == plain["logprobs"]
    stats = guessed["speculation"]
    assert stats == named["speculation"]
    assert stats["tokens"] == stats["forwards"] + stats["accepted"] >= 59
    assert stats["tokens_per_forward"] > 1.5
    assert stats["acceptance"] == stats["accepted"] / stats["proposed"]


def test_the_summary_says_what_speculation_and_log_probabilities_were(capsys, model_dir):
    arguments = ["generate", "--model", str(model_dir), "--ids", LOOP, "--max-new-tokens", "40"]
    assert main([*arguments, "--speculate", "--logprobs"]) == 0
    out, err = capsys.readouterr()
    assert len(out.split()) == 40
    assert re.search(r"\d\.\d\d tokens per forward, \d+ of \d+ proposed ones accepted", err)
    assert re.search(r"mean log-probability -\d+\.\d{4}", err)
    assert main(arguments) == 0
    plain = capsys.readouterr()
    assert plain.out == out
    assert "per forward" not in plain.err
    assert "log-probability" not in plain.err


def test_the_result_holds_all_that_scoring_it_again_needs(capsys, model_dir, tmp_path):
    path = tmp_path / "turn.kvsnap"
    common = ("--model", model_dir, "--max-new-tokens", 3)
    first = generate(capsys, *common, "--ids", "5,6,7", "--save", path)
    assert first["prompt_ids"] == [5, 6, 7]
    second = generate(capsys, *common, "--restore", path, "--ids", "8", "--logprobs")
    assert second["prompt_ids"] == [5, 6, 7, *first["ids"], 8]
    assert len(second["logprobs"]) == 3
    assert all(np.float32(value) == value < 0 for value in second["logprobs"])
    assert second["fingerprint"] == first["fingerprint"]
    assert second["fingerprint"]["architecture"] == "LlamaForCausalLM"


def test_the_proposers_of_the_command_line_are_those_of_the_runtime():
    from kvpager.cli import generate
    from kvpager.speculation import speculation

    assert (*speculation.PROPOSERS, speculation.DRAFT) == generate.PROPOSERS


def test_a_mistyped_proposer_names_the_closest_one(capsys, model_dir):
    code, err = refused(
        capsys, "generate", "--model", model_dir, "--ids", "1", "--speculate", "promt-lookup"
    )
    assert code == 2
    assert "did you mean prompt-lookup?" in err


@pytest.mark.parametrize(("text", "exact"), [("reuse", "'reuse'"), ("false", "False")])
def test_speculation_without_exactness_is_refused_before_a_model_is_loaded(capsys, text, exact):
    arguments = ("generate", "--model", "x", "--ids", "1,2", "--speculate", "--exact", text)
    code, err = refused(capsys, *arguments)
    assert code == 2
    assert f"--exact is {exact}" in err
    assert "use --exact all, or no --speculate" in err


# generate with a store.


def text_ids(count, start=0):
    return ",".join(str((i * 7 + start) % 60) for i in range(count))


def test_a_session_saved_in_a_store_goes_on_by_name(capsys, model_dir, tmp_path):
    store = tmp_path / "store"
    common = ("--model", model_dir, "--pool", "256", "--store", store)
    whole = generate(capsys, *common[:4], "--ids", text_ids(300), "--max-new-tokens", 9)
    first = generate(
        capsys, *common, "--ids", text_ids(300), "--max-new-tokens", 4, "--save", "turn1"
    )
    second = generate(
        capsys, *common, "--restore", "turn1", "--max-new-tokens", 5, "--save", "turn2"
    )
    assert first["ids"] + second["ids"] == whole["ids"]
    assert (second["reused_tokens"], second["prefilled_tokens"]) == (304, 0)
    assert second["restored_tokens_consumed"] == second["restored_tokens"] == 303
    assert second["saved_shared_bytes"] > 0
    assert second["saved_bytes"] < first["saved_bytes"]
    third = generate(
        capsys,
        "--model",
        model_dir,
        "--pool",
        "256",
        "--restore",
        f"{store}/turn1",
        *("--max-new-tokens", 5),
    )
    assert third["ids"] == second["ids"]
    other = tmp_path / "other"
    fourth = generate(
        capsys,
        *("--model", model_dir, "--pool", "256", "--store", other, "--save", "copy"),
        *("--restore", f"{store}/turn1", "--max-new-tokens", 5),
    )
    assert fourth["ids"] == second["ids"]
    assert main(["snapshot", "diff", str(store / "turn2"), str(other / "copy")]) == 0
    capsys.readouterr()


def test_a_prompt_that_a_store_knows_starts_from_there_without_being_told(
    capsys, model_dir, tmp_path
):
    store = tmp_path / "store"
    common = ("--model", model_dir, "--pool", "256", "--max-new-tokens", 6)
    generate(capsys, *common, "--ids", text_ids(300), "--store", store, "--save", "other")
    ids = text_ids(300) + "," + text_ids(50, start=3)
    cold = generate(capsys, *common, "--ids", ids)
    warm = generate(capsys, *common, "--ids", ids, "--store", store)
    assert warm["ids"] == cold["ids"]
    assert (cold["reused_tokens"], cold["prefilled_tokens"]) == (0, 350)
    assert (warm["reused_tokens"], warm["prefilled_tokens"]) == (256, 94)
    assert warm["restored_tokens_consumed"] == 256
    arguments = ["generate", *map(str, common), "--ids", ids, "--store", str(store)]
    assert main(arguments) == 0
    err = capsys.readouterr().err
    assert "256 tokens reused, 94 prefilled" in err
    assert "256 of 256 restored tokens consumed" in err


def test_a_damaged_snapshot_fails_or_is_computed_again_as_told(capsys, model_dir, tmp_path):
    path = tmp_path / "turn.kvsnap"
    common = ("--model", model_dir, "--pool", "256", "--max-new-tokens", 6)
    saved = generate(capsys, *common, "--ids", text_ids(300), "--save", path)
    whole = generate(capsys, *common, "--restore", path)
    data = bytearray(path.read_bytes())
    data[4096 + 100] ^= 1
    path.write_bytes(data)
    code, err = refused(capsys, "generate", "-q", *common, "--restore", path)
    assert code == 1
    assert "chunk 0" in err
    healed = generate(capsys, *common, "--restore", path, "--on-corrupt", "recompute")
    assert healed["ids"] == whole["ids"]
    assert healed["recomputed_tokens"] == 64
    assert saved["recomputed_tokens"] == 0


def test_a_store_keeps_to_the_budget_and_ttl_it_was_given(capsys, model_dir, tmp_path):
    store = tmp_path / "store"
    common = ("--model", model_dir, "--max-new-tokens", 1, "--store", store)
    limits = ("--store-budget", "2MiB", "--store-ttl", "12h")
    generate(capsys, *common, *limits, "--ids", "1", "--save", "small")
    main(["snapshot", "ls", str(store), "--format", "json"])
    values = json.loads(capsys.readouterr().out)
    assert values["totals"]["byte_budget"] == 2 * 2**20
    assert values["snapshots"][0]["ttl_seconds"] == 12 * 3600
    generate(capsys, *common, "--store-budget", "200KiB", "--ids", "1", "--save", "small")
    large = ("--ids", text_ids(900), "--save", "large", "--format", "json")
    code, err = refused(capsys, "generate", "-q", *common, *large)
    assert code == 1
    assert "bytes" in err


def test_a_file_in_fewer_bits_is_smaller_and_taken_only_where_that_is_said(
    capsys, model_dir, tmp_path
):
    common = ("--model", model_dir, "--pool", "256", "--max-new-tokens", 2)
    paths = [tmp_path / "whole.kvsnap", tmp_path / "coded.kvsnap"]
    generate(capsys, *common, "--ids", text_ids(300), "--save", paths[0])
    generate(capsys, *common, "--ids", text_ids(300), "--save", paths[1], "--save-kv-dtype", "q8")
    assert paths[1].stat().st_size < 0.6 * paths[0].stat().st_size
    code, err = refused(capsys, "generate", "-q", *common, "--restore", paths[1])
    assert code == 1
    assert 'on_mismatch="convert"' in err
    again = generate(capsys, *common, "--restore", paths[1], "--on-mismatch", "convert")
    assert len(again["ids"]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--store-budget", "1GiB"), "--store-budget has no meaning without --store"),
        (("--store-ttl", "7d"), "--store-ttl has no meaning without --store"),
        (("--on-corrupt", "recompute"), "--on-corrupt has no meaning without --restore"),
        (("--on-mismatch", "approximate"), "--on-mismatch has no meaning without --restore"),
        (("--save-kv-dtype", "q8"), "--save-kv-dtype has no meaning without --save"),
        (("--store", "s", "--store-budget", "much"), "--store-budget is 'much'"),
        (("--store", "s", "--store-ttl", "soon"), "--store-ttl is 'soon'"),
        (("--store", "s", "--save", "../up"), "--save is '../up'"),
    ],
)
def test_a_store_option_that_cannot_be_is_refused_before_anything_is_made(
    capsys, monkeypatch, tmp_path, arguments, message
):
    monkeypatch.chdir(tmp_path)
    code, err = refused(capsys, "generate", "--model", "x", "--ids", "1", *arguments)
    assert code == 2
    assert message in err
    assert list(tmp_path.iterdir()) == []


def test_a_mistyped_name_to_restore_lists_the_closest_before_a_model_is_loaded(capsys, tmp_path):
    from kvpager.stores import DirectoryStore

    store = DirectoryStore(tmp_path / "store")
    code, err = refused(
        capsys, "generate", "--model", "x", "--restore", "turn1", "--store", store.path
    )
    assert code == 1
    assert "no snapshot 'turn1'" in err


def test_a_pack_is_not_restored(capsys, model_dir, tmp_path):
    common = ("--model", model_dir, "--max-new-tokens", 1)
    store = tmp_path / "store"
    generate(capsys, *common, "--ids", text_ids(70), "--store", store, "--save", "turn")
    (pack,) = (store / "packs").glob("*.kvsnap")
    code, err = refused(capsys, "generate", "-q", *common, "--restore", pack)
    assert code == 1
    assert "pack" in err


def test_text_goes_through_the_tokenizer_both_ways(capsys, spoken_model_dir, tmp_path):
    common = ("--model", spoken_model_dir, "--max-new-tokens", 6)
    text = "the cache keeps every chunk"
    spoken = generate(capsys, *common, "--prompt", text)
    assert spoken["prefilled_tokens"] == 5
    assert spoken["ids"] == generate(capsys, *common, "--ids", "1 2 3 4 5")["ids"]
    file = tmp_path / "prompt.txt"
    file.write_text(text)
    assert generate(capsys, *common, "--prompt-file", file)["text"] == spoken["text"]
    arguments = ["generate", "-q", *map(str, common), "--prompt", text]
    assert main(arguments) == 0
    assert capsys.readouterr().out.split() == spoken["text"].split()


def test_text_without_a_tokenizer_names_the_option_for_ids(capsys, model_dir):
    code, err = refused(capsys, "generate", "--model", model_dir, "--prompt", "hello")
    assert code == 1
    assert "--ids" in err


def test_a_missing_model_folder_is_one_line(capsys, tmp_path):
    missing = tmp_path / "no-model"
    code, err = refused(capsys, "generate", "--model", missing, "--ids", "1")
    assert code == 1
    assert f"{missing}: no such folder" in err


def test_a_damaged_model_folder_is_one_line(capsys, model_dir, tmp_path):
    (tmp_path / "config.json").write_text((model_dir / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(b"rubbish")
    code, err = refused(capsys, "generate", "--model", tmp_path, "--ids", "1")
    assert code == 1
    assert str(tmp_path) in err


def test_a_missing_snapshot_is_one_line(capsys, model_dir, tmp_path):
    missing = tmp_path / "none.kvsnap"
    for arguments in (
        ("generate", "--model", model_dir, "--restore", missing, "-q"),
        ("snapshot", "inspect", missing),
    ):
        code, err = refused(capsys, *arguments)
        assert code == 1
        assert "none.kvsnap" in err


def test_a_session_of_other_settings_is_refused_by_name(capsys, model_dir, tmp_path):
    path = tmp_path / "turn.kvsnap"
    generate(capsys, "--model", model_dir, "--ids", "1", "--max-new-tokens", 1, "--save", path)
    code, err = refused(
        capsys, "generate", "-q", "--model", model_dir, "--restore", path, "--chunks", "4"
    )
    assert code == 1
    assert "selection" in err


def test_debug_shows_where_a_failure_came_from(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("KVPAGER_DEBUG", "1")
    assert main(["snapshot", "inspect", str(tmp_path / "none.kvsnap")]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ids", "message"), [("", "--ids is empty"), ("1,x", "'x'"), ("-3", "-3"), ("900", "0 to 63")]
)
def test_bad_ids_are_refused(capsys, model_dir, ids, message):
    _, err = refused(capsys, "generate", "-q", "--model", model_dir, f"--ids={ids}")
    assert message in err


def test_a_prompt_or_a_restore_is_needed(capsys, model_dir):
    code, err = refused(capsys, "generate", "--model", model_dir)
    assert code == 2
    assert "--restore" in err


def test_inspect_tells_what_was_saved(capsys, model_dir, tmp_path):
    path = tmp_path / "turn.kvsnap"
    ids = " ".join(str(i % 60) for i in range(130))
    saved = generate(
        capsys, "--model", model_dir, "--ids", ids, "--max-new-tokens", 1, "--save", path
    )
    assert main(["snapshot", "inspect", str(path), "--format", "json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["tokens"] == 130
    assert (values["chunks"], values["sealed_chunks"]) == (3, 2)
    assert values["session"]["pending"] == saved["ids"][0]
    assert values["fingerprint"]["architecture"] == "LlamaForCausalLM"
    assert values["file_bytes"] == path.stat().st_size
    assert main(["snapshot", "inspect", str(path)]) == 0
    assert values["logical_digest"] in capsys.readouterr().out


def test_generate_takes_penalties_and_biases(capsys, model_dir):
    common = ("--model", model_dir, "--ids", "1,2,3", "--max-new-tokens", 12)
    plain = generate(capsys, *common)["ids"]
    forbidden = generate(
        capsys, *common, "--logit-bias", f"{plain[0]}=-inf", "--logit-bias", "9=0.5"
    )
    assert plain[0] not in forbidden["ids"]
    penalties = ("--presence-penalty", "100", "--frequency-penalty", "1")
    assert len(set(generate(capsys, *common, *penalties)["ids"])) == 12
    assert generate(capsys, *common, "--repetition-penalty", "9")["ids"] != plain
    sampled = ("--temperature", "5", "--seed", "3")
    assert generate(capsys, *common, *sampled)["ids"] != plain
    assert generate(capsys, *common, *sampled, "--min-p", "1")["ids"] == plain


@pytest.mark.parametrize("bias", ["5", "x=1", "-1=2", "5=much"])
def test_a_bias_that_is_none_is_a_usage_error(capsys, bias):
    code, err = refused(capsys, "generate", "--model", "m", f"--logit-bias={bias}")
    assert code == 2
    assert "no ID=BIAS" in err
