"""Quantised weights are taken where all that they are made of can be read and rows stand alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from quantised_models import (
    KINDS,
    AttributesLinear,
    BuffersLinear,
    CodedTensor,
    LazyLinear,
    ObjectLinear,
    OneRowInFloatLinear,
    OneRowLinear,
    PerTensorLinear,
    PerTokenLinear,
    Silent,
    first_layer,
    quantised,
    with_tensors,
)
from reference_models import COMMON, build, make_engine, prompt

from kvpager import FingerprintMismatchError, ModelChangedError
from kvpager._model.weights.digests import weights_digest
from kvpager._model.weights.held import held_by, is_quantised
from kvpager.errors import UnsupportedModelError

PARTS = {
    "object": ["weight", "weight.state.scales", "weight.state.more.table[0]"],
    "tensor": ["weight.codes", "weight.scales"],
    "attributes": ["W_q", "meta.scale"],
    "buffers": ["qweight", "scales"],
}
EACH_PART = [(kind, part) for kind, parts in PARTS.items() for part in parts]


def part_of(model, part):
    """A tensor that a weight is made of, as plain bytes [n] that lie where it does."""
    name = f"model.layers.1.self_attn.k_proj.{part}"
    (found,) = (tensor for at, tensor in held_by(model).tensors if at == name)
    return found.data.as_subclass(torch.Tensor).reshape(-1).view(torch.uint8)


def flip(model, part):
    part_of(model, part)[-3] ^= 1


def opened(model, **options):
    """An engine of forwards with one number of rows, whose start takes less."""
    return make_engine(model, small_rows="fixed", **options)


def refused(model, *words, **options):
    with pytest.raises(UnsupportedModelError) as error:
        make_engine(model, **options)
    for word in words:
        assert word in str(error.value)


def assert_answers_are_scored_alike(engine):
    """An answer has the log-probabilities of scoring it in one piece."""
    session = engine.session()
    session.prefill(prompt(40))
    answer = session.generate(8, logprobs=True)
    again = engine.score(np.concatenate([prompt(40), answer.tokens]))
    assert again.against(answer.logprobs).differing == 0


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_weights_are_taken_and_decoding_has_the_bits_of_a_prefill(kind, closing):
    engine = closing(make_engine(quantised(kind)))
    session = engine.session()
    session.prefill(prompt(40))
    answer = session.generate(12, logprobs=True)
    again = engine.score(np.concatenate([prompt(40), answer.tokens]))
    assert again.against(answer.logprobs).differing == 0


def test_what_quantised_weights_compute_is_what_they_are_decoded_to(closing):
    tokens = {}
    for kind in KINDS:
        session = closing(opened(quantised(kind))).session()
        session.prefill(prompt(40))
        tokens[kind] = session.generate(8).tokens.tolist()
    plain = quantised("buffers")
    for layer in plain.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, coded in [*part.named_children()]:
                if isinstance(coded, BuffersLinear):
                    linear = torch.nn.Linear(coded.in_features, coded.out_features, bias=False)
                    linear.weight.data.copy_(coded.weights(torch.float32))
                    setattr(part, name, linear)
    session = closing(opened(plain)).session()
    session.prefill(prompt(40))
    expected = session.generate(8).tokens.tolist()
    assert tokens == dict.fromkeys(KINDS, expected)


@pytest.mark.parametrize(("kind", "part"), EACH_PART)
def test_each_bit_that_a_weight_is_made_of_is_in_the_digest(kind, part):
    model = quantised(kind)
    before = weights_digest(model)
    assert weights_digest(quantised(kind)) == before
    flip(model, part)
    assert weights_digest(model) != before
    flip(model, part)
    assert weights_digest(model) == before


def test_each_setting_that_a_weight_is_read_with_is_in_the_digest():
    def digests(kind, change):
        model = quantised(kind)
        before = weights_digest(model)
        change(first_layer(model))
        return before, weights_digest(model)

    changes = {
        "object": [
            lambda layer: setattr(layer.weight.state, "group", 64),
            lambda layer: setattr(layer.weight.state, "dtype", torch.bfloat16),
            lambda layer: layer.weight.state.more.update(factor=0.5),
            lambda layer: layer.weight.state.more["table"].append(torch.ones(1)),
        ],
        "tensor": [lambda layer: setattr(layer.weight, "factor", 0.5)],
        "attributes": [
            lambda layer: layer.meta.update(shape=torch.Size([1, 2])),
            lambda layer: layer.meta.update(packing=ObjectLinear),
        ],
    }
    for kind, several in changes.items():
        for change in several:
            before, after = digests(kind, change)
            assert before != after, kind


def test_whether_layers_share_what_they_refer_to_is_of_no_account():
    one, other = quantised("object"), quantised("object")
    ones = torch.ones(4)
    for module in one.modules():
        if isinstance(module, ObjectLinear):
            module.weight.state.more["table"] = [ones]
    assert weights_digest(one) == weights_digest(other)


@pytest.mark.parametrize("model", [build("llama"), build("qwen3", "bfloat16")], ids=["one", "two"])
def test_a_plain_model_holds_its_parameters_and_buffers_and_nothing_else(model):
    held = held_by(model)
    named = [*model.named_parameters(), *model.named_buffers()]
    assert [(name, id(tensor)) for name, tensor in held.tensors] == [
        (name, id(tensor)) for name, tensor in named
    ]
    assert [held.settings, held.containers, held.made_of_others, held.opaque] == [[], [], [], []]


@pytest.mark.parametrize(("kind", "part"), EACH_PART)
def test_a_snapshot_is_refused_where_a_bit_of_a_quantised_weight_is_another(
    kind, part, tmp_path, closing
):
    file = tmp_path / "turn.kvp"
    session = closing(opened(quantised(kind))).session()
    session.prefill(prompt(40))
    session.save(file)
    model = quantised(kind)
    flip(model, part)
    engine = closing(opened(model))
    with pytest.raises(FingerprintMismatchError) as error:
        engine.restore(file, on_mismatch="approximate")
    assert error.value.field == "weights"


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_conversation_goes_on_in_an_engine_of_the_same_quantised_weights(
    kind, tmp_path, closing
):
    file = tmp_path / "turn.kvp"
    session = closing(opened(quantised(kind))).session()
    session.prefill(prompt(40))
    session.generate(5)
    session.save(file)
    expected = session.generate(8, logprobs=True)
    restored = closing(opened(quantised(kind))).restore(file)
    found = restored.generate(8, logprobs=True)
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert found.logprobs.tobytes() == expected.logprobs.tobytes()


@pytest.mark.parametrize(("kind", "part"), EACH_PART)
def test_weights_that_are_changed_in_the_middle_of_a_conversation_are_noticed(kind, part, closing):
    model = quantised(kind)
    session = closing(opened(model)).session()
    session.prefill(prompt(40))
    part_of(model, part).add_(1)  # all of it, by a way that nothing counts
    with pytest.raises(ModelChangedError, match=r"layers\.1\.self_attn\.k_proj"):
        session.generate(4)


def scale_replaced(layer):
    layer.weight.state.scales = layer.weight.state.scales * 1.5


def factor_changed(layer):
    layer.weight.state.more["factor"] = 0.5


def item_replaced(layer):
    layer.weight.state.more["table"][0] = torch.zeros(4)


def codes_replaced(layer):
    layer.weight.codes = layer.weight.codes.clone()


def setting_changed(layer):
    layer.weight.factor = 2.0


def entry_replaced(layer):
    layer.meta["scale"] = layer.meta["scale"] * 2


def dictionary_replaced(layer):
    layer.meta = {**layer.meta, "factor": 2.0}


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("object", scale_replaced),
        ("object", factor_changed),
        ("object", item_replaced),
        ("tensor", codes_replaced),
        ("tensor", setting_changed),
        ("attributes", entry_replaced),
        ("attributes", dictionary_replaced),
    ],
)
def test_what_a_weight_refers_to_is_noticed_where_it_is_replaced(kind, change, closing):
    model = quantised(kind)
    session = closing(opened(model)).session()
    session.prefill(prompt(40))
    change(first_layer(model))
    with pytest.raises(ModelChangedError):
        session.generate(4)


def test_an_engine_goes_on_with_quantised_weights_that_were_changed(closing):
    model = quantised("object")
    engine = closing(opened(model))
    session = engine.session()
    session.prefill(prompt(40))
    before = engine.fingerprint["weights"]
    scale_replaced(first_layer(model))
    engine.weights_changed()
    assert engine.fingerprint["weights"] not in (before, None)
    found = session.generate(8, logprobs=True)
    fresh = closing(opened(model)).session()
    fresh.prefill(prompt(40))
    expected = fresh.generate(8, logprobs=True)
    assert found.logprobs.tobytes() == expected.logprobs.tobytes()


def test_a_weight_that_was_exchanged_as_a_whole_is_noticed(closing):
    model = quantised("tensor")
    session = closing(opened(model)).session()
    session.prefill(prompt(40))
    weight = first_layer(model).weight
    other = CodedTensor(weight.codes, weight.scales * 2)
    weight.__dict__, other.__dict__ = other.__dict__, weight.__dict__  # as swap_tensors ends
    with pytest.raises(ModelChangedError, match="exchanged"):
        session.generate(4)


def test_weights_that_a_first_forward_packs_are_what_an_engine_watches(closing):
    engine = closing(opened(quantised(LazyLinear)))
    session = engine.session()
    session.prefill(prompt(40))
    answer = session.generate(8)
    usual = closing(opened(quantised("buffers"))).session()
    usual.prefill(prompt(40))
    assert answer.tokens.tolist() == usual.generate(8).tokens.tolist()
    packed = quantised(LazyLinear)
    with torch.inference_mode():
        packed(torch.ones(1, 4, dtype=torch.int64))
    assert engine.fingerprint["weights"] == weights_digest(packed)


def test_activations_rounded_by_a_scale_of_each_token_are_taken(closing):
    engine = closing(make_engine(quantised(PerTokenLinear)))
    assert_answers_are_scored_alike(engine)


def test_activations_rounded_by_a_scale_of_the_whole_forward_are_refused():
    model = quantised(PerTensorLinear)
    refused(model, "other rows", "PerTensorLinear", "a scale of each token")


def test_a_kernel_of_one_row_that_adds_in_another_order_is_found(closing):
    engine = closing(make_engine(quantised(OneRowLinear), small_rows="proven"))
    assert 1 not in engine.row_counts.ladder
    assert any(one.rows == 1 and "OneRowLinear" in one.where for one in engine.row_proof.dropped)
    refused(quantised(OneRowLinear), "OneRowLinear", small_rows=(1,))


class SixteenRowsTensor(CodedTensor):
    """Rounds otherwise where there are sixteen rows, which plain products do not."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        made = super().__torch_function__(function, types, args, kwargs)
        if function is torch.nn.functional.linear and args[0].shape[-2] == 16:
            return made / 3 * 3
        return made


def test_a_layer_is_tried_with_the_tensors_that_its_weight_is_made_of():
    def made(linear):
        return with_tensors(linear, SixteenRowsTensor)

    make_engine(quantised("tensor"), small_rows=(16,)).close()
    with pytest.raises(UnsupportedModelError, match=r"16 rows gives.*_proj \(Linear"):
        make_engine(quantised(made), small_rows=(16,))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_that_order_is_found_in_sixteen_bits_too(dtype, closing):
    refused(quantised(OneRowLinear, dtype), "1 rows gives", small_rows=(1,))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_sum_of_one_row_that_differs_in_its_last_bits_is_found_before_they_are_rounded(dtype):
    # One element in some forty thousand is another, as with a kernel of bitsandbytes.
    refused(quantised(OneRowInFloatLinear, dtype), "1 rows gives", "Linear", small_rows=(1,))


@torch.library.custom_op("kvpager_tests::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5


class OwnOperation(BuffersLinear):
    """Calls an operation of a library."""

    def forward(self, x):
        return halved(super().forward(x))


def test_an_operation_of_a_library_is_tried_with_the_layer_that_calls_it(closing):
    engine = closing(make_engine(quantised(OwnOperation)))
    plain = closing(make_engine(quantised("buffers")))
    assert engine.row_counts.ladder == plain.row_counts.ladder

    class Norm(torch.nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.norm = norm

        def forward(self, x):
            return halved(self.norm(x))

    model = quantised("buffers")
    model.model.norm = Norm(model.model.norm)
    outside = closing(make_engine(model))
    assert len(outside.row_counts.ladder) == 1  # of nothing but M rows


def test_weights_that_do_not_say_what_they_are_made_of_are_refused():
    def silent(linear):
        return with_tensors(linear, Silent)

    refused(quantised(silent), "q_proj.weight is a Silent", "digest", "quantising")


def test_objects_that_cannot_be_followed_are_refused_and_named():
    model = quantised("object")
    first_layer(model).weight.state.table = np.ones(4)
    refused(model, "layers.1.self_attn.k_proj.weight.state.table is a numpy.ndarray", "digest")
    model = quantised("attributes")
    first_layer(model).meta["outside"] = torch.nn.Linear(2, 2)
    refused(model, "meta.outside is a torch.nn.modules.linear.Linear")
    model = quantised("object")
    factor = 2.0
    first_layer(model).weight.state.finish = lambda x: x * factor  # what it holds has no name
    refused(model, "weight.state.finish is a builtins.function")


def test_a_class_with_memory_of_its_own_cannot_be_followed():
    class Slotted:
        __slots__ = ("__dict__", "hidden")

    model = quantised("object")
    first_layer(model).weight.state.more["slotted"] = Slotted()
    refused(model, "Slotted")


@pytest.mark.filterwarnings("ignore")
def test_weights_in_objects_of_torch_are_refused():
    model = build("llama")
    dynamic = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    refused(dynamic, "q_proj", "ScriptObject", "without quantising")


def test_integers_that_a_layer_of_torch_multiplies_by_are_refused():
    model = build("llama")
    layer = model.model.layers[2].mlp.down_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach().to(torch.int8), requires_grad=False)
    refused(model, "layers.2.mlp.down_proj.weight is int8", "dtype=torch.float32")


def test_a_layer_that_decodes_its_weights_with_a_compiled_method_is_refused():
    model = quantised("buffers")
    layer = first_layer(model)
    layer.weights = torch.compile(layer.weights, backend="eager")
    refused(model, "layers.1.self_attn.k_proj is compiled")


def test_sparse_weights_are_refused():
    model = build("llama")
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach().to_sparse(), requires_grad=False)
    refused(model, "layers.0.mlp.up_proj.weight is laid out as sparse_coo")


def test_packed_embeddings_and_a_packed_head_are_refused():
    class Packed(torch.nn.Embedding):
        pass

    model = quantised("buffers")
    table = model.get_input_embeddings().weight.detach()
    model.model.embed_tokens = Packed(*table.shape)
    model.model.embed_tokens.weight = torch.nn.Parameter(table.to(torch.int8), False)
    refused(model, "input embeddings", "Packed", "leave")
    model = quantised("buffers")
    model.lm_head = BuffersLinear(model.lm_head)
    refused(model, "language-model head", "BuffersLinear", "leave")


def test_a_head_whose_quantised_weight_has_the_shape_of_a_plain_one_is_taken(closing):
    model = quantised("tensor")
    model.lm_head = with_tensors(model.lm_head)
    engine = closing(make_engine(model))
    assert_answers_are_scored_alike(engine)


def test_quantised_experts_are_refused():
    config = transformers.Qwen3MoeConfig(
        **COMMON, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.set_experts_implementation("batched_mm")
    experts = model.model.layers[0].mlp.experts
    experts.gate_up_proj = torch.nn.Parameter(
        experts.gate_up_proj.detach().to(torch.float8_e4m3fn), requires_grad=False
    )
    experts.forward = experts.forward
    assert is_quantised(experts)
    refused(model, "experts", "quantised")


def test_a_configuration_that_speaks_of_quantisation_decides_nothing(closing):
    model = build("llama")
    model.config.quantization_config = {"quant_method": "made up"}  # and decoded as it was loaded
    closing(opened(model))

    class HiddenLinear(torch.nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.forward = lambda x: torch.nn.functional.linear(x, linear.weight)

    model.model.layers[1].mlp.up_proj = HiddenLinear(model.model.layers[1].mlp.up_proj)
    refused(model, "model.layers.1.mlp.up_proj", "HiddenLinear", "holds none")


def test_a_model_that_does_not_run_is_refused_with_what_its_library_says():
    class Elsewhere(AttributesLinear):
        def weights(self, dtype):
            raise RuntimeError("needs a GPU")

    refused(quantised(Elsewhere), "does not run", "needs a GPU", "library")
