"""`kvpager plan`: its text, its JSON, and what it says to a wrong command line."""

from __future__ import annotations

import json
import shutil

import pytest
from cli_snapshots import refused, told, told_json
from hub_cache import keep_model
from plan_shapes import LLAMA_8B, write_config

from kvpager import PagerConfig
from kvpager.config import config_from_json

A_GPU = ("--device", "cuda", "--device-memory", "24GiB", "--host-memory", "64GiB")


@pytest.fixture
def llama(tmp_path):
    return write_config(tmp_path, LLAMA_8B)


def test_a_plan_says_bytes_per_token_what_fits_and_what_to_type(llama, capsys):
    arguments = ("plan", llama, *A_GPU, "--sessions", 2, "--context", "64K")
    text = " ".join(told(capsys, *arguments).split())
    values = told_json(capsys, *arguments)
    config = config_from_json(values["config"])
    assert values["kv"]["token_bytes"] == 2 * 32 * 8 * 128 * 2
    assert "128.0 KiB of K/V per token" in text
    assert "2 x 65,536 tokens take 16.0 GiB" in text
    assert config.pool_tokens * values["kv"]["token_bytes"] == values["memory"]["pool"]
    assert f"the pool holds {config.pool_tokens:,} of 131,072 tokens" in text
    typed = text[text.index("PagerConfig(") : text.index(")", text.index("PagerConfig(")) + 1]
    assert eval(typed, {"PagerConfig": PagerConfig}) == config
    whole = told(capsys, "plan", llama, "--device-memory", "80GiB", "--context", "32K")
    assert "everything fits into the pool, paging is redundant" in whole


def test_a_configuration_is_found_in_the_cache_of_the_hub(llama, capsys, monkeypatch, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    shutil.copy(llama, folder / "config.json")
    keep_model(monkeypatch, tmp_path / "cache", "somebody/small", folder)
    arguments = (*A_GPU, "--context", "4K")
    there = told(capsys, "plan", "somebody/small", *arguments)
    assert there == told(capsys, "plan", llama, *arguments)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("nowhere",), 1, "MODEL nowhere: no such file or folder, and the cache"),
        (("some/body",), 1, "`hf download some/body config.json` gets config.json"),
        (("./nowhere",), 1, "MODEL ./nowhere: no such file or folder\n"),
        (("{}", "--context", "4x"), 2, "is no number of tokens"),
        (("{}", "--context", "256K", "--device-memory", "80GiB"), 2, "made for up to 131,072"),
        (("{}", "--device", "rtx4080"), 2, "unknown 'rtx4080'; expected cpu, cuda"),
        (("{}", "--device-memory", "24Gb"), 2, "--device-memory is '24Gb'"),
        (("{}", "--device-memory", "8GiB"), 1, "short of"),
        (("{}", "--output", "/nowhere/x.json"), 1, "there is no folder"),
        (("{layers}", *A_GPU), 1, f"num_hidden_layers is {10**22}"),
        (("{deep}", *A_GPU), 1, "cannot be read as JSON"),
        (("{mamba}", *A_GPU), 1, "layers that carry a state; try the model itself, with Engine("),
    ],
)
def test_what_cannot_be_planned_is_one_line(tmp_path, capsys, arguments, code, said):
    path = tmp_path / "model.json"
    contents = {
        "{}": json.dumps(LLAMA_8B),
        "{layers}": json.dumps({**LLAMA_8B, "num_hidden_layers": 10**22}),
        "{deep}": "[" * 200_000,
        "{mamba}": json.dumps({"model_type": "mamba", "num_hidden_layers": 1}),
    }
    path.write_text(contents.get(arguments[0], ""))
    model = str(path) if arguments[0] in contents else arguments[0]
    assert said in refused(capsys, "plan", model, *arguments[1:], code=code)
