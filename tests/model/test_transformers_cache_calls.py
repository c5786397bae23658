"""Calls of a model with a transformers cache, and how its text is saved and restored."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import threading
from pathlib import Path

import pytest
import torch
from bits import assert_same_bits
from cached_models import Cache, assert_close, forward, generate, ids_of, make_cache, shared, small
from reference_models import make_engine

from interrupts import at_every_instant
from kvpager import (
    CorruptSnapshotError,
    DirectoryStore,
    FingerprintMismatchError,
    InvalidArgumentError,
    ModelChangedError,
    StorageError,
    UnsupportedModelError,
)
from kvpager._model.seam.attention import is_running
from kvpager._model.seam.causal_lm import handed

sys.path.append(str(Path(__file__).parents[1] / "python"))


TEXT, MORE = ids_of(50), ids_of(90, 1)


@pytest.fixture(scope="module", params=["llama", "mistral"])
def uninterrupted(request):
    """Logits of a model that nobody else uses, before it had a cache, and of two calls with one."""
    model = small(request.param)
    stock = forward(model, TEXT)
    with make_cache(model, rewind_tokens=16) as cache:
        forward(model, TEXT, cache)
        logits = forward(model, MORE, cache)
    return model, stock, logits


def after_text(model):
    """A cache that holds a text; the next prompt releases chunks of it behind a window."""
    cache = make_cache(model, rewind_tokens=16)
    forward(model, TEXT, cache)
    return cache


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize(("place", "part"), [(0, 1), (1, 2), (2, 3), ("head", 1), ("norm", 3)])
def test_a_call_that_fails_anywhere_leaves_the_cache_as_it_was(
    error, place, part, uninterrupted, closing
):
    model, stock, expected = uninterrupted
    cache = closing(after_text(model))
    before = [chunk.provenance for chunk in cache.ledger()]
    module = {"head": model.lm_head, "norm": model.model.norm}.get(place)
    module = model.model.layers[place] if module is None else module
    calls = []

    def fail(module, args):
        calls.append(1)
        if len(calls) == part:
            raise error("here")

    hook = module.register_forward_pre_hook(fail)
    with pytest.raises(error, match="here"):
        forward(model, MORE, cache)
    hook.remove()
    assert_same_bits(forward(model, TEXT), stock, "a call without the cache")
    assert not is_running()
    assert cache.get_seq_length() == 50
    assert [chunk.provenance for chunk in cache.ledger()] == before
    cache.pager.check_invariants()
    assert_same_bits(forward(model, MORE, cache), expected, "the same call again")


def test_an_interrupted_call_is_undone_by_whatever_the_cache_is_asked_first(uninterrupted):
    model, _, _ = uninterrupted
    calls = []

    def stop(module, args):
        calls.append(1)
        if len(calls) % 3 == 0:  # the last part, after which torch calls no hook
            raise KeyboardInterrupt

    questions = (
        lambda cache: cache.get_seq_length() == 50,
        lambda cache: len(cache.tokens) == 50,
        lambda cache: cache.fork().get_seq_length() == 50,
        lambda cache: cache.crop(-1) is None and cache.get_seq_length() == 49,
        lambda cache: cache.close() is None,
    )
    for question in questions:
        cache = after_text(model)
        hook = model.model.norm.register_forward_pre_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            forward(model, MORE, cache)
        hook.remove()
        assert cache.pager.core.forward_running()
        assert question(cache)
        cache.close()


@pytest.mark.parametrize("most", [12, pytest.param(None, marks=pytest.mark.deep)])
def test_an_interrupt_at_any_return_leaves_the_cache_as_it_was_or_with_the_call(
    most, uninterrupted
):
    model, stock, expected = uninterrupted

    def check(cache, interrupted):
        assert_same_bits(forward(model, TEXT), stock, "a call without the cache")
        assert not is_running()
        length = cache.get_seq_length()
        assert length in (50, 140)
        cache.pager.check_invariants()
        if length == 50:
            assert_same_bits(forward(model, MORE, cache), expected, "the same call again")

    at_every_instant(
        lambda: after_text(model),
        lambda cache: forward(model, MORE, cache),
        check,
        lambda cache: cache.close(),
        most=most,
    )


def test_calls_without_the_cache_have_stock_bits_and_hooks_go_with_the_last_cache():
    model = small("llama")
    stock, tokens = forward(model, TEXT), generate(model, TEXT)
    one = make_cache(model)
    two = one.fork()
    other = make_cache(model)
    generate(model, TEXT, two)
    assert_same_bits(forward(model, TEXT), stock, "logits")
    assert_same_bits(torch.stack(generate(model, TEXT).logits), torch.stack(tokens.logits), "all")
    modules = (model, model.model)

    def hooks():
        return [(len(x._forward_pre_hooks), len(x._forward_hooks)) for x in modules]

    assert hooks() == [(1, 1), (1, 1)]
    one.close()
    del two
    other.close()
    del one, other  # closed ones may be kept
    gc.collect()
    assert hooks() == [(0, 0), (0, 0)]


def test_a_closed_cache_is_refused_and_frees_the_hooks():
    model = small("llama")
    cache = make_cache(model)
    cache.close()
    cache.close()
    assert not model._forward_pre_hooks
    assert repr(cache) == "Cache(closed)"
    for use in (lambda: cache.tokens, lambda: cache.crop(-1), cache.fork, cache.stats):
        with pytest.raises(InvalidArgumentError, match="the cache is closed"):
            use()
    with pytest.raises(InvalidArgumentError, match="a layer handed its keys"):
        generate(model, TEXT, cache)


def test_a_collected_cache_whose_call_was_interrupted_leaves_no_trace():
    model = small("llama")
    stock = forward(model, TEXT)

    def interrupted():
        def stop(module, args):
            raise KeyboardInterrupt

        cache = make_cache(model)
        hook = model.model.norm.register_forward_pre_hook(stop)
        try:
            forward(model, TEXT[:, :20], cache)
        except KeyboardInterrupt:
            hook.remove()
        assert is_running()  # nobody was told of the interrupt

    interrupted()
    gc.collect()
    assert not model._forward_pre_hooks
    assert not is_running()
    assert_same_bits(forward(model, TEXT), stock, "logits")


def test_another_model_is_refused_and_a_copy_of_a_model_has_no_working_hooks(closing):
    model = small("llama")
    cache = closing(make_cache(model))
    copied = copy.deepcopy(model)
    with pytest.raises(InvalidArgumentError, match="a kvpager cache of another LlamaForCausalLM"):
        forward(copied, TEXT, cache)
    assert_same_bits(forward(copied, TEXT), forward(model, TEXT), "logits")
    own = closing(make_cache(copied))
    assert len(copied._forward_pre_hooks) == 1
    assert_close(generate(copied, TEXT, own), generate(model, TEXT))
    forward(pickle.loads(pickle.dumps(small("llama"))), TEXT)


def test_shallow_copies_and_pickles_are_refused_by_name(closing):
    cache = closing(make_cache(shared()))
    with pytest.raises(InvalidArgumentError, match=r"cache\.fork\(\)"):
        copy.copy(cache)
    with pytest.raises(InvalidArgumentError, match=r"cache\.save\(path\)"):
        pickle.dumps(cache)


def test_a_compiled_model_is_refused(closing):
    model = small("llama")
    cache = closing(make_cache(model))
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(InvalidArgumentError, match="call the very model"):
        forward(compiled, TEXT, cache)
    torch._dynamo.reset()
    model.compile(backend="eager")
    with pytest.raises(InvalidArgumentError, match="not compiled"):
        forward(model, TEXT, cache)
    with pytest.raises(UnsupportedModelError, match="is compiled"):
        make_cache(model)
    assert cache.get_seq_length() == 0


def test_a_layer_that_is_run_alone_with_a_cache_is_refused(closing):
    model, cache = shared(), closing(make_cache(shared()))
    hidden = torch.zeros(1, 2, 64)
    rope = model.model.rotary_emb(hidden, torch.arange(2)[None])
    with pytest.raises(InvalidArgumentError, match="outside of a call"):
        model.model.layers[0](hidden, position_embeddings=rope, **handed(model, cache))


def test_one_cache_in_two_threads_is_refused_and_forks_take_turns(closing):
    model, cache = shared(), closing(make_cache(shared(), pool_tokens=256))
    inside, go_on = threading.Event(), threading.Event()

    def wait(module, args):
        if threading.current_thread() is not threading.main_thread() and not inside.is_set():
            inside.set()
            go_on.wait(5)

    hook = model.model.layers[1].register_forward_pre_hook(wait)
    results = []
    twin = closing(cache.fork())
    first = threading.Thread(target=lambda: results.append(generate(model, TEXT, cache)))
    first.start()
    assert inside.wait(10)
    with pytest.raises(InvalidArgumentError, match="another thread is running the model with this"):
        generate(model, TEXT, cache)
    with pytest.raises(InvalidArgumentError, match="crop: a forward of the model"):
        cache.crop(-1)
    with pytest.raises(InvalidArgumentError, match="close: a forward of the model"):
        cache.close()
    second = threading.Thread(target=lambda: results.append(generate(model, TEXT, twin)))
    second.start()
    go_on.set()
    first.join()
    second.join()
    hook.remove()
    expected = generate(model, TEXT)
    assert len(results) == 2
    for result in results:
        assert_close(result, expected)


def test_a_call_inside_a_call_is_refused_and_the_outer_one_goes_on(closing):
    model, cache = small("llama"), closing(make_cache(shared()))
    cache = closing(make_cache(model))
    seen = []

    def again(module, args):
        if not seen:
            seen.append(1)
            with pytest.raises(InvalidArgumentError, match="inside another such call"):
                forward(model, TEXT, cache)

    hook = model.model.layers[1].register_forward_pre_hook(again)
    actual = forward(model, MORE, cache)
    hook.remove()
    assert seen
    torch.testing.assert_close(actual, forward(model, MORE), atol=2e-4, rtol=1e-4)
    assert cache.get_seq_length() == 90


def test_an_engine_beside_it_keeps_its_bits(closing):
    model = small("llama")
    engine = closing(make_engine(model))

    def turn():
        session = engine.session()
        session.prefill(TEXT[0])
        return session.logits

    expected = turn()
    cache = closing(make_cache(model))
    generate(model, TEXT, cache)
    engine.pager.evict_all()
    assert_same_bits(turn(), expected, "logits of the engine")
    later = closing(make_engine(model))
    assert later.fingerprint == engine.fingerprint  # hooks of a cache change no results
    generate(model, torch.cat([generate(model, TEXT).sequences, MORE], dim=1), cache)


def test_asking_for_hidden_states_does_not_count_as_another_model(closing):
    """transformers leaves a hook on every layer that only collects."""
    model = small("llama")
    engine, cache = closing(make_engine(model)), closing(make_cache(model))
    forward(model, TEXT, output_hidden_states=True)
    session = engine.session()
    session.prefill(TEXT[0])
    assert make_cache(model).fingerprint == cache.fingerprint


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
