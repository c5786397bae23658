"""The command line on a device."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from cli_snapshots import told_json

sys.path.append(str(Path(__file__).parents[1] / "model"))
from devices import DEVICES, require

SMALL = ["--pool", "256", "--rows", "16", "--chunk-tokens", "16", "--host", "16MiB"]
IDS = ",".join(str(3 + i * 7 % 60) for i in range(70))


@pytest.fixture(params=DEVICES)
def device(request):
    return require(request.param)


def run(capsys, *arguments):
    return told_json(capsys, *arguments, "-q")


def test_text_and_scores_of_the_reference_order_are_those_of_the_cpu(model_dir, tmp_path, capsys):
    require("shim")
    answers = {}
    for device in ("cpu", "shim"):
        common = ["--model", model_dir, "--device", device, "--attention", "reference", *SMALL]
        saved = tmp_path / f"{device}.kvsnap"
        told = run(
            capsys,
            *("generate", *common, "--ids", IDS, "--max-new-tokens", 8, "--save", saved),
            *("--logprobs", "--dense"),
        )
        again = run(
            capsys, "generate", *common, "--restore", saved, "--max-new-tokens", 4, "--dense"
        )
        score = run(capsys, "score", *common, "--ids", IDS, "--dense")
        answers[device] = (told["ids"], told["logprobs"], again["ids"], score["logprobs"])
    assert answers["shim"] == answers["cpu"]


def test_a_saved_turn_goes_on_where_it_was_saved(device, model_dir, tmp_path, capsys):
    common = ["--model", model_dir, "--device", device, "--dtype", "bfloat16", "--dense", *SMALL]
    saved = tmp_path / "turn.kvsnap"
    whole = run(capsys, "generate", *common, "--ids", IDS, "--max-new-tokens", 10)
    run(capsys, "generate", *common, "--ids", IDS, "--max-new-tokens", 6, "--save", saved)
    rest = run(capsys, "generate", *common, "--restore", saved, "--max-new-tokens", 4)
    assert rest["restored_tokens_consumed"] == 75
    assert whole["ids"][6:] == rest["ids"]


@pytest.mark.cuda
def test_the_demo_runs_on_a_gpu(capsys):
    require("cuda")
    small = ("--context", 4096, "--needles", 4, "--turns", 2)
    told = run(capsys, "demo", "--device", "cuda", *small)
    assert told["differing_bits"] == 0


@pytest.mark.cuda
def test_verify_runs_on_a_gpu(model_dir, capsys):
    require("cuda")
    told = run(capsys, "verify", "--model", model_dir, "--device", "cuda", "--dense", *SMALL)
    assert told["kept"]
