"""Salts: slow to guess from files, free where there is none; and snapshots of older releases."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch
import xxhash
from bits import assert_same_session
from reference_models import build, make_engine, prompt

from kvpager import FingerprintMismatchError, PagerConfig, salts
from kvpager.pager import Pager, open_snapshot
from kvpager.weights import old_weights_digest

SALT = "acme"
TEXT = prompt(40)


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture
def counted(monkeypatch):
    """The salts that were stretched."""
    seen = []
    whole = hashlib.scrypt

    def scrypt(password, **options):
        seen.append(password.decode())
        return whole(password, **options)

    salts.stretched.cache_clear()
    monkeypatch.setattr(hashlib, "scrypt", scrypt)
    yield seen
    salts.stretched.cache_clear()


def test_a_salt_is_stretched_once_per_process_and_no_salt_never(model, closing, counted):
    closing(make_engine(model)).session().prefill(TEXT)
    assert counted == []
    for _ in range(2):
        engine = closing(make_engine(model, salt=SALT))
        engine.session().prefill(TEXT)
        engine.cache_segment(TEXT, name="a")
        engine.score(TEXT)
    assert counted == [SALT]


def test_a_guess_at_a_salt_cannot_be_tried_on_a_file_without_stretching_it(
    model, tmp_path, closing
):
    engine = closing(make_engine(model, salt=SALT))
    session = engine.session()
    session.prefill(TEXT)
    session.save(tmp_path / "mine.kvsnap")
    snapshot = open_snapshot(tmp_path / "mine.kvsnap")
    told = json.dumps([snapshot.fingerprint, snapshot.session])
    for guess in (SALT.encode(), b"kvpager salt\0" + SALT.encode()):
        assert xxhash.xxh3_128_hexdigest(guess) not in told
    assert SALT not in told
    assert salts.salt_digest(SALT) not in told
    # Names of chunks: what a pager makes of the fingerprint, the tokens and the guess.
    names = snapshot.reader.chain_hashes
    assert engine.pager.chain_hashes(TEXT, SALT) != list(names)
    assert engine.pager.chain_hashes(TEXT, salts.stretched(SALT)) == list(names)


def as_older_releases_saved(engine, path, monkeypatch, **changes):
    """TEXT, as a snapshot of 1.1 says what it is."""
    with engine.session() as session:
        session.prefill(TEXT)
        parts = [session.sequence.read_kv(at, 0, len(TEXT)) for at in range(engine.layout.layers)]
    fingerprint = {
        **{k: v for k, v in engine.fingerprint.items() if k not in ("additions", "behaviour")},
        "weights": old_weights_digest(engine.model),
        "salt": xxhash.xxh3_128_hexdigest(b"kvpager salt\0" + engine.salt.encode()),
        **changes,
    }
    config = PagerConfig(pool_tokens=96, chunk_tokens=16, rows=32, host_bytes="8MiB")
    pager = Pager(engine.layout, config, rows=32, fingerprint=fingerprint)
    sequence = pager.sequence(salt=engine.salt)
    k, v = (torch.stack(one) for one in zip(*parts))
    sequence.append(TEXT, k, v, provenance="exact")
    with monkeypatch.context() as patched:
        patched.setattr("kvpager.pager.pager.salt_digest", salts.old_salt_digest)
        sequence.save(path, session={"version": 1})
    pager.close()


@pytest.mark.parametrize("salt", ["", SALT])
def test_a_snapshot_of_an_older_release_is_restored_as_exact(
    salt, model, tmp_path, closing, monkeypatch
):
    engine = closing(make_engine(model, salt=salt))
    path = tmp_path / "older.kvsnap"
    as_older_releases_saved(engine, path, monkeypatch)
    fresh = closing(make_engine(model, salt=salt))
    session = fresh.restore(path)
    assert {chunk.provenance for chunk in session.ledger()} == {"exact"}
    session.append([5])
    expected = engine.session()
    expected.prefill([*TEXT, 5])
    assert_same_session(session, expected, "restored")
    session.save(tmp_path / "again.kvsnap")
    assert_same_session(fresh.restore(tmp_path / "again.kvsnap"), expected, "saved again")


@pytest.mark.parametrize(
    ("field", "changes"), [("weights", {"weights": "0" * 32}), ("salt", {"salt": "0" * 32})]
)
def test_a_snapshot_of_an_older_release_of_another_model_or_tenant_is_refused(
    field, changes, model, tmp_path, closing, monkeypatch
):
    engine = closing(make_engine(model, salt=SALT))
    path = tmp_path / "older.kvsnap"
    as_older_releases_saved(engine, path, monkeypatch, **changes)
    with pytest.raises(FingerprintMismatchError) as refused:
        engine.restore(path, on_mismatch="approximate")
    assert refused.value.field == field
    other = closing(make_engine(model, salt="other"))
    as_older_releases_saved(engine, path, monkeypatch)
    with pytest.raises(FingerprintMismatchError) as refused:
        other.restore(path, on_mismatch="approximate")
    assert refused.value.field == "salt"


def test_what_an_older_release_did_not_tell_is_taken_for_no_additions(
    model, tmp_path, closing, monkeypatch
):
    path = tmp_path / "older.kvsnap"
    as_older_releases_saved(closing(make_engine(model)), path, monkeypatch)
    handle = model.model.norm.register_forward_hook(lambda module, given, output: output * 1.01)
    try:
        engine = closing(make_engine(model))
        with pytest.raises(FingerprintMismatchError) as refused:
            engine.restore(path, on_mismatch="approximate")
        assert refused.value.field == "additions"
    finally:
        handle.remove()
