"""Models from folders, GGUF files and names: `Engine.from_pretrained` and what it refuses."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import stat

import blake3
import pytest
import text_models
import torch

from gguf_files import qwen, write_gguf
from kvpager import Engine
from kvpager._model import pretrained, unpacked
from kvpager.errors import InvalidArgumentError
from kvpager.plan import read_shape

SMALL = {"pool_tokens": 1024, "rows": 16, "small_rows": "fixed"}
TEXT = "A cache keeps what is needed again."


@pytest.fixture(scope="module")
def made():
    """The model that `file` was written from."""
    return qwen(text_models.VOCAB)


@pytest.fixture(scope="module")
def file(tmp_path_factory, made):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", made, text_models.byte_level())


def refused(source, **options):
    with pytest.raises(InvalidArgumentError) as error:
        Engine.from_pretrained(source, local_files_only=True, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_folder_gives_the_engine_of_its_model_and_tokenizer(tmp_path, made):
    made.save_pretrained(tmp_path)
    text_models.byte_level().save_pretrained(tmp_path)
    with (
        Engine(made, tokenizer=text_models.byte_level(), **SMALL) as given,
        Engine.from_pretrained(tmp_path, **SMALL) as engine,
    ):
        assert engine.fingerprint == given.fingerprint
        own = engine.session()
        own.prefill(TEXT)
        expected = given.session()
        expected.prefill(TEXT)
        assert own.generate(8).tokens.tolist() == expected.generate(8).tokens.tolist()


def test_a_gguf_file_has_the_weights_the_tokenizer_and_the_chat_template(file, made):
    model, tokenizer = pretrained.load_model(file), pretrained.load_tokenizer(file)
    assert model.dtype == torch.bfloat16
    expected = made.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.float(), expected[name]), name
    own = text_models.byte_level()
    assert tokenizer.encode(TEXT) == own.encode(TEXT)
    messages = [{"role": "user", "content": TEXT}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == own.apply_chat_template(
        messages, tokenize=False
    )
    assert model.generation_config.eos_token_id == own.eos_token_id


def test_a_gguf_files_model_computes_what_the_model_it_was_made_of_does(file, made):
    with (
        Engine.from_pretrained(file, dtype="float32", **SMALL) as engine,
        Engine(made, **SMALL) as given,
    ):
        names = ("weights", "behaviour", "additions", "architecture", "rope")
        assert [engine.fingerprint[name] for name in names] == [
            given.fingerprint[name] for name in names
        ]
        assert engine.session().chat("Hello", 4).tokens.tolist()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of the user's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("KVPAGER_CACHE", str(folder))
    return folder


def test_a_gguf_file_is_unpacked_once_and_then_read_from_a_copy(file, cache, monkeypatch):
    first, words = pretrained.load_model(file), pretrained.load_tokenizer(file)
    (copy,) = (cache / "gguf").iterdir()
    assert stat.S_IMODE(copy.stat().st_mode) == 0o700

    def unpack(*_, **__):
        raise AssertionError("unpacked again")

    reader = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    monkeypatch.setattr(reader, "load_gguf_checkpoint", unpack)
    again, same_words = pretrained.load_model(file), pretrained.load_tokenizer(file)
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor.view(torch.uint8), again.state_dict()[name].view(torch.uint8))
    assert same_words.get_vocab() == words.get_vocab()
    assert same_words.chat_template == words.chat_template
    with Engine(first, **SMALL) as one, Engine(again, **SMALL) as other:
        assert one.fingerprint == other.fingerprint


def test_another_file_another_release_and_half_a_copy_are_unpacked_anew(file, cache, made):
    expected = pretrained.load_model(file).state_dict()["lm_head.weight"]
    (copy,) = (cache / "gguf").iterdir()
    for damage in (
        lambda: (copy / "kvpager.json").write_text('{"transformers": "0.1"}'),
        lambda: (copy / "kvpager.json").unlink(),
        lambda: copy.chmod(0o777),  # somebody else may have written in it
    ):
        (copy / "model.safetensors").unlink()
        damage()
        assert torch.equal(pretrained.load_model(file).state_dict()["lm_head.weight"], expected)
    other = qwen(text_models.VOCAB)
    with torch.no_grad():
        other.lm_head.weight.zero_()
    path = write_gguf(file.with_name("other.gguf"), other, text_models.byte_level())
    assert not pretrained.load_model(path).state_dict()["lm_head.weight"].any()
    assert len([*(cache / "gguf").iterdir()]) == 2


def test_a_gguf_file_can_be_planned_for_before_and_after_it_is_unpacked(file, cache, made):
    made.save_pretrained(cache.parent / "folder")
    expected = read_shape(cache.parent / "folder", "bfloat16")
    assert read_shape(file) == expected
    pretrained.load_model(file)
    assert read_shape(file) == expected


def test_a_gguf_file_is_hashed_once_in_a_process_until_it_changes(file, cache, monkeypatch):
    hashed = []

    class Hasher:
        def __init__(self, **options):
            self.own = blake3.blake3(**options)

        def update_mmap(self, path):
            hashed.append(path)
            return self.own.update_mmap(path)

    monkeypatch.setattr(unpacked, "blake3", Hasher)
    path = shutil.copy(file, cache.with_name("copied.gguf"))
    for _ in range(2):
        pretrained.load_config(path)
        pretrained.load_tokenizer(path)
        pretrained.load_model(path)
    assert len(hashed) == 1
    with path.open("r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        opened.write(b"\1")
    pretrained.load_config(path)
    assert len(hashed) == 2


def test_copies_within_the_budget_stay_and_the_least_recently_used_go_first(
    file, cache, monkeypatch
):
    folder = cache / "gguf"

    def load(dtype):
        pretrained.load_model(file, dtype)
        return {each.name.rpartition("-")[2]: each for each in folder.iterdir()}

    load("float32")
    copies = load("float16")
    assert copies.keys() == {"float32", "float16"}
    for seconds, name in ((1e9, "float32"), (1.5e9, "float16")):
        os.utime(copies[name] / "kvpager.json", (seconds, seconds))
    load("float32")
    sizes = [each.stat().st_size for copy in copies.values() for each in copy.iterdir()]
    monkeypatch.setattr(unpacked, "_BUDGET_BYTES", sum(sizes) + 1000)
    assert load("bfloat16").keys() == {"float32", "bfloat16"}
    for name in (".abandoned", ".being written"):
        (folder / name).mkdir()
    os.utime(folder / ".abandoned", (1e9, 1e9))
    (folder / "a file").touch()
    monkeypatch.setattr(unpacked, "_BUDGET_BYTES", 0)
    assert load("float16").keys() == {"float16", ".being written", "a file"}


def test_no_copy_is_kept_where_nothing_is_to_be_remembered(file, cache, tmp_path, monkeypatch):
    copied = pretrained.load_model(file)
    monkeypatch.setenv("KVPAGER_CACHE", "off")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    plain = pretrained.load_model(file)
    assert not (tmp_path / "own").exists()
    with Engine(plain, **SMALL) as one, Engine(copied, **SMALL) as other:
        assert one.fingerprint == other.fingerprint


def test_a_folder_with_one_gguf_file_is_that_file(file, tmp_path):
    (tmp_path / "one.gguf").symlink_to(file)
    assert pretrained.load_config(tmp_path).model_type == "qwen3"
    (tmp_path / "two.gguf").symlink_to(file)
    assert "has one.gguf, two.gguf; expected the path of one of them" in refused(tmp_path)


def test_a_generation_config_beside_a_gguf_file_is_the_models(file, tmp_path):
    (tmp_path / "one.gguf").symlink_to(file)
    (tmp_path / "generation_config.json").write_text('{"do_sample": true, "top_k": 7}')
    config = pretrained.load_model(tmp_path / "one.gguf").generation_config
    assert (config.do_sample, config.top_k) == (True, 7)


def test_without_the_package_gguf_the_error_says_how_to_get_it(tmp_path, monkeypatch):
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    said = refused(tmp_path / "a.gguf")
    assert "a.gguf: GGUF files need gguf and accelerate; pip install 'kvpager[gguf]'" in said


def test_a_gguf_file_that_transformers_cannot_read_is_refused_in_one_line(tmp_path):
    import gguf

    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, "unheard-of")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "architecture unheard-of is not supported" in refused(path)
    path.write_bytes(b"no GGUF at all")
    assert f"model {path}: " in refused(path)


def test_what_is_no_model_is_named(tmp_path):
    assert "model /nowhere: no such folder" in refused("/nowhere")
    assert "model /nowhere.gguf: no such file" in refused("/nowhere.gguf")
    assert "hf download nobody/nothing" in refused("nobody/nothing")
    assert "no config.json in it" in refused(tmp_path)
    (tmp_path / "a.bin").write_bytes(b"")
    assert "expected a folder, or a .gguf file" in refused(tmp_path / "a.bin")
    assert "dtype is 'q4'" in refused(tmp_path, dtype="q4")
