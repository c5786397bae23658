from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from kvpager.sampling import Sampling
from kvpager_bench.plain_transformers import compare_with_transformers, prefix_tokens

VOCAB = 256


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        tie_word_embeddings=False,
        initializer_range=0.2,  # so that texts do not fall into repeating themselves
    )
    return Qwen3ForCausalLM(config).eval()


@pytest.fixture(scope="module")
def prompts():
    return [np.random.default_rng(i).integers(VOCAB, size=20 + 9 * i) for i in range(4)]


def test_in_float32_both_ways_are_the_same_computation_but_for_rounding(model, prompts):
    reuse, decode = compare_with_transformers(model, prompts, new_tokens=12)
    assert (reuse.name, decode.name) == ("prefix reuse", "one-token decode")
    for route in (reuse, decode):
        assert route.forks == 0
        assert route.first_forks == [None] * len(prompts)
        assert route.agreement.max_abs_delta < 1e-3
    assert reuse.comparison.elements == len(prompts) * VOCAB
    assert decode.comparison.elements == len(prompts) * 11 * VOCAB
    assert (reuse.agreement.tokens, decode.agreement.tokens) == (48, 44)


@pytest.mark.parametrize("sampling", [None, Sampling(temperature=1.0, seed=5)])
def test_a_one_token_step_that_computes_something_else_is_seen(model, prompts, sampling):
    def mirrored(module, arguments, output):
        return -output if output.shape[1] == 1 else output

    handle = model.lm_head.register_forward_hook(mirrored)
    try:
        reuse, decode = compare_with_transformers(model, prompts, new_tokens=12, sampling=sampling)
    finally:
        handle.remove()
    assert decode.forks == len(prompts)
    assert set(decode.first_forks) == {1}  # the first token comes from the prompt's own prefill
    assert decode.comparison.differing_elements > 0.99 * decode.comparison.elements
    assert decode.agreement.differing == decode.agreement.tokens
    assert decode.comparison.first.place.startswith("prompt 0: logits of decoded tokens")
    assert reuse.forks == 0  # both of its sides take the same steps


def test_a_suffix_that_computes_something_else_is_seen(model, prompts):
    suffixes = {len(ids) - prefix_tokens(len(ids), i) for i, ids in enumerate(prompts)}
    assert len(suffixes) == len(prompts)

    def mirrored(module, arguments, output):
        return -output if output.shape[1] in suffixes else output

    handle = model.lm_head.register_forward_hook(mirrored)
    try:
        reuse, decode = compare_with_transformers(model, prompts, new_tokens=12)
    finally:
        handle.remove()
    assert set(reuse.first_forks) == {0}
    assert reuse.agreement.tokens == len(prompts)  # what follows a fork follows another text
    assert decode.forks == 0


def test_the_models_attention_is_given_back(model, prompts):
    model.set_attn_implementation("eager")
    try:
        compare_with_transformers(model, prompts[:1], new_tokens=2)
        assert model.config._attn_implementation == "eager"
    finally:
        model.set_attn_implementation("sdpa")


@pytest.mark.parametrize(
    ("lengths", "new_tokens", "said"),
    [([], 4, "prompts is empty"), ([20, 7], 4, "fewer than 8"), ([20], 1, "new_tokens is 1")],
)
def test_what_would_compare_nothing_is_refused(model, lengths, new_tokens, said):
    prompts = [np.arange(length) for length in lengths]
    with pytest.raises(ValueError, match=said):
        compare_with_transformers(model, prompts, new_tokens=new_tokens)
