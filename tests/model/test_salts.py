"""Salts: slow to guess from files, and free where there is none."""

from __future__ import annotations

import hashlib
import json

import pytest
import xxhash
from reference_models import build, make_engine, prompt

from kvpager._support import salts
from kvpager.pager import open_snapshot

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
