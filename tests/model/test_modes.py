"""Modes: "reuse" seals exact chunks over provisional rows, False promises and shares nothing.

Row counts other than those of the ladder give other bits with torch's products in float32 (one test
says so), so that a provisional row left where it must not be is seen.
"""

from __future__ import annotations

import numpy as np
import pytest
from apart import apart, ids_of
from bits import assert_same_bits, assert_same_session
from reference_models import CHUNK, ROWS, build, make_engine, prompt

from kvpager import FingerprintMismatchError
from kvpager._model.watch.looks import only_looks

LENGTH = 37
NEW = 60


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture(scope="module")
def cold(model):
    """Of the mode "all": what everything sealed and saved is compared with."""
    with make_engine(model, pool_tokens=1024, linear="torch") as engine:
        yield engine


@pytest.fixture(scope="module")
def engine(model):
    with make_engine(model, pool_tokens=1024, exact="reuse", linear="torch") as engine:
        yield engine


@pytest.fixture
def session(engine, closing):
    session = closing(engine.session())
    session.prefill(prompt(LENGTH))
    return session


def assert_sealed_as_cold(session, cold, what):
    """Every sealed chunk is exact, and is what a cold run of the same tokens computes."""
    expected = apart(cold)
    expected.prefill(session.tokens)
    sealed = session.committed // CHUNK * CHUNK
    assert [info.provenance for info in session.ledger()[: sealed // CHUNK]] == (
        ["exact"] * (sealed // CHUNK)
    )
    for layer in range(session.core.facts.layout.layers):
        ours = session.sequence.read_kv(layer, 0, sealed)
        theirs = expected.sequence.read_kv(layer, 0, sealed)
        for name, a, b in zip(("keys", "values"), ours, theirs):
            assert_same_bits(a, b, f"{what}: {name} of layer {layer}")
    expected.close()


def differs_from_cold(session, cold):
    expected = apart(cold)
    expected.prefill(session.tokens)
    start = session.committed // CHUNK * CHUNK
    ours = session.sequence.read_kv(2, start, session.committed)[0]
    theirs = expected.sequence.read_kv(2, start, session.committed)[0]
    return bool((ours != theirs).any())


@pytest.fixture
def batches(engine, monkeypatch):
    """Notes of every forward: whether it is exact, its rows used and run, how many sequences."""
    notes = []
    run = engine.core.runner.run

    def note(batch):
        notes.append((batch.exact, batch.used, engine.core.runner.count(batch), len(batch.owners)))
        return run(batch)

    monkeypatch.setattr(engine.core.runner, "run", note)
    return notes


def test_rows_decoded_one_at_a_time_have_other_bits_here(session, cold):
    session.generate(8, eos=None).tokens.tolist()
    assert session.ledger()[-1].provenance == "decode"
    assert differs_from_cold(session, cold)


@pytest.mark.parametrize("count", [1, 10, 11, 12, 26, 27, 28, NEW])
def test_sealed_chunks_of_generated_text_are_those_of_a_cold_run(session, cold, count):
    session.generate(count, eos=None).tokens.tolist()
    assert session.length == LENGTH + count
    assert_sealed_as_cold(session, cold, f"{count} tokens")


def test_a_decode_step_has_as_many_rows_as_sessions_and_none_of_prompts(engine, batches):
    with engine.scheduler() as scheduler:
        decoding = [scheduler.submit(prompt(5, seed), 40, eos=None) for seed in range(3)]
        scheduler.submit(prompt(12 * ROWS, 9), 2, eos=None)
        while not scheduler.idle:
            scheduler.step()
    assert all(one.completion.finish_reason == "length" for one in decoding)
    ladder = engine.row_counts.ladder
    for exact, used, run, owners in batches:
        if exact:
            assert run in ladder
        else:
            assert run == used == owners  # one row for each, no prompt among them
    assert (False, 3, 3, 3) in batches
    assert (False, 1, 1, 1) in batches or (False, 2, 2, 2) in batches


def test_sessions_together_seal_what_each_seals_alone(engine, cold):
    prompts = [prompt(20 + 3 * seed, seed) for seed in range(5)]
    completions = engine.run(prompts, 40, eos=None, keep_sessions=True)
    for completion in completions:
        assert completion.finish_reason == "length"
        assert_sealed_as_cold(completion.session, cold, f"prompt {completion.index}")
        completion.session.close()


def test_a_count_of_the_ladder_leaves_nothing_to_settle(engine, cold, batches):
    count = engine.row_counts.smaller[0]
    sessions = [engine.session() for _ in range(count)]
    engine.prefill_many((session, prompt(4, i)) for i, session in enumerate(sessions))
    for _ in engine.generate_many(sessions, 8, eos=None):
        pass
    batches.clear()
    for session in sessions:
        session.append([5])
        whole = apart(cold)
        whole.prefill(session.tokens)
        assert_same_session(session, whole, "decoded in a proven row count")
    assert [used for _, used, _, _ in batches] == [2] * count  # the pending token and the new one


def test_generated_text_is_reused_by_the_next_prompt(engine, session):
    session.generate(NEW, eos=None).tokens.tolist()
    before = engine.stats()["prefix_tokens_reused"]
    with engine.session() as other:
        other.prefill(session.tokens)
        reused = engine.stats()["prefix_tokens_reused"] - before
        assert reused == session.committed // CHUNK * CHUNK


@pytest.mark.parametrize("new", [1, 5, 40])
def test_an_append_settles_and_gives_what_a_cold_prefill_gives(session, cold, new):
    session.generate(20, eos=None).tokens.tolist()
    session.append(prompt(new, 3))
    whole = apart(cold)
    whole.prefill(session.tokens)
    assert_same_session(session, whole, "appended")
    assert session.ledger()[-1].provenance == "exact"


@pytest.mark.parametrize("count", [1, 8, 11, 12, 20])
def test_a_snapshot_is_exact_and_saving_does_not_touch_the_session(
    session, cold, closing, tmp_path, count
):
    twin = session.fork()
    session.generate(count, eos=None).tokens.tolist()
    twin.generate(count, eos=None).tokens.tolist()
    text = session.tokens
    tail = session.sequence.read_kv(0, 0, session.committed)[0]
    session.save(tmp_path / "turn.kvsnap")
    assert_same_bits(session.sequence.read_kv(0, 0, session.committed)[0], tail, "the tail")
    again = closing(cold.restore(tmp_path / "turn.kvsnap"))
    assert again.tokens.tolist() == text.tolist()
    assert again.pending == session.pending
    whole = closing(apart(cold))
    whole.prefill(text[:-1])
    whole.transcript.set_pending(int(text[-1]))
    assert_same_session(again, whole, "restored in the mode all")
    assert {info.provenance for info in again.ledger()} == {"exact"}
    assert (
        session.generate(30, eos=None).tokens.tolist()
        == twin.generate(30, eos=None).tokens.tolist()
    )
    assert_sealed_as_cold(session, cold, "after a save")


@pytest.mark.parametrize("upto", [16, 20, 32, 45, 50])
def test_a_partial_save_is_exact_too(session, cold, closing, tmp_path, upto):
    session.generate(20, eos=None).tokens.tolist()
    session.save(tmp_path / "part.kvsnap", upto=upto)
    again = closing(cold.restore(tmp_path / "part.kvsnap"))
    whole = closing(apart(cold))
    whole.prefill(session.tokens[:upto])
    assert_same_session(again, whole, f"upto={upto}")


def test_a_snapshot_of_the_mode_all_goes_on_in_the_mode_reuse(engine, cold, closing, tmp_path):
    with cold.session() as session:  # a tail alone, which shares nothing
        session.prefill(prompt(10))
        session.generate(3, eos=None).tokens.tolist()
        session.save(tmp_path / "turn.kvsnap")
    again = closing(engine.restore(tmp_path / "turn.kvsnap"))
    again.generate(NEW, eos=None).tokens.tolist()
    assert_sealed_as_cold(again, cold, "gone on")


class ModelError(Exception):
    """What a test throws from the middle of the model."""


BEFORE = 3 * CHUNK - LENGTH  # tokens after which the pending one is to fill a chunk
AFTERWARDS = {
    "generate": lambda session: session.generate(9, eos=None).tokens.tolist(),
    "append": lambda session: session.append([7, 8]),
    "prefill": lambda session: session.prefill(session.tokens),
    "trim the pending token": lambda session: session.trim(session.length - 1),
    "trim into what is owed": lambda session: session.trim(session.length - 5),
    "trim what is owed": lambda session: session.trim(2 * CHUNK),
    "trim into a sealed chunk": lambda session: session.trim(CHUNK + 3),
}


@pytest.fixture
def interrupted(model, engine, session):
    """A session whose settling failed: its last tokens are owed."""
    stream = session.generate(NEW, eos=None, stream="tokens")
    for _ in range(BEFORE):
        next(stream)
    text, pending, logits = session.tokens, session.pending, session.logits
    assert session.length == 3 * CHUNK

    def interrupt(*_):
        raise ModelError

    handle = model.model.layers[1].mlp.register_forward_hook(only_looks(interrupt))
    try:
        with pytest.raises(ModelError):
            next(stream)
        with pytest.raises(ModelError):
            session.append([7])
    finally:
        handle.remove()
    assert session.committed == 2 * CHUNK
    assert session.transcript.uncomputed.tolist() == text[2 * CHUNK : -1].tolist()
    assert session.tokens.tolist() == text.tolist()
    assert session.pending == pending
    assert_same_bits(session.logits, logits, "logits")
    engine.pager.check_invariants()
    return session


@pytest.mark.parametrize("afterwards", AFTERWARDS)
def test_an_error_while_settling_loses_nothing(interrupted, cold, afterwards):
    text = interrupted.tokens.tolist()
    AFTERWARDS[afterwards](interrupted)
    kept = min(len(text), interrupted.length)
    assert interrupted.tokens.tolist()[:kept] == text[:kept]
    interrupted.generate(NEW, eos=None).tokens.tolist()
    assert interrupted.length >= kept + NEW
    assert_sealed_as_cold(interrupted, cold, f"interrupted, then {afterwards}")


def test_what_is_owed_is_forked_and_saved(interrupted, cold, closing, tmp_path):
    text, owed = interrupted.tokens.tolist(), interrupted.transcript.uncomputed.tolist()
    with interrupted.fork() as fork:
        assert fork.tokens.tolist() == text
        assert fork.transcript.uncomputed.tolist() == owed
    interrupted.save(tmp_path / "turn.kvsnap")
    assert interrupted.transcript.uncomputed.tolist() == owed
    again = closing(cold.restore(tmp_path / "turn.kvsnap"))
    assert again.tokens.tolist() == text
    whole = closing(apart(cold))
    whole.prefill(text[:-1])
    whole.transcript.set_pending(text[-1])
    assert_same_session(again, whole, "saved while tokens were owed")


def test_settling_in_several_forwards_goes_on_after_an_error_between_them(model, cold, closing):
    options = {"pool_tokens": 1024, "rows": 8, "linear": "torch"}
    engine = closing(make_engine(model, exact="reuse", **options))
    reference = closing(make_engine(model, **options))
    session = engine.session()
    session.prefill(prompt(LENGTH))
    stream = session.generate(NEW, eos=None, stream="tokens")
    for _ in range(BEFORE):
        next(stream)
    text = session.tokens.tolist()
    calls = []

    def fail_second(*_):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    handle = model.model.layers[1].mlp.register_forward_hook(only_looks(fail_second))
    try:
        with pytest.raises(KeyboardInterrupt):
            next(stream)
    finally:
        handle.remove()
    assert session.tokens.tolist() == text
    assert session.committed == 2 * CHUNK + 8
    assert len(session.transcript.uncomputed) == 7
    session.generate(NEW, eos=None).tokens.tolist()
    assert_sealed_as_cold(session, reference, "settled in pieces")


def test_trims_of_provisional_rows_keep_the_promise(session, cold):
    random = np.random.default_rng(1)
    for _ in range(12):
        session.generate(int(random.integers(1, 25)), eos=None).tokens.tolist()
        assert_sealed_as_cold(session, cold, "generated")
        session.trim(int(random.integers(1, session.length + 1)))
        assert_sealed_as_cold(session, cold, "trimmed")
        logits = session.logits  # of whatever is there now
        assert logits.isfinite().all()


def test_the_modes_all_and_reuse_are_one_to_a_snapshot_and_false_is_another(
    model, engine, cold, closing, tmp_path
):
    approximate = closing(make_engine(model, exact=False))
    assert engine.fingerprint == cold.fingerprint
    session = approximate.session()
    session.prefill(prompt(40))
    session.generate(20, eos=None).tokens.tolist()
    session.save(tmp_path / "turn.kvsnap")
    with pytest.raises(FingerprintMismatchError) as refused:
        cold.restore(tmp_path / "turn.kvsnap")
    assert refused.value.field in ("exact", "rows")
    again = closing(approximate.restore(tmp_path / "turn.kvsnap"))
    assert_same_session(again, session, "restored where it was made")
    assert {info.provenance for info in again.ledger()} == {"decode"}
    waived = closing(cold.restore(tmp_path / "turn.kvsnap", on_mismatch="approximate"))
    assert {info.provenance for info in waived.ledger()} == {"approximate"}


def test_without_exactness_nothing_is_shared(model, closing):
    engine = closing(make_engine(model, pool_tokens=512, exact=False))
    first, second = engine.session(), engine.session()
    first.prefill(prompt(100))
    first.generate(20, eos=None).tokens.tolist()
    second.prefill(first.tokens)
    stats = engine.stats()
    assert stats["prefix_tokens_reused"] == stats["chunks_shared"] == 0
    assert {info.provenance for info in second.ledger()} == {"decode"}
    assert not first.transcript.uncomputed.size


def test_without_exactness_a_forward_has_exactly_the_rows_there_are(model, closing):
    engine = closing(make_engine(model, pool_tokens=512, exact=False))
    session = engine.session()
    session.prefill(prompt(ROWS + 5))
    session.generate(4, eos=None).tokens.tolist()
    engine.run([prompt(5), prompt(6, 1)], 4, eos=None)
    assert session.logits.isfinite().all()
    engine.score(prompt(20))
    stats = engine.stats()
    assert stats["model_rows"] == stats["model_rows_used"]


def test_without_exactness_text_is_close_to_what_it_is_with_it(model, cold, closing):
    engine = closing(make_engine(model, pool_tokens=512, exact=False))
    ids = prompt(80)
    ours, theirs = engine.session(), apart(cold)
    for session in (ours, theirs):
        session.prefill(ids)
    assert (ours.logits - theirs.logits).abs().max() < 1e-3
    ours = list(ours.generate(5, eos=None, logprobs=True, stream="tokens"))
    theirs = list(theirs.generate(5, eos=None, logprobs=True, stream="tokens"))
    assert ids_of(ours) == ids_of(theirs)
    np.testing.assert_allclose(
        [token.logprob for token in ours], [token.logprob for token in theirs], atol=1e-3
    )
