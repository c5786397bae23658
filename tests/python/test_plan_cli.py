"""`kvpager plan`: its text, its JSON, its picture, and what it says to a wrong command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hub_cache import keep_model
from plan_shapes import LLAMA_8B, QWEN3_MOE_30B, write_config

from kvpager import PagerConfig, TopK
from kvpager.cli import main
from kvpager.cli.plan import config_text, seconds_text
from kvpager.config_json import config_from_json
from kvpager.plan import measure
from kvpager.plan.machine import DEVICES

GOLDEN = Path(__file__).parent / "golden_plan.txt"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "scaling.md"
A_4090 = ("--device", "rtx4090", "--host-memory", "64GiB")


def plan(capsys, *arguments, code=0):
    assert main(["plan", *map(str, arguments)]) == code
    return capsys.readouterr()


def refused(capsys, *arguments, code):
    out, err = plan(capsys, *arguments, code=code)
    assert out == ""
    assert err.startswith("kvpager: ")
    assert err.count("\n") == 1, err
    return err


@pytest.fixture
def llama(tmp_path):
    return write_config(tmp_path, LLAMA_8B)


def test_what_a_plan_says_is_what_it_said(llama, capsys, monkeypatch):
    # After a change that is meant, write what comes out to the file and read the difference.
    monkeypatch.setenv("COLUMNS", "100")
    out, err = plan(capsys, llama, *A_4090, "--context", "128K")
    assert err == ""
    assert out == GOLDEN.read_text(encoding="utf-8")


def test_json_holds_the_configuration_to_use(llama, capsys):
    out, _ = plan(capsys, llama, *A_4090, "--context", "65536", "--format", "json")
    values = json.loads(out)
    config = config_from_json(values["config"])
    assert config.selection == TopK(chunks=32)
    assert config.pool_tokens * values["kv"]["token_bytes"] == values["memory"]["pool"]
    assert not values["redundant"]
    assert [row["context"] for row in values["decode"]] == [1024, 4096, 16384, 65536]


def test_what_is_to_be_typed_gives_the_recommended_configuration(llama, capsys):
    from kvpager.plan import Budget, Workload, read_shape, recommend

    shape = read_shape(llama)
    found = recommend(shape, DEVICES["rtx4090"], Budget(24 << 30, 64 << 30), Workload(131072))
    text = config_text(found.config)
    assert eval(text, {"PagerConfig": PagerConfig, "TopK": TopK}) == found.config
    assert text.replace(" ", "") in "".join(plan(capsys, llama, *A_4090)[0].split())


def test_everything_fits_is_said(llama, capsys):
    out, _ = plan(capsys, llama, "--device", "h100", "--context", "32K")
    assert "everything fits, paging is redundant" in " ".join(out.split())


@pytest.mark.parametrize("layers", [1025, 10**22])
def test_a_forged_number_of_layers_is_refused_before_any_is_made(tmp_path, capsys, layers):
    path = write_config(tmp_path, {**LLAMA_8B, "num_hidden_layers": layers})
    assert f"num_hidden_layers is {layers}" in refused(capsys, path, *A_4090, code=1)


def test_a_configuration_that_is_nested_too_deep_is_refused(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text("[" * 200_000)
    assert "cannot be read as JSON" in refused(capsys, path, *A_4090, code=1)


def test_a_mixture_of_experts_says_what_is_kept_hot(tmp_path, capsys):
    path = write_config(tmp_path, QWEN3_MOE_30B)
    out, _ = plan(
        capsys, path, "--device", "h100", "--host-memory", "128GiB", "--context", "40K",
        "--sessions", 8,
    )  # fmt: skip
    assert "128 instead of 85 of 128 experts per layer fit" in " ".join(out.split())
    err = refused(capsys, path, *A_4090, code=1)
    assert "the weights alone do not fit" in err
    assert "experts per layer beside a pool" in err


def test_rates_given_by_hand_change_what_is_expected(llama, capsys):
    def seconds(*arguments):
        out, _ = plan(capsys, llama, *A_4090, "--context", "4K", "--format", "json", *arguments)
        return json.loads(out)["decode"][0]["seconds"]

    assert seconds("--bandwidth", 100) > 5 * seconds()


def test_a_measured_machine_is_told_as_such(model_dir, capsys, monkeypatch):
    found = DEVICES["laptop"]
    monkeypatch.setattr(measure, "measure", lambda *_, **__: found)
    _, err = plan(capsys, model_dir, "--context", "4K", "--device-memory", "2GiB")
    assert err == "measuring this machine ...\n"


def test_a_configuration_is_found_in_the_cache_of_the_hub(llama, capsys, monkeypatch, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    shutil.copy(llama, folder / "config.json")
    keep_model(monkeypatch, tmp_path / "cache", "somebody/small", folder)
    arguments = (*A_4090, "--context", "4K")
    assert plan(capsys, "somebody/small", *arguments) == plan(capsys, llama, *arguments)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("nowhere",), 1, "MODEL nowhere: no such file or folder, and the cache"),
        (("some/body",), 1, "`hf download some/body config.json` gets config.json"),
        (("./nowhere",), 1, "MODEL ./nowhere: no such file or folder\n"),
        (("{}", "--contxt", "4K"), 2, "did you mean --context?"),
        (("{}", "--context", "4x"), 2, "is no number of tokens"),
        (("{}", "--context", "256K", "--device", "h100"), 2, "made for up to 131,072"),
        (("{}", "--device", "rtx4080"), 2, "did you mean rtx4090?"),
        (("{}", "--device-memory", "24Gb", "--device", "h100"), 2, "--device-memory is '24Gb'"),
        (("{}", "--bandwidth", "-3"), 2, "is no number above 0"),
        (("{}", "--device", "rtx4090", "--device-memory", "8GiB"), 1, "short of"),
        (("{}", "--output", "/nowhere/x.json"), 1, "there is no folder"),
    ],
)
def test_what_cannot_be_planned_is_one_line(llama, capsys, arguments, code, said):
    filled = [str(llama) if argument == "{}" else argument for argument in arguments]
    assert said in refused(capsys, *filled, code=code)


def test_a_model_the_engine_refuses_is_refused(tmp_path, capsys):
    path = write_config(tmp_path, {"model_type": "mamba", "num_hidden_layers": 1})
    said = refused(capsys, path, *A_4090, code=1)
    assert "a plan knows no cost of layers that carry a state" in said
    assert 'exact="reuse"' in said


def test_times_have_two_digits():
    said = [seconds_text(s) for s in (8e-4, 0.0412, 1.2, 7.61, 119, 1234)]
    assert said == ["0.8 ms", "41 ms", "1200 ms", "7.6 s", "119 s", "21 min"]


def test_the_examples_of_the_page_are_what_the_command_says(tmp_path, capsys):
    page = PAGE.read_text(encoding="utf-8")
    path = write_config(tmp_path, LLAMA_8B)
    values = json.loads(
        plan(capsys, path, *A_4090, "--context", "128K", "--format", "json", "-q")[0]
    )
    for row in values["decode"]:
        line = next(
            (at for at in page.splitlines() if at.startswith(f"| {row['context'] >> 10}K |")), None
        )
        if line is None:
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        bound = f"{row['bound']} {row['terms'][row['bound']] / row['seconds']:.0%}"
        assert cells[1:3] == [f"{row['tokens_per_second']:.0f}", bound]
        assert float(cells[3]) == pytest.approx(row["dense_tokens_per_second"], rel=0.02)
    freed = values["freed"]
    layers = f"{freed['bytes'] / 2**30:.1f} GiB, {freed['layers']:.1f} layers"
    assert layers in page
    cold, warm = values["cold_first_token"], values["warm_first_token"]
    assert f"cold first token at 128K takes {cold['seconds']:.0f} s" in page
    assert f"{warm['cached']['seconds']:.1f} s from the page cache" in " ".join(page.split())
