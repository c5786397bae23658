"""Operations between modules are tried too, one by one, in the shapes of every row count."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
import torch
import transformers
from interruptions import interrupted, returns_of
from reference_models import COMMON, build, make_engine, prompt

from kvpager import UnsupportedModelError
from kvpager._model.proof.cancelling import cancelling_product
from kvpager._model.proof.operation_trial import OperationTrial, Pair
from kvpager._model.proof.operations import MOVE, UNKNOWN, kind_of, recorded
from kvpager._model.proof.rowwise import RowwiseProbe, Sample
from kvpager._model.proof.telling import telling_numbers

CPU = torch.device("cpu")


def mixture(seed=0, dtype=torch.float32):
    """A small Qwen2-MoE, whose shared expert has a gate of one number per row."""
    config = transformers.Qwen2MoeConfig(
        **COMMON | {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=64,
    )
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(2)
    model.set_experts_implementation("batched_mm")
    return model


def operation(function, *shapes, dtype=torch.float32):
    """The last operation that a function of tensors of these shapes records."""
    given = [torch.zeros(shape, dtype=dtype) for shape in shapes]
    with torch.inference_mode():
        return recorded(lambda: function(*given))[-1]


def alike(function, rows, count, width=(), dtype=torch.float32):
    """Whether a function of [rows, *width] gives the rows of M in M itself, and in another."""
    whole = operation(function, (1, rows, *width), dtype=dtype)
    other = operation(function, (1, count, *width), dtype=dtype)
    pair = Pair(whole, other)
    assert pair.matches()
    assert pair.has_rows
    trial = OperationTrial(whole, pair.row_dimensions, pair.result_dimensions, CPU)
    with torch.inference_mode():
        return trial.same_rows(whole), trial.same_rows(other)


def few_elements_differ(function):
    """Whether torch computes what does not fill a vector otherwise, on this processor."""
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 4
    return not torch.equal(function(x), torch.cat([function(y) for y in x.split(1)]))


ONE_PATH = not few_elements_differ(torch.sigmoid)
needs_two_paths = pytest.mark.skipif(ONE_PATH, reason="this processor has one path for sigmoid")


def test_a_mixture_with_a_gate_of_one_number_per_row_scores_what_it_generated():
    ids = prompt(40)
    with make_engine(mixture(), pool_tokens=512, rows=64) as engine:
        rollout = engine.run([ids], 50, temperature=1.0, seed=[0], logprobs=True, eos=None)[0]
        score = engine.score(np.concatenate([ids, rollout.tokens]))
    assert score.against(rollout.logprobs).differing == 0


@needs_two_paths
def test_counts_whose_narrow_tensors_fill_no_vector_are_dropped_by_name_of_the_operation():
    with make_engine(mixture(), rows=64, linear="torch") as engine:
        dropped = {drop.rows: drop.where for drop in engine.row_proof.dropped}
        kept = engine.row_counts.ladder
    gate = torch.randn(64, 1, generator=torch.Generator().manual_seed(0)) * 4
    assert any("sigmoid of" in where for where in dropped.values())
    for count in kept:  # what is left agrees in the operation itself, at every place
        for at in range(0, 64, count):
            for value in gate[:, 0]:
                same = torch.sigmoid(value.expand(count, 1).clone())
                assert torch.equal(
                    same, torch.sigmoid(value.expand(64, 1).clone())[at : at + count]
                )


@needs_two_paths
def test_rows_at_the_end_of_m_that_fill_no_vector_are_refused():
    with pytest.raises(
        UnsupportedModelError, match=r"index in the forward in sigmoid of \[40, 1\]"
    ):
        make_engine(mixture(), rows=40, linear="torch")


@needs_two_paths
def test_numbers_are_found_that_tell_one_path_of_an_operation_from_another():
    (numbers,) = telling_numbers(operation(torch.sigmoid, (1, 64, 1)), CPU)
    alone = torch.cat([torch.sigmoid(x) for x in numbers.split(1)])
    assert 4 <= len(numbers) < 20
    assert (alone != torch.sigmoid(numbers.repeat_interleave(64))[::64]).any()


def test_all_numbers_of_a_short_dtype_are_tried():
    seen = []

    def noting(x):
        seen.append(x)
        return torch.sigmoid(x)

    described = operation(torch.sigmoid, (4, 1), dtype=torch.bfloat16)
    object.__setattr__(described, "op", noting)
    noting.overloadpacket = torch.ops.aten.sigmoid
    telling_numbers(described, CPU)
    whole = torch.cat([x for x in seen if x.ndim == 1 and len(x) == 1 << 15])
    assert len(whole.view(torch.int16).unique()) == 1 << 16


@pytest.mark.parametrize("function", [torch.add, torch.mul, torch.div])
def test_operations_whose_every_bit_is_defined_need_no_numbers(function):
    assert telling_numbers(operation(function, (4, 1), (4, 1)), CPU) == []
    assert alike(lambda x: function(x, 3.0), 64, 5, (3,)) == (True, True)


@needs_two_paths
@pytest.mark.parametrize(
    ("rows", "count", "width", "expected"),
    [
        (64, 32, (1,), (True, True)),
        (64, 4, (1,), (True, False)),
        (64, 5, (64,), (True, True)),  # rows of whole vectors
        (64, 33, (7,), (True, False)),
        (40, 64, (1,), (False, True)),
    ],
)
def test_an_element_wise_operation_keeps_rows_where_they_fill_vectors(rows, count, width, expected):
    whole, other = alike(torch.sigmoid, rows, count, width)
    assert whole is expected[0]
    if expected[0]:
        assert other is expected[1]


@needs_two_paths
def test_the_end_of_a_threads_share_is_an_end_too():
    """Three threads share 64 rows of 1,031 elements in pieces that are no whole vectors."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert alike(torch.sigmoid, 64, 32, (1031,))[0] is False
        torch.set_num_threads(1)
        assert alike(torch.sigmoid, 64, 32, (1031,)) == (True, True)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 1), (256, 8), (96, 40)])
def test_a_product_of_no_module_is_tried_as_one_of_a_module_is(inputs, outputs, dtype):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    made, given = cancelling_product(weight, 64, generator)
    with torch.inference_mode():
        sample = Sample(lambda x: [torch.nn.functional.linear(x[0][None], made)[0]], [given])
        probe = RowwiseProbe([sample], 64)
    for count in (1, 2, 4, 16, 32):
        found = alike(lambda x: torch.nn.functional.linear(x, weight), 64, count, (inputs,), dtype)
        with torch.inference_mode():
            assert found == (True, not probe.differs(count))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.softmax(-1),
        lambda x: x.mean(-1, keepdim=True),
        lambda x: x.cumsum(-1),
        lambda x: x.topk(3)[0],
        lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]),
    ],
)
def test_functions_of_each_row_keep_it(function):
    assert alike(function, 64, 16, (60,)) == (True, True)


def test_a_function_that_shifts_rows_into_one_another_does_not_keep_them():
    assert alike(lambda x: x.cumsum(1), 64, 16, (60,)) == (False, False)


def changed_layer(model, step, counts):
    """Lets a step of row counts that `counts` accepts follow the second layer of a model."""
    layer = model.model.layers[1]
    original = layer.forward

    def forward(hidden, *args, **kwargs):
        out = original(hidden, *args, **kwargs)
        return step(out) if counts(hidden.shape[1]) else out

    layer.forward = forward
    return model


def dropped_of(model):
    with make_engine(model) as engine:
        return engine.row_counts.smaller, {d.rows: d.where for d in engine.row_proof.dropped}


def test_a_count_that_takes_other_operations_is_dropped_whatever_they_give():
    model = changed_layer(
        build("llama", "bfloat16"), lambda x: x.neg().neg(), lambda rows: rows == 16
    )
    smaller, dropped = dropped_of(model)
    assert 16 not in smaller
    assert "then does other operations" in dropped[16]


def test_an_operation_that_nothing_is_known_of_leaves_m_alone():
    with torch.library._scoped_library("kvpager_test", "DEF") as library:
        library.define("mystery(Tensor x) -> Tensor")
        library.impl("mystery", lambda x: x.clone(), "CPU")
        mystery = torch.ops.kvpager_test.mystery
        model = changed_layer(build("llama", "bfloat16"), mystery, lambda rows: True)
        smaller, dropped = dropped_of(model)
    assert smaller == ()
    assert all("mystery" in where for rows, where in dropped.items() if rows == 16)
    assert any("not known to be of each row alone" in where for where in dropped.values())


@needs_two_paths
def test_a_function_between_modules_that_sees_ends_of_vectors_drops_counts():
    """One number per row, in a step that no module holds: what whole-model trials met by luck."""
    model = changed_layer(
        build("llama"), lambda x: x * torch.sigmoid(x[..., :1] * 3).contiguous(), lambda rows: True
    )
    smaller, dropped = dropped_of(model)
    assert all(count % 8 == 0 for count in smaller)
    assert any("sigmoid" in where for where in dropped.values())


def test_copies_are_told_from_what_computes():
    assert kind_of(torch.ops.aten.cat.default) == MOVE
    assert kind_of(torch.ops.aten.view.default) == MOVE
    assert kind_of(torch.ops.aten.index_add.default) == UNKNOWN
    assert kind_of(torch.ops.aten.scatter_add.default) == UNKNOWN


def test_a_forward_that_is_recorded_computes_no_product():
    def function(x):
        return torch.sigmoid(torch.nn.functional.linear(x + 1, torch.ones(8, 4)))

    x = torch.ones(1, 3, 4)
    results = []
    with torch.inference_mode():
        operations = recorded(lambda: results.append(function(x)))
    assert torch.equal(results[0], torch.full((1, 3, 8), 0.5))
    assert [op.name for op in operations] == ["add", "mm", "sigmoid"]
    assert [op.results[0].shape for op in operations] == [(1, 3, 4), (3, 8), (1, 3, 8)]


def test_no_interrupt_of_a_recording_leaves_products_that_give_zeros():
    a, b = torch.ones(3, 4), torch.ones(4, 5)

    def record():
        recorded(lambda: torch.nn.functional.gelu(a @ b) @ b.T)

    record()
    for moment in range(returns_of(record)):
        with suppress(KeyboardInterrupt), interrupted(moment):
            record()
        assert (a @ b == 4).all(), moment
        recorded(lambda: a @ b)
        assert torch._C._len_torch_dispatch_stack() == 0, moment
