"""A model generates with a kvpager cache what it generates with a stock one."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import transformers
from bits import assert_same_bits
from cached_models import (
    NAMES,
    assert_close,
    forward,
    generate,
    ids_of,
    make_cache,
    shared,
    small,
)
from devices import DEVICES, require, tensors_of
from reference_models import make_engine

from kvpager import CapacityError, InvalidArgumentError, TopK, UnsupportedModelError
from kvpager._model.seam.causal_lm import CACHE_ARGUMENTS, cache_argument, handed


@pytest.mark.parametrize("name", NAMES)
def test_generation_beyond_the_pool_is_that_of_a_stock_cache(name, closing):
    model, ids = shared(name), ids_of(150)
    cache = closing(make_cache(model))
    expected = generate(model, ids)
    assert_close(generate(model, ids, cache), expected)
    assert cache.get_seq_length() == expected.sequences.shape[1] - 1
    assert cache.tokens.tolist()[:150] == ids[0].tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_a_device_generates_what_a_stock_cache_does(device, closing):
    device = require(device)
    model = small("mistral").to(tensors_of(device))
    ids = torch.cat([ids_of(70), torch.nn.functional.pad(ids_of(41, 1), (29, 0))])
    ids = ids.to(model.device)
    mask = torch.ones_like(ids)
    mask[1, :29] = 0
    kind = "shim" if device == "shim" else "auto"
    cache = closing(make_cache(model, pool_tokens=192, device=kind))
    expected = generate(model, ids, attention_mask=mask)
    assert_close(generate(model, ids, cache, attention_mask=mask), expected)


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "mistral"])
def test_a_batch_with_left_padding_generates_what_a_stock_cache_does(name, closing):
    model = shared(name)
    ids = torch.cat([ids_of(70), torch.nn.functional.pad(ids_of(41, 1), (29, 0))])
    mask = torch.ones_like(ids)
    mask[1, :29] = 0
    expected = generate(model, ids, attention_mask=mask)
    cache = closing(make_cache(model, pool_tokens=128))
    assert_close(generate(model, ids, cache, attention_mask=mask), expected)
    assert [sequence.length for sequence in cache.sequences] == [77, 48]
    chunked = closing(make_cache(model, pool_tokens=128))
    options = {"attention_mask": mask, "prefill_chunk_size": 20}  # the first of padding alone
    assert_close(generate(model, ids, chunked, **options), expected)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_padding_may_be_longer_than_a_forward(name, closing):
    """As a tokenizer's padding="max_length" makes it."""
    model, text = shared(name), ids_of(40)
    ids = torch.nn.functional.pad(text, (80, 0))
    mask = torch.nn.functional.pad(torch.ones_like(text), (80, 0))
    cache = closing(make_cache(model, pool_tokens=192))
    assert 2 * cache.host.pager.rows < 80
    expected = generate(model, ids, attention_mask=mask)
    assert_close(generate(model, ids, cache, attention_mask=mask), expected)
    assert cache.sequences[0].length == 47


def test_logits_of_columns_that_are_padding_everywhere_are_not_to_be_had(closing):
    model, text = shared(), ids_of(40)
    cache = closing(make_cache(model, pool_tokens=192))
    ids = torch.nn.functional.pad(text, (80, 0))
    mask = torch.nn.functional.pad(torch.ones_like(text), (80, 0))
    with pytest.raises(InvalidArgumentError, match="leave the first 80 columns out"):
        forward(model, ids, cache, attention_mask=mask)
    assert cache.get_seq_length() == 0


WAYS = {
    "sampled": {"do_sample": True, "top_k": 5},
    "chunked": {"prefill_chunk_size": 20},
    "beams": {"num_beams": 3},
    "sampled beams": {"num_beams": 2, "do_sample": True},
    "several": {"num_return_sequences": 3, "do_sample": True},
    "prompt lookup": {"prompt_lookup_num_tokens": 4},
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_generate_gives_the_tokens_of_a_stock_cache(way, closing):
    model, ids = shared(), ids_of(60).repeat(1, 2)  # a prompt to look tokens up in
    options = {"do_sample": False, "max_new_tokens": 10, **WAYS[way]}
    torch.manual_seed(1)
    expected = model.generate(ids, **options)
    cache = closing(make_cache(model, pool_tokens=160))
    torch.manual_seed(1)
    assert model.generate(ids, **options, **handed(model, cache)).tolist() == expected.tolist()
    cache.pager.check_invariants()


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_an_assistants_guesses_change_no_token(name, closing):
    model, ids = shared(name), ids_of(50)
    expected = generate(model, ids, tokens=30).sequences
    assistant = small(name, num_hidden_layers=1)
    cache = closing(make_cache(model))
    assistant.generation_config.num_assistant_tokens = 4
    got = model.generate(
        ids, max_new_tokens=30, do_sample=False, prompt_lookup_num_tokens=3, **handed(model, cache)
    )
    assert got.tolist() == expected.tolist()
    cache.reset()
    got = model.generate(
        ids, max_new_tokens=30, do_sample=False, assistant_model=assistant, **handed(model, cache)
    )
    assert got.tolist() == expected.tolist()


def test_a_growing_prompt_is_computed_only_where_it_grew(closing):
    model, cache = shared(), closing(make_cache(shared()))
    text = generate(model, ids_of(50), cache).sequences
    text = torch.cat([text, ids_of(40, 1)], dim=1)
    rows = []
    hook = model.model.layers[0].register_forward_pre_hook(
        lambda module, args: rows.append(args[0].shape[1])
    )
    try:
        actual = generate(model, text, cache, tokens=3)
    finally:
        hook.remove()
    assert_close(actual, generate(model, text, tokens=3))
    assert rows == [32, 9, 1, 1]  # the last token of the first answer, 40 new ones, two answers


def test_a_loop_written_by_hand_has_the_logits_of_a_stock_cache(closing):
    model, ids = shared("gemma2"), ids_of(60)
    cache = closing(make_cache(model))
    stock = transformers.DynamicCache(config=model.config)
    for start, stop in ((0, 45), (45, 46), (46, 60)):
        part = ids[:, start:stop]
        torch.testing.assert_close(
            forward(model, part, cache), forward(model, part, stock), atol=2e-4, rtol=1e-4
        )


def test_a_streamer_sees_every_token(closing):
    class Streamer(transformers.generation.BaseStreamer):
        def __init__(self):
            self.seen, self.ended = [], False

        def put(self, value):
            self.seen += value.flatten().tolist()

        def end(self):
            self.ended = True

    model, streamer = shared(), Streamer()
    out = generate(model, ids_of(50), closing(make_cache(model)), streamer=streamer)
    assert streamer.ended
    assert streamer.seen == out.sequences[0].tolist()


@pytest.mark.parametrize("keep", [0, 1, 40, 100, torch.tensor([3, 99])], ids=str)
def test_logits_of_a_prompt_in_parts_are_those_of_the_columns_asked_for(keep, closing):
    model, ids = shared(), ids_of(100)
    actual = forward(model, ids, closing(make_cache(model)), logits_to_keep=keep)
    expected = forward(model, ids, logits_to_keep=keep)
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-4)


def test_hidden_states_router_logits_and_the_loss_are_of_the_whole_prompt(closing):
    model, ids = small("qwen3_moe"), ids_of(70)
    options = {"output_hidden_states": True, "output_router_logits": True, "labels": ids}
    cache = closing(make_cache(model))
    with torch.no_grad():
        actual = model(ids, **options, **handed(model, cache))
        expected = model(ids, **options)
    torch.testing.assert_close(actual.loss, expected.loss)
    for name in ("hidden_states", "router_logits"):
        for ours, theirs in zip(actual[name], expected[name], strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)


def test_a_prompt_that_the_cache_has_whole_gets_the_bits_of_its_last_step(closing):
    model, cache = shared("mistral"), closing(make_cache(shared("mistral")))
    first = generate(model, ids_of(50), cache)
    again = generate(model, first.sequences[:, : cache.get_seq_length()], cache, tokens=1)
    assert_same_bits(again.logits[0], first.logits[-1], "logits of the last token")
    assert cache.get_seq_length() == 57
    text = torch.as_tensor(cache.tokens)[None].long()
    positions = torch.arange(57)[None]
    whole = forward(model, text, cache, position_ids=positions)  # all logits, of read-only rows
    torch.testing.assert_close(whole, forward(model, text), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("selection", [None, TopK(chunks=2, sinks=16, recent=32)])
def test_the_size_of_the_pool_changes_no_bit(selection, closing):
    model = shared("qwen3")
    options = {} if selection is None else {"selection": selection}
    runs = [
        generate(model, ids_of(150), closing(make_cache(model, pool_tokens=pool, **options)))
        for pool in (64, 96, 1024)
    ]
    for run in runs[1:]:
        assert_same_bits(torch.stack(run.logits), torch.stack(runs[0].logits), "logits")


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_forwards_of_as_many_rows_have_the_bits_of_an_engine(name, closing):
    model, ids = shared(name), ids_of(96)
    # The model's own forwards have torch's products.
    session = closing(make_engine(model, linear="torch")).session()
    session.prefill(ids[0])
    cache = closing(make_cache(model))
    forward(model, ids, cache)  # three forwards of 32 rows, as the engine's
    for layer in range(3):
        ours = cache.sequences[0].read_kv(layer, 0, 96)
        theirs = session.sequence.read_kv(layer, 0, 96)
        for what, a, b in zip(("keys", "values"), ours, theirs):
            assert_same_bits(a, b, f"{what} of layer {layer}")


def test_the_ledger_says_decode_of_every_chunk(closing):
    model, cache = shared(), closing(make_cache(shared()))
    assert cache.ledger() == []
    generate(model, ids_of(100), cache)
    assert {chunk.provenance for chunk in cache.ledger()} == {"decode"}
    assert cache.stats()["chunks_evicted"] > 0


def test_entries_are_forked_selected_and_repeated(closing):
    model, cache = shared(), closing(make_cache(shared(), pool_tokens=160))
    both = torch.cat([ids_of(50), ids_of(50, 1)])
    forward(model, both, cache)
    cache.batch_repeat_interleave(2)
    assert [one.tokens[0] for one in cache.sequences] == [both[0, 0]] * 2 + [both[1, 0]] * 2
    cache.batch_select_indices(torch.tensor([3, 0]))
    step = torch.tensor([[7], [8]])
    expected = forward(model, torch.cat([both.flip(0), step], dim=1))[:, -1:]
    torch.testing.assert_close(forward(model, step, cache), expected, atol=2e-4, rtol=1e-4)
    with pytest.raises(InvalidArgumentError, match=r"beam_idx is .*expected numbers .*0 to 1"):
        cache.reorder_cache(torch.tensor([2]))
    cache.pager.check_invariants()


def test_a_crop_takes_columns_from_every_entry_padding_included(closing):
    model, cache = shared(), closing(make_cache(shared(), pool_tokens=160))
    ids = torch.cat([ids_of(50), torch.nn.functional.pad(ids_of(4, 1), (46, 0))])
    mask = (torch.arange(50) >= torch.tensor([[0], [46]])).long()
    forward(model, ids, cache, attention_mask=mask)
    cache.crop(-6)
    assert cache.get_seq_length() == 44
    assert [sequence.length for sequence in cache.sequences] == [44, 0]
    more = torch.cat([mask[:, :44], torch.ones(2, 1, dtype=torch.long)], dim=1)
    more[1, :44] = 0
    actual = forward(model, torch.tensor([[9], [9]]), cache, attention_mask=more)
    alone = forward(model, torch.cat([ids[:1, :44], torch.tensor([[9]])], dim=1))
    torch.testing.assert_close(actual[0, -1], alone[0, -1], atol=2e-4, rtol=1e-4)
    with pytest.raises(InvalidArgumentError, match="expected 0 or less"):
        cache.crop(3)


def test_a_fork_and_a_deep_copy_go_on_alone_in_the_same_pool(closing):
    model, cache = shared(), closing(make_cache(shared(), pool_tokens=160))
    generate(model, ids_of(50), cache)
    text = torch.as_tensor(cache.tokens)[None].long()
    copies = [closing(cache.fork()), closing(copy.deepcopy(cache))]
    for seed, twin in enumerate(copies):
        assert twin.pager is cache.pager
        longer = torch.cat([text, ids_of(20, seed)], dim=1)
        assert_close(generate(model, longer, twin), generate(model, longer))
    assert cache.get_seq_length() == 57
    cache.close()
    assert copies[0].get_seq_length() == 57 + 20 + 7


def test_a_prompt_that_goes_another_way_is_refused_until_the_cache_is_cropped(closing):
    model, cache = shared(), closing(make_cache(shared()))
    generate(model, ids_of(50), cache)
    other = ids_of(50)
    other[0, 30] = 7 if int(other[0, 30]) != 7 else 8
    with pytest.raises(InvalidArgumentError, match=r"position 30.*call cache\.keep_prefix"):
        forward(model, other, cache, position_ids=torch.arange(50)[None])
    assert cache.keep_prefix(other[0]) == 30
    assert_close(generate(model, other, cache), generate(model, other))


def test_long_texts_of_windowed_models_are_held_in_a_bounded_budget(closing):
    model = small("mistral", max_position_embeddings=4096)
    cache = closing(make_cache(model, host_bytes=12 * 6144, rewind_tokens=16))
    ids = ids_of(600)
    assert_close(generate(model, ids, cache), generate(model, ids))
    assert cache.sequences[0].released > 400
    with pytest.raises(InvalidArgumentError):
        cache.crop(-300)
    assert cache.get_seq_length() == 607


IMPOSSIBLE = {
    "inputs_embeds": ({"input_ids": None, "inputs_embeds": torch.zeros(1, 4, 64)}, "no inputs_emb"),
    "a mask of four dimensions": ({"attention_mask": torch.ones(1, 1, 4, 4)}, "causal attention"),
    "padding at the right": (
        {"attention_mask": torch.tensor([[1, 1, 1, 0]])},
        'padding_side = "left"',
    ),
    "a mask that is too long": ({"attention_mask": torch.ones(1, 6)}, "expected 4"),
    "positions with gaps": ({"position_ids": torch.tensor([[0, 1, 5, 6]])}, "count up by one"),
    "weights of attention": ({"output_attentions": True}, "no matrix of weights"),
    "no tokens": ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, "1 token or more"),
    "a batch beyond the rows": ({"input_ids": torch.ones(33, 1, dtype=torch.long)}, "rows=33"),
}


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_what_cannot_be_expressed_is_refused_and_changes_nothing(what, closing):
    options, message = IMPOSSIBLE[what]
    model, cache = shared(), closing(make_cache(shared()))
    with torch.no_grad(), pytest.raises(InvalidArgumentError, match=message):
        model(
            **{"input_ids": torch.ones(1, 4, dtype=torch.long), **options}, **handed(model, cache)
        )
    assert cache.get_seq_length() == 0
    assert_close(generate(model, ids_of(40), cache), generate(model, ids_of(40)))


def test_a_batch_that_the_pool_cannot_hold_names_what_it_needs(closing):
    cache = closing(make_cache(shared()))
    with pytest.raises(
        CapacityError, match="pool_tokens is 96, and a batch of 6 needs at least 11"
    ):
        forward(shared(), torch.ones(6, 1, dtype=torch.long), cache)


def test_a_prompt_that_no_tier_holds_is_refused_before_it_is_computed(closing):
    model = shared()
    cache = closing(make_cache(model, host_bytes=0))
    ran = []
    hook = model.model.layers[0].register_forward_pre_hook(lambda module, args: ran.append(1))
    try:
        with pytest.raises(CapacityError, match="bytes"):
            forward(model, ids_of(300), cache)
    finally:
        hook.remove()
    assert not ran
    assert cache.get_seq_length() == 0
    forward(model, ids_of(20), cache)


NAMES = [
    name for name in CACHE_ARGUMENTS[:2] if name in (cache_argument(shared()), CACHE_ARGUMENTS[1])
]


@pytest.mark.parametrize("name", NAMES)
def test_a_call_finds_it_under_the_names_of_every_release(name, closing):
    model = small("llama")
    cache = closing(make_cache(model))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of the older name, by the newer release
        logits = model(ids_of(20), **{name: cache}).logits
    assert cache.get_seq_length() == 20
    torch.testing.assert_close(logits, forward(model, ids_of(20)))


def test_models_that_it_cannot_serve_are_refused_with_the_reason():
    mamba = transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1)
    )
    with pytest.raises(UnsupportedModelError, match="a state beside K/V"):
        make_cache(mamba.eval())
    bloom = transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=50, hidden_size=32, n_layer=1, n_head=2)
    )
    with pytest.raises(UnsupportedModelError, match="AttentionInterface"):
        make_cache(bloom.eval())
    with pytest.raises(UnsupportedModelError, match="training mode"):
        make_cache(small("llama").train())
    with pytest.raises(InvalidArgumentError, match="exact is 'all'"):
        make_cache(shared(), exact="all")


def test_a_gradient_through_it_is_an_error_and_not_zero(closing):
    model = small("llama")
    logits = model(ids_of(20), **handed(model, closing(make_cache(model)))).logits
    with pytest.raises(InvalidArgumentError, match="has no gradient"):
        logits.sum().backward()
