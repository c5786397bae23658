"""Models that torchao has quantised: what is taken, and what is refused."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from quantised_models import SMALL
from reference_models import COMMON, build, make_engine, prompt

from kvpager import FingerprintMismatchError, ModelChangedError
from kvpager._model.weights.digests import weights_digest
from kvpager._model.weights.held import held_by
from kvpager.errors import UnsupportedModelError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of extensions for GPUs
    pytest.importorskip("torchao", reason="torchao is not installed; run `make pytest-quantised`")
    from torchao import quantization as ao

pytestmark = pytest.mark.filterwarnings("ignore")  # torchao's own, of what it replaces


def per_group():
    return ao.PerGroup(32)


TAKEN = {
    "int8 weights": lambda: ao.Int8WeightOnlyConfig(),
    "int4 weights in groups": lambda: ao.IntxWeightOnlyConfig(
        weight_dtype=torch.int4, granularity=per_group()
    ),
    "float8 weights": lambda: ao.Float8WeightOnlyConfig(),
    "int8 weights and tokens": lambda: ao.Int8DynamicActivationInt8WeightConfig(),
    "int4 weights and int8 tokens": lambda: ao.Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4, weight_granularity=per_group()
    ),
}


def quantised(config, dtype="float32", *, head=False):
    """A small model with quantised layers, the same in every process."""
    model = build("llama", dtype, **{**COMMON, **SMALL})

    def chosen(module, name):
        return isinstance(module, torch.nn.Linear) and (head or not name.endswith("lm_head"))

    ao.quantize_(model, config, filter_fn=chosen)
    return model


@pytest.fixture(params=TAKEN)
def config(request):
    return TAKEN[request.param]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decoding_and_packing_have_the_bits_of_a_prefill(config, dtype, closing):
    engine = closing(make_engine(quantised(config(), dtype), pool_tokens=256))
    results = engine.run([prompt(40), prompt(23, seed=1), prompt(9, seed=2)], 12, logprobs=True)
    for ids, result in zip([prompt(40), prompt(23, seed=1), prompt(9, seed=2)], results):
        score = engine.score(np.concatenate([ids, result.tokens]))
        assert score.against(result.logprobs).differing == 0


def test_a_conversation_goes_on_with_the_same_bits_and_under_no_other_weights(
    config, tmp_path, closing
):
    file = tmp_path / "turn.kvp"
    session = closing(make_engine(quantised(config()), small_rows="fixed")).session()
    session.prefill(prompt(40))
    session.generate(5)
    session.save(file)
    expected = session.generate(8, logprobs=True)
    again = quantised(config())
    restored = closing(make_engine(again, small_rows="fixed")).restore(file)
    found = restored.generate(8, logprobs=True)
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert found.logprobs.tobytes() == expected.logprobs.tobytes()
    for part in ("qdata", "scale"):
        other = quantised(config())
        getattr(other.model.layers[1].mlp.up_proj.weight, part).view(torch.uint8)[-1, -1] ^= 1
        engine = closing(make_engine(other, small_rows="fixed"))
        with pytest.raises(FingerprintMismatchError) as error:
            engine.restore(file, on_mismatch="approximate")
        assert error.value.field == "weights"


def test_every_tensor_of_a_weight_is_watched(config, closing):
    model = quantised(config())
    weight = model.model.layers[0].self_attn.o_proj.weight
    parts, _ = weight.__tensor_flatten__()
    name = "model.layers.0.self_attn.o_proj.weight"
    names = {at for at, _ in held_by(model).tensors}
    assert {f"{name}.{part}" for part in parts} <= names
    for part in parts:
        engine = closing(make_engine(model, small_rows="fixed"))
        before = getattr(weight, part).clone()
        raw = getattr(weight, part).view(torch.uint8)
        raw.data.bitwise_xor_(1)  # all of it, by a way that nothing counts
        with pytest.raises(ModelChangedError, match=part):
            engine.score(prompt(20))
        getattr(weight, part).copy_(before)


def test_moving_a_quantised_model_to_another_dtype_is_noticed(closing):
    model = quantised(ao.Int8WeightOnlyConfig())
    engine = closing(make_engine(model, small_rows="fixed"))
    model.to(torch.bfloat16)
    with pytest.raises(ModelChangedError):
        engine.score(prompt(20))


def test_settings_that_say_how_codes_are_read_are_in_the_digest():
    one = quantised(ao.Int8WeightOnlyConfig())
    other = quantised(ao.Int8WeightOnlyConfig())
    assert weights_digest(one) == weights_digest(other)
    other.model.layers[1].mlp.up_proj.weight.block_size = [1, 32]
    assert weights_digest(one) != weights_digest(other)


def test_activations_rounded_by_a_scale_of_the_whole_forward_are_refused():
    config = ao.Int8DynamicActivationInt8WeightConfig(granularity=ao.PerTensor())
    with pytest.raises(UnsupportedModelError, match="a scale of each token"):
        make_engine(quantised(config))


def test_a_quantised_head_is_taken(closing):
    engine = closing(make_engine(quantised(ao.Int8WeightOnlyConfig(), head=True)))
    session = engine.session()
    session.prefill(prompt(40))
    answer = session.generate(8, logprobs=True)
    again = engine.score(np.concatenate([prompt(40), answer.tokens]))
    assert again.against(answer.logprobs).differing == 0
