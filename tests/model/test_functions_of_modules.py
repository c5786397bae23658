"""Functions that modules call, of routers and gates, are kvpager's in an engine's forwards."""

from __future__ import annotations

import gc

import pytest
import torch
from bits import assert_same_bits
from reference_models import build, make_engine, prompt
from test_expert_products import DTYPES, KINDS, beside_a_generation, mixture
from torch.nn import functional
from torch.overrides import _get_current_function_mode_stack

from kvpager import _core
from kvpager._model.seam.functions import _Functions, exchange_callers
from kvpager._model.seam.linear import Callers, LinearLayers, computing, product
from kvpager._model.watch.looks import active_modes


def router(model):
    (first, *_) = (each for each in model.modules() if "Router" in type(each).__name__)
    return first


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_lone_sessions_of_a_mixture_decode_with_one_row(kind, dtype, closing):
    engine = closing(make_engine(mixture(kind, dtype), linear="kvpager"))
    assert engine.core.facts.row_counts.smaller[0] == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_routers_row_has_the_bits_that_it_has_alone(kind, dtype):
    model = mixture(kind, dtype)
    layers = LinearLayers(model, _core.Workers(2), callers=exchange_callers(model))
    module = router(model)
    x = torch.randn(1, 70, model.config.hidden_size).to(module.weight.dtype)
    with torch.inference_mode(), computing(layers):
        whole = logits_of(module, x)
        for i in range(70):
            assert_same_bits(logits_of(module, x[:, i : i + 1])[0], whole[i], f"row {i}")
    plain = x[0] if module.weight.dtype == torch.float32 else None
    if plain is not None:
        assert_same_bits(whole, product(layers.workers, plain, module.weight), "the product")


def logits_of(module, x):
    made = module(x)
    return made[0] if isinstance(made, tuple) else made


def test_outside_an_engines_forward_routers_are_torchs(closing):
    model = mixture()
    module, seen = router(model), []
    x = torch.randn(40, model.config.hidden_size)

    def run():
        with torch.inference_mode():
            seen.append(logits_of(module, x))

    engine = closing(make_engine(model, linear="kvpager"))
    session = engine.session()
    session.prefill(prompt(90))
    beside_a_generation(session, run)
    run()
    for logits in seen:
        assert_same_bits(logits, functional.linear(x, module.weight), "torch's")


def test_an_engine_with_torchs_products_stays_as_it_is_beside_one_with_kvpagers(closing):
    model = mixture()
    model.set_experts_implementation("batched_mm")
    first = closing(make_engine(model, linear="torch")).session()
    first.prefill(prompt(40))
    closing(make_engine(model, linear="kvpager")).session().prefill(prompt(40))
    first.append([3])


def test_models_without_such_modules_have_the_products_they_had(closing):
    assert exchange_callers(build("llama")) == Callers()
    engine = closing(make_engine(build("llama"), linear="kvpager"))
    assert engine.fingerprint["linear"] == f"kvpager {_core.LINEAR_VERSION}"


def test_a_mode_that_an_interrupt_left_computes_nothing_and_counts_for_none(monkeypatch):
    model = mixture()
    layers = LinearLayers(model, _core.Workers(1), callers=exchange_callers(model))
    x, weight = torch.randn(40, 256), torch.randn(8, 256)
    leave = _Functions.__exit__
    with monkeypatch.context() as patch, torch.inference_mode(), computing(layers):
        patch.setattr(_Functions, "__exit__", lambda *_: None)  # as an interrupt before it does
        router(model)(x)
    (left,) = _get_current_function_mode_stack()
    try:
        assert active_modes() == []
        with torch.inference_mode(), computing(layers):
            assert_same_bits(functional.linear(x, weight), x @ weight.T, "torch's")
    finally:
        leave(left, None, None, None)


def test_under_autocast_a_router_is_torchs():
    model = mixture()
    layers = LinearLayers(model, _core.Workers(1), callers=exchange_callers(model))
    module, x = router(model), torch.randn(40, model.config.hidden_size)
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = logits_of(module, x)
        with computing(layers):
            assert_same_bits(logits_of(module, x), expected, "torch's")


def test_a_class_is_exchanged_once(closing):
    exchange_callers(mixture())
    forward = type(router(mixture())).forward
    exchange_callers(mixture())
    gc.collect()
    assert type(router(mixture())).forward is forward
