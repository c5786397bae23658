"""Keys and values in 8 and 4 bits: the same promise, other numbers, texts of their own.

That every relation holds, to the bit, is among the cases of `matrix.py` and those of `kv_dtype`.
"""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from reference_models import CHUNK, SHIPPED, build, make_engine, prompt

from kvpager import Dense, FingerprintMismatchError, PagerConfig, TopK
from kvpager._model.layout import CODED
from kvpager.cli import main
from kvpager.cli.needles import NeedleTask
from kvpager.errors import InvalidArgumentError
from kvpager.pager import Layout
from kvpager.plan.shape import KvShape, read_shape


@pytest.fixture(scope="module")
def model():
    return build("llama", "bfloat16")


@pytest.fixture(params=["q8", "k8v4", "q4"])
def coded(request):
    return request.param


@pytest.fixture
def engine(model, closing, coded):
    return closing(make_engine(model, kv_dtype=coded))


def computed(engine, ids):
    """Logits after a prompt, and K/V [2, n, kv_heads, dim] of the first layer."""
    with engine.session() as session:
        session.prefill(ids)
        k, v = session.sequence.read_kv(0, 0, len(ids))
        return session.logits.float(), torch.stack([k.float(), v.float()])


def test_the_ledger_the_stats_and_a_session_say_what_chunks_are_kept_in(engine, coded):
    with engine.session() as session:
        session.prefill(prompt(5 * CHUNK))
        (entry, *_) = session.sequence.ledger()
        assert (entry.k_dtype, entry.v_dtype) == CODED[coded]
        k, v = session.sequence.read_kv(1, 3, 20)
        assert k.dtype == v.dtype == torch.float32
        assert engine.layout.format == coded
    assert engine.stats()["pool_bytes"] % engine.layout.chunk_bytes == 0


def test_a_chunk_has_little_more_than_half_of_its_bytes_in_bfloat16():
    plain, codes = (
        Layout(32, 8, 128, 128, k_dtype=dtype, v_dtype=dtype) for dtype in ("bfloat16", "q8")
    )
    assert codes.token_bytes == 32 * 8 * 2 * (128 + 2)
    assert codes.chunk_bytes / plain.chunk_bytes < 0.51


KNOWN_MODELS = {  # layers, K/V heads; all with a head_dim of 128
    "Qwen3-0.6B": (28, 8),
    "Llama-3.1-8B": (32, 8),
    "Qwen3-32B": (64, 8),
}


def test_the_page_has_the_bytes_of_a_token():
    page = Path(__file__).parents[2] / "docs" / "kv_formats.md"
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.read_text(encoding="utf-8").splitlines()
    ]
    names = next(row[1:] for row in rows if row[0] == "`kv_dtype`" and row[1] in KNOWN_MODELS)
    assert names == list(KNOWN_MODELS)
    for kv_dtype in ("auto", *CODED):
        told = next(
            row[1:] for row in rows if row[0].startswith(f'`"{kv_dtype}"`') and row[1][-1].isdigit()
        )
        for (layers, heads), count in zip(KNOWN_MODELS.values(), told, strict=True):
            own = Layout(layers, heads, 128, 128, k_dtype="bfloat16", v_dtype="bfloat16")
            assert count == f"{own.kept_as(kv_dtype).token_bytes:,}"


def test_codes_are_rotated_and_four_bits_leave_the_first_layer_as_it_is(model, closing):
    assert layout_of_engine(model, closing, "q8") == ("keys and values", ())
    assert layout_of_engine(model, closing, "k8v4") == ("keys and values", (0,))
    assert layout_of_engine(model, closing, "q4") == ("keys and values", (0,))
    assert layout_of_engine(model, closing, "q8", kv_rotation=False) == ("none", ())
    assert layout_of_engine(model, closing, "q4", kv_rotation=False) == ("none", (0,))
    assert layout_of_engine(model, closing, "q8", float_layers=[1]) == ("keys and values", (1,))
    assert layout_of_engine(model, closing, "q4", float_layers=()) == ("keys and values", ())


def layout_of_engine(model, closing, kv_dtype, **options):
    layout = closing(make_engine(model, kv_dtype=kv_dtype, **options)).layout
    return layout.rotation, layout.float_layers


@pytest.mark.parametrize(("kv_dtype", "warned"), [("q4", True), ("k8v4", True), ("q8", False)])
def test_a_model_with_attention_sinks_is_warned_about_below_eight_bits(
    caplog, closing, kv_dtype, warned
):
    with caplog.at_level(logging.WARNING):
        closing(make_engine(build("gpt_oss", "bfloat16"), kv_dtype=kv_dtype))
    assert ("attention sinks in 3 of its 3 layers" in caplog.text) == warned


def test_a_float_layer_has_the_bits_of_an_engine_without_codes(model, closing):
    ids = prompt(100)
    for dtype in ("k8v4", "q4"):
        found = computed(closing(make_engine(model, kv_dtype=dtype)), ids)[1]
        expected = computed(closing(make_engine(model, kv_dtype="auto")), ids)[1]
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kv_rotation": True}, "kv_rotation is True and kv_dtype 'auto'"),
        ({"float_layers": (0,)}, r"float_layers is \(0,\) and kv_dtype 'auto'"),
        ({"kv_dtype": "q4", "float_layers": (0, 7)}, "float_layers has 7; expected layers"),
        ({"kv_dtype": "q4", "float_layers": (-1,)}, "float_layers is .*expected"),
        ({"kv_dtype": "q4", "float_layers": 1}, "float_layers is 1; expected"),
        ({"kv_dtype": "q4", "kv_rotation": "yes"}, "kv_rotation is 'yes'; expected"),
    ],
)
def test_options_that_fit_no_codes_are_refused_by_name(model, options, said):
    with pytest.raises(InvalidArgumentError, match=said):
        make_engine(model, **options)


def test_each_number_is_within_half_a_step_of_the_one_that_was_computed(model, closing):
    ids = prompt(100)
    engine = closing(make_engine(model, kv_dtype="q8", kv_rotation=False))
    plain = closing(make_engine(model, kv_dtype="float32"))
    # The first layer's K/V depend on no other's: they are those that became codes.
    expected, found = (computed(one, ids)[1] for one in (plain, engine))
    step = expected.abs().amax(-1, keepdim=True) / 127
    assert ((found - expected).abs() <= step * 0.51).all()
    assert not torch.equal(found, expected)


def test_logits_are_near_those_of_plain_chunks(model, engine, coded, closing):
    ids = prompt(200)
    plain = closing(make_engine(model, kv_dtype="auto"))
    expected, found = (computed(one, ids)[0] for one in (plain, engine))
    assert (found - expected).std() < {"q8": 0.05, "k8v4": 0.3, "q4": 0.4}[coded] * expected.std()


@pytest.mark.parametrize("selection", [Dense(), TopK(chunks=4)])
def test_a_trained_model_finds_its_needles(selection, coded, closing):
    model = build(SHIPPED)
    task = NeedleTask(seed=3)
    document = task.document(4096, 8, avoid=[(0, 64), (3500, 4096)])
    found = {}
    for dtype in ("auto", coded):
        engine = closing(
            make_engine(
                model,
                kv_dtype=dtype,
                pool_tokens=2048,
                chunk_tokens=64,
                rows=64,
                selection=selection,
            )
        )
        found[dtype] = []
        with engine.session() as session:
            for key, value in zip(document.keys, document.values, strict=True):
                session.prefill(np.concatenate([document.ids, task.query(key)]))
                answer = session.generate(4, eos=None).tokens
                found[dtype].append(answer.tolist() == task.answer(value).tolist())
                session.trim(len(document.ids))
    assert sum(found[coded]) >= sum(found["auto"]) >= 6


def test_a_text_in_one_dtype_is_refused_by_an_engine_of_another(model, engine, closing, tmp_path):
    plain = closing(make_engine(model, kv_dtype="auto"))
    for saver, other in ((engine, plain), (plain, engine)):
        with saver.session() as session:
            session.prefill(prompt(40))
            session.save(tmp_path / "text.kv")
        with pytest.raises(FingerprintMismatchError, match="kv_dtype") as refused:
            other.restore(tmp_path / "text.kv")
        assert refused.value.field == "k_dtype"
        with pytest.raises(FingerprintMismatchError, match="kv_dtype"):
            other.restore(tmp_path / "text.kv", on_mismatch="approximate")
        assert other.stats()["sequences"] == 0


@pytest.mark.parametrize("changed", [{"kv_rotation": False}, {"float_layers": (1,)}])
def test_a_text_is_refused_by_an_engine_that_rotates_or_keeps_other_layers(
    model, closing, tmp_path, changed
):
    (field,) = changed
    engine, other = (
        closing(make_engine(model, kv_dtype="q4", **options)) for options in ({}, changed)
    )
    with engine.session() as session:
        session.prefill(prompt(40))
        session.save(tmp_path / "text.kv")
    with pytest.raises(FingerprintMismatchError, match=field) as refused:
        other.restore(tmp_path / "text.kv")
    assert refused.value.field == field


def test_texts_of_two_formats_share_no_chunk(model, engine, closing):
    plain = closing(make_engine(model, kv_dtype="auto"))
    names = []
    for one in (engine, plain):
        with one.session() as session:
            session.prefill(prompt(3 * CHUNK))
            names.append(one.pager.chain_hashes(session.tokens, ""))
    assert set(names[0]).isdisjoint(names[1])


def test_a_dtype_that_is_none_is_refused_with_those_there_are():
    with pytest.raises(InvalidArgumentError, match=r"'q5', expected .*'q8' or 'q4'"):
        Layout(1, 1, 32, 32, k_dtype="q5")
    with pytest.raises(InvalidArgumentError, match="kv_dtype"):
        PagerConfig(kv_dtype="q5")
    with pytest.raises(InvalidArgumentError, match="q4 and k_dim is 48; expected a multiple of 32"):
        Layout(1, 1, 48, 64, k_dtype="q4")


@pytest.mark.parametrize(
    ("kv_dtype", "field"), [("q4", "k_dim"), ("k8v4", "v_dim")], ids=["q4", "k8v4"]
)
@pytest.mark.parametrize("size", [16, 80])
def test_heads_that_four_bits_do_not_fit_are_refused_with_the_option_and_what_fits(
    kv_dtype, field, size
):
    plain = Layout(2, 1, size, size, k_dtype="float32")
    with pytest.raises(InvalidArgumentError) as error:
        plain.kept_as(kv_dtype)
    assert f"kv_dtype is '{kv_dtype}' and {field}" in str(error.value)
    assert f"is {size}; 4 bits take a multiple of 32" in str(error.value)
    assert plain.kept_as("q8").k_dtype == "q8"


def test_a_plan_counts_the_bytes_of_codes(model, tmp_path):
    model.config.save_pretrained(tmp_path)
    shape = read_shape(tmp_path, "bfloat16")
    plain, codes, mixed = (KvShape.of(shape, 64, dtype) for dtype in ("auto", "q8", "q4"))
    dim = shape.k_dim
    assert codes.token_bytes * 2 * dim == plain.token_bytes * (dim + 2)
    each = plain.token_bytes // shape.layers
    assert mixed.token_bytes == each + (shape.layers - 1) * each * 9 // 32  # one layer is bfloat16


def test_inspect_and_diff_know_codes(engine, coded, tmp_path, capsys):
    paths = []
    for name, ids in (("a", prompt(50)), ("b", np.append(prompt(49), 299))):
        paths.append(str(tmp_path / f"{name}.kv"))
        with engine.session() as session:
            session.prefill(ids)
            session.save(paths[-1])
    assert main(["snapshot", "inspect", paths[0]]) == 0
    out = capsys.readouterr().out
    assert f"head_dim {engine.layout.k_dim} ({CODED[coded][0]}) and" in out
    assert "rotated      keys and values" in out
    assert ("float layers" in out) == (coded != "q8")
    assert main(["snapshot", "verify", paths[0]]) == 0
    capsys.readouterr()
    assert main(["snapshot", "diff", *paths]) == 1
    assert "token 49" in capsys.readouterr().out
