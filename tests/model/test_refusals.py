"""Models that cannot keep the promise are refused by the engine, with reason and remedy."""

from __future__ import annotations

import time
from functools import partial

import peft
import pytest
import torch
import transformers
from reference_models import COMMON, build, make_engine, prompt
from torch.nn.utils import prune

from kvpager import InvalidArgumentError, UnsupportedModelError
from kvpager._model.seam.support import check_supported, has_experts


def refused(model, *words, **options):
    """Asserts that an engine refuses `model` with an error that holds all of `words`."""
    before = getattr(getattr(model, "config", None), "_attn_implementation", None)
    with pytest.raises(UnsupportedModelError) as error:
        make_engine(model, **options)
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
    refused(model, "experts", 'set_experts_implementation("batched_mm")', linear="torch")
    model.set_experts_implementation("batched_mm")
    make_engine(model, linear="torch").close()


@pytest.mark.parametrize(
    ("writes", "remedy"),
    [
        (partial(prune.l1_unstructured, name="weight", amount=0.3), "prune.remove(module"),
        (torch.nn.utils.weight_norm, "remove_weight_norm(module)"),
        (torch.nn.utils.spectral_norm, "remove_spectral_norm(module)"),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_weights_that_a_hook_writes_before_every_call_are_refused(writes, remedy):
    model = build("llama")
    writes(model.model.layers[1].mlp.up_proj)
    refused(model, "layers.1.mlp.up_proj anew before every call", remedy)


def test_weights_that_were_pruned_are_taken():
    model = build("llama")
    layer = model.model.layers[1].mlp.up_proj
    prune.l1_unstructured(layer, "weight", 0.3)
    prune.remove(layer, "weight")
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

    refused(Wrapper(), "NoneType", "AutoModelForCausalLM")


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's
def test_adapters_that_put_vectors_before_a_prompt_are_refused():
    tuned = peft.get_peft_model(
        build("llama"), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    )
    refused(tuned.eval(), "prompt learning", "LoRA")


def test_weights_that_are_not_in_memory_are_refused():
    with torch.device("meta"):
        config = transformers.LlamaConfig(**COMMON)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    refused(model, "meta", "CPU")


def test_dtypes_without_a_kernel_are_refused():
    refused(build("llama").double(), "float64", "bfloat16")


def test_a_weight_of_another_dtype_is_named():
    model = build("llama")
    model.model.layers[1].mlp.up_proj.double()
    refused(model, "model.layers.1.mlp.up_proj.weight is float64", "dtype=torch.float32")


def test_norms_in_float32_beside_a_model_of_sixteen_bits_are_accepted():
    model = build("llama", "bfloat16")
    check_supported(model)
    model.model.norm.float()
    check_supported(model)


@pytest.mark.parametrize("part", ["model", "layer", "wrapped layer", "forward"])
def test_a_compiled_model_is_refused_at_once_and_accepted_once_loaded_again(part):
    model = build("llama")
    layers = model.model.layers
    if part == "model":
        model.compile(backend="eager")
    elif part == "layer":
        layers[1].compile(backend="eager")
    elif part == "wrapped layer":
        layers[1] = torch.compile(layers[1], backend="eager")
    else:
        layers[1].forward = torch.compile(layers[1].forward, backend="eager")
    start = time.monotonic()
    refused(model, "it is compiled" if part == "model" else "model.layers.1", "torch.compile")
    assert time.monotonic() - start < 10  # nothing was compiled
    make_engine(build("llama")).close()


def test_what_torch_compile_returns_is_refused_and_what_it_wraps_is_accepted():
    model = build("llama")
    compiled = torch.compile(model, backend="eager")
    refused(compiled, "_orig_mod")
    check_supported(compiled._orig_mod)


def test_a_model_whose_dtype_changes_later_is_told_of_its_dtype(closing):
    model = build("llama")
    session = closing(make_engine(model)).session()
    model.half()
    with pytest.raises(InvalidArgumentError, match=r"dtype is torch\.float16, but"):
        session.prefill(prompt(5))


# What a refusal says to do has to help; where nothing does, it says none.


def test_experts_without_another_implementation_are_refused_without_a_remedy():
    options = {**COMMON, "num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 32}
    del options["head_dim"]
    config = transformers.JetMoeConfig(**options)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(UnsupportedModelError) as error:
        make_engine(model)
    assert "no other way to run the experts of this architecture" in str(error.value)
    assert "batched_mm" not in str(error.value)


def test_a_configuration_that_counts_experts_a_model_does_not_have_is_no_mixture():
    model = transformers.AutoModelForCausalLM.from_config(transformers.DogeConfig(**COMMON))
    assert model.config.num_experts > 1
    assert not has_experts(model)
    config = transformers.DogeConfig(**COMMON, is_moe=True, num_experts=16)
    assert has_experts(transformers.AutoModelForCausalLM.from_config(config))
    assert has_experts(build("qwen3_moe"))


def test_layers_with_a_state_are_refused_until_forwards_are_of_one_sequence():
    options = {**COMMON, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
    config = transformers.Qwen3NextConfig(**options, num_experts=0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    refused(model, 'exact="reuse"')
    make_engine(model, exact="reuse", rows=None).close()


def test_layers_of_an_unknown_type_are_refused_without_a_remedy():
    config = transformers.Llama4TextConfig(
        **{**COMMON, "num_hidden_layers": 4}, intermediate_size_mlp=64, num_local_experts=2
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(UnsupportedModelError, match=r"stretch of 8192 positions") as error:
        make_engine(model)
    assert ";" not in str(error.value)


# Errors of architectures while they are watched.


def test_an_architecture_that_calls_its_head_a_decoder_is_refused_for_what_its_head_does():
    sizes = {name: COMMON[name] for name in ("vocab_size", "num_hidden_layers", "pad_token_id")}
    config = transformers.ModernBertDecoderConfig(
        **sizes, hidden_size=64, intermediate_size=96, num_attention_heads=4
    )
    refused(transformers.AutoModelForCausalLM.from_config(config).eval(), "its logits", "head")


def test_heads_of_another_size_in_some_layers_are_refused_and_not_raised():
    config = transformers.Gemma4TextConfig(
        **{**COMMON, "num_hidden_layers": 4},
        layer_types=["sliding_attention", "full_attention"] * 2,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=COMMON["vocab_size"],
        global_head_dim=64,
        num_kv_shared_layers=0,
    )
    refused(transformers.AutoModelForCausalLM.from_config(config).eval(), "2 shapes")


def test_layers_of_different_shapes_are_refused():
    model = build("llama")
    attention = model.model.layers[1].self_attn
    attention.k_proj = torch.nn.Linear(256, 64, bias=False)
    attention.v_proj = torch.nn.Linear(256, 64, bias=False)
    attention.num_key_value_groups = 4
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
