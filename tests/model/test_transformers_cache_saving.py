"""The next script goes on with the K/V of a cache."""

from __future__ import annotations

import pytest
import torch
from bits import assert_same_bits
from cached_models import Cache, assert_close, forward, generate, ids_of, make_cache, shared, small
from reference_models import make_engine

from kvpager import (
    CorruptSnapshotError,
    DirectoryStore,
    FingerprintMismatchError,
    InvalidArgumentError,
    ModelChangedError,
    StorageError,
)

OPTIONS = {"pool_tokens": 96, "rows": 32, "chunk_tokens": 16, "host_bytes": "64MiB"}


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_a_restored_cache_goes_on_with_the_bits_of_the_saved_one(name, closing, tmp_path):
    model, cache = shared(name), closing(make_cache(shared(name), rewind_tokens=16))
    text = generate(model, ids_of(150), cache).sequences
    cache.save(tmp_path / "chat.kv")
    more = torch.cat([text, ids_of(30, 1)], dim=1)
    expected = generate(model, more, cache)
    other = small(name)  # as another process would load it
    restored = closing(Cache.restore(other, tmp_path / "chat.kv", **OPTIONS, rewind_tokens=16))
    assert restored.get_seq_length() == 157
    actual = generate(other, more, restored)
    assert_same_bits(torch.stack(actual.logits), torch.stack(expected.logits), "logits")
    assert {chunk.provenance for chunk in restored.ledger()} == {"decode"}


def test_a_prompt_that_was_restored_whole_is_answered_without_computing_it_again(closing, tmp_path):
    model, cache = shared(), closing(make_cache(shared()))
    first = generate(model, ids_of(50), cache)
    cache.save(tmp_path / "chat.kv")
    restored = closing(Cache.restore(model, tmp_path / "chat.kv", **OPTIONS))
    rows = []
    hook = model.model.layers[0].register_forward_pre_hook(
        lambda module, args: rows.append(args[0].shape[1])
    )
    again = generate(model, first.sequences[:, :57], restored, tokens=2)
    hook.remove()
    assert_same_bits(again.logits[0], first.logits[-1], "logits of the last token")
    assert rows == [1, 1]


def test_a_store_gets_the_new_chunks_alone(closing, tmp_path):
    model, cache = shared(), closing(make_cache(shared()))
    store = DirectoryStore(tmp_path)
    text = generate(model, ids_of(100), cache).sequences
    first = cache.save("chat", store=store)
    text = generate(model, torch.cat([text, ids_of(20, 1)], dim=1), cache).sequences
    second = cache.save("chat-2", store=store)
    assert second.bytes_written < first.bytes_written
    restored = closing(Cache.restore(model, "chat-2", store=store, **OPTIONS))
    assert restored.tokens.tolist() == cache.tokens.tolist()
    assert_close(generate(model, text, restored), generate(model, text))


def test_other_weights_options_or_files_are_refused_by_field(closing, tmp_path):
    model, cache = shared(), closing(make_cache(shared()))
    path = tmp_path / "chat.kv"
    generate(model, ids_of(60), cache)
    cache.save(path)
    changed = small("llama")
    with torch.no_grad():
        changed.lm_head.weight[3, 3] += 1
    for field, other, options in (
        ("weights", changed, {}),
        ("chunk_tokens", model, {"chunk_tokens": 32, "pool_tokens": 128}),
        ("k_dtype", model, {"kv_dtype": "float16"}),
    ):
        with pytest.raises(FingerprintMismatchError) as error:
            Cache.restore(other, path, **{**OPTIONS, **options})
        assert error.value.field == field
    with pytest.raises(StorageError):
        Cache.restore(model, tmp_path / "nothing.kv", **OPTIONS)
    path.write_bytes(b"nothing of ours")
    with pytest.raises(CorruptSnapshotError):
        Cache.restore(model, path, **OPTIONS)


def test_what_cannot_be_saved_is_refused_and_says_why(closing, tmp_path):
    model = small("llama")
    cache = closing(make_cache(model))
    with pytest.raises(InvalidArgumentError, match="holds 0 texts"):
        cache.save(tmp_path / "x.kv")
    forward(model, torch.cat([ids_of(20), ids_of(20, 1)]), cache)
    with pytest.raises(InvalidArgumentError, match=r"holds 2 texts.*batch_select_indices"):
        cache.save(tmp_path / "x.kv")
    cache.batch_select_indices(torch.tensor([1]))
    cache.save(tmp_path / "x.kv")
    with torch.no_grad():
        model.lm_head.weight[3, 3] += 1
    with pytest.raises(ModelChangedError):
        cache.save(tmp_path / "y.kv")
    assert not (tmp_path / "y.kv").exists()


def test_a_sessions_snapshot_is_taken_as_approximate_alone(closing, tmp_path):
    model = small("llama")
    session = closing(make_engine(model)).session()
    session.prefill(ids_of(60)[0])
    session.save(tmp_path / "session.kv")
    with pytest.raises(FingerprintMismatchError):
        Cache.restore(model, tmp_path / "session.kv", **OPTIONS)
    cache = closing(
        Cache.restore(model, tmp_path / "session.kv", on_mismatch="approximate", **OPTIONS)
    )
    assert {chunk.provenance for chunk in cache.ledger()} == {"approximate"}
    longer = torch.cat([ids_of(60), ids_of(9, 1)], dim=1)
    assert_close(generate(model, longer, cache), generate(model, longer))
