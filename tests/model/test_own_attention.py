"""An engine attends as the model does, also where only its mask says how; or refuses the model."""

from __future__ import annotations

import pytest
import torch
import transformers
from reference_models import COMMON, build, make_engine, prompt, stock_logits
from transformers import masking_utils

from kvpager import UnsupportedModelError
from kvpager._model.proof import own_attention
from kvpager._model.proof import prove as start
from kvpager._model.proof.masks import NotCausalWindowError, window_of
from kvpager._model.seam.attention import mask_windows

WINDOW = 24
MOE = {"num_experts_per_tok": 2, "num_local_experts": 4, "num_experts": 4}


def made(kind, dtype=torch.float32, **changes):
    """A small model of a configuration class, its experts, if any, one row at a time."""
    options = {**COMMON, "hidden_size": 64, "head_dim": 16, "num_attention_heads": 4}
    options |= {"num_key_value_heads": 2, "intermediate_size": 96, **changes}
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(kind(**options)).eval().to(dtype)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.mul_(2)
    if "num_experts" in changes:
        model.set_experts_implementation("batched_mm")
    return model


def phimoe(dtype=torch.float32, **changes):
    return made(transformers.PhimoeConfig, dtype, **{"sliding_window": WINDOW, **MOE, **changes})


def qwen2_moe(**changes):
    windows = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    sizes = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    return made(transformers.Qwen2MoeConfig, **{**MOE, **sizes, **windows, **changes})


def doge(**changes):
    return made(transformers.DogeConfig, **{"keep_window_size": WINDOW, **changes})


# Beyond a window that no keyword names.


@pytest.mark.parametrize(("kind", "windows"), [(phimoe, [WINDOW] * 3), (qwen2_moe, None)])
def test_a_window_that_only_the_mask_has_is_attended_to(kind, windows, closing):
    model = kind()
    ids = prompt(90)
    expected = stock_logits(model, ids)
    engine = closing(make_engine(model))
    cold = engine.session()
    cold.prefill(ids)
    torch.testing.assert_close(cold.logits, expected[-1], atol=2e-4, rtol=1e-4)
    found = [*mask_windows(model).values()]
    assert found == windows if windows else {None, WINDOW} == set(found)


def test_a_window_that_only_the_mask_has_is_attended_to_in_sixteen_bits(closing):
    model = phimoe(torch.bfloat16)
    closing(make_engine(model))
    assert [*mask_windows(model).values()] == [WINDOW] * 3


def test_a_window_that_only_the_mask_has_is_known_where_row_counts_were_proven_before(
    closing, monkeypatch, tmp_path
):
    monkeypatch.setenv("KVPAGER_CACHE", str(tmp_path))
    closing(make_engine(phimoe()))
    model = phimoe()
    monkeypatch.setattr(start, "prove", None)  # is not called
    session = closing(make_engine(model)).session()
    assert [*mask_windows(model).values()] == [WINDOW] * 3
    ids = prompt(90)
    session.prefill(ids)
    expected = stock_logits(model, ids)[-1]
    torch.testing.assert_close(session.logits, expected, atol=2e-4, rtol=1e-4)


def test_a_long_window_is_found_without_a_long_forward(closing, monkeypatch):
    model = phimoe(sliding_window=5000, max_position_embeddings=32768)
    rows = []
    original = own_attention._run
    monkeypatch.setattr(
        own_attention,
        "_run",
        lambda model, inputs: (rows.append(inputs["input_ids"].shape[1]), original(model, inputs)),
    )
    closing(make_engine(model))
    assert [*mask_windows(model).values()] == [5000] * 3
    assert max(rows) < 100


def test_an_engine_after_a_changed_configuration_attends_to_what_it_says_now(closing):
    model = phimoe()
    make_engine(model).close()
    model.config.sliding_window = None
    ids = prompt(90)
    session = closing(make_engine(model)).session()
    session.prefill(ids)
    torch.testing.assert_close(session.logits, stock_logits(model, ids)[-1], atol=2e-4, rtol=1e-4)
    assert [*mask_windows(model).values()] == [None] * 3


# What is no window is refused, whatever is promised.


@pytest.mark.parametrize("exact", ["all", "reuse", False])
def test_a_bias_that_is_carried_by_the_mask_is_refused_and_its_layer_named(exact):
    with pytest.raises(UnsupportedModelError, match=r"layer 0 \(Doge.* makes its own mask"):
        make_engine(doge(), exact=exact)


def test_a_bias_on_scores_is_refused():
    model = build("llama")
    patch_attention(model, lambda mask: mask + torch.linspace(0, 1, mask.shape[-1]))
    with pytest.raises(UnsupportedModelError, match=r"layer 1 \(Llama.* makes its own mask"):
        make_engine(model)


def test_a_mask_of_stretches_is_refused_and_the_first_position_named():
    model = build("llama")
    original = masking_utils.create_causal_mask

    def chunked(config, inputs_embeds, attention_mask, position_ids, **cache):
        arguments = (config, inputs_embeds, attention_mask)
        if attention_mask is not None:
            return original(*arguments, position_ids=position_ids, **cache)
        return masking_utils.create_chunked_causal_mask(*arguments, **cache)

    model.config.attention_chunk_size = 8192  # longer than anything that is run here
    module = __import__(type(model).__module__, fromlist=["create_causal_mask"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "create_causal_mask", chunked)
        model.config.max_position_embeddings = 32768
        with pytest.raises(UnsupportedModelError, match=r"layer 0 .* 8192 sees 8192 to 8192"):
            make_engine(model)


def test_a_window_that_is_not_the_masks_is_refused():
    model = build("gemma2")
    model.model.layers[2].self_attn.sliding_window = 30
    with pytest.raises(UnsupportedModelError, match=r"layer 2 .* window of 30 .* one of 40"):
        make_engine(model)


def test_an_attention_that_does_more_than_its_call_says_is_refused(monkeypatch):
    model = build("qwen3")
    home = __import__(type(model).__module__, fromlist=["eager_attention_forward"])
    original = home.eager_attention_forward

    def other(module, query, key, value, mask, scaling, **options):
        return original(module, query, key, value, mask, scaling * 1.01, **options)

    monkeypatch.setattr(home, "eager_attention_forward", other)
    with pytest.raises(UnsupportedModelError, match=r"layer 0 .* at position \d+ its own"):
        make_engine(model)


def test_positions_that_follow_the_row_are_refused_also_where_nothing_is_promised():
    model = build("llama")
    original = model.model.forward

    def forward(input_ids, position_ids=None, **options):
        position_ids = torch.arange(input_ids.shape[1])[None]
        return original(input_ids, position_ids=position_ids, **options)

    model.model.forward = forward
    with pytest.raises(UnsupportedModelError, match=r"(keys|queries) of layer"):
        make_engine(model, exact=False)


def test_a_refused_model_has_its_attention_back():
    model = doge()
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModelError):
        make_engine(model)
    assert model.config._attn_implementation == before
    with torch.inference_mode():
        assert model(torch.tensor([[5, 6, 7]])).logits.isfinite().all()


# Masks, asked for positions nobody runs.


def test_a_causal_mask_has_no_window():
    assert window_of(masking_utils.causal_mask_function, 1 << 20) is None


@pytest.mark.parametrize("window", [1, 2, 24, 4096, 100_000])
def test_the_window_of_a_mask_is_found_whatever_its_length(window):
    function = masking_utils.sliding_window_causal_mask_function(window)
    assert window_of(function, 1 << 17) == window


@pytest.mark.parametrize("chunk", [3, 16, 8192])
def test_a_mask_of_stretches_is_no_window(chunk):
    function = masking_utils.chunked_causal_mask_function(chunk, torch.zeros(1, dtype=torch.int64))
    with pytest.raises(NotCausalWindowError, match="sees"):
        window_of(function, 1 << 15)


def test_a_mask_that_shows_later_tokens_is_no_window():
    for function in (
        masking_utils.bidirectional_mask_function,
        masking_utils.sliding_window_bidirectional_mask_function(8),
    ):
        with pytest.raises(NotCausalWindowError, match="sees"):
            window_of(function, 4096)


def test_a_mask_with_gaps_is_no_window():
    def strided(batch, head, query, key):
        return (key <= query) & ((query - key) % 2 == 0)

    with pytest.raises(NotCausalWindowError, match="sees 1 to 1"):
        window_of(strided, 4096)


def test_a_mask_that_cannot_be_asked_is_no_window():
    seen = torch.ones(10, dtype=torch.bool)
    with pytest.raises(NotCausalWindowError, match="cannot be asked"):
        window_of(lambda batch, head, query, key: seen[key] & (key <= query), 4096)


def patch_attention(model, change):
    """Gives layer 1 another mask than the one the model made."""
    attention = model.model.layers[1].self_attn
    original = attention.forward

    def forward(*args, attention_mask=None, **options):
        if attention_mask is not None and attention_mask.shape[-1] > 1:
            attention_mask = change(attention_mask)
        return original(*args, attention_mask=attention_mask, **options)

    attention.forward = forward
