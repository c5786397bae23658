"""What is said where a device is not there, is named wrongly, or is not where the tensors are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from kvpager import _core
from kvpager._model.weights import numerics
from kvpager.cli import main
from kvpager.config import PagerConfig, config_from_json, config_to_json
from kvpager.errors import DeviceError, InvalidArgumentError, PagerError
from kvpager.pager import Layout, Pager, device

LAYOUT = Layout(1, 1, 16, 16, chunk_tokens=16)
NO_PLUGIN = {"kind": "cuda", "plugin": "", "why_not": "no plug-in was found", "devices": []}
ONE = {
    "kind": "cuda",
    "plugin": "/somewhere/libkvpager_cuda.so",
    "why_not": "",
    "devices": [
        {
            "name": "NVIDIA H100 80GB HBM3",
            "capability": "9.0",
            "multiprocessors": 132,
            "memory_bytes": 85 * 10**9,
            "driver": 13000,
            "runtime": 13000,
        }
    ],
}


@pytest.fixture
def found(monkeypatch):
    """Says what a probe is to find of CUDA."""

    def say(report, torch_can=True, count=1):
        probe = _core.probe_device
        monkeypatch.setattr(
            _core, "probe_device", lambda kind: report if kind == "cuda" else probe(kind)
        )
        monkeypatch.setattr(torch.cuda, "is_available", lambda: torch_can)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    return say


@pytest.mark.parametrize("name", ["auto", "cpu", "cuda", "cuda:0", "cuda:12", "shim"])
def test_devices_have_names(name):
    config = PagerConfig(256, device=name)
    assert config.device == name
    assert config_from_json(json.loads(json.dumps(config_to_json(config)))) == config


def test_a_torch_device_is_a_name_too():
    assert PagerConfig(256, device=torch.device("cuda", 1)).device == "cuda:1"


@pytest.mark.parametrize(
    "value", ["gpu", "CUDA", "cuda:", "cuda:-1", "cpu:0", "mps", "", None, 0, True]
)
def test_other_names_are_refused_with_those_there_are(value):
    with pytest.raises(InvalidArgumentError, match=r'PagerConfig\.device .*"cuda:N" or "shim"'):
        PagerConfig(256, device=value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"attention": "tensor"}, r"PagerConfig\.attention is 'tensor'; expected .*'reference'"),
        ({"missed_chunks": "later"}, r"PagerConfig\.missed_chunks is 'later'; .*'staged'"),
    ],
)
def test_other_words_are_refused(options, words):
    with pytest.raises(InvalidArgumentError, match=words):
        PagerConfig(256, **options)


def test_more_rows_are_the_default_on_a_gpu_and_taken_in_turn():
    assert PagerConfig(4096).row_choices("cuda") == (256, 128, 64)
    assert PagerConfig(4096).row_choices("cpu") == (256, 64)
    assert PagerConfig(960).row_choices("cuda") == (128, 64)


def test_without_a_plug_in_it_is_said_where_one_was_looked_for_and_how_to_get_one(found):
    found(NO_PLUGIN)
    with pytest.raises(DeviceError) as error:
        Pager(LAYOUT, PagerConfig(256, chunk_tokens=16), rows=16, device="cuda", q_heads=1)
    assert isinstance(error.value, PagerError)
    for words in ("cuda: no plug-in was found", "KVPAGER_CUDA=ON", 'device="cpu"'):
        assert words in str(error.value)


def test_a_plug_in_without_a_driver_is_told_from_a_missing_one(found):
    found({**ONE, "devices": [], "why_not": "no CUDA driver was found"})
    with pytest.raises(DeviceError, match="no CUDA driver was found; check that nvidia-smi"):
        device.require("cuda")


def test_a_torch_without_cuda_is_told(found):
    found(ONE, torch_can=False)
    with pytest.raises(DeviceError, match=r"torch .*; install a build of torch for CUDA"):
        device.require("cuda")


def test_a_number_too_high_is_refused_with_how_many_there_are(found):
    found(ONE)
    with pytest.raises(DeviceError, match=r"cuda:3: there is 1 CUDA device; run `kvpager info`"):
        device.resolve("cuda:3", None)


@pytest.mark.parametrize(
    ("wanted", "model", "words"),
    [
        ("cuda", "cpu", r'model is on cpu; call model\.to\("cuda"\) first'),
        ("cpu", "cuda:0", r'model is on cuda:0; expected "auto"'),
        ("shim", "cuda:0", r"model is on cuda:0"),
        ("cuda:1", "cuda:0", r'model is on cuda:0; expected "auto"'),
        ("auto", "meta", "model is on meta; expected the CPU or one CUDA device"),
    ],
)
def test_a_model_elsewhere_than_the_pager_is_refused_naming_both(found, wanted, model, words):
    found(ONE, count=2)
    with pytest.raises(InvalidArgumentError, match=words):
        device.resolve(wanted, torch.device(model))


@pytest.mark.parametrize(
    ("wanted", "model", "name"),
    [
        ("auto", "cpu", "cpu"),
        ("auto", None, "cpu"),
        ("auto", "cuda:1", "cuda:1"),
        ("cuda", "cuda:1", "cuda:1"),
        ("cuda:1", None, "cuda:1"),
        ("cuda", None, "cuda:0"),
    ],
)
def test_auto_is_where_the_model_is(found, wanted, model, name):
    found(ONE, count=2)
    place = device.resolve(wanted, None if model is None else torch.device(model))
    assert place.name == name
    assert str(place.tensors) == name
    assert place.kind == name.partition(":")[0]


def test_info_tells_the_devices_there_are(found, capsys):
    found(ONE)
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert "CPU and CUDA" in text
    assert "cuda:0" in text
    assert "NVIDIA H100 80GB HBM3, capability 9.0, 79.2 GiB, driver for CUDA 13.0" in text
    assert main(["info", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["cuda"] == ONE


def test_info_tells_why_there_is_none(found, capsys):
    found(NO_PLUGIN)
    assert main(["info"]) == 0
    assert "no plug-in was found; build kvpager with KVPAGER_CUDA=ON" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["generate", "score", "verify", "demo"])
def test_every_command_that_runs_a_model_takes_a_device(command, model_dir, found, capsys):
    found(NO_PLUGIN)
    tokens = [] if command in ("verify", "demo") else ["--ids", "1,2,3"]
    few = ["--context", "512", "--needles", "2", "--turns", "2"] if command == "demo" else []
    if command == "demo":
        found({**NO_PLUGIN, "why_not": "no plug-in"})  # its turns are processes of their own
    arguments = ["--model", str(model_dir), "--device", "cuda:63", "-q", *tokens, *few]
    assert main([command, *arguments]) != 0
    said = capsys.readouterr().err
    assert "cuda:" in said
    assert said.count("\n") == 1


def test_the_environment_names_a_device(model_dir, found, capsys, monkeypatch):
    found(NO_PLUGIN)
    monkeypatch.setenv("KVPAGER_DEVICE", "cuda")
    assert main(["score", "--model", str(model_dir), "--ids", "1,2", "-q"]) == 1
    assert "no plug-in was found" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("before", "given", "expected"),
    [
        ("", {}, ":4096:8"),
        ("", {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, ":16:8"),
        ("import torch; torch.version.cuda = '13.0'", {}, ":4096:8"),
        ("import torch; torch.version.cuda = None", {}, None),
        (
            "import torch; torch.version.cuda = '13.0'; torch.cuda.is_initialized = lambda: True",
            {},
            None,
        ),
        ("import sys; sys.modules['vllm'] = object()", {}, None),
    ],
)
def test_cublas_is_given_one_workspace_before_cuda_starts_and_never_another(
    before, given, expected
):
    code = f"import os\n{before}\nimport kvpager\nprint(os.environ.get('CUBLAS_WORKSPACE_CONFIG'))"
    environment = {k: v for k, v in os.environ.items() if k != "CUBLAS_WORKSPACE_CONFIG"}
    said = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | given,
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.strip() == str(expected)


def test_less_memory_is_pinned_by_default_than_is_mapped(monkeypatch):
    monkeypatch.setattr("kvpager.config.physical_memory", lambda: 1 << 40)
    config = PagerConfig(256)
    assert config.host_budget_on("cpu") == 1 << 38
    assert config.host_budget_on("cuda") == 8 << 30
    assert PagerConfig(256, host_bytes="64GiB").host_budget_on("cuda") == 64 << 30


def test_the_settings_of_cuda_are_told_however_they_were_made(monkeypatch):
    gpu = torch.device("cuda", 0)
    before = numerics.settings(gpu)
    assert before["torch.backends.cuda.matmul.allow_tf32"] is False
    described = numerics.describe_settings(gpu)
    for name, was in before.items():
        owner, _, leaf = name.rpartition(".")
        if owner != "torch.backends.cuda.matmul" or not isinstance(was, bool):
            continue
        setattr(torch.backends.cuda.matmul, leaf, not was)
        try:
            assert numerics.settings(gpu)[name] is (not was), name
            assert numerics.describe_settings(gpu) != described
        finally:
            setattr(torch.backends.cuda.matmul, leaf, was)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert numerics.settings(gpu)["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_both_names_of_a_switch_at_once_are_told_as_such():
    code = (
        "import torch\n"
        "torch.backends.cuda.matmul.allow_tf32 = True\n"
        "torch.backends.cuda.matmul.fp32_precision = 'ieee'\n"
        "from kvpager._model.weights import numerics\n"
        "s = numerics.settings(torch.device('cuda', 0))\n"
        "print(s['torch.backends.cuda.matmul.fp32_precision'])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "ieee"


def test_the_release_of_cublas_is_read_from_the_library_itself():
    class Library:
        def cublasGetProperty(self, which, out):  # noqa: N802  # its name
            out._obj.value = (13, 1, 2)[which]
            return 0

    assert numerics._version_of(Library()) == "13.1.2"
    assert numerics._version_of(SimpleNamespace(cublasGetProperty=lambda *_: 1)) == ""
    assert list(numerics._loaded("/libno-such-library.so")) == []
    assert any("torch" in path for path in numerics._loaded("/libtorch_cpu.so"))
