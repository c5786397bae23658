"""An engine goes on with a changed model: bits of a new engine, and nothing of the old model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from adapters import merge, with_adapters
from bits import assert_same_bits, assert_same_session
from drafts import draft_of
from recurrent_models import build_recurrent, make_recurrent_engine
from reference_models import CHUNK, build, make_engine, prompt

from kvpager import DirectoryStore, FingerprintMismatchError, InvalidArgumentError, PagerError

TEXT = prompt(50)


def trained(model):
    """As an optimiser would leave it."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)


def synchronised(model):
    """As a weight synchronisation would leave it, which torch does not count."""
    for parameter in model.parameters():
        parameter.data.mul_(1.02)


CHANGES = {
    "trained": (lambda: build("llama"), trained),
    "synchronised": (lambda: build("llama"), synchronised),
    "another adapter": (lambda: with_adapters("a", "b"), lambda m: m.set_adapter("b")),
    "merged": (lambda: with_adapters("a"), merge),
    "another dtype": (lambda: build("llama"), lambda m: m.bfloat16()),
    "more tokens": (
        lambda: build("llama"),
        lambda m: m.resize_token_embeddings(310, mean_resizing=False),
    ),
}


SLOW = ("merged", "more tokens")


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.deep if kind in SLOW else ()) for kind in CHANGES],
)
def test_everything_after_it_has_the_bits_of_a_new_engine(kind, tmp_path, closing):
    make, change = CHANGES[kind]
    model = make()
    store = DirectoryStore(tmp_path)
    engine = closing(make_engine(model, store=store))
    old = dict(engine.fingerprint)
    session = engine.session()
    session.prefill(TEXT)
    told = session.generate(5).tokens.tolist()
    session.save("old", store=store)
    twin = session.fork()
    change(model)
    engine.weights_changed()

    fresh = closing(make_engine(model))
    assert dict(engine.fingerprint) == dict(fresh.fingerprint)
    assert engine.fingerprint != old
    assert engine.row_counts == fresh.row_counts
    assert engine.vocab_size == fresh.vocab_size
    text = np.concatenate([TEXT, told])
    assert session.tokens.tolist() == text.tolist()  # its own, whatever the model says now
    expected = fresh.session()
    expected.prefill(text)
    session.prefill(text)
    assert {chunk.provenance for chunk in session.ledger()} == {"exact"}
    assert_same_session(session, expected, "prefilled")
    assert session.generate(6).tokens.tolist() == expected.generate(6).tokens.tolist()
    expected.prefill(expected.tokens)
    session.prefill(session.tokens)
    assert_same_session(session, expected, "decoded")
    session.save("new", store=store)
    assert_same_session(engine.restore("new", store=store), expected, "restored")
    assert_same_session(fresh.restore("new", store=store), expected, "restored by another engine")
    assert_same_session(session.fork(), expected, "forked")
    assert_same_bits(
        torch.from_numpy(engine.score(text).logprobs),
        torch.from_numpy(fresh.score(text).logprobs),
        "scored",
    )
    # What began before the change and was not touched goes on as a new session of its text would.
    alone = fresh.session()
    alone.prefill(text)
    assert twin.generate(4).tokens.tolist() == alone.generate(4).tokens.tolist()
    with pytest.raises(FingerprintMismatchError):
        engine.restore("old", store=store)
    engine.pager.check_invariants()


def test_nothing_of_the_old_model_is_found_again(tmp_path, closing):
    model = build("llama")
    store = DirectoryStore(tmp_path)
    engine = closing(make_engine(model, store=store))
    with engine.session() as session:
        session.prefill(TEXT)
        session.save("old", store=store)
    synchronised(model)
    engine.weights_changed()
    session = engine.session()
    session.prefill(TEXT)
    assert session.restored_tokens == 0
    assert engine.stats()["prefix_tokens_reused"] == 0
    assert session.tokens_computed == len(TEXT)


def test_a_session_is_known_once_however_often_its_sequence_was_exchanged(closing):
    model = build("llama")
    engine = closing(make_engine(model))
    session = engine.session()
    session.prefill(TEXT)
    for _ in range(4):
        synchronised(model)
        engine.weights_changed()
        assert list(engine.core.transcripts) == [session.transcript]
        assert len(list(engine.core.transcripts)) == 1
    session.prefill(TEXT)
    session.update([*TEXT[:20], *TEXT[:30]])
    assert engine.core.transcripts.of(session.sequence) is session.transcript
    assert len(list(engine.core.transcripts)) == 1


def test_a_pending_token_stays_pending_and_is_the_next_to_be_computed(closing):
    model = build("llama")
    engine = closing(make_engine(model))
    session = engine.session()
    session.prefill(TEXT)
    next(session.generate(3, stream="tokens"))
    pending = session.pending
    assert pending is not None
    trained(model)
    engine.weights_changed()
    assert session.pending == pending
    assert session.committed == 0
    assert session.length == len(TEXT) + 1
    fresh = closing(make_engine(model)).session()
    fresh.prefill(session.tokens)
    assert session.generate(4).tokens.tolist() == fresh.generate(4).tokens.tolist()


def test_a_generation_goes_on_over_the_change(closing):
    model = build("llama")
    engine = closing(make_engine(model))
    session = engine.session()
    session.prefill(TEXT)
    stream = session.generate(8, stream="tokens")
    first = [next(stream) for _ in range(3)]
    trained(model)
    engine.weights_changed()
    rest = list(stream)
    fresh = closing(make_engine(model)).session()
    fresh.prefill([*TEXT, *first])
    assert rest == fresh.generate(5).tokens.tolist()


def test_requests_of_a_scheduler_go_on(closing):
    model = build("llama")
    engine = closing(make_engine(model))
    with engine.scheduler() as scheduler:
        requests = [scheduler.submit(prompt(40, seed=i), 6, seed=0) for i in range(3)]
        for _ in range(3):
            scheduler.step()
        synchronised(model)
        engine.weights_changed()
        while not scheduler.idle:
            scheduler.step()
    assert [request.completion.finish_reason for request in requests] == ["length"] * 3
    assert {len(request.completion.tokens) for request in requests} == {6}


def test_segments_are_computed_again_when_they_are_used(closing):
    model = build("llama")
    engine = closing(make_engine(model))
    a, b = prompt(2 * CHUNK + 3, seed=1), prompt(CHUNK + 5, seed=2)
    for name, ids in (("a", a), ("b", b)):
        engine.cache_segment(ids, name=name)
    trained(model)
    engine.weights_changed()
    assert list(engine.segments) == ["a", "b"]
    fresh = closing(make_engine(model))
    for name, ids in (("a", a), ("b", b)):
        fresh.cache_segment(ids, name=name)
    parts = [prompt(7), "b", "a", prompt(5, seed=4)]
    assert_same_session(engine.assemble(parts), fresh.assemble(parts), "assembled")


def test_recurrent_states_are_forgotten_with_the_chunks(closing):
    model = build_recurrent("qwen3_next")
    engine = closing(make_recurrent_engine(model))
    session = engine.session()
    session.prefill(TEXT)
    trained(model)
    engine.weights_changed()
    assert engine.stats()["checkpoint_states"] == 0
    fresh = closing(make_recurrent_engine(model)).session()
    fresh.prefill([*TEXT, 5])
    session.append([5])
    assert_same_session(session, fresh, "recomputed")


def test_a_draft_models_cache_stays_and_guesses_for_the_new_model(closing):
    model, small = build("llama"), build("qwen3", num_hidden_layers=1)
    engine = closing(make_engine(model, draft=small))
    session = engine.session()
    session.prefill(TEXT)
    session.generate(6, speculate="draft").tokens.tolist()
    held = draft_of(session).length
    assert held
    trained(model)
    engine.weights_changed()
    assert draft_of(session).length == held
    fresh = closing(make_engine(model)).session()
    fresh.prefill(session.tokens)
    assert (
        session.generate(6, speculate="draft").tokens.tolist() == fresh.generate(6).tokens.tolist()
    )


def test_a_model_that_cannot_be_kept_leaves_the_engine_as_it_was(closing):
    model = build("llama")
    engine = closing(make_engine(model))
    session = engine.session()
    session.prefill(TEXT)
    before = dict(engine.fingerprint)
    kept = model.model.norm

    class Shifted(torch.nn.Module):
        def forward(self, x):
            return x.roll(1, dims=1)

    model.model.norm = Shifted()
    with pytest.raises(PagerError, match="Shifted"):
        engine.weights_changed()
    assert dict(engine.fingerprint) == before
    assert session.committed == len(TEXT)
    model.model.norm = kept
    session.append([5])
    fresh = closing(make_engine(model)).session()
    fresh.prefill([*TEXT, 5])
    assert_same_session(session, fresh, "put back")


def test_another_vocabulary_than_the_drafts_is_refused(closing):
    model = build("llama")
    engine = closing(make_engine(model, draft=build("qwen3", num_hidden_layers=1)))
    model.resize_token_embeddings(310, mean_resizing=False)
    with pytest.raises(InvalidArgumentError, match="310 token ids"):
        engine.weights_changed()
    assert engine.vocab_size == 300


def test_a_closed_engine_refuses_and_a_model_that_did_not_change_keeps_its_name(closing):
    model = build("llama")
    engine = closing(make_engine(model))
    before = dict(engine.fingerprint)
    engine.weights_changed()
    assert dict(engine.fingerprint) == before
    engine.close()
    with pytest.raises(InvalidArgumentError, match="closed"):
        engine.weights_changed()


def test_tokens_that_a_model_has_no_longer_are_refused_and_named(closing):
    model = build("llama")
    engine = closing(make_engine(model))
    session, other = closing(engine.session()), closing(engine.session())
    session.prefill(TEXT)
    other.prefill([3, 4])
    fingerprint = engine.fingerprint
    model.resize_token_embeddings(20, mean_resizing=False)
    with pytest.raises(
        InvalidArgumentError, match=f"20 token ids now.* a token {max(TEXT)}; close"
    ):
        engine.weights_changed()
    assert engine.fingerprint == fingerprint
    session.close()
    engine.weights_changed()
    other.generate(2, eos=None)
