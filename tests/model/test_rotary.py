"""Keys that are moved are those the model itself computes at the new position."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
import transformers
from reference_models import COMMON, VOCAB, build

from kvpager._model.seam.attach import attach
from kvpager._model.seam.attention import running
from kvpager._model.seam.causal_lm import cache_argument
from kvpager._model.seam.observe import Recorder, packed_inputs
from kvpager._model.seam.rotary import Rotation, find_rotation
from kvpager._model.seam.rows import same_bits
from kvpager.errors import InvalidArgumentError, UnsupportedModelError

FAR = 131_072
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
YARN |= {"original_max_position_embeddings": 32_768}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 512}
TWO_KINDS = ["sliding_attention", "full_attention", "sliding_attention"]

# Shapes of a rotation that no reference model has.
SHAPES = {
    "gemma3": (  # another theta in layers with a window
        transformers.Gemma3TextConfig,
        {"sliding_window": 40, "layer_types": TWO_KINDS},
    ),
    "glm": (transformers.GlmConfig, {"partial_rotary_factor": 0.5}),  # neighbours, half of the key
    "gpt_neox": (transformers.GPTNeoXConfig, {"rotary_pct": 0.25}),  # a quarter of the key
    "nanochat": (transformers.NanoChatConfig, {}),  # turns backwards
    "deepseek_v3": (  # the end of the key
        transformers.DeepseekV3Config,
        {"head_dim": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}
        | {"num_key_value_heads": 8, "first_k_dense_replace": 3, "n_group": 1, "topk_group": 1}
        | {"q_lora_rank": None, "kv_lora_rank": 32, "n_routed_experts": 4},
    ),
    "hunyuan": (transformers.HunYuanDenseV1Config, {}),  # scales keys after it turned them
    "gpt2": (transformers.GPT2Config, {"n_embd": 256, "n_layer": 3, "n_head": 8}),
    "opt": (transformers.OPTConfig, {"ffn_dim": 512, "word_embed_proj_dim": 256}),
}

MODELS = {
    "default": lambda: build("llama"),
    "linear": lambda: build("llama", rope_parameters=scaled("linear")),
    "llama3": lambda: build("llama", rope_parameters=LLAMA3),
    "yarn": lambda: build("llama", rope_parameters=YARN, max_position_embeddings=FAR),
    "qwen3": lambda: build("qwen3"),
    "qwen3, bfloat16": lambda: build("qwen3", "bfloat16"),
    "yarn, bfloat16": lambda: shaped("llama", "bfloat16", rope_parameters=YARN),
    "smollm3": lambda: build("smollm3"),
    "cohere": lambda: build("cohere"),
    "gemma3": lambda: shaped("gemma3"),
    "gemma3, bfloat16": lambda: shaped("gemma3", "bfloat16"),
    "glm": lambda: shaped("glm"),
    "glm, float16": lambda: shaped("glm", "float16"),
    "gpt_neox": lambda: shaped("gpt_neox"),
    "nanochat": lambda: shaped("nanochat"),
}


def scaled(rope_type):
    return {"rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0}


def shaped(name, dtype="float32", **changes):
    """A model of three layers with random weights, whose frequencies stay in float32."""
    kind, options = SHAPES.get(name) or (transformers.LlamaConfig, {})
    config = kind(**{**COMMON, **options, **changes})
    torch.manual_seed(sum(map(ord, name)))
    dtype = getattr(torch, dtype)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def mover_of(model):
    attach(model)
    return find_rotation(model)


def own_keys(model, tokens, positions):
    """Per layer [n, kv_heads, k_dim]: what transformers computes for tokens [n], each alone."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        output = model(tokens[:, None], position_ids=positions[:, None], use_cache=True)
    return [layer.keys[:, :, 0] for layer in output[cache_argument(model)].layers]


def seen_by_attention(model, tokens, positions):
    """q, k and v of each layer, [n, heads, dim], for tokens [n], each alone."""
    seen = Recorder()
    attach(model)
    with torch.no_grad(), running(seen):
        model.get_decoder()(**packed_inputs(tokens, positions))
    return seen.calls


def some_tokens(count):
    return torch.from_numpy(np.random.default_rng(5).integers(3, VOCAB, count))


def some_positions(model, count):
    """Old and new positions, among them the first and the last that the model has."""
    last = model.config.max_position_embeddings - 1
    old, new = np.random.default_rng(6).integers(0, last, (2, count))
    old[:3], new[:3] = (0, 0, last), (1, last, 0)
    return torch.from_numpy(old), torch.from_numpy(new)


def roundings(keys, expected):
    """The largest difference, in roundings of the largest element of its key."""
    expected = expected.double()
    unit = expected.abs().amax(-1, keepdim=True) * torch.finfo(keys.dtype).eps
    return float(((keys.double() - expected).abs() / unit).max())


def turned(keys, angles, *, interleaved=False):
    """Keys [n, kv_heads, dim] turned by angles [n, dim / 2], as complex numbers in float64."""
    n, heads, dim = keys.shape
    pairs = keys.double().view(n, heads, *((-1, 2) if interleaved else (2, dim // 2)))
    if not interleaved:
        pairs = pairs.transpose(2, 3)
    pairs = torch.view_as_complex(pairs.contiguous())
    pairs = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[:, None])
    return (pairs if interleaved else pairs.transpose(2, 3)).reshape(n, heads, dim)


@pytest.mark.parametrize("name", MODELS)
def test_moved_keys_are_those_that_the_model_computes_there(name):
    model = MODELS[name]()
    tokens = some_tokens(64)
    old, new = some_positions(model, 64)
    move = mover_of(model).at(old.numpy(), new.numpy())
    before, after = own_keys(model, tokens, old), own_keys(model, tokens, new)
    assert len(before) == model.config.num_hidden_layers
    for layer, (keys, expected) in enumerate(zip(before, after)):
        moved = move.move(layer, keys)
        assert moved.dtype == keys.dtype
        assert roundings(moved, expected) < 6, f"layer {layer}"


def test_keys_that_turn_at_their_end_are_moved():
    model = shaped("deepseek_v3")  # transformers would keep what keys are made of
    tokens = some_tokens(64)
    old, new = some_positions(model, 64)
    before, after = (seen_by_attention(model, tokens, positions) for positions in (old, new))
    move = mover_of(model).at(old.numpy(), new.numpy())
    for layer in range(3):
        keys = before[layer][1]
        moved = move.move(layer, keys)
        assert roundings(moved, after[layer][1]) < 6
        assert same_bits(moved[..., :32], keys[..., :32])


def test_keys_of_a_layer_without_rotation_keep_their_bits():
    model = build("smollm3")
    tokens = some_tokens(64)
    old, new = some_positions(model, 64)
    before, after = own_keys(model, tokens, old), own_keys(model, tokens, new)
    move = mover_of(model).at(old.numpy(), new.numpy())
    assert same_bits(before[1], after[1])
    assert same_bits(move.move(1, before[1]), before[1])
    for layer in (0, 2):
        assert roundings(before[layer], after[layer]) > 1000


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
def test_a_move_is_one_rounding_from_the_rotation_in_float64(dtype, interleaved):
    frequencies = 1e4 ** (-torch.arange(16) / 16.0)
    old, new = torch.from_numpy(np.random.default_rng(7).integers(0, FAR, (2, 512)))
    keys = torch.randn(512, 4, 32, generator=torch.Generator().manual_seed(1))
    keys = keys.to(getattr(torch, dtype))
    rotation = Rotation(frequencies, 0, interleaved)
    moved = rotation.apply(keys, *rotation.between(old, new)).double()
    angles = ((new[:, None].float() * frequencies).double()) - (
        (old[:, None].float() * frequencies).double()
    )
    exact = turned(keys, angles, interleaved=interleaved)
    eps = torch.finfo(keys.dtype).eps
    in_float32 = 4 * torch.finfo(torch.float32).eps * keys.double().abs().max()
    # Half of the last place of a number below a power of two is half of eps times that power.
    place = torch.exp2(exact.abs().log2().floor()) * eps / 2
    assert ((moved - exact).abs() <= place + in_float32).all()


def test_the_rounding_of_angles_far_out_is_moved_with_the_keys():
    model = MODELS["yarn"]()
    tokens = some_tokens(256)
    old = torch.arange(256)
    new = old + 100_000
    before, after = own_keys(model, tokens, old), own_keys(model, tokens, new)
    move = mover_of(model).at(old.numpy(), new.numpy())
    frequencies = model.model.rotary_emb.inv_freq.double()
    for layer, (keys, expected) in enumerate(zip(before, after)):
        assert roundings(move.move(layer, keys), expected) < 6
        by_true_angles = turned(keys, (new - old)[:, None] * frequencies).float()
        assert roundings(by_true_angles, expected) > 1000  # what a better angle would be off by


@pytest.mark.parametrize("name", ["default", "yarn", "qwen3", "gemma3", "glm", "smollm3"])
def test_attention_to_a_moved_segment_is_that_of_relative_positions(name):
    model = MODELS[name]()
    length, offset, behind = 48, 2011, 5
    segment, question = some_tokens(length), some_tokens(9)
    with torch.no_grad():
        model.set_attn_implementation("eager")
        alone = model(segment[None], use_cache=True)[cache_argument(model)].layers
    here = seen_by_attention(model, question, torch.full((9,), length + behind))
    there = seen_by_attention(model, question, torch.full((9,), offset + length + behind))
    old = np.arange(length)
    move = mover_of(model).at(old, old + offset)
    for layer, cached in enumerate(alone):
        kept = cached.keys.shape[2]  # a window keeps the last ones
        keys, values = (x[0].transpose(0, 1) for x in (cached.keys, cached.values))
        full = torch.zeros(length, *keys.shape[1:])
        full[length - kept :] = keys
        moved = move.move(layer, full)[length - kept :]
        (near, _, _), (far, _, _) = here[layer], there[layer]
        expected = attend(near, keys, values)
        # Angles far out are rounded by up to 2^-24 of the position, and cancel for the most part.
        slack = 0.2 * (offset + length + behind) * 2**-24 * float(values.abs().max())
        assert (attend(far, moved, values) - expected).abs().max() < slack
        if not same_bits(moved, keys):
            assert (attend(far, keys, values) - expected).abs().max() > 50 * slack


def attend(q, k, v):
    """Of q [n, heads, dim] to all of k and v [m, kv_heads, dim], in float64."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->nhm", q.double(), k) * q.shape[-1] ** -0.5
    return torch.einsum("nhm,mhd->nhd", scores.softmax(-1), v)


def test_a_chain_of_moves_is_worse_than_one():
    model = shaped("llama", "bfloat16", rope_parameters=YARN)
    tokens, start = some_tokens(128), torch.zeros(128, dtype=torch.int64)
    mover = mover_of(model)
    keys = own_keys(model, tokens, start)[0]
    stops = [*range(0, 2001, 40)]
    chained = keys
    for old, new in pairwise(stops):
        chained = mover.at([old] * 128, [new] * 128).move(0, chained)
    once = mover.at([0] * 128, [2000] * 128).move(0, keys)
    angles = (torch.full((128, 1), 2000.0) * model.model.rotary_emb.inv_freq).double()
    exact = turned(keys, angles)
    assert roundings(once, exact) <= 0.51
    assert roundings(chained, exact) > 4 * roundings(once, exact)


def test_keys_that_stay_keep_their_bits_beside_keys_that_move():
    mover = mover_of(build("llama"))
    keys = own_keys(build("llama"), some_tokens(6), torch.arange(6))[0].clone()
    keys[2] = -0.0
    keys[3, :, ::2] = -0.0
    old, new = [4, 5, 6, 7, 8, 9], [7, 5, 6, 7, 8, 12]
    assert mover.at(old, old).move(0, keys) is keys
    moved = mover.at(old, new).move(0, keys)
    assert same_bits(moved[1:5], keys[1:5])
    assert not torch.equal(moved[0], keys[0])
    assert not torch.equal(moved[5], keys[5])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_moved_key_does_not_depend_on_the_keys_beside_it(dtype):
    mover = mover_of(build("llama"))
    heads = torch.randn(4, 1500, 32, generator=torch.Generator().manual_seed(2))
    keys = heads.to(getattr(torch, dtype)).transpose(0, 1)  # as a model has them
    before = keys.clone()
    old = np.random.default_rng(8).integers(0, 4000, 1500)
    new = old[::-1].copy()
    together = mover.at(old, new).move(0, keys)
    assert same_bits(keys, before)
    assert same_bits(mover.at(old, new).move(0, keys.contiguous()), together)
    for start, stop in ((0, 1), (1, 3), (3, 700), (700, 1499), (1499, 1500)):
        apart = mover.at(old[start:stop], new[start:stop]).move(0, keys[start:stop])
        assert same_bits(apart, together[start:stop])


def test_positions_may_be_reused_by_the_caller_before_the_keys_are_moved():
    mover = mover_of(build("llama"))
    keys = torch.randn(8, 4, 32, generator=torch.Generator().manual_seed(3))
    old = np.arange(8)
    expected = mover.at(old, old + 7).move(0, keys)
    new = old + 7
    move = mover.at(old, new)
    old[:], new[:] = 1, 2
    assert same_bits(move.move(0, keys), expected)


@pytest.mark.parametrize(("name", "tables"), [("default", 1), ("smollm3", 1), ("gemma3", 2)])
def test_layers_of_the_same_frequencies_share_their_angles(name, tables, monkeypatch):
    model = MODELS[name]()
    move = mover_of(model).at([0, 1, 2], [5, 6, 7])
    made = []
    between = Rotation.between
    monkeypatch.setattr(
        Rotation, "between", lambda self, old, new: made.append(self) or between(self, old, new)
    )
    for layer in range(3):
        move.move(layer, torch.ones(3, 4, 32))
    assert len(made) == tables


def refused(model, *words):
    attach(model)
    with pytest.raises(UnsupportedModelError) as error:
        find_rotation(model)
    for word in (type(model).__name__, *words):
        assert word in str(error.value)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_frequencies_that_follow_the_longest_position_are_refused_by_name(rope_type):
    parameters = scaled(rope_type)
    if rope_type == "longrope":
        parameters |= {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
        parameters |= {"original_max_position_embeddings": 2048}
    refused(build("llama", rope_parameters=parameters), f"RoPE type {rope_type!r}", '"yarn"')


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_absolute_positions_are_refused(name):
    refused(shaped(name), "values of layer 0", "absolute position", "RoPE")


def test_keys_that_are_not_left_as_they_were_turned_are_refused_with_their_layer():
    model = shaped("hunyuan")
    with torch.no_grad():  # of ones, it would scale all elements alike
        model.model.layers[1].self_attn.key_layernorm.weight[::3] = 2.0
    refused(model, "keys of layer 1", "of 5 guesses", "positions 0, 1, 7, 293, 4095", "RoPE")


def test_a_rotation_that_is_another_one_far_out_is_refused():
    model = build("llama")
    table = model.model.rotary_emb
    whole = table.forward
    table.forward = lambda x, position_ids: whole(x, position_ids.clamp(max=4000))
    refused(model, "keys of layer 0", "4095")


def test_keys_that_are_no_numbers_are_refused():
    model = build("llama")
    with torch.no_grad():
        model.model.layers[2].self_attn.k_proj.weight.fill_(torch.nan)
    refused(model, "keys of layer 2")


def test_positions_that_do_not_fit_are_refused():
    mover = mover_of(build("llama"))
    with pytest.raises(InvalidArgumentError, match="old has 3 positions and new has 2"):
        mover.at([0, 1, 2], [3, 4])
    with pytest.raises(InvalidArgumentError, match="least element -1; expected"):
        mover.at([0, 1], [-1, 4])
    with pytest.raises(InvalidArgumentError, match="1 keys for 2 positions"):
        mover.at([0, 1], [3, 4]).move(0, torch.ones(1, 4, 32))
