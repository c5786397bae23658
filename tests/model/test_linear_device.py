"""Linear layers of an engine on a device: the device computes them if `linear="kvpager"`."""

from __future__ import annotations

import pytest
import torch
from adapters import with_adapters
from bits import assert_same_bits, assert_same_session
from devices import DEVICES, require, tensors_of
from reference_models import build, make_engine, prompt

from kvpager import FingerprintMismatchError, PagerConfig, _core
from kvpager._model.seam.linear import LinearLayersOnDevice
from kvpager.pager.device import resolve
from kvpager.verify import RELATIONS, Subject, verify

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
OPTIONS = {"linear": "kvpager", "host_bytes": "16MiB"}


@pytest.fixture(params=DEVICES)
def device(request):
    return require(request.param)


def layers_on(device, model):
    place = resolve(device, tensors_of(device))
    return LinearLayersOnDevice(model, _core.Workers(1), place)


def drawn(*shape, dtype, device, seed=0):
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(tensors_of(device), dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_products_are_as_near_to_float64_as_torchs(dtype, device):
    x = drawn(70, 300, dtype=dtype, device=device)
    weight, bias = (drawn(*n, dtype=dtype, device=device, seed=1) for n in ((41, 300), (41,)))
    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    theirs = torch.nn.functional.linear(x, weight, bias)
    with torch.inference_mode():
        ours = layers_on(device, torch.nn.Module()).product(x, weight, bias)

    def error(found):
        return (found.double() - exact).pow(2).mean().sqrt().item()

    assert ours.dtype == dtype
    assert ours.device == x.device
    assert error(ours) <= 1.02 * error(theirs) + 1e-9


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_row_has_the_same_bits_wherever_it_lies_in_memory(dtype, device):
    layers = layers_on(device, torch.nn.Module())
    x, weight = drawn(9, 72, dtype=dtype, device=device), drawn(5, 72, dtype=dtype, device=device)
    with torch.inference_mode():
        expected = layers.product(x, weight, None)
        apart = torch.empty(9, 73, dtype=dtype, device=x.device)[:, 1:].copy_(x)
        odd = torch.empty(9 * 72 + 1, dtype=dtype, device=x.device)[1:].view(9, 72).copy_(x)
        batch = x.view(3, 3, 72)
        assert_same_bits(layers.product(apart, weight, None), expected, "rows apart")
        assert_same_bits(layers.product(odd, weight, None), expected, "at an odd address")
        assert_same_bits(layers.product(batch, weight, None).view(9, 5), expected, "a batch")


def test_what_is_elsewhere_or_of_another_dtype_is_left_to_torch(device):
    layers = layers_on(device, torch.nn.Module())
    x = drawn(2, 8, dtype=torch.float32, device=device)
    with torch.inference_mode():
        assert layers.product(x, x.double(), None) is None
        assert layers.product(x, x.to("meta"), None) is None
        assert layers.product(x, x[:, :4], None) is None
        assert layers.product(x, drawn(8, 5, dtype=x.dtype, device=device).T, None) is None
        assert layers.product(x, x, x[0, :1]) is None
        assert layers.product(x.double(), x.double(), None) is None


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_float32_on_the_shim_has_the_bits_of_the_processors_products(architecture, closing):
    model, ids = build(architecture, "float32"), prompt(50)

    def run(engine):
        session = engine.session()
        session.prefill(ids)
        return session, session.generate(6, eos=None).tokens.tolist()

    ours, text = run(closing(make_engine(model, device=require("shim"), **OPTIONS)))
    theirs, expected = run(closing(make_engine(model, **OPTIONS)))
    assert text == expected
    assert_same_session(ours, theirs, "on the shim")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_lone_sessions_decode_with_one_row_and_the_proof_leaves_these_layers_out(
    dtype, device, closing
):
    model = build("llama", dtype).to(tensors_of(device))
    engine = closing(make_engine(model, device=device, **OPTIONS))
    assert isinstance(engine.core.facts.linear, LinearLayersOnDevice)
    assert engine.row_counts.ladder[0] == 1


def test_layers_of_an_adapter_are_computed_on_the_device_too(device, closing):
    model = with_adapters("a").to(tensors_of(device))
    engine = closing(make_engine(model, device=device, **OPTIONS))
    names = [
        n for n, module in model.named_modules() if id(module) in engine.core.facts.linear.known
    ]
    assert any("lora_A" in name for name in names)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.long)])
def test_relations_hold_on_tensor_cores_and_in_lanes(dtype, device):
    model = build("llama", dtype).to(tensors_of(device))
    config = PagerConfig(device=device, pool_tokens=192, chunk_tokens=16, rows=32, **OPTIONS)
    relations = [one for one in RELATIONS if not one.processes and one.at_start]
    with Subject(model, config, effort="start") as subject:
        assert isinstance(subject.engine().core.facts.linear, LinearLayersOnDevice)
        report = verify(subject, relations)
    assert report.kept, report.verdict()
    assert any(outcome.comparison.bits > 0 for outcome in report.outcomes)


def test_a_snapshot_of_torchs_products_is_refused_by_name_and_taken_if_asked(
    tmp_path, device, closing
):
    model = build("llama", "bfloat16").to(tensors_of(device))
    path = tmp_path / "turn.kvsnap"
    torchs = {**OPTIONS, "linear": "torch"}
    with make_engine(model, device=device, **torchs) as engine, engine.session() as session:
        session.prefill(prompt(40))
        session.save(path)
    engine = closing(make_engine(model, device=device, **OPTIONS))
    with pytest.raises(FingerprintMismatchError, match="linear") as refused:
        engine.restore(path)
    assert "tensor cores" in str(refused.value.expected)
    assert engine.restore(path, on_mismatch="approximate").length == 40
