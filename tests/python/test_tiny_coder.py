"""The small language model: what it was trained on, its tokenizer, and what it says."""

from __future__ import annotations

import ast
import importlib
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvpager.cli import needles
from kvpager_bench import library_text

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "models" / "tiny-coder"
EXCERPT_TOKENS = 1024
EXCERPT_PERPLEXITY = 45.0  # of that many tokens of textwrap.py, of 4096 that there are; it is 38.6


def from_models(name: str) -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "models")
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def training() -> ModuleType:
    return from_models("train_tiny_coder")


@pytest.fixture(scope="module")
def text() -> ModuleType:
    return from_models("coder_text")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER).eval()


# What it reads.


def test_held_out_sources_are_in_the_library_and_fill_several_long_windows():
    texts = library_text.held_out_texts()
    assert tuple(name for name, _ in texts) == library_text.HELD_OUT
    assert all(len(source) > 5_000 for _, source in texts)
    assert sum(len(source) for _, source in texts) > 5 * 32768 * 4


def test_nothing_held_out_installed_of_a_test_or_of_the_machine_is_trained_on():
    texts = library_text.training_texts()
    names = [name for name, _ in texts]
    assert names == sorted(set(names), key=lambda name: Path(name).parts)
    assert len(names) > 200
    assert not set(names) & set(library_text.HELD_OUT)
    assert not [name for name in names if {"site-packages", "test"} & set(name.split("/"))]
    assert not [name for name in names if "sysconfigdata" in name]
    trained = {source for _, source in texts}
    assert not trained & {source for _, source in library_text.held_out_texts()}


EXAMPLE = '''
def greet(name):
    """Says hello.

    To one person.
    """
    return f"Hello {name}"


class Counter:
    def count(self):
        "How many there are."
        return 0

    def undocumented(self):
        return 1
'''


def test_documented_functions_are_found_with_their_source_and_first_paragraph(text):
    first, second = sorted(text.functions("a/b.py", EXAMPLE), key=lambda found: -len(found.source))
    assert (first.name, first.summary) == ("greet", "Says hello.")
    assert first.source == EXAMPLE.split("\n\n\n")[0].strip()
    assert (second.name, second.summary) == ("count", "How many there are.")
    assert second.source.splitlines()[0] == "def count(self):"


def test_conversations_alternate_and_speak_of_what_was_shown(text):
    talk = text.conversations([("a.py", EXAMPLE)], np.random.default_rng(0), 400)
    for _ in range(50):
        dialogue = next(talk)
        assert [turn["role"] for turn in dialogue] == ["user", "assistant"] * (len(dialogue) // 2)
        assert all(turn["content"] for turn in dialogue)
        assert "greet" in str(dialogue) or "count" in str(dialogue)


def test_windows_are_full_and_the_same_for_the_same_seed_and_stage(text, tokenizer):
    texts = [("a.py", EXAMPLE), ("b.py", EXAMPLE.upper())]
    first, again, other = (
        text.Corpus(texts, tokenizer, seed).windows(0, 5, 64) for seed in (0, 0, 1)
    )
    assert first.shape == (5, 64)
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    assert (first != text.Corpus(texts, tokenizer, 0).windows(1, 5, 64)).any()
    assert {0, 1, 2} <= set(first.flat)  # an end of text, a turn's start and its end


# How it is trained.


def test_a_few_steps_of_every_stage_train_a_model_that_is_loaded(training, tmp_path, capsys):
    training.main(["--out", str(tmp_path), "--smoke"])
    told = capsys.readouterr().out
    assert all(f"stage {n}/{len(training.SMOKE)}" in told for n in range(1, 5))
    assert not (tmp_path / training.CHECKPOINT).exists()
    model, tokenizer = training.load(tmp_path)
    assert {name: getattr(model.config, name) for name in ("vocab_size", "num_hidden_layers")} == {
        name: training.ARCHITECTURE[name] for name in ("vocab_size", "num_hidden_layers")
    }
    assert len(tokenizer) <= model.config.vocab_size
    assert isinstance(training.complete(tmp_path, "def ", 3), str)


def test_a_resumed_training_ends_where_an_unbroken_one_does(training, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "training_texts", lambda: [("a.py", EXAMPLE), ("b.py", EXAMPLE)])
    recipe = [training.Stage(tokens=16, windows=1, steps=2)] * 2
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    loss = training.train(whole, recipe, 0, resume=False)

    class StoppedError(Exception):
        pass

    run_stage = training.Trainer._run_stage

    def stop(self: Any, number: int, *others: Any) -> None:
        if number == 1:
            raise StoppedError
        run_stage(self, number, *others)

    with monkeypatch.context() as patch:
        patch.setattr(training.Trainer, "_run_stage", stop)
        with pytest.raises(StoppedError):
            training.train(broken, recipe, 0, resume=False)
    assert training.train(broken, recipe, 0, resume=True) == pytest.approx(loss, rel=1e-4)


# Its tokenizer.


@given(given_text=st.text())
def test_every_text_is_decoded_as_it_was_encoded(tokenizer, given_text):
    assert tokenizer.decode(tokenizer.encode(given_text)) == given_text


def test_every_byte_has_a_token(tokenizer):
    odd = "".join(map(chr, range(256))) + "\u20ac\U0001f600\ufeff\u2028\r\n\t\x00"
    assert tokenizer.decode(tokenizer.encode(odd)) == odd
    assert len(tokenizer) == 4096


def test_python_takes_few_tokens(tokenizer):
    source = dict(library_text.held_out_texts())["textwrap.py"]
    assert 3.0 < len(source) / len(tokenizer.encode(source)) < 4.5


def test_a_conversation_is_written_between_marks_and_a_turn_ends_with_the_end_token(tokenizer):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "def"}]
    written = tokenizer.apply_chat_template(messages, tokenize=False)
    assert written == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\ndef<|im_end|>\n"
    asked = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert written.startswith(asked)
    assert asked.endswith("<|im_start|>assistant\n")
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"]) == [0, 2]
    assert tokenizer.encode(asked).count(1) == 2


# The model.


def test_the_shipped_model_is_small_and_is_what_the_script_describes(training, model):
    assert (FOLDER / "model.safetensors").stat().st_size <= 16_000_000
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert sum(weight.numel() for weight in model.parameters()) == 6_951_680
    for name, value in training.ARCHITECTURE.items():
        assert getattr(model.config, name) == value, name
    assert sorted(model.generation_config.eos_token_id) == [0, 2]
    assert not list(FOLDER.glob(training.CHECKPOINT))


def test_text_that_it_never_saw_is_far_from_random_to_it(training, tokenizer, model):
    source = dict(library_text.held_out_texts())["textwrap.py"]
    ids = torch.tensor([tokenizer.encode(source)[:EXCERPT_TOKENS]])
    with torch.no_grad():
        perplexity = float(training.token_losses(model, ids).mean().exp())
    assert 1.5 < perplexity < EXCERPT_PERPLEXITY


def test_it_completes_python_that_parses(training):
    start = "class Reader:\n    def __init__(self, path):\n        self.path = path\n"
    completed = start + training.complete(FOLDER, start, 60)
    whole = completed.rpartition("\n    def ")[0]
    assert len(whole) > len(start)
    ast.parse(whole)


def test_it_ends_its_turn(training, tokenizer, model):
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What does `close` do?"}],
        add_generation_prompt=True,
        tokenize=False,
    )
    ids = torch.tensor([tokenizer.encode(prompt)])
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=200, do_sample=False
    )
    assert int(made[0, -1]) == 2


# Where it is found.


def test_a_checkout_has_it_and_elsewhere_an_error_says_what_has(monkeypatch, tmp_path):
    assert needles.shipped_model_path("tiny-coder") == FOLDER
    elsewhere = tmp_path / "site-packages" / "kvpager" / "cli" / "needles.py"
    elsewhere.parent.mkdir(parents=True)
    shutil.copyfile(needles.__file__, elsewhere)
    monkeypatch.setattr(needles, "__file__", str(elsewhere))
    with pytest.raises(FileNotFoundError, match=r"tiny-coder is in neither.*a checkout all,"):
        needles.shipped_model_path("tiny-coder")
