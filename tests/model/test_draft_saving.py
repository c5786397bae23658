"""A draft model's cache in snapshots: it comes back with its session, or is computed again."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest
from apart import ids_of
from bits import assert_same_bits, assert_same_session
from drafts import Seen, draft_of, drafted_engine, noisy
from reference_models import CHUNK, build, make_engine, prompt

from kvpager import DirectoryStore, InvalidArgumentError
from kvpager.errors import CapacityError
from kvpager.pager import SnapshotInfo

IDS = prompt(100, 3)
NEW = 24


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture(scope="module")
def engine(model):
    with drafted_engine(model, model) as engine:
        yield engine


@pytest.fixture(params=["file", "store"])
def place(request, tmp_path):
    """Where to save: keyword arguments of `save` and `restore`, and the folder."""
    if request.param == "file":
        return Place({}, tmp_path, str(tmp_path / "chat"))
    return Place({"store": DirectoryStore(tmp_path / "store")}, tmp_path / "store", "chat")


class Place:
    def __init__(self, options, folder, name):
        self.options = options
        self.folder = folder
        self.name = name

    def save(self, session, **more):
        return session.save(self.name, **self.options, **more)

    def restore(self, engine, **more):
        return engine.restore(self.name, **self.options, **more)

    @property
    def companion(self):
        """Its file."""
        if self.options:
            return self.folder / "snapshots" / "chat.draft.kvsnap"
        return Path(self.name + ".draft")

    def damage(self):
        """Flips a bit in the middle of what the companion holds."""
        path = self.companion
        if self.options:  # of the store's packs, its own
            pack = self.options["store"].open("chat.draft").packs[0][0]
            path = self.folder / "packs" / f"{pack}.kvsnap"
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


def talked(engine):
    session = engine.session()
    session.prefill(IDS)
    session.generate(8, eos=None, speculate="draft").tokens.tolist()
    return session


@pytest.fixture
def session(engine):
    with talked(engine) as session:
        yield session


def goes_on(engine, place, session, caplog=None, **more):
    """Restores, continues with guesses, and compares with the session going on plainly."""
    expected = list(session.fork().generate(NEW, eos=None, logprobs=True, stream="tokens"))
    with Seen(engine) as seen:
        restored = place.restore(engine, **more)
        seen.restored_draft = draft_of(restored).length
        produced = list(
            restored.generate(NEW, eos=None, logprobs=True, speculate="draft", stream="tokens")
        )
    assert produced == expected
    assert restored.speculation.acceptance == 1
    return restored, seen


def test_a_session_is_restored_with_what_the_draft_held(engine, place, session):
    report = place.save(session)
    assert [companion.tokens for companion in report.companions] == [draft_of(session).length]
    restored, seen = goes_on(engine, place, session)
    assert seen.restored_draft == draft_of(session).length > len(IDS)
    assert seen.draft_tokens_fed < 2 * NEW
    twin = session.fork()
    twin.generate(NEW, eos=None).tokens.tolist()
    assert_same_session(restored, twin, "restored")
    ours, theirs = (draft_of(one).transcript.sequence for one in (restored, session))
    for layer in range(engine.draft.layout.layers):
        for a, b in zip(ours.read_kv(layer, 0, 100), theirs.read_kv(layer, 0, 100)):
            assert_same_bits(a, b, f"the draft's layer {layer}")


def test_a_save_beside_the_session_keeps_the_companion_as_it_was(engine, place, session):
    held, length = draft_of(session).length, session.length
    handle = place.save(session, wait=False)
    session.generate(30, eos=None, speculate="draft").tokens.tolist()
    session.trim(20)
    report = handle.result()
    assert report.companions[0].tokens == held
    restored = place.restore(engine)
    assert (restored.length, draft_of(restored).length) == (length, held)


def test_a_companion_that_is_missing_is_computed_again(engine, place, session, caplog):
    place.save(session)
    place.companion.unlink()
    with caplog.at_level(logging.WARNING):
        _, seen = goes_on(engine, place, session)
    assert "is left out" in caplog.text
    assert seen.restored_draft == 0
    assert seen.draft_tokens_fed > len(IDS)


def test_a_companion_of_another_save_is_computed_again(engine, place, session, caplog):
    place.save(session)
    kept = place.companion.read_bytes()
    session.generate(20, eos=None, speculate="draft").tokens.tolist()
    place.save(session)
    place.companion.write_bytes(kept)
    with caplog.at_level(logging.WARNING):
        _, seen = goes_on(engine, place, session)
    assert "is left out" in caplog.text
    assert seen.restored_draft == 0


def test_damage_in_a_companion_costs_the_companion_alone(engine, place, session, caplog):
    place.save(session)
    place.damage()
    with caplog.at_level(logging.WARNING):
        restored, seen = goes_on(engine, place, session)  # though on_corrupt is "fail"
    assert "computes a text again" in caplog.text
    assert seen.draft_tokens_fed > len(IDS)
    assert restored.recomputed_tokens == 0
    place.save(restored)  # the store was told, so that this writes the chunk anew
    with caplog.at_level(logging.WARNING):
        caplog.clear()
        _, seen = goes_on(engine, place, restored)
    assert caplog.text == ""
    assert seen.restored_draft > len(IDS)


def test_a_companion_that_cannot_be_opened_costs_the_companion_alone(
    engine, place, session, caplog
):
    place.save(session)
    place.companion.write_bytes(b"\0" * 5000)
    with caplog.at_level(logging.WARNING):
        _, seen = goes_on(engine, place, session)
    assert "is left out" in caplog.text
    assert seen.restored_draft == 0


def test_another_draft_model_begins_anew(model, place, session, caplog):
    place.save(session)
    expected = session.fork().generate(NEW, eos=None).tokens.tolist()
    with drafted_engine(model, noisy(model, 0.02)) as other:
        with caplog.at_level(logging.WARNING):
            restored = place.restore(other)
        assert "is left out" in caplog.text
        assert draft_of(restored).length == 0
        assert restored.generate(NEW, eos=None, speculate="draft").tokens.tolist() == expected


def test_a_draft_of_another_release_is_restored(engine, place, session, monkeypatch):
    """Guesses need no bits: what a session must refuse, its draft need not."""
    place.save(session)
    core = engine.draft.core
    older = {**core.facts.fingerprint, "torch_version": "0.0"}
    monkeypatch.setattr(core, "facts", dataclasses.replace(core.facts, fingerprint=older))
    _, seen = goes_on(engine, place, session)
    assert seen.restored_draft == draft_of(session).length


def test_an_engine_without_a_draft_restores_the_session_alone(model, place, session, caplog):
    place.save(session)
    expected = session.fork().generate(NEW, eos=None).tokens.tolist()
    with make_engine(model, pool_tokens=512) as plain, caplog.at_level(logging.WARNING):
        restored = place.restore(plain)
        assert restored.transcript.companions == []
        assert restored.generate(NEW, eos=None).tokens.tolist() == expected
    assert caplog.records == []


def test_a_session_that_never_guessed_is_saved_alone(engine, place):
    with engine.session() as session:
        session.prefill(IDS)
        assert place.save(session).companions == ()
        with place.restore(engine) as restored:
            restored.generate(8, eos=None, speculate="draft").tokens.tolist()
            assert restored.speculation.acceptance == 1


@pytest.mark.parametrize("upto", [1, CHUNK, 50, 101])
def test_a_save_of_a_beginning_has_the_companion_of_that_beginning(engine, place, session, upto):
    report = place.save(session, upto=upto)
    assert report.companions[0].tokens == upto
    with place.restore(engine) as restored:
        assert (restored.length, draft_of(restored).length) == (upto, upto)


def test_what_was_restored_can_be_saved_again_at_once(engine, place, session):
    place.save(session)
    with place.restore(engine) as restored:
        report = place.save(restored)
        assert report.companions[0].tokens == draft_of(session).length
        if place.options:
            assert report.companions[0].chunks_written <= 1  # the tail
    _, seen = goes_on(engine, place, session)
    assert seen.restored_draft == draft_of(session).length


def test_guesses_beyond_the_text_are_not_saved(model, place):
    with drafted_engine(model, noisy(model, 0.2)) as engine, talked(engine) as session:
        session.generate(30, eos=None, speculate="draft").tokens.tolist()
        assert session.speculation.acceptance < 1
        place.save(session)
        store = place.options.get("store")
        with place.restore(engine) as restored:
            held = draft_of(restored).transcript.tokens
            assert held.tolist() == session.tokens[: len(held)].tolist()
        if store is not None:
            info = SnapshotInfo.of(store.open("chat.draft"))
            assert info.tokens.tolist() == session.tokens[: len(info.tokens)].tolist()


def test_a_companion_that_cannot_be_frozen_is_left_out(engine, place, session, monkeypatch, caplog):
    def refuse(upto):
        raise CapacityError("no room for a tail")

    monkeypatch.setattr(draft_of(session), "freeze", refuse)
    with caplog.at_level(logging.WARNING):
        assert place.save(session).companions == ()
    assert "saved without its draft: no room" in caplog.text


def test_turns_in_a_store_write_the_new_chunks_of_the_companion(engine, session, tmp_path):
    store = DirectoryStore(tmp_path / "store")
    first = session.save("chat", store=store)
    session.generate(2 * CHUNK, eos=None, speculate="draft").tokens.tolist()
    second = session.save("chat", store=store)
    assert first.companions[0].chunks_written > 6
    assert second.companions[0].chunks_written <= 4
    assert second.companions[0].bytes_shared > 0


def test_a_generation_can_be_made_anew_after_a_restore(engine, place):
    options = {"eos": None, "temperature": 1.0}
    with engine.session() as session:
        session.prefill(IDS)
        session.generate(12, seed=1, **options).tokens.tolist()
        place.save(session)
        expected = session.regenerate(12, seed=2, **options).tokens.tolist()
        with place.restore(engine) as restored:
            assert (
                restored.regenerate(12, seed=2, speculate="draft", **options).tokens.tolist()
                == expected
            )
            restored.trim(50)
            place.save(restored)
        with place.restore(engine) as cut, pytest.raises(InvalidArgumentError):
            cut.regenerate(4)


def test_a_fork_of_a_restored_session_shares_the_restored_companion(engine, place, session):
    place.save(session)
    with place.restore(engine) as restored, restored.fork() as twin:
        assert draft_of(twin).length == draft_of(restored).length == draft_of(session).length
        expected = session.fork().generate(8, eos=None).tokens.tolist()
        for one in (twin, restored):
            assert one.generate(8, eos=None, speculate="draft").tokens.tolist() == expected


def test_logprobs_are_those_of_plain_decode_after_a_restore(engine, place, session):
    place.save(session)
    with place.restore(engine) as restored:
        ours = list(
            restored.generate(NEW, eos=None, logprobs=True, speculate="draft", stream="tokens")
        )
    assert ids_of(ours) == session.generate(NEW, eos=None).tokens.tolist()
