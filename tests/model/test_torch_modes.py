"""Modes of torch, which see and may change every operation of a thread."""

from __future__ import annotations

import pytest
import torch
from bits import assert_same_bits
from reference_models import build, make_engine, prompt
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kvpager import InvalidArgumentError
from kvpager._model.watch.looks import only_looks
from kvpager._runtime.execution.recordings import WORTH


class TwiceOfFunctions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        return made * 2 if getattr(func, "__name__", "") == "silu" else made


class TwiceOfOperations(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        return made * 2 if "silu" in str(func) else made


MODES = [TwiceOfFunctions, TwiceOfOperations, FakeTensorMode]


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture
def engine(model, closing):
    return closing(make_engine(model))


@pytest.mark.parametrize("mode", MODES)
def test_a_forward_within_a_mode_is_refused_and_nothing_is_computed(engine, mode):
    session, undisturbed = engine.session(), engine.session()
    session.prefill(prompt(70))
    with mode(), pytest.raises(InvalidArgumentError, match=f"{mode.__name__} of .* leave its"):
        session.append([3])
    assert session.length == 70
    session.append([3])
    undisturbed.prefill([*prompt(70).tolist(), 3])
    assert_same_bits(session.logits, undisturbed.logits, "logits")


@pytest.mark.parametrize("mode", MODES)
def test_an_engine_is_not_opened_within_a_mode(model, mode):
    with mode(), pytest.raises(InvalidArgumentError, match=mode.__name__):
        make_engine(model)


def test_a_default_device_is_no_mode_that_matters(model, closing):
    torch.set_default_device("cpu")
    try:
        closing(make_engine(model)).session().prefill(prompt(20))
    finally:
        torch.set_default_device(None)


def test_a_mode_that_only_looks_sees_every_forward(engine):
    """Those, too, that would be replayed without it."""

    class Count(TorchDispatchMode):
        products = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.products += "silu" in str(func)
            return func(*args, **(kwargs or {}))

    session = engine.session()
    session.prefill(prompt(20))
    plain = session.fork().generate(WORTH + 4, eos=None, temperature=0.0).tokens
    assert engine.stats()["graph_replays"] > 0
    counts = []
    with only_looks(Count()) as count:
        for token in plain:
            session.append([token])
            counts.append(count.products)
    layers = engine.core.model.config.num_hidden_layers
    assert counts == [layers * (i + 1) for i in range(len(plain))]
    assert session.tokens[20:].tolist() == plain.tolist()
