"""English text of 8K tokens: what selection and formats of few bits cost beside transformers.

Bits are compared where they are promised. Perplexity and KL are printed (`-s`), and compared with
bounds a few times as wide as what was measured.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from bits import assert_same_bits

from kvpager import Dense, Engine, TopK

ROOT = Path(__file__).resolve().parents[2]
CONTEXT, SCORED = 8000, 128
SHORT = 2048
TEXT = ("LICENSE", "docs/exactness.md")


@pytest.fixture(scope="module")
def ids(loaded):
    """[CONTEXT] token ids of English text."""
    text = "".join((ROOT / name).read_text(encoding="utf-8") for name in TEXT)
    found = loaded[1].encode(text)
    assert len(found) >= CONTEXT
    return found[:CONTEXT]


def reference(model, ids):
    """Log-probabilities [SCORED, vocab] float32 before each of the last tokens, of transformers."""
    with torch.inference_mode():
        head = model(torch.tensor([ids[: -SCORED - 1]]), use_cache=True, logits_to_keep=1)
        rest = model(torch.tensor([ids[-SCORED - 1 : -1]]), past_key_values=head.past_key_values)
    return rest.logits[0].float().log_softmax(-1)


def paged(model, ids, **options):
    """The same of an engine, and its logits [SCORED, vocab]."""
    with Engine(model, **options) as engine, engine.session() as session:
        session.prefill(ids[: -SCORED - 1])
        logits = []
        for token in ids[-SCORED - 1 : -1]:
            session.append([token])
            logits.append(session.logits.clone())
    found = torch.stack(logits)
    return found.float().log_softmax(-1), found


def cost(name, found, expected, ids):
    """Perplexity divided by that of a reference, and the mean KL from it in nats; printed."""
    wanted = torch.tensor(ids[-SCORED:])[:, None]
    ours, theirs = (math.exp(-one.gather(1, wanted).mean()) for one in (found, expected))
    kl = (expected.exp() * (expected - found)).sum(-1).mean().item()
    top = (found.argmax(-1) == expected.argmax(-1)).float().mean().item()
    print(f"{name}: perplexity {ours:.3f} beside {theirs:.3f}, KL {kl:.2e}, same top {top:.3f}")
    return ours / theirs, kl


def test_selection_beside_transformers_on_8k_tokens(loaded, ids):
    model = loaded[0]
    expected = reference(model, ids)
    ratio, kl = cost("Dense()", paged(model, ids, pool_tokens=2048)[0], expected, ids)
    assert 0.97 < ratio < 1.03
    assert kl < 0.02
    chosen = TopK(chunks=32)
    found, small = paged(model, ids, pool_tokens=2048, selection=chosen)
    ratio, kl = cost("TopK(chunks=32)", found, expected, ids)
    assert ratio < 1.2
    assert kl < 0.2
    _, large = paged(model, ids, pool_tokens=8192, selection=chosen)
    assert_same_bits(small, large, "TopK through a pool of 2K and of 8K tokens")


def test_keys_and_values_in_few_bits(loaded, ids):
    model, text = loaded[0], ids[:SHORT]
    expected, _ = paged(model, text, pool_tokens=4096, selection=Dense())
    for kv_dtype, most_ratio, most_kl in (("q8", 1.03, 0.01), ("q4", 1.2, 0.2)):
        found, small = paged(model, text, pool_tokens=1024, kv_dtype=kv_dtype)
        ratio, kl = cost(kv_dtype, found, expected, text)
        assert ratio < most_ratio
        assert kl < most_kl
        _, large = paged(model, text, pool_tokens=4096, kv_dtype=kv_dtype)
        assert_same_bits(small, large, kv_dtype)
