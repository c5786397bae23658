"""A model that attends in another way has another fingerprint, whatever its weights say."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from reference_models import ARCHITECTURES, COMMON, build, make_engine, prompt

from kvpager import DirectoryStore, FingerprintMismatchError
from kvpager._model.identity.behaviour import KEYS, TOKENS, Mixing, behave, behaviour_tokens
from kvpager._model.seam.attach import attach
from kvpager._model.seam.rows import RowCounts


def attentions(model):
    return [layer.self_attn for layer in model.model.layers]


def gemma3():
    config = transformers.Gemma3TextConfig(
        **COMMON, sliding_window=40, query_pre_attn_scalar=32, layer_types=["full_attention"] * 3
    )
    torch.manual_seed(1)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def scaled(model):
    for module in attentions(model):
        module.scaling *= 2


def scaled_in_one_layer(model):
    attentions(model)[-1].scaling *= 1 + 1e-6


def capped_higher(model):
    for module in attentions(model):
        module.attn_logit_softcapping *= 2


def give(model, **arguments):
    """Has one layer call its attention with further arguments."""
    module = attentions(model)[1]
    module.forward = functools.partial(type(module).forward, module, **arguments)


CHANGES = {
    "scaling": (lambda: build("llama"), scaled),
    "scaling of one layer by a millionth": (lambda: build("qwen3"), scaled_in_one_layer),
    "Gemma 2's scaling": (lambda: build("gemma2"), scaled),
    "Gemma 2's soft cap": (lambda: build("gemma2"), capped_higher),
    "Gemma 3's scaling": (gemma3, scaled),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_another_way_to_attend_is_refused_by_name(kind, tmp_path, closing):
    make, change = CHANGES[kind]
    model = make()
    with make_engine(model) as engine, engine.session() as session:
        session.prefill(prompt(87))
        session.save(tmp_path / "before.kvsnap")
    change(model)
    engine = closing(make_engine(model))
    for on_mismatch in ("refuse", "approximate"):
        with pytest.raises(FingerprintMismatchError) as refused:
            engine.restore(tmp_path / "before.kvsnap", on_mismatch=on_mismatch)
        assert refused.value.field == "behaviour"


@pytest.mark.parametrize("window", [None, 39, 4095])
def test_another_window_is_another_digest(window):
    """An engine refuses it, unless the mask was changed with it."""
    model = build("gemma2")
    before = digest(model)
    attentions(model)[0].sliding_window = window
    assert digest(model) != before


def test_a_class_whose_forward_was_exchanged_is_refused(tmp_path, closing, monkeypatch):
    model = build("llama")
    with make_engine(model) as engine, engine.session() as session:
        session.prefill(prompt(40))
        session.save(tmp_path / "before.kvsnap")
    kind = type(attentions(model)[0])
    own = kind.forward

    def hotter(self, *args, **kwargs):
        before, self.scaling = self.scaling, self.scaling * 1.5
        try:
            return own(self, *args, **kwargs)
        finally:
            self.scaling = before

    monkeypatch.setattr(kind, "forward", hotter)
    engine = closing(make_engine(model))
    with pytest.raises(FingerprintMismatchError) as refused:
        engine.restore(tmp_path / "before.kvsnap")
    assert refused.value.field in ("additions", "behaviour")


def test_a_prefill_takes_no_chunk_of_a_model_that_attends_otherwise(tmp_path, closing):
    model, store = build("llama"), DirectoryStore(tmp_path)
    with make_engine(model) as engine, engine.session() as session:
        session.prefill(prompt(80))
        session.save("before", store=store)
    same = closing(closing(make_engine(model, store=store)).session())
    same.prefill(prompt(80))
    assert same.restored_tokens == 80
    scaled(model)
    other = closing(closing(make_engine(model, store=store)).session())
    other.prefill(prompt(80))
    assert other.restored_tokens == 0


def test_the_fingerprint_changes_with_weights_changed(closing):
    model = build("llama")
    engine = closing(make_engine(model))
    before = dict(engine.fingerprint)
    scaled(model)
    engine.weights_changed()
    now = dict(engine.fingerprint)
    assert now != before
    assert now == closing(make_engine(model)).fingerprint


def digest(model, counts=(32,)):
    attach(model)
    return behave(model, RowCounts(counts[-1], tuple(counts[:-1]))).digest


@pytest.mark.parametrize("argument", ["cache_position", "cache", "output_attentions"])
def test_every_argument_of_a_call_is_part_of_the_digest(argument):
    model = build("llama")
    before = digest(model)
    give(model, **{argument: torch.ones(1, 3)})
    ones = digest(model)
    give(model, **{argument: torch.zeros(1, 3)})
    assert len({before, ones, digest(model)}) == 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_model_has_one_digest_whatever_the_rows_and_threads(architecture, dtype):
    """Where torch's own products of as many rows have the same bits; here attention alone."""
    model = build(architecture, dtype)
    threads = torch.get_num_threads()
    whole = digest(model, (16, 32))
    assert digest(model, (16, 64)) == whole
    try:
        torch.set_num_threads(1)
        one = digest(model, (16,))
        assert digest(model, (16,)) == one
    finally:
        torch.set_num_threads(threads)


def test_engines_of_other_sizes_and_other_processes_find_the_same(closing):
    made = {rows: closing(make_engine(build("llama"), rows=rows)) for rows in (8, 32, 64)}
    digests = {engine.fingerprint["behaviour"] for engine in made.values()}
    program = (
        "import sys, json; sys.path.insert(0, sys.argv[1])\n"
        "from reference_models import build, make_engine\n"
        "import torch; torch.set_num_threads(int(sys.argv[2]))\n"
        "print(json.dumps(dict(make_engine(build('llama')).fingerprint)))\n"
    )
    folder = str(Path(__file__).parent)
    command = [sys.executable, "-c", program, folder, str(torch.get_num_threads())]
    said = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    assert json.loads(said.stdout) == dict(made[32].fingerprint)
    assert len(digests) == 1


def test_its_tokens_reach_from_the_first_position_to_the_last():
    model = build("llama")
    tokens, positions = behaviour_tokens(model)
    assert len(tokens) == len(positions) == TOKENS
    assert positions.unique().numel() == TOKENS
    assert (positions[0], positions[-1]) == (0, COMMON["max_position_embeddings"] - 1)
    short = build("llama", max_position_embeddings=9)
    assert behaviour_tokens(short)[1].tolist() == [*range(9), *[8] * (TOKENS - 9)]


HEADS, DIM = 4, 32


def drawn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator)


def mixed(q, k, v, *, pieces=(KEYS,), positions=None, **call):
    mixing = Mixing()
    made, start = [], 0
    positions = torch.arange(len(q)) * 10 if positions is None else positions
    for rows in pieces:
        at = slice(start, start + rows)
        mixing.begin(positions[at])
        made.append(mixing.attend(0, q[at], k[at], v[at], scaling=0.2, **call))
        start += rows
    return torch.cat(made)


@pytest.fixture
def rows():
    return drawn(KEYS, HEADS, DIM), drawn(KEYS, 2, DIM, seed=1), drawn(KEYS, 2, DIM, seed=2)


def test_rows_that_mix_see_every_key_up_to_their_own_and_no_other(rows):
    q, k, v = rows
    whole = mixed(q, k, v)
    for changed in range(KEYS):
        for tensor in (k, v):
            kept = tensor[changed].clone()
            tensor[changed] *= 1.001
            differs = (mixed(q, k, v) != whole).flatten(1).any(1)
            tensor[changed] = kept
            # The first row's weight is 1, whatever its key.
            first = changed + (tensor is k and changed == 0)
            assert differs.tolist() == [row >= first for row in range(KEYS)]


@pytest.mark.parametrize(
    "call", [{"window": 35}, {"softcap": 2.0}, {"sinks": torch.zeros(HEADS)}], ids=str
)
def test_rows_that_mix_show_what_a_call_asks_for(rows, call):
    plain, other = mixed(*rows), mixed(*rows, **call)
    assert (other != plain).flatten(1).any(1)[4:].all()


def test_rows_that_mix_have_the_same_bits_in_any_pieces_and_order_of_sums(rows):
    q, k, v = rows
    whole = mixed(q, k, v, window=55, softcap=3.0)
    for pieces in ((8, 8), (1,) * KEYS, (3, 13)):
        assert torch.equal(mixed(q, k, v, pieces=pieces, window=55, softcap=3.0), whole)
    order = torch.randperm(DIM, generator=torch.Generator().manual_seed(1))
    assert torch.equal(mixed(q[..., order], k[..., order], v, window=55, softcap=3.0), whole)
