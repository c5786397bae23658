"""Which models with recurrent layers are run, what is found out about them, and what is refused."""

from __future__ import annotations

import pytest
import torch
import transformers
from bits import assert_same_bits
from recurrent_models import (
    CHUNK,
    RECURRENT,
    STEPPING,
    WHOLE_CHUNKS,
    build_recurrent,
    make_recurrent_engine,
)
from reference_models import build, make_engine, prompt

from kvpager import Engine, InvalidArgumentError, UnsupportedModelError
from kvpager._model.proof.aligned import settle_states
from kvpager._model.seam.attach import attach
from kvpager._model.seam.observe import observe
from kvpager._model.seam.recurrent import is_recurrent
from kvpager._model.seam.state import EMPTY
from kvpager._model.watch.looks import only_looks
from kvpager.errors import VerificationError
from kvpager.verify import verify_engine

NEW = 2 * CHUNK + 3
# Those that differ most; the others take minutes.
OFTEN = ("qwen3_next", "mamba2", "mamba", "lfm2", "zamba", "zamba2")


def _architectures(names):
    """Test parameters, of which those beside OFTEN are slow."""
    return [name if name in OFTEN else pytest.param(name, marks=pytest.mark.deep) for name in names]


@pytest.mark.parametrize("name", _architectures(RECURRENT))
def test_generation_is_that_of_transformers(name, closing):
    """In float32: tokens are equal, logits are close."""
    model = build_recurrent(name)
    ids = prompt(2 * CHUNK + 5)
    own = model.config._attn_implementation
    with make_recurrent_engine(model) as engine:
        session = engine.session()
        session.prefill(ids)
        logits = session.logits
        tokens = session.generate(NEW, eos=None).tokens.tolist()
    assert model.config._attn_implementation == own
    given = torch.as_tensor(ids)[None]
    with torch.inference_mode():
        expected = model(given, use_cache=False).logits[0, -1]
        # No end token, so that it does not stop early.
        told = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
    assert told[0, len(ids) :].tolist()[: len(tokens)] == tokens


@pytest.mark.parametrize("name", _architectures(["qwen3_next", "mamba2", "falcon_h1", "mamba"]))
def test_half_precision_is_as_exact(name):
    model = build_recurrent(name, "bfloat16")
    with make_recurrent_engine(model, pool_tokens=256) as engine:
        session = engine.session()
        session.prefill(prompt(CHUNK + 5))
        session.generate(CHUNK, eos=None).tokens.tolist()
        session.append([5])
        tokens, logits = session.tokens, session.logits
        kv = session.sequence.read_kv(0, 0, 2 * CHUNK)
    with make_recurrent_engine(model, pool_tokens=256) as engine:
        session = engine.session()
        session.prefill(tokens)
        assert_same_bits(session.logits, logits, "logits")
        for one, other in zip(session.sequence.read_kv(0, 0, 2 * CHUNK), kv):
            assert_same_bits(one, other, "K/V")


@pytest.mark.parametrize("name", _architectures(WHOLE_CHUNKS))
def test_forwards_have_a_chunks_rows(name):
    model = build_recurrent(name)
    with make_recurrent_engine(model) as engine:
        assert engine.rows == CHUNK
        assert engine.row_counts.ladder == (CHUNK,)
        assert engine.fingerprint["exact"] == "aligned"


@pytest.mark.parametrize("name", _architectures(STEPPING))
def test_layers_that_go_on_by_single_tokens_have_forwards_of_one_row(name):
    model = build_recurrent(name)
    with make_recurrent_engine(model) as engine:
        assert engine.rows == 1
        session = engine.session()
        session.prefill(prompt(CHUNK + 3))
        assert engine.core.runner.forwards == CHUNK + 3


def test_states_are_what_a_forward_leaves(closing):
    model = build_recurrent("qwen3_next")
    engine = closing(make_recurrent_engine(model))
    shape = engine.core.facts.recurrence.shape
    assert [(slot.layer, slot.name) for slot in shape.slots] == [
        (0, "conv_states.0"),
        (0, "recurrent_states.0"),
        (2, "conv_states.0"),
        (2, "recurrent_states.0"),
    ]
    session = engine.session()
    session.prefill(prompt(CHUNK))
    assert session.transcript.states.at(CHUNK).nbytes == shape.nbytes


def test_keys_and_values_are_kept_by_the_pager_alone(closing):
    model = build_recurrent("qwen3_next")
    engine = closing(make_recurrent_engine(model))
    assert engine.layout.layers == 2
    assert engine.core.facts.recurrence.layers == {1: 0, 3: 1}
    for layer in engine.core.facts.recurrence.cache(EMPTY).layers:
        assert getattr(layer, "keys", None) is None


def test_a_model_without_attention_keeps_zeros(closing):
    engine = closing(make_recurrent_engine(build_recurrent("mamba2")))
    session = engine.session()
    session.prefill(prompt(CHUNK + 2))
    assert engine.layout.token_bytes == 64
    keys, values = session.sequence.read_kv(0, 0, CHUNK + 2)
    assert not keys.any()
    assert not values.any()


def test_a_chunk_is_the_same_with_experts_of_any_implementation(closing):
    """They are computed by one forward, whoever else decodes: nothing of others is in it."""
    model = build_recurrent("qwen3_next")
    for implementation in ("eager", "grouped_mm", "batched_mm"):
        model.set_experts_implementation(implementation)
        engine = closing(make_recurrent_engine(model, pool_tokens=256))
        alone = engine.session()
        alone.prefill(prompt(2 * CHUNK))
        kv = alone.sequence.read_kv(1, 0, 2 * CHUNK)
        other = engine.adopt(engine.pager.sequence(salt="of its own"))
        beside = [engine.session() for _ in range(2)]
        engine.prefill_many(
            [(other, prompt(2 * CHUNK))]
            + [(session, prompt(20, seed=i)) for i, session in enumerate(beside)]
        )
        for one, two in zip(other.sequence.read_kv(1, 0, 2 * CHUNK), kv):
            assert_same_bits(one, two, implementation)
        engine.close()


def test_where_weights_lie_is_part_of_the_fingerprint():
    """Products of one row differ by it in float32: chunks of another placement are not shared."""
    model = build_recurrent("qwen3_next")
    with make_recurrent_engine(model) as engine:
        before = engine.fingerprint["processor"]
    weight = model.lm_head.weight
    moved = torch.empty(weight.numel() + 2)[2:].view_as(weight)
    assert moved.data_ptr() % 64 != weight.data_ptr() % 64
    weight.data = moved.copy_(weight.data)
    with make_recurrent_engine(model) as engine:
        after = engine.fingerprint["processor"]
        assert after.startswith(before)
        assert after != before
    moved_alike = torch.empty(weight.numel() + 2)[2:].view_as(weight)
    weight.data = moved_alike.copy_(weight.data)
    with make_recurrent_engine(model) as engine:
        assert engine.fingerprint["processor"] == after


def test_such_a_model_is_refused_where_rows_are_packed():
    with pytest.raises(UnsupportedModelError, match='use exact="reuse"'):
        Engine(build_recurrent("qwen3_next"), pool_tokens=256)


def test_plain_models_are_not_taken_for_recurrent_ones():
    assert not is_recurrent(build("llama"))
    assert not is_recurrent(build("mistral"))
    assert all(is_recurrent(build_recurrent(name)) for name in ("lfm2", "mamba", "zaya"))


OLDER = not hasattr(transformers.cache_utils.Cache, "get_recurrent_state")
has_states = pytest.mark.skipif(OLDER, reason="this release of transformers has no getter of it")


@has_states
def test_layers_that_ignore_their_state_are_refused(monkeypatch):
    model = build_recurrent("qwen3_next")
    monkeypatch.setattr(
        transformers.cache_utils.LinearAttentionLayer,
        "has_previous_state",
        {0: False},
        raising=False,
    )
    monkeypatch.setattr(
        transformers.cache_utils.Cache, "get_recurrent_state", lambda *args, **kwargs: None
    )
    with pytest.raises(UnsupportedModelError, match="do not go on from a state"):
        make_recurrent_engine(model)


@has_states
def test_layers_that_take_their_state_up_wrongly_are_refused(monkeypatch):
    model = build_recurrent("qwen3_next")
    get = transformers.cache_utils.Cache.get_recurrent_state

    def half(*args, **kwargs):
        state = get(*args, **kwargs)
        return None if state is None else state * -3

    monkeypatch.setattr(transformers.cache_utils.Cache, "get_recurrent_state", half)
    with pytest.raises(UnsupportedModelError, match="not close to one forward"):
        make_recurrent_engine(model)


@has_states
@pytest.mark.parametrize("when", ["always", "later"])
def test_forwards_that_do_not_repeat_themselves_are_refused(monkeypatch, when):
    """later: only those that begin at a state."""
    model = build_recurrent("qwen3_next")
    noise = torch.Generator().manual_seed(0)
    update = transformers.cache_utils.Cache.update_recurrent_state

    def noisy(self, states, layer, *args, **kwargs):
        if when == "always" or self.get_recurrent_state(layer) is None:
            return update(self, states, layer, *args, **kwargs)
        moved = states + torch.randn(1, generator=noise) * 1e-6
        return update(self, moved, layer, *args, **kwargs)

    if when == "always":
        norm = model.model.norm.forward
        monkeypatch.setattr(
            model.model.norm, "forward", lambda x: norm(x) + torch.randn(1, generator=noise) * 1e-6
        )
    monkeypatch.setattr(transformers.cache_utils.Cache, "update_recurrent_state", noisy)
    with pytest.raises(UnsupportedModelError, match="differ between two forwards"):
        make_recurrent_engine(model)


def test_caches_with_more_than_states_and_keys_are_refused(monkeypatch):
    model = build_recurrent("qwen3_next")
    kind = type("IndexedLayer", (transformers.cache_utils.DynamicLayer,), {})
    mapping = transformers.cache_utils.DYNAMIC_LAYER_TYPE_MAPPING
    monkeypatch.setitem(mapping, "full_attention", kind)
    with pytest.raises(UnsupportedModelError, match=r"keeps more than keys.*IndexedLayer"):
        make_recurrent_engine(model)


def test_an_attention_that_cannot_be_paged_is_refused():
    kind = getattr(transformers, "InklingTextConfig", None)
    if kind is None:
        pytest.skip("this release of transformers has no Inkling")
    config = kind(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        pad_token_id=0,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(UnsupportedModelError, match="position_bias"):
        make_recurrent_engine(model)


def test_a_recurrent_model_given_to_the_lower_level_is_settled_alone():
    model = build_recurrent("mamba2")
    attach(model)
    seen, counts, recurrence = settle_states(model, CHUNK)
    assert (seen.rows, counts.ladder, recurrence.layers) == (CHUNK, (CHUNK,), {})


def test_windows_of_attention_are_noted():
    model = build("mistral")
    attach(model)
    assert observe(model, 16).windows == {0: 40, 1: 40, 2: 40}
    with make_engine(build("llama")) as engine:
        assert engine.core.facts.recurrence is None
        assert "checkpoint_states" not in engine.stats()


@pytest.mark.parametrize("name", _architectures(["qwen3_next", "mamba2", "jamba"]))
def test_the_promise_is_verified_at_the_start(name):
    with make_recurrent_engine(build_recurrent(name), verify=verify_engine) as engine:
        assert engine.core.runner.forwards == 0
        assert engine.stats()["checkpoint_states"] == 0


def test_verification_finds_a_tail_that_was_extended(monkeypatch):
    monkeypatch.setattr(
        "kvpager._runtime.scheduling.aligned._drop_tail", lambda engine, session: None
    )
    with pytest.raises(VerificationError) as error:
        make_recurrent_engine(build_recurrent("qwen3_next"), verify=verify_engine)
    broken = {outcome.relation for outcome in error.value.report.outcomes if not outcome.kept}
    assert "warm" in broken


@pytest.mark.parametrize("name", ["qwen3_next", "zamba2"])
def test_a_model_that_is_called_within_its_own_forward_is_an_error_and_no_other_bits(name, closing):
    model = build_recurrent(name)
    alone = closing(closing(make_recurrent_engine(build_recurrent(name))).session())
    session = closing(closing(make_recurrent_engine(model)).session())
    alone.prefill(prompt(20))
    session.prefill(prompt(20))
    said = []

    def look(module, given, output):
        with torch.no_grad():
            try:
                model(torch.ones(1, 1, dtype=torch.int64), use_cache=False)
            except InvalidArgumentError as error:
                said.append(str(error))

    handle = model.model.layers[3].register_forward_hook(only_looks(look))
    session.append([5])
    handle.remove()
    alone.append([5])
    assert any("attends twice" in text for text in said)
    assert_same_bits(session.logits, alone.logits, "after a call within its forward")
