"""Checks that guard what a forward is: each of them, left out, would let other numbers pass."""

from __future__ import annotations

import pytest
import torch
from reference_models import build, make_engine

from kvpager import InvalidArgumentError, UnsupportedModelError
from kvpager._model.proof.whole import WholeModel
from kvpager._model.seam.attach import attach
from kvpager._model.seam.attention import attention, running
from kvpager._model.seam.causal_lm import Head
from kvpager._model.seam.observe import Recorder, observe
from kvpager._model.seam.rows import same_bits


class Layer(torch.nn.Module):
    layer_idx = 0


def attend(recorder, batch=1, **options):
    """One attention call of four rows, two heads and eight dimensions."""
    q, k, v = torch.ones(3, batch, 2, 4, 8)
    with running(recorder):
        return attention(Layer(), q, k, v, None, **options)


def test_attention_with_dropout_is_refused_and_without_is_not():
    with pytest.raises(UnsupportedModelError, match=r"attention dropout 0\.25; call model\.eval"):
        attend(Recorder(), dropout=0.25)
    assert attend(Recorder(), dropout=0.0)[0].shape == (1, 4, 2, 8)


@pytest.mark.parametrize("batch", [0, 2, 3])
def test_attention_over_several_batch_entries_is_refused(batch):
    recorder = Recorder()
    with pytest.raises(InvalidArgumentError, match=f"a batch of {batch}; "):
        attend(recorder, batch=batch)
    assert not recorder.calls


def test_a_layer_that_attends_twice_is_refused_by_its_number():
    recorder = Recorder()
    attend(recorder)
    with pytest.raises(UnsupportedModelError, match="layer 0 attends more than once"):
        attend(recorder)


def changed_at(model, places):
    """Other bits in the last layer, in rows whose place in a forward of 16 or less is listed."""
    layer = model.model.layers[2]
    original = layer.forward

    def forward(hidden, *args, **kwargs):
        out = original(hidden, *args, **kwargs).clone()
        here = [place for place in places if place < out.shape[1] <= 16]
        out[:, here] *= 1 + 2**-6
        return out

    layer.forward = forward


@pytest.mark.parametrize("count", [8, 16])
def test_the_whole_model_is_compared_in_many_rows_of_a_count(count):
    """Wherever a little more than a quarter of the places has other bits, one is looked at."""
    model = build("llama", "bfloat16")
    attach(model)
    seen = observe(model, 32)
    for start in range(0, count, count // 4 + 1):
        places = range(start, min(start + count // 4 + 1, count))
        changed_at(model, places if len(places) > count // 4 else range(count // 4 + 1))
        with torch.inference_mode():
            assert "hidden states" in WholeModel(model, seen).differing([count])[count]
        del model.model.layers[2].forward


def test_hidden_states_of_another_dtype_are_rounded_to_the_heads():
    model = build("llama", "bfloat16")
    hidden = torch.randn(20, 256, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logits = Head(model)(hidden, range(20))
        assert logits.dtype == torch.bfloat16
        assert same_bits(logits, Head(model)(hidden.bfloat16(), range(20)))


def test_another_number_of_threads_is_another_fingerprint():
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            with make_engine(build("llama", num_hidden_layers=1)) as engine:
                found.append(engine.fingerprint["threads"])
    finally:
        torch.set_num_threads(before)
    assert found == [1, 2]
