"""Of a mixture of experts, a short text is computed in every count that was proven, at each start.

The faults here are steps of numpy, which no trial of torch's operations sees, on values that no
forward of the proof has: what is left of it is what a text comes to.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch
from bits import assert_same_session
from reference_models import CHUNK, build, prompt
from reference_models import make_engine as make_engine_of
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from kvpager import NonFiniteError, UnsupportedModelError
from kvpager._model.facts import row_counts as settling
from kvpager._model.facts.checked_model import check_model
from kvpager._model.facts.count_trial import CountTrial
from kvpager._model.proof.prove import prove
from kvpager._model.seam.attach import attach
from kvpager._model.seam.observe import observe
from kvpager._model.watch.model_watch import ModelWatch
from kvpager.pager import Sequence

ROWS = 32
# Its products have other bits in some counts, which these tests are about.
make_engine = partial(make_engine_of, linear="torch")


@pytest.fixture(scope="module")
def model():
    """One model for all: what is wrong with it is put on and taken off its classes."""
    return build("qwen3_moe", num_hidden_layers=2)


class Head(torch.nn.Linear):
    """A class of its own, so that a fault of the head is no fault of other products."""


class Steps:
    """What follows the forward of a class: `step(rows, values, result)`, of tensors [rows, n]."""

    def __init__(self, kind):
        self.kind = kind
        self.step = lambda values, result: None

    def __enter__(self):
        self._own = vars(self.kind).get("forward")
        original = self.kind.forward

        def forward(module, x, *args, **kwargs):
            out = original(module, x, *args, **kwargs)
            result = out[0] if isinstance(out, tuple) else out
            self.step(*(t.detach().reshape(-1, t.shape[-1]) for t in (x, result)))
            return out

        self.kind.forward = forward
        return self

    def __exit__(self, *_):
        if self._own is None:
            del self.kind.forward
        else:
            self.kind.forward = self._own


def blind_spot(model, kind, count, alone=False):
    """A feature, and a value that it has in forwards of `count` rows of a trial, not of a proof.

    alone: of a trial and a proof of M rows, whatever forwards those have.
    """
    seen = []

    def note(values, result):
        if (alone or len(values) == count) and values.shape[1] == 256:
            told, times = np.unique(values.numpy(), axis=0, return_counts=True)
            seen.append(told[times == 1] if kind is not Head else told)  # without padding

    small_rows = "fixed" if alone else "proven"
    with Steps(kind) as steps:
        steps.step = note
        attach(model)
        proof = prove(model, observe(model, ROWS), small_rows)
        highest = highest_of(seen)
        seen.clear()
        assert count in (*proof.counts.ladder, *proof.counts.head)
        steps.step = lambda values, result: None
        with make_engine(model, small_rows=small_rows) as engine:
            steps.step = note
            with trial_of(engine) as trial:
                assert trial.differing() == []
                if alone:
                    assert trial.difference_of_all_rows() is None
    beyond = highest_of(seen) - highest
    feature = int(beyond.argmax())
    assert beyond[feature] > 0
    return feature, float(highest[feature])


def trial_of(engine):
    core = engine.core
    subject = check_model(core.model, core.config, core.workers)
    return CountTrial(subject, core.facts, ModelWatch(core.model))


def highest_of(rows):
    values = np.concatenate([*rows, np.full((1, 256), -1e30, dtype=np.float32)])
    return np.where(abs(values) < 1e4, values, -1e30).max(0)


@contextmanager
def faulty(kind, rows, feature, bound, first=0):
    """Forwards of the given row counts change rows whose feature is beyond the bound."""

    def change(values, result):
        chosen = values[:, feature] > bound
        chosen[:first] = False
        more = 2**-10 if len(values) in rows else 0.0  # by the same operations in every count
        result *= torch.where(chosen, 1 + more, 1.0)[:, None]

    with Steps(kind) as steps:
        steps.step = change
        yield


@pytest.fixture(scope="module")
def smallest(model):
    with make_engine(model) as engine:
        assert engine.row_counts.smaller
        assert engine.row_proof.dropped == tuple(
            drop for drop in engine.row_proof.dropped if "short check" not in drop.where
        )
        return engine.row_counts.smaller[0]


@pytest.fixture(scope="module")
def spot(model, smallest):
    return blind_spot(model, Qwen3MoeSparseMoeBlock, smallest)


def differing_logprobs(engine):
    prompts = [prompt(20, seed) for seed in range(4)]
    done = engine.run(prompts, 30, temperature=1.0, seed=[0, 1, 2, 3], logprobs=True, eos=None)
    texts = [np.concatenate([ids, one.tokens]) for ids, one in zip(prompts, done)]
    return sum(engine.score(ids).against(one.logprobs).differing for ids, one in zip(texts, done))


def test_a_count_that_a_short_text_finds_other_bits_in_is_dropped_and_named(
    model, smallest, spot, caplog, monkeypatch
):
    with faulty(Qwen3MoeSparseMoeBlock, [smallest], *spot):
        with caplog.at_level(logging.WARNING), make_engine(model) as engine:
            assert engine.row_counts.ladder == (ROWS,)
            assert engine.row_counts.head == (16,)
            found = [d for d in engine.row_proof.dropped if "the short check at start" in d.where]
            assert [d.rows for d in found] == [smallest]
            assert engine.pager.smaller_rows == ()
            (record,) = [r for r in caplog.records if r.name.startswith("kvpager")]
            assert f"{smallest} rows, the short check at start" in record.getMessage()
            assert "Qwen3MoeForCausalLM" in record.getMessage()
            assert differing_logprobs(engine) == 0
        # Without the check the proof takes the count, and a rollout is scored otherwise.
        monkeypatch.setattr(settling, "_to_be_checked", lambda subject, found: False)
        with make_engine(model) as unchecked:
            assert unchecked.row_counts.smaller[0] == smallest
            assert differing_logprobs(unchecked) > 0


@pytest.mark.deep
def test_it_is_the_engine_of_one_that_was_told_to_use_m_alone(model, smallest, spot, closing):
    with faulty(Qwen3MoeSparseMoeBlock, [smallest], *spot):
        fallen = closing(make_engine(model))
        fixed = closing(make_engine(model, small_rows="fixed"))
        assert dict(fallen.fingerprint) == dict(fixed.fingerprint)
        assert (fallen.row_counts, fallen.plan) == (fixed.row_counts, fixed.plan)


def test_a_count_that_was_asked_for_is_refused_by_name(model, smallest, spot):
    with (
        faulty(Qwen3MoeSparseMoeBlock, [smallest], *spot),
        pytest.raises(UnsupportedModelError, match=rf"but {smallest} rows .* short check at start"),
    ):
        make_engine(model, small_rows=(smallest,))


@pytest.mark.deep
def test_a_fault_of_the_head_alone_is_found_and_named(model):
    model.lm_head.__class__ = Head
    try:
        with make_engine(model) as engine:
            count = next(head for head in engine.row_counts.head if head != 16)
        spot = blind_spot(model, Head, count)
        with faulty(Head, [count], *spot), make_engine(model) as engine:
            found = [d for d in engine.row_proof.dropped if "short check" in d.where]
            assert engine.row_counts.head == (16,)
        assert [d.rows for d in found] == [count]
        assert "in the head" in found[0].where
    finally:
        model.lm_head.__class__ = torch.nn.Linear


def test_a_model_whose_rows_depend_on_their_place_in_m_is_refused(model):
    spot = blind_spot(model, Qwen3MoeSparseMoeBlock, ROWS, alone=True)
    everywhere = range(1, ROWS + 1)
    with (
        faulty(Qwen3MoeSparseMoeBlock, everywhere, *spot, first=1),
        pytest.raises(UnsupportedModelError, match="which tokens share a forward"),
    ):
        make_engine(model)


def test_keys_and_values_are_compared_as_raw_bits(model, monkeypatch):
    read = Sequence.read_kv
    calls = []

    def changed(self, layer, start, stop):
        keys, values = read(self, layer, start, stop)
        calls.append(layer)
        if len(calls) == 4:  # two layers of the cold run came first
            values.view(torch.int32)[stop - 1, -1, -1] ^= 1
        return keys, values

    with make_engine(model) as engine, trial_of(engine) as trial:
        monkeypatch.setattr(Sequence, "read_kv", changed)
        (found,) = trial.differing()
    assert found.rows == engine.row_counts.smaller[0]
    assert found.where.endswith(f"values of layer 1 at position {CHUNK + 7}")


def test_a_text_that_is_not_finite_leaves_m_alone(model, monkeypatch):
    run = CountTrial._run

    def overflowing(self, *args):
        for pieces, logits in run(self, *args):
            yield pieces, logits
            raise NonFiniteError("k of layer 0 has inf")

    monkeypatch.setattr(CountTrial, "_run", overflowing)
    with make_engine(model) as engine:
        assert engine.row_counts.smaller == ()
        assert any("could not be made" in drop.where for drop in engine.row_proof.dropped)


@pytest.mark.parametrize("options", [{}, {"small_rows": "fixed"}, {"exact": False}])
def test_it_is_made_for_mixtures_with_other_counts_than_m_alone(model, options, monkeypatch):
    class Made(Exception):  # noqa: N818
        pass

    def made(*_):
        raise Made

    monkeypatch.setattr(settling, "CountTrial", made)
    make_engine(build("llama"), **options).close()
    if options:
        make_engine(model, **options).close()
    else:
        with pytest.raises(Made):
            make_engine(model)


def test_it_leaves_nothing_behind(model, monkeypatch, caplog, closing):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    with caplog.at_level(logging.INFO):
        checked = closing(make_engine(model))
    said = [record.getMessage() for record in caplog.records]
    assert torch.equal(torch.get_rng_state(), state)
    monkeypatch.setattr(settling, "_to_be_checked", lambda subject, found: False)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        unchecked = closing(make_engine(model))
    assert said == [record.getMessage() for record in caplog.records]
    assert checked.stats() == unchecked.stats()
    assert not any(checked.stats()[name] for name in ("model_forwards", "model_rows"))
    assert checked.core.checkpoints.stats() == unchecked.core.checkpoints.stats()
    assert dict(checked.fingerprint) == dict(unchecked.fingerprint)
    assert checked.row_proof == unchecked.row_proof
    sessions = [closing(engine.session()) for engine in (checked, unchecked)]
    for session in sessions:
        session.prefill(prompt(40))
        assert session.generate(4, temperature=1.0, seed=1).tokens.tolist()
    assert_same_session(*sessions, "prefilled and decoded")
    checked.pager.check_invariants()


def test_counts_that_are_proven_again_for_a_changed_model_are_checked_again(
    model, smallest, spot, closing
):
    engine = closing(make_engine(model))
    session = engine.session()
    session.prefill(prompt(40))
    with faulty(Qwen3MoeSparseMoeBlock, [smallest], *spot):
        engine.weights_changed()
        assert engine.row_counts.ladder == (ROWS,)
        assert any("short check" in drop.where for drop in engine.row_proof.dropped)
        assert differing_logprobs(engine) == 0
        assert len(session.generate(3).tokens.tolist()) == 3


@pytest.mark.deep
def test_a_changed_model_whose_counts_were_asked_for_leaves_the_engine_as_it_was(
    model, smallest, spot, closing
):
    engine = closing(make_engine(model, small_rows=(smallest,)))
    known = engine.row_counts, dict(engine.fingerprint)
    with (
        faulty(Qwen3MoeSparseMoeBlock, [smallest], *spot),
        pytest.raises(UnsupportedModelError, match="short check at start"),
    ):
        engine.weights_changed()
    assert (engine.row_counts, dict(engine.fingerprint)) == known
    assert differing_logprobs(engine) == 0
