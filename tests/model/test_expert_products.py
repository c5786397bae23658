"""Experts of an engine's forwards are kvpager's own products, as linear layers are."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
import transformers
from bits import assert_same_bits, assert_same_session
from reference_models import COMMON, make_engine, prompt

from kvpager import FingerprintMismatchError, InvalidArgumentError, ModelChangedError, _core
from kvpager._model.seam.expert_products import takes_experts
from kvpager._model.seam.linear import product, product_of_experts
from kvpager._runtime.execution.recordings import WORTH
from kvpager.plan import shape_of

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
DTYPES = ("float32", "float16", "bfloat16")
MIXTURE = {**COMMON, "num_hidden_layers": 2, "num_experts_per_tok": 3}
# Experts with a gate and a scale of the router's, shared experts beside them, groups of experts.
KINDS = {
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 64},
    "mixtral": {"num_local_experts": 8},
    "olmoe": {"num_experts": 8},
    "qwen2_moe": {"num_experts": 8, "moe_intermediate_size": 64},
    "deepseek_v3": {
        "n_routed_experts": 12,  # torch's sigmoid has other bits for what fills no two vectors
        "moe_intermediate_size": 64,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": None,
        "kv_lora_rank": 32,
        "num_key_value_heads": 8,
        "head_dim": 16,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "first_k_dense_replace": 1,
    },
}


def mixture(kind="qwen3_moe", dtype="float32"):
    """A small mixture of experts, which run as transformers chooses."""
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(kind, **{**MIXTURE, **KINDS[kind]})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    return model.eval()


@pytest.fixture(scope="module")
def workers():
    return _core.Workers(2)


def drawn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
def test_each_row_is_the_product_with_the_matrix_it_chose(workers, dtype, biased):
    weight = drawn(5, 24, 64, dtype=dtype)
    bias = drawn(5, 24, dtype=dtype, seed=1) if biased else None
    x = drawn(9, 64, dtype=dtype, seed=2)
    chosen = torch.tensor([[0, 3], [3, 1], [3, 0], [4, 3], [0, 1], [1, 0], [3, 4], [0, 3], [4, 0]])
    with torch.inference_mode():
        out = product_of_experts(workers, x, weight, bias, chosen)
        alone = [
            product(workers, x[row], weight[expert], None if bias is None else bias[expert])
            for row, experts in enumerate(chosen.tolist())
            for expert in experts
        ]
        assert_same_bits(out, torch.stack(alone), "rows")
        # With a row of its own for each choice, as the second product of a layer has.
        again = product_of_experts(workers, x.repeat_interleave(2, 0), weight, bias, chosen)
        assert_same_bits(again, out, "a row for each choice")
        crooked = chosen.t().contiguous().t()
        made = product_of_experts(workers, x.t().contiguous().t(), weight, bias, crooked)
        assert_same_bits(made, out, "laid out otherwise")


def test_what_does_not_fit_is_left_to_torch_and_an_unknown_expert_is_an_error(workers):
    weight, x, chosen = drawn(2, 8, 16), drawn(3, 16), torch.zeros(3, 1, dtype=torch.int64)
    assert product_of_experts(workers, x, weight, None, chosen) is not None
    others = [
        (x.bfloat16(), weight, None, chosen),
        (x[:, :8], weight, None, chosen),
        (x.to("meta"), weight, None, chosen),
        (x, weight[:, :, ::2], None, chosen),
        (x, weight.transpose(1, 2), None, chosen),
        (x, weight, drawn(3, 8), chosen),
        (x, weight, None, chosen.int()),
        (x[:2], weight, None, chosen),
    ]
    for arguments in others:
        assert product_of_experts(workers, *arguments) is None
    with pytest.raises(InvalidArgumentError, match="row 1 chose expert 2; expected 0 to 1"):
        product_of_experts(workers, x, weight, None, torch.tensor([[0], [2], [1]]))


def decoded(closing, model, tokens=12, **options):
    """A session of an engine of its own, after a prompt and some tokens."""
    engine = closing(make_engine(model, linear="kvpager", **options))
    session = closing(engine.session())
    session.prefill(prompt(90))
    session.generate(tokens, eos=None)
    return session


@pytest.mark.parametrize("kind", KINDS)
def test_mixtures_are_taken_however_transformers_runs_their_experts(kind, closing):
    model = mixture(kind)
    assert model.config._experts_implementation == "grouped_mm"
    assert takes_experts(model)
    expected = decoded(closing, model)
    products = f"kvpager {_core.LINEAR_VERSION}, experts, functional"
    assert expected.core.facts.fingerprint["linear"] == products
    for implementation in ("eager", "batched_mm"):
        model = mixture(kind)
        model.set_experts_implementation(implementation)
        assert_same_session(decoded(closing, model), expected, implementation)
        assert model.config._experts_implementation == implementation


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_one_by_one_beside_others_have_the_bits_of_a_prefill(kind, dtype, closing):
    ids = prompt(60)
    engine = closing(make_engine(mixture(kind, dtype), linear="kvpager"))
    whole, stepwise = closing(engine.session()), closing(engine.session())
    whole.prefill(ids)
    stepwise.prefill(ids[:9])
    for at in range(9, 60):
        stepwise.append(ids[at : at + 1])
    assert_same_session(stepwise, whole, "token by token")
    packed = engine.run([ids, prompt(31, 4), prompt(7, 5)], 1)
    alone = engine.run([ids], 1)
    assert packed[0].tokens.tolist() == alone[0].tokens.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_and_their_number_change_no_bit(dtype, workers):
    weight, x = drawn(6, 200, 96, dtype=getattr(torch, dtype)), drawn(70, 96, seed=1)
    x = x.to(weight.dtype)
    chosen = torch.randint(6, (70, 2), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        expected = product_of_experts(_core.Workers(1), x, weight, None, chosen)
        assert_same_bits(product_of_experts(workers, x, weight, None, chosen), expected, "threads")


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_are_as_near_to_float64_as_those_of_transformers(dtype, closing):
    model, ids = mixture(dtype=dtype), prompt(40)
    exact = mixture(dtype=dtype).double()
    exact.set_experts_implementation("eager")
    with torch.inference_mode():
        theirs = model(torch.from_numpy(ids)[None]).logits[0, -1].double()
        expected = exact(torch.from_numpy(ids)[None]).logits[0, -1]
    session = closing(closing(make_engine(model, linear="kvpager")).session())
    session.prefill(ids)
    ours = session.logits.double()
    # In 16 bits a near tie of a router may go either way, for them as for us.
    assert (ours - expected).norm() <= 2 * (theirs - expected).norm() + 1e-5 * expected.norm()


def test_replayed_steps_have_the_bits_of_the_model(closing):
    for dtype in DTYPES:
        sessions = [
            decoded(closing, mixture(dtype=dtype), WORTH + 40, graphs=graphs)
            for graphs in (True, False)
        ]
        assert sessions[0].core.runner.graphs.replays > 0
        assert_same_session(*sessions, dtype)


def beside_a_generation(session, run):
    """Runs something in three threads while a session generates."""
    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    session.generate(30, eos=None)
    for thread in threads:
        thread.join()


def test_the_model_itself_runs_its_experts_as_before_also_in_another_thread(closing):
    model = mixture()
    ids = torch.from_numpy(prompt(40))[None]
    seen = []

    def run():
        with torch.inference_mode():
            seen.append(model(ids).logits)

    run()
    session = decoded(closing, model)
    beside_a_generation(session, run)
    for logits in seen[1:]:
        assert_same_bits(logits, seen[0], "of the model alone")
    with torch.inference_mode():
        assert_same_bits(copy.deepcopy(model)(ids).logits, seen[0], "a copy")


def test_weights_of_experts_that_change_are_noticed(closing):
    session = decoded(closing, mixture())
    with torch.no_grad():
        session.core.model.model.layers[1].mlp.experts.down_proj.mul_(2)
    with pytest.raises(ModelChangedError, match="down_proj"):
        session.generate(2, eos=None)


def test_transposed_and_foreign_experts_stay_transformers_and_are_proven_as_such(closing):
    options = {**MIXTURE, "num_local_experts": 4, "num_experts_per_tok": 2}
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(transformers.GptOssConfig(**options))
    assert not takes_experts(model.eval())
    model.set_experts_implementation("batched_mm")
    engine = closing(make_engine(model, linear="kvpager"))
    products = f"kvpager {_core.LINEAR_VERSION}, functional"  # its routers are kvpager's
    assert engine.fingerprint["linear"] == products
    other = mixture()
    experts = other.model.layers[1].mlp.experts
    experts.forward = type(experts).forward.__get__(experts)
    assert not takes_experts(other)
    assert shape_of(other, exact=False).gathers_experts


def test_a_snapshot_of_transformers_experts_is_refused_by_name(closing, tmp_path):
    model = mixture()
    model.set_experts_implementation("batched_mm")
    with make_engine(model, linear="torch") as engine, engine.session() as session:
        session.prefill(prompt(40))
        session.save(tmp_path / "one.kvsnap")
    engine = closing(make_engine(model, linear="kvpager"))
    with pytest.raises(FingerprintMismatchError, match="linear"):
        engine.restore(tmp_path / "one.kvsnap")


def test_a_plan_copies_no_matrices_on_a_processor():
    shape = shape_of(mixture())
    assert shape.experts == 8
    assert not shape.gathers_experts
