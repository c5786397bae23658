"""Models that cannot keep the promise are refused by the engine, with reason and remedy."""

from __future__ import annotations

import pytest
import torch
import transformers
from reference_models import COMMON, build, make_engine, prompt

from kvpager import InvalidArgumentError, UnsupportedModelError


def refused(model, *words):
    """Asserts that an engine refuses `model` with an error that holds all of `words`."""
    before = getattr(getattr(model, "config", None), "_attn_implementation", None)
    with pytest.raises(UnsupportedModelError) as error:
        make_engine(model)
    for word in words:
        assert word in str(error.value)
    if before is not None:
        assert model.config._attn_implementation == before


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rope_that_follows_the_longest_position_is_refused(rope_type):
    parameters = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0}
    if rope_type == "longrope":
        parameters |= {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
        parameters |= {"original_max_position_embeddings": 2048}
    refused(build("llama", rope_parameters=parameters), rope_type, "yarn")


@pytest.mark.parametrize("rope_type", ["linear", "llama3", "yarn"])
def test_rope_with_fixed_frequencies_is_accepted(rope_type):
    parameters = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0}
    parameters |= {"original_max_position_embeddings": 2048}
    if rope_type == "llama3":
        parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    make_engine(build("llama", rope_parameters=parameters)).close()


def test_layers_that_mix_rows_are_refused():
    config = transformers.Qwen3NextConfig(**COMMON, num_experts=4, num_experts_per_tok=2)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    refused(model, "linear_attention", 'exact="reuse"')


def test_experts_that_share_a_matrix_product_are_refused_until_they_do_not():
    config = transformers.Qwen3MoeConfig(
        **COMMON, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    refused(model, "experts", 'set_experts_implementation("batched_mm")')
    model.set_experts_implementation("batched_mm")
    make_engine(model).close()


def test_training_mode_is_refused():
    refused(build("llama").train(), "training mode", "model.eval()")


def test_a_model_put_into_training_mode_later_is_refused(closing):
    model = build("llama")
    session = closing(make_engine(model)).session()
    model.train()
    with pytest.raises(InvalidArgumentError, match=r"model\.eval\(\)"):
        session.prefill(prompt(5))


def test_an_encoder_decoder_is_refused():
    config = transformers.T5Config(
        d_model=64, d_kv=16, d_ff=64, num_layers=1, num_heads=4, vocab_size=100
    )
    refused(transformers.T5ForConditionalGeneration(config).eval(), "encoder-decoder")


def test_a_model_without_a_head_is_refused():
    refused(build("llama").model, "language-model head", "AutoModelForCausalLM")


def test_a_model_of_several_parts_is_refused():
    config = transformers.Gemma3Config(
        text_config={**COMMON},
        vision_config={"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
        | {"num_attention_heads": 2, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=1,
    )
    refused(
        transformers.Gemma3ForConditionalGeneration(config).eval(), "several parts", "text model"
    )


def test_anything_but_a_transformers_model_is_refused():
    refused(torch.nn.Linear(4, 4), "Linear", "AutoModelForCausalLM")

    class Wrapper(torch.nn.Module):
        def get_base_model(self):
            return None

    refused(Wrapper(), "get_base_model()")


def test_weights_that_are_not_in_memory_are_refused():
    with torch.device("meta"):
        config = transformers.LlamaConfig(**COMMON)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    refused(model, "meta", "CPU")


def test_dtypes_without_a_kernel_are_refused():
    refused(build("llama").double(), "float64", "bfloat16")


def test_quantised_weights_are_refused():
    model = build("llama")
    model.config.quantization_config = {"quant_method": "made up"}
    refused(model, "quantised")


def test_layers_of_different_shapes_are_refused():
    model = build("llama")
    attention = model.model.layers[1].self_attn
    attention.k_proj = torch.nn.Linear(256, 64, bias=False)
    attention.v_proj = torch.nn.Linear(256, 64, bias=False)
    refused(model, "2 shapes", "one shape in all layers")


def test_a_layer_that_does_not_attend_is_refused():
    model = build("llama")

    class Nothing(torch.nn.Module):
        def forward(self, hidden_states, **_):
            return hidden_states, None

    model.model.layers[1].self_attn = Nothing()
    refused(model, "3 layers", "2 of them attended")


def test_a_layer_whose_rows_see_one_another_is_refused():
    model = build("llama")

    class MixingNorm(torch.nn.Module):
        def forward(self, x):
            return x - x.mean(dim=1, keepdim=True)

    model.model.layers[1].post_attention_layernorm = MixingNorm()
    refused(model, "layers.1.post_attention_layernorm (MixingNorm 256 -> 256", "other rows")


def test_rows_that_see_one_another_between_modules_are_refused():
    model = build("llama")
    layer = model.model.layers[1]
    original = layer.forward
    layer.forward = lambda x, *args, **kwargs: original(
        x + 1e-3 * x.mean(dim=1, keepdim=True), *args, **kwargs
    )
    refused(model, "queries of layer 1", "other rows")


def test_a_step_between_modules_that_follows_the_row_index_is_refused():
    model = build("llama")
    layer = model.model.layers[2]
    original = layer.forward

    def forward(x, *args, **kwargs):
        out = original(x, *args, **kwargs)
        return torch.cat([out[:, :1], out[:, 1:] * (1 + 2**-20)], dim=1)

    layer.forward = forward
    refused(model, "final hidden states", "index")


def test_a_last_layer_whose_rows_see_one_another_is_refused():
    model = build("llama")

    class Shifted(torch.nn.Module):
        def forward(self, x):
            return x.roll(1, dims=1)

    model.model.norm = Shifted()
    refused(model, "model.norm (Shifted", "other rows")


def test_a_step_between_modules_that_lets_rows_see_one_another_is_refused():
    model = build("llama")
    layer = model.model.layers[1]
    original = layer.forward

    def forward(hidden, *args, **kwargs):
        out = original(hidden, *args, **kwargs)
        return out + out.roll(1, dims=1)

    layer.forward = forward
    refused(model, "queries of layer 2", "other rows")


def test_an_activation_whose_bits_follow_the_row_index_is_refused():
    model = build("llama")

    class Uneven(torch.nn.Module):
        def forward(self, x):
            y = torch.nn.functional.silu(x)
            y[:, -1, -1] = torch.nextafter(y[:, -1, -1], torch.tensor(torch.inf))
            return y

    for layer in model.model.layers:
        layer.mlp.act_fn = Uneven()
    refused(model, "act_fn (Uneven 512 -> 512", "its index", "32 rows", "multiple of 64")


def test_an_unknown_step_after_the_head_is_refused(monkeypatch):
    model = build("granite")
    model.config.model_type = "unknown"  # so that the scale is taken for a factor
    refused(model, "logits", "head")


def test_an_attention_option_that_is_not_implemented_is_refused():
    model = build("llama")
    attention = model.model.layers[0].self_attn
    original = attention.forward
    attention.forward = lambda *args, **kwargs: original(*args, position_bias=1.0, **kwargs)
    refused(model, "position_bias")


def test_attention_to_later_tokens_is_refused():
    model = build("llama")
    model.model.layers[0].self_attn.is_causal = False
    refused(model, "is_causal=False")
