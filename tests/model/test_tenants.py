"""Tenants of one store: each is shown its own, and does not take another's names by accident."""

from __future__ import annotations

import json

import pytest
from reference_models import build, make_engine, prompt

from kvpager import DirectoryStore, FingerprintMismatchError, InvalidArgumentError
from kvpager.cli import main


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture
def store(model, tmp_path):
    """Snapshots of three tenants, one of whom has no salt; and a segment of one."""
    store = DirectoryStore(tmp_path / "store")
    for salt in ("", "a", "b"):
        with make_engine(model, salt=salt, store=store) as engine, engine.session() as session:
            session.prefill(prompt(20))
            session.save(f"of-{salt or 'nobody'}", store=store)
            if salt == "a":
                engine.cache_segment(prompt(20), name="text")
                engine.segments.save("text")
    return store


def names(entries):
    return [entry.name for entry in entries]


def test_an_engine_lists_what_its_own_salt_has_saved(model, store, closing):
    for salt, own in (
        ("", ["of-nobody"]),
        ("a", ["of-a", "segment-text"]),
        ("b", ["of-b"]),
        ("c", []),
    ):
        engine = closing(make_engine(model, salt=salt))
        assert names(engine.snapshots(store)) == own
    assert len(store.entries()) == 4
    with pytest.raises(InvalidArgumentError, match="store is None"):
        engine.snapshots()


def test_a_snapshot_of_another_salt_is_not_overwritten_unasked(model, store, closing):
    engine = closing(make_engine(model, salt="b", store=store))
    session = engine.session()
    session.prefill(prompt(30))
    before = store.open("of-a").logical_digest
    with pytest.raises(InvalidArgumentError, match=r"another salt.*overwrite=True"):
        session.save("of-a", store=store)
    with pytest.raises(InvalidArgumentError, match="another salt"):
        session.save("of-a", store=store, wait=False).result()
    assert store.open("of-a").logical_digest == before
    session.save("of-b", store=store)  # its own
    session.save("of-a", store=store, overwrite=True)
    assert names(engine.snapshots()) == ["of-a", "of-b"]
    assert closing(make_engine(model, salt="b")).restore("of-a", store=store).length == 30


def test_a_snapshot_of_another_model_is_not_overwritten_unasked(model, store, closing):
    other = build("llama")
    other.lm_head.weight.data.mul_(2)
    session = closing(make_engine(other)).session()
    session.prefill(prompt(30))
    with pytest.raises(InvalidArgumentError, match=r"another model \(weights differs\)"):
        session.save("of-nobody", store=store)
    session.save("of-nobody", store=store, overwrite=True)
    with pytest.raises(FingerprintMismatchError):
        closing(make_engine(model)).restore("of-nobody", store=store)


def test_other_numerics_of_the_same_model_go_on_under_its_name(model, store, closing):
    session = closing(make_engine(model, exact=False)).session()
    session.prefill(prompt(30))
    session.save("of-nobody", store=store)
    assert store.open("of-nobody").tokens.size == 30


def test_a_snapshot_of_another_salt_is_not_deleted_unasked(store):
    for name, salt in (("of-a", "b"), ("of-a", ""), ("segment-text", "b"), ("of-nobody", "a")):
        with pytest.raises(InvalidArgumentError, match=r"another salt.*force=True"):
            store.delete(name, salt=salt)
    store.delete("of-a", salt="a")
    store.delete("segment-text", salt="a")
    store.delete("of-nobody")
    store.delete("of-b", force=True)
    assert store.entries() == []


def test_the_command_lists_and_removes_those_without_a_salt_unless_told_otherwise(store, capsys):
    def listed(*options):
        assert main(["snapshot", "ls", store.path, "--format", "json", *options]) == 0
        values = json.loads(capsys.readouterr().out)
        return [one["name"] for one in values["snapshots"]], values["of_other_salts"]

    assert listed() == (["of-nobody"], 3)
    assert listed("--salt", "a") == (["of-a", "segment-text"], 2)
    assert listed("--every-salt") == (["of-a", "of-b", "of-nobody", "segment-text"], 0)
    assert main(["snapshot", "ls", store.path]) == 0
    assert "3 snapshots of other salts" in capsys.readouterr().out
    assert main(["snapshot", "rm", f"{store.path}/of-a"]) != 0
    assert "it was saved under a salt; give --force" in capsys.readouterr().err
    assert main(["snapshot", "rm", f"{store.path}/of-a", "--force"]) == 0
    capsys.readouterr()
    assert listed("--every-salt")[0] == ["of-b", "of-nobody", "segment-text"]
