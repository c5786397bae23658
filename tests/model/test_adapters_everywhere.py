"""Adapters of PEFT in any place: decoding and a restore have the bits of a cold prefill."""

from __future__ import annotations

import peft
import pytest
import torch
from bits import assert_same_session
from reference_models import build, make_engine, prompt

PLACES = {
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "embedding, DoRA": {"target_modules": ["embed_tokens"], "use_dora": True},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [1, 2, 3, 17]},
    "copy of the embedding": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "copy of the head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "DoRA": {"target_modules": ["q_proj", "up_proj"], "use_dora": True},
}


def adapted(*places):
    """A model with an adapter for each of these places, none of them zero; the last is active."""
    torch.manual_seed(5)
    first, *more = [
        peft.LoraConfig(r=4, task_type="CAUSAL_LM", init_lora_weights=False, **PLACES[place])
        for place in places
    ]
    model = peft.get_peft_model(build("llama"), first)
    for number, config in enumerate(more):
        model.add_adapter(f"more-{number}", config)
        model.set_adapter(f"more-{number}")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("lora_", "trainable_tokens_", "modules_to_save")):
                parameter.add_(torch.randn(parameter.shape) * 0.05)
    return model.eval()


@pytest.mark.filterwarnings("ignore")  # peft's, of another release of transformers
@pytest.mark.parametrize("places", [(each,) for each in PLACES] + [("embedding", "DoRA")], ids=str)
def test_decoding_and_a_restore_have_the_bits_of_a_cold_prefill(closing, tmp_path, places):
    with torch.no_grad():
        plain, changed = build("llama"), adapted(*places)
        ids = torch.as_tensor(prompt(8))[None]
        assert not torch.equal(plain(ids).logits, changed(ids).logits)
    engine = closing(make_engine(changed, pool_tokens=512))
    decoded = closing(engine.session())
    decoded.prefill(prompt(40))
    decoded.generate(50, eos=None)
    assert engine.stats()["graph_replays"] > 0  # decode steps were recorded, too
    decoded.prefill(decoded.tokens)  # the pending one as well
    decoded.save(tmp_path / "saved")
    cold = closing(engine.session(salt="another"))
    cold.prefill(decoded.tokens)
    assert_same_session(cold, decoded, "cold, and decoded")
    restored = closing(engine.restore(tmp_path / "saved"))
    for session in (restored, decoded):
        session.generate(10, eos=None)
    assert_same_session(restored, decoded, "restored, and gone on with")
