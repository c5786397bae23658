"""A snapshot that lies under another's name is never taken for that one."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from reference_models import CHUNK, VOCAB, build, make_engine, prompt

from kvpager import CorruptSnapshotError, DirectoryStore, InvalidArgumentError
from kvpager.segments import segment, shelf
from kvpager.stores import FileStore
from kvpager.stores.segments import SegmentNote

TEXTS = {
    name: np.random.default_rng(seed).integers(8, VOCAB, 2 * CHUNK + 5).astype(np.int32)
    for name, seed in (("a", 1), ("b", 2))
}


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture
def store(model, tmp_path):
    store = DirectoryStore(tmp_path / "store")
    with make_engine(model, store=store) as engine:
        for name, ids in TEXTS.items():
            engine.cache_segment(ids, name=name)
            engine.segments.save(name)
        session = engine.session()
        session.prefill(prompt(40))
        session.save("mine", store=store)
        session.append(prompt(5, seed=3))
        session.save("other", store=store)
    return store


def manifest(store, name):
    return Path(store.path) / "snapshots" / f"{name}.kvsnap"


def put_in_place(store, source, target):
    """As a tenant with write access, or a wrong `mv`, would."""
    shutil.copyfile(manifest(store, source), manifest(store, target))
    os.utime(manifest(store, target), ns=(1, 1))


def test_a_segment_under_anothers_name_is_refused_and_never_assembled(model, store, closing):
    put_in_place(store, "segment-b", "segment-a")
    engine = closing(make_engine(model, store=store))
    with pytest.raises(CorruptSnapshotError, match=r"'segment-b'.*'segment-a'"):
        engine.assemble([TEXTS["b"], "a"])
    with pytest.raises(CorruptSnapshotError, match="segment-a"):
        engine.segments.load("a")
    assert list(engine.segments) == []
    assert engine.segments.load("b").tokens.tolist() == TEXTS["b"].tolist()


def test_a_segments_file_under_anothers_name_is_refused_by_what_it_says_of_itself(
    model, tmp_path, closing
):
    store = FileStore(tmp_path)
    engine = closing(make_engine(model))
    engine.cache_segment(TEXTS["b"], name="b")
    engine.segments.save("b", store)
    (tmp_path / "segment-b").rename(tmp_path / "segment-a")
    engine.segments.remove("b")
    with pytest.raises(CorruptSnapshotError, match=r"segment 'b'.*expected 'a'"):
        engine.segments.load("a", store)
    assert list(engine.segments) == []


def test_a_segment_whose_digest_is_of_other_ids_is_refused(model, tmp_path, closing, monkeypatch):
    store = FileStore(tmp_path)
    engine = closing(make_engine(model))
    engine.cache_segment(TEXTS["b"], name="b")
    whole = SegmentNote.to_session
    monkeypatch.setattr(
        SegmentNote,
        "to_session",
        lambda note: {"segment": {**whole(note)["segment"], "digest": "0" * 32}},
    )
    engine.segments.save("b", store)
    engine.segments.remove("b")
    with pytest.raises(CorruptSnapshotError, match="digest"):
        engine.segments.load("b", store)


def test_texts_that_collide_in_a_digest_are_two_segments(model, closing, monkeypatch):
    for module in (segment, shelf):
        monkeypatch.setattr(module, "digest_of", lambda tokens: "0" * 64)
    engine = closing(make_engine(model))
    engine.cache_segment(TEXTS["a"], name="a")
    with pytest.raises(InvalidArgumentError, match="another text"):
        engine.cache_segment(TEXTS["b"], name="a")


def test_a_snapshot_under_anothers_name_in_a_directory_store_is_refused(model, store, closing):
    put_in_place(store, "other", "mine")
    engine = closing(make_engine(model))
    with pytest.raises(CorruptSnapshotError, match=r"'other'.*'mine'"):
        engine.restore("mine", store=store)
    assert engine.restore("other", store=store).length == 45
    entries = {entry.name: entry for entry in store.entries()}
    assert "'other'" in entries["mine"].error
    assert entries["other"].error is None
    session = engine.session()
    session.prefill(prompt(40))
    session.save("mine", store=store)  # puts it right
    assert engine.restore("mine", store=store).length == 40
    assert {entry.error for entry in store.entries()} == {None}


def test_a_misnamed_snapshot_can_be_deleted_and_its_chunks_stay_with_their_own(store):
    put_in_place(store, "other", "mine")
    store.delete("mine")
    assert store.verify("other") == []


def test_a_single_file_may_be_renamed_and_copied_into_a_store_under_any_name(
    model, tmp_path, store, closing
):
    engine = closing(make_engine(model))
    reader = store.open("mine")
    FileStore(tmp_path).save(
        "first.kvsnap", reader, fingerprint=reader.fingerprint, session=reader.session
    )
    (tmp_path / "first.kvsnap").rename(tmp_path / "second.kvsnap")
    assert engine.restore(tmp_path / "second.kvsnap").length == 40
    again = FileStore(tmp_path).open("second.kvsnap")
    store.save("third", again, fingerprint=again.fingerprint, session=again.session)
    assert engine.restore("third", store=store).length == 40
    assert json.loads(store.open("third").session)["stored_as"] == "third"
