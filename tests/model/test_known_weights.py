"""Weights that were hashed before are known by a checksum of all their bytes, and only by it."""

from __future__ import annotations

import json
import stat

import numpy as np
import pytest
import torch
from cached_models import Cache
from reference_models import build, make_engine

from kvpager._model.watch.model_watch import ModelWatch
from kvpager._model.weights import digests as weights
from kvpager._model.weights.digests import known_weights_digest, weights_digest
from kvpager._support.remembered import recall, remember


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    folder = tmp_path / "cache"
    monkeypatch.setenv("KVPAGER_CACHE", str(folder))
    return folder


@pytest.fixture
def hashed(monkeypatch):
    """Bytes that went through BLAKE3."""
    blocks = []
    own = weights._BLAKE3

    def noting(block):
        blocks.append(len(block))
        return own.of_block(block)

    monkeypatch.setattr(weights, "_BLAKE3", weights._Hash(own.summary, noting))
    return blocks


def kept(cache):
    return sorted((cache / "weights").iterdir())


def test_weights_are_hashed_once_whichever_object_holds_them(hashed):
    expected = weights_digest(build("llama"))
    del hashed[:]
    assert known_weights_digest(build("llama")) == expected
    assert sum(hashed) > 0
    del hashed[:]
    for _ in range(2):
        assert known_weights_digest(build("llama")) == expected
    assert hashed == []


def test_an_engine_and_a_cache_take_a_digest_that_is_known(hashed, closing):
    first = closing(make_engine(build("llama")))
    assert sum(hashed) > 0
    del hashed[:]
    second = closing(make_engine(build("llama")))
    assert hashed == []
    assert second.fingerprint == first.fingerprint
    with Cache(build("llama"), pool_tokens=256) as cached:
        assert cached.fingerprint["weights"] == first.fingerprint["weights"]
    assert hashed == []


def test_weights_that_are_watched_are_not_read_again(hashed, closing, monkeypatch):
    first = closing(make_engine(build("llama")))
    monkeypatch.setattr(weights, "_blocks", None)
    second = closing(make_engine(build("llama")))
    assert second.fingerprint == first.fingerprint


def test_a_watch_has_the_checksums_of_what_it_read_alone(cache):
    model = build("llama")
    weight = model.lm_head.weight
    watch = ModelWatch(model)
    seed = weights.checksum_seed()
    expected = weights._seeded(seed).of_block(weight.detach().numpy().reshape(-1).view(np.uint8))
    assert watch.digests(weight, seed) == expected
    assert watch.digests(weight, seed + 1) is None
    assert watch.digests(weight[1:], seed) is None
    assert watch.digests(weight.T, seed) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.lm_head.weight.data.view(torch.int32)[-1, -1].bitwise_xor_(1),
        lambda model: model.model.embed_tokens.weight.data.view(torch.int32)[0, 0].bitwise_xor_(1),
        lambda model: model.model.rotary_emb.inv_freq[3].mul_(1.5),  # no checkpoint holds it
        lambda model: model.half(),
        lambda model: model.model.norm.register_buffer("more", torch.zeros(1)),
    ],
    ids=["last-bit", "first-bit", "buffer", "dtype", "tensor"],
)
def test_weights_that_differ_in_anything_are_hashed(hashed, change):
    model = build("llama")
    before = known_weights_digest(model)
    del hashed[:]
    change(model)
    after = known_weights_digest(model)
    assert sum(hashed) > 0
    assert after == weights_digest(model) != before


def test_bytes_in_another_order_are_other_weights(hashed):
    model = build("llama")
    weight = model.model.layers[0].mlp.up_proj.weight.data
    before = known_weights_digest(model)
    weight.copy_(weight.flip(0))
    assert known_weights_digest(model) == weights_digest(model) != before


def test_a_checksum_says_nothing_without_the_secret_that_it_was_made_with(hashed, cache):
    """So that nobody makes weights that are taken for others."""
    model = build("llama")
    known_weights_digest(model)
    secret = cache / "secret"
    first = secret.read_bytes()
    for value in (bytes([first[0] ^ 1]) + first[1:], b""):
        secret.write_bytes(value)
        del hashed[:]
        assert known_weights_digest(model) == weights_digest(model)
        assert len(hashed) > 0
    assert len({json.loads(path.read_text())["key"]["checksum"] for path in kept(cache)}) == 3


def test_a_forged_digest_is_nothing(hashed, cache):
    """Weights would be taken for others, and a snapshot of these be restored as exact."""
    model = build("llama")
    known_weights_digest(model)
    (path,) = kept(cache)
    path.write_text(json.dumps({**json.loads(path.read_text()), "value": "0" * 64}))
    assert known_weights_digest(model) == weights_digest(model)


def test_two_folders_have_seeds_of_their_own(cache, monkeypatch, tmp_path):
    known_weights_digest(build("llama"))
    monkeypatch.setenv("KVPAGER_CACHE", str(tmp_path / "other"))
    known_weights_digest(build("llama"))
    names = [[path.name for path in kept(folder)] for folder in (cache, tmp_path / "other")]
    assert names[0] != names[1]


@pytest.mark.parametrize("value", [None, "", "0" * 63, "Z" * 64, 3, ["0" * 64]])
def test_what_is_no_digest_is_nothing(cache, value):
    model = build("llama")
    digest = known_weights_digest(model)
    (path,) = kept(cache)
    key = json.loads(path.read_text())["key"]
    remember("weights", key, value)
    assert known_weights_digest(model) == digest
    assert recall("weights", key) == digest


def test_what_is_kept_is_its_owners_alone(cache):
    known_weights_digest(build("llama"))
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    for path in (*kept(cache), cache / "secret"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_folder_that_cannot_be_made_costs_the_hash_alone(hashed, cache):
    cache.write_text("a file")
    model = build("llama")
    for _ in range(2):
        del hashed[:]
        assert known_weights_digest(model) == weights_digest(model)
        assert len(hashed) > 0


def test_nothing_is_kept_where_that_is_not_wanted(hashed, cache, monkeypatch):
    monkeypatch.setenv("KVPAGER_CACHE", "off")
    model = build("llama")
    assert known_weights_digest(model) == weights_digest(model)
    assert not cache.exists()


def test_weights_that_are_exchanged_under_an_engine_are_not_kept(hashed, cache, closing):
    """A training loop does so at every step."""
    engine = closing(make_engine(build("llama")))
    before = kept(cache)
    with torch.no_grad():
        engine.model.lm_head.weight[0, 0] += 1
    engine.weights_changed()
    assert engine.fingerprint["weights"] == weights_digest(engine.model)
    assert kept(cache) == before


def test_progress_only_grows_and_ends_at_all_of_it():
    model = build("llama")
    total = sum(p.nbytes for p in [*model.parameters(), *model.buffers()])
    for last in (2 * total, total):
        calls = []
        known_weights_digest(model, lambda *call, calls=calls: calls.append(call))
        assert calls[0] == (0, total)
        assert calls[-1] == (last, last)
        assert calls == sorted(calls)
