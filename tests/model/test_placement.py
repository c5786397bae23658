"""A device_map that puts all of a model on one device is no placement at all."""

from __future__ import annotations

import types

import pytest
import torch
import transformers
from accelerate import cpu_offload, dispatch_model
from quantised_models import SMALL
from reference_models import COMMON, build, make_engine, prompt

from kvpager import ModelChangedError
from kvpager.errors import UnsupportedModelError

PARTS = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head")
PARTS = (*PARTS, "model.rotary_emb")


def small():
    return build("llama", **{**COMMON, **SMALL})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    small().save_pretrained(path)
    return path


def load(folder, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def opened(model):
    return make_engine(model, small_rows="fixed")


def refused(model, *words):
    with pytest.raises(UnsupportedModelError) as error:
        opened(model)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    "device_map", ["cpu", "auto", {"": "cpu"}, dict.fromkeys(PARTS, "cpu")], ids=str
)
def test_a_device_map_of_one_device_changes_nothing(folder, device_map, closing):
    if device_map == "auto" and torch.cuda.is_available():
        pytest.skip("with a GPU, auto is the GPU")
    placed = closing(opened(load(folder, device_map=device_map)))
    plain = closing(opened(load(folder)))
    assert placed.fingerprint == plain.fingerprint


@pytest.mark.parametrize("device_map", [{"": "cpu"}, dict.fromkeys(PARTS, "cpu")], ids=str)
def test_hooks_that_move_nothing_change_nothing(device_map, closing):
    dispatched = dispatch_model(small(), device_map, force_hooks=True, main_device="cpu")
    engine = closing(opened(dispatched.eval()))
    plain = closing(opened(small()))
    assert engine.fingerprint == plain.fingerprint
    tokens = []
    for one in (engine, plain):
        session = one.session()
        session.prefill(prompt(40))
        tokens.append(session.generate(8).tokens.tolist())
    assert tokens[0] == tokens[1]


def test_layers_with_hooks_that_move_nothing_are_tried_once_for_all_of_a_shape(closing):
    model = small()
    dispatched = dispatch_model(model, {"": "cpu"}, force_hooks=True, main_device="cpu")
    many = closing(make_engine(dispatched.eval())).row_proof.dropped
    few = closing(make_engine(small())).row_proof.dropped
    assert many == few


def test_a_hook_around_a_patched_forward_is_an_addition(closing):
    model = small()
    norm = model.model.norm
    norm.forward = types.MethodType(lambda self, x: type(self).forward(self, x) * 1.5, norm)
    dispatched = dispatch_model(model, {"": "cpu"}, force_hooks=True, main_device="cpu")
    assert closing(opened(dispatched.eval())).fingerprint["additions"]


def test_hooks_taken_off_under_an_open_engine_are_noticed(closing):
    from accelerate.hooks import remove_hook_from_submodules

    model = dispatch_model(small(), {"": "cpu"}, force_hooks=True, main_device="cpu").eval()
    engine = closing(opened(model))
    remove_hook_from_submodules(model)
    with pytest.raises(ModelChangedError):
        engine.score(prompt(20))


def test_modules_on_disk_are_refused_and_named(folder, tmp_path):
    device_map = {**dict.fromkeys(PARTS, "cpu"), "model.layers.1": "disk"}
    model = load(folder, device_map=device_map, offload_folder=tmp_path)
    refused(model, "model.layers.1 on disk", 'device_map="cpu"', '{"": 0}')


def test_modules_whose_weights_come_when_they_run_are_refused_and_named():
    model = cpu_offload(small(), execution_device="cpu").eval()
    refused(model, "not in memory", "model.layers.0.self_attn.q_proj", "more")


def test_a_hook_that_moves_rows_elsewhere_is_refused():
    model = dispatch_model(small(), {"": "cpu"}, force_hooks=True, main_device="cpu").eval()
    model.model.layers[1].mlp._hf_hook.execution_device = torch.device("meta")
    refused(model, "model.layers.1.mlp", "meta", "remove_hook_from_submodules")


def test_weights_on_two_devices_are_refused_and_named():
    model = small()
    model.model.layers[1].mlp.to("meta")
    refused(model, "model.layers.1.mlp.gate_proj", "meta")
