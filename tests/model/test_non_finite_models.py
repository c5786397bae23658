"""A model that computes NaN is refused wherever it does, and never answered for."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvpager import Engine
from kvpager.errors import NonFiniteError

C, VOCAB = 16, 64
BAD = [math.nan, math.inf]
PROMPT = np.random.default_rng(2).integers(0, VOCAB, 3 * C + 5)


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=None,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def make_engine(model=None) -> Engine:
    return Engine(
        make_model() if model is None else model,
        pool_tokens=16 * C,
        chunk_tokens=C,
        rows=C,
        small_rows="fixed",
        host_bytes="4MiB",
    )


class BadHead:
    """The head of an engine, but for one logit of the rows after a position."""

    def __init__(self, engine: Engine, position: int, value: float, token: int = 7) -> None:
        self._engine, self._inner = engine, engine.core.runner.head
        self.position, self.value, self.token = position, value, token
        run = engine.core.runner.run

        def noting(batch):
            self._batch = batch
            return run(batch)

        engine.core.runner.head, engine.core.runner.run = self, noting

    def __call__(self, hidden, wanted):
        logits = self._inner(hidden, wanted).clone()
        for row, positions in zip(logits, self._batch.positions[wanted]):
            if positions + 1 == self.position:
                row[self.token] = self.value
        return logits


def id_of(token) -> int:
    """Of a token, told with its log-probability or without."""
    return int(getattr(token, "id", token))


@pytest.mark.parametrize("projection", ["q_proj", "k_proj", "v_proj"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_weight_is_refused_at_every_length(closing, projection, bad):
    model = make_model()
    with torch.no_grad():
        getattr(model.model.layers[1].self_attn, projection).weight[3, 5] = bad
    engine = closing(make_engine(model))
    for length in (1, 2, 3, 5, 8, 13, 15, 16, 17, 21, 31, 32, 33, 47):
        session = engine.session()
        with pytest.raises(NonFiniteError, match=r"layer 1: the .* at position \d+ of"):
            session.prefill(PROMPT[:length])
        with pytest.raises(NonFiniteError, match="layer 1"):
            engine.score(PROMPT[: length + 1])
        assert session.committed == 0
        session.close()
    engine.pager.check_invariants()
    assert engine.pager.stats()["open_blocks"] == 0


SAMPLINGS = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "seed": 3},
    "top-k": {"temperature": 0.8, "seed": 3, "top_k": 5},
    "top-p": {"temperature": 0.8, "seed": 3, "top_p": 0.7},
    "speculated": {"speculate": "prompt-lookup"},
    "logprobs": {"logprobs": True},
}


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("bad", BAD)
def test_a_bad_logit_is_refused_at_every_offset_of_a_chunk(closing, bad, sampling):
    engine = closing(make_engine())
    start = len(PROMPT)
    session = engine.session()
    session.prefill(PROMPT)
    expected = list(map(id_of, session.generate(C, **SAMPLINGS[sampling], stream="tokens")))
    session.close()
    head = BadHead(engine, -1, bad)
    for offset in range(0, C, 3):
        session = engine.session()
        head.position = start + offset
        session.prefill(PROMPT)
        told = []
        with pytest.raises(NonFiniteError, match=f"position {start + offset} "):
            told.extend(map(id_of, session.generate(C, **SAMPLINGS[sampling], stream="tokens")))
        assert told == expected[:offset]
        session.close()
    head.position = -1
    session = engine.session()
    session.prefill(PROMPT)
    assert list(map(id_of, session.generate(C, **SAMPLINGS[sampling], stream="tokens"))) == expected
    engine.pager.check_invariants()


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_logit_is_refused_by_a_score(closing, bad):
    engine = closing(make_engine())
    expected = engine.score(PROMPT).logprobs
    head = BadHead(engine, -1, bad)
    for position in range(1, 2 * C + 1):
        head.position = position
        with pytest.raises(NonFiniteError, match=f"position {position} "):
            engine.score(PROMPT)
    head.position = -1
    assert engine.score(PROMPT).logprobs.tobytes() == expected.tobytes()


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_forbidden_token_is_no_fault_and_is_never_chosen(closing, sampling):
    engine = closing(make_engine())
    session = engine.session()
    session.prefill(PROMPT)
    would = id_of(next(session.generate(1, **SAMPLINGS[sampling], stream="tokens")))
    session.close()
    BadHead(engine, len(PROMPT), -math.inf, would)
    session = engine.session()
    session.prefill(PROMPT)
    assert id_of(next(session.generate(1, **SAMPLINGS[sampling], stream="tokens"))) != would
    logprobs = engine.score([*PROMPT, would]).logprobs
    assert logprobs[-1] == -math.inf
    assert np.isfinite(logprobs[:-1]).all()
