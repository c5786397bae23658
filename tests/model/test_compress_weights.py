"""Lossless copies of weights in 12 bits: an engine reads them, and has the bits of the weights."""

from __future__ import annotations

import logging

import pytest
import torch
from adapters import with_adapters
from bits import assert_same_bits, assert_same_session
from reference_models import build, make_engine, prompt

from kvpager import Cache, CapacityError, Engine, InvalidArgumentError, ModelChangedError, _core
from kvpager._model.seam.linear import LinearLayers
from kvpager._runtime.execution import recordings
from kvpager._runtime.execution.workers import new_workers

WORTH = 6  # forwards before one is recorded, in these tests
MODELS = {
    "llama": lambda: build("llama", tied=True),
    "qwen3_moe": lambda: build("qwen3_moe"),
    "mistral": lambda: build("mistral", hidden=1024),
    "adapters": lambda: with_adapters("a"),
}

pytestmark = pytest.mark.skipif(_core.processor()["level"] < 3, reason="this processor lacks AVX2")


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(recordings, "WORTH", WORTH)


def narrow(model, dtype="float32"):
    """A model whose weights are those of a bfloat16 checkpoint, in float32 or bfloat16."""
    return model.to(torch.bfloat16).to(getattr(torch, dtype))


def open_engine(model, *, compress_weights=True, **options):
    return make_engine(
        model, pool_tokens=1024, linear="kvpager", compress_weights=compress_weights, **options
    )


def copied(engine):
    return engine.stats()["compressed_weight_bytes"]


def answered(engine, *, length=40, new=3 * WORTH, seed=0):
    session = engine.session()
    session.prefill(prompt(length, seed))
    session.generate(new, eos=None)
    return session


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", MODELS)
def test_an_engine_with_copies_has_the_bits_of_one_without(closing, name, dtype):
    model = narrow(MODELS[name](), dtype)
    plain = closing(open_engine(model, compress_weights=False))
    engine = closing(open_engine(model))
    assert copied(plain) == 0
    assert copied(engine) > 0
    assert engine.fingerprint == plain.fingerprint
    assert_same_session(answered(engine), answered(plain), "one text")
    together = []
    for one in (engine, plain):
        sessions = [one.session() for _ in range(5)]
        for seed, session in enumerate(sessions):
            session.prefill(prompt(20 + seed, seed))
        one.generate_many(sessions, 3 * WORTH, eos=None)
        together.append(sessions)
    for ours, theirs in zip(*together):
        assert_same_session(ours, theirs, "one of five texts")
    assert engine.stats()["graph_replays"] == plain.stats()["graph_replays"] > 0


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_every_product_of_few_rows_is_given_the_copies(closing, monkeypatch, name):
    """Module by module, of experts, and of a recording's programs."""
    engine = closing(open_engine(narrow(MODELS[name]())))
    copies, seen = engine.core.facts.linear.compressed, set()
    own_program = _core.Program  # also made of other operations, to try them

    def noting(function):
        own = getattr(_core, function)

        def called(*args, compressed):
            assert compressed is copies
            seen.add(function)
            return own(*args, compressed=compressed)

        return called

    def program(workers, steps, fixed, given, compressed=None):
        if any(step[0] == "linear" for step in steps):
            assert compressed is copies
            seen.add("Program")
        return own_program(workers, steps, fixed, given, compressed)

    monkeypatch.setattr(_core, "Program", program)
    for function in ("linear", "linear_of_experts"):
        monkeypatch.setattr(_core, function, noting(function))
    answered(engine)
    assert engine.stats()["graph_replays"] > 0
    expected = {"linear", "Program"} | ({"linear_of_experts"} if name == "qwen3_moe" else set())
    assert seen == expected


def test_copies_are_of_every_layers_weights(closing):
    model = narrow(build("llama", tied=True), "bfloat16")
    seen = []
    engine = closing(open_engine(model, progress=lambda done, total: seen.append((done, total))))
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    weights = {id(layer.weight): layer.weight for layer in layers}.values()
    copies = engine.core.facts.linear.compressed
    assert copies.weight_bytes == sum(weight.nbytes for weight in weights)
    assert 0.75 * copies.weight_bytes < copies.bytes < 0.8 * copies.weight_bytes
    assert (0, copies.weight_bytes) in seen
    assert (copies.weight_bytes, copies.weight_bytes) in seen


def test_experts_are_copied(closing):
    model = narrow(build("qwen3_moe"), "bfloat16")
    experts = sum(weight.nbytes for weight in model.parameters() if weight.ndim == 3)
    copies = closing(open_engine(model)).core.facts.linear.compressed
    assert copies.weight_bytes > experts > 0


def test_a_weight_that_two_layers_share_is_copied_once(closing):
    model, totals = narrow(build("llama")), set()
    first, second = model.model.layers[0].mlp, model.model.layers[1].mlp
    second.up_proj.weight = first.up_proj.weight
    engine = closing(open_engine(model, progress=lambda done, total: totals.add(total)))
    assert engine.core.facts.linear.compressed.weight_bytes in totals


def test_snapshots_go_from_one_to_the_other(closing, tmp_path):
    model = narrow(build("llama"))
    path = tmp_path / "turn.kvsnap"
    plain = closing(open_engine(model, compress_weights=False))
    engine = closing(open_engine(model))
    answered(plain).save(path)
    restored, expected = engine.restore(path), plain.restore(path)
    for session in (restored, expected):
        session.generate(8, eos=None)
    assert_same_session(restored, expected, "a session that was restored")


def test_changed_weights_are_noticed_and_copied_anew(closing):
    model = narrow(build("llama"))
    engine = closing(open_engine(model))
    session = answered(engine)
    before = engine.core.facts.linear.compressed
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(2)
    with pytest.raises(ModelChangedError, match=r"up_proj.weight was changed in place"):
        session.generate(1, eos=None)
    engine.weights_changed()
    assert engine.core.facts.linear.compressed is not before
    fresh = closing(open_engine(model, compress_weights=False))
    assert_same_session(answered(engine, seed=3), answered(fresh, seed=3), "after the change")


def test_weights_that_12_bits_cannot_hold_are_read_as_they_are(closing, caplog):
    model = build("llama")  # float32 with all its bits
    with caplog.at_level(logging.WARNING):
        engine = closing(open_engine(model))
    assert "no weights were compressed" in caplog.text
    assert copied(engine) == 0
    plain = closing(open_engine(model, compress_weights=False))
    assert_same_session(answered(engine), answered(plain), "without copies")


def test_single_weights_that_12_bits_cannot_hold_change_nothing(closing):
    model = narrow(build("llama"))
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.weight[::9, 70] *= 1.001  # more bits than a bfloat16 has
                layer.weight[3, 5] = 1e-30
    engine = closing(open_engine(model))
    plain = closing(open_engine(model, compress_weights=False))
    assert copied(engine) > 0
    assert_same_session(answered(engine), answered(plain), "with weights of many bits")


def test_closing_an_engine_frees_the_copies():
    engine = open_engine(narrow(build("llama")))
    answered(engine)
    copies = engine.core.facts.linear.compressed
    assert copies.bytes > 0
    engine.close()
    assert copies.bytes == 0


@pytest.mark.parametrize("options", [{"linear": "torch"}, {"device": "shim", "linear": "kvpager"}])
def test_copies_that_nothing_would_read_are_refused(options):
    with pytest.raises(InvalidArgumentError, match=r"compress_weights is True, but") as refused:
        Engine(build("llama"), pool_tokens=256, compress_weights=True, **options)
    assert 'linear="kvpager" on the CPU' in str(refused.value)


def test_weights_of_a_librarys_own_kind_are_left_alone():
    class Own(torch.nn.Parameter):
        pass

    layers = torch.nn.Sequential(torch.nn.Linear(64, 8), torch.nn.Linear(8, 8))
    layers[0].weight = Own(layers[0].weight.detach())
    known = LinearLayers(layers, new_workers(1))
    assert [id(weight) for weight in known.weights(layers)] == [id(layers[1].weight)]


def test_copies_that_memory_has_no_room_for_are_refused(monkeypatch):
    monkeypatch.setattr("kvpager._model.facts.compression.free_memory", lambda: 1000)
    with pytest.raises(CapacityError, match=r"take [\d,]+ bytes, of which 1,000 are free"):
        open_engine(build("llama", "bfloat16"))


def test_a_cache_for_transformers_refuses_copies_that_it_would_not_read():
    with pytest.raises(InvalidArgumentError, match="compress_weights is True; forwards of a Cache"):
        Cache(build("llama"), pool_tokens=256, compress_weights=True)


def test_a_tensor_is_copied_where_12_bits_hold_it():
    workers, copies = new_workers(2), _core.CompressedWeights()
    numbers = torch.randn(8, 3, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert copies.add(workers, numbers)  # as one matrix
    assert copies.weight_bytes == numbers.nbytes
    for other in (numbers.half(), numbers.double(), numbers.to("meta"), torch.randn(4, 128)):
        assert not copies.add(workers, other)
    x = torch.randn(2, 128).bfloat16()
    given, expected = torch.empty(2, 3).bfloat16(), torch.empty(2, 3).bfloat16()
    for matrix in numbers:
        assert _core.linear(workers, x, matrix, None, given, copies)
        assert _core.linear(workers, x, matrix, None, expected)
        assert_same_bits(given, expected, "one matrix of several")


def in_one_row(model, weight):
    """All outputs of a layer have the first one's weights, in the memory of one."""
    layer = model.model.layers[0].mlp.gate_proj
    layer.weight = torch.nn.Parameter(weight(layer.weight.detach()), requires_grad=False)
    return model


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_weight_whose_rows_are_in_one_place_has_the_bits_of_one_with_rows_of_its_own(
    closing, dtype
):
    def expanded(weight):
        return weight[:1].expand_as(weight)

    def apart(weight):
        return expanded(weight).contiguous()

    answers = [
        answered(closing(open_engine(in_one_row(narrow(MODELS["llama"](), dtype), of), **options)))
        for of, options in ((expanded, {}), (apart, {}), (expanded, {"compress_weights": False}))
    ]
    for other in answers[1:]:
        assert_same_session(answers[0], other, "one text")
