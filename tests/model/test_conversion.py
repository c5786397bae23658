"""K/V that are saved or read in another dtype than they were computed in."""

from __future__ import annotations

import pytest
import torch
from reference_models import CHUNK, build, make_engine, prompt

from kvpager import DirectoryStore, FingerprintMismatchError, InvalidArgumentError
from kvpager._model.layout import CODED
from kvpager.cli import main
from kvpager.pager import open_snapshot

TOKENS = 5 * CHUNK + 7


@pytest.fixture(scope="module")
def model():
    return build("llama", "bfloat16")


@pytest.fixture
def plain(model, closing):
    return closing(make_engine(model))


@pytest.fixture(params=[*CODED, "float32"])
def other(request):
    return request.param


def saved(engine, path, **options):
    with engine.session() as session:
        session.prefill(prompt(TOKENS))
        session.save(path, **options)
    return path


def rows(session, layer):
    return session.sequence.read_kv(layer, 0, TOKENS)


def assert_as_if_rounded_once(session, source, layout):
    """K/V of `session` are those of `source`, kept as `layout` keeps them."""
    for layer in range(layout.layers):
        for found, computed in zip(rows(session, layer), rows(source, layer), strict=True):
            off = (found.float() - computed.float()).abs().amax()
            assert float(off) <= 0.3 * float(computed.float().abs().amax())
            if layer in layout.float_layers:
                assert torch.equal(found.float(), computed.float())


def test_a_text_saved_in_another_dtype_has_what_an_engine_of_that_dtype_stores(
    model, plain, other, closing, tmp_path
):
    path = saved(plain, tmp_path / "text.kv", kv_dtype=other)
    theirs = closing(make_engine(model, kv_dtype=other))
    with theirs.session() as computed, plain.session() as source:
        computed.prefill(prompt(TOKENS))
        source.prefill(prompt(TOKENS))
        with theirs.restore(path, on_mismatch="approximate") as session:
            # Layer 0's keys and values depend on no attention: they are what was rounded.
            for mine, expected in zip(rows(session, 0), rows(computed, 0), strict=True):
                assert torch.equal(mine, expected)
            assert_as_if_rounded_once(session, source, theirs.layout)
            assert {entry.provenance for entry in session.sequence.ledger()} == {"approximate"}
            assert len(session.generate(4, eos=None).tokens) == 4


def test_what_was_converted_says_so_and_is_refused_without_leave(
    model, plain, other, closing, tmp_path
):
    path = saved(plain, tmp_path / "text.kv", kv_dtype=other)
    opened = open_snapshot(path)
    theirs = closing(make_engine(model, kv_dtype=other))
    assert opened.layout == theirs.layout
    assert opened.fingerprint["kv_converted"] == "bfloat16"
    with pytest.raises(FingerprintMismatchError, match="approximate") as refused:
        theirs.restore(path)
    assert refused.value.field == "kv_converted"
    with pytest.raises(FingerprintMismatchError, match='on_mismatch="convert"'):
        plain.restore(path, on_mismatch="approximate")
    assert theirs.stats()["sequences"] == plain.stats()["sequences"] == 0


def test_a_text_of_another_dtype_is_read_where_that_was_asked_for(
    model, plain, other, closing, tmp_path
):
    theirs = closing(make_engine(model, kv_dtype=other))
    path = saved(theirs, tmp_path / "text.kv")
    with theirs.session() as source, plain.restore(path, on_mismatch="convert") as session:
        source.prefill(prompt(TOKENS))
        for layer in range(plain.layout.layers):
            for mine, computed in zip(rows(session, layer), rows(source, layer), strict=True):
                assert torch.equal(mine, computed.to(torch.bfloat16))
        assert {entry.provenance for entry in session.sequence.ledger()} == {"approximate"}
        session.prefill(prompt(TOKENS + 20))
        again = saved(plain, tmp_path / "again.kv")
        session.save(tmp_path / "converted.kv")
    assert open_snapshot(again).fingerprint == plain.fingerprint  # nothing of it is shared


def test_a_store_keeps_a_converted_text_as_a_file_does(model, plain, closing, tmp_path):
    store = DirectoryStore(tmp_path / "store")
    saved(plain, "text", store=store, kv_dtype="q8")
    saved(plain, tmp_path / "text.kv", kv_dtype="q8")
    theirs = closing(make_engine(model, kv_dtype="q8"))
    with (
        theirs.restore("text", store=store, on_mismatch="approximate") as ours,
        theirs.restore(tmp_path / "text.kv", on_mismatch="approximate") as expected,
    ):
        for layer in range(theirs.layout.layers):
            for mine, one in zip(rows(ours, layer), rows(expected, layer), strict=True):
                assert torch.equal(mine, one)


def test_a_text_in_8_bits_has_little_more_than_half_of_the_bytes(plain, tmp_path):
    whole, coded = (
        saved(plain, tmp_path / f"{name}.kv", kv_dtype=name).stat().st_size
        for name in ("bfloat16", "q8")
    )
    assert coded < 0.7 * whole


@pytest.mark.parametrize("wrong", ["q5", 8, "native"])
def test_a_dtype_that_is_none_is_refused_before_anything_is_written(plain, wrong, tmp_path):
    with pytest.raises(
        InvalidArgumentError, match=r"kv_dtype is .*expected None, or one of 'auto'"
    ):
        saved(plain, tmp_path / "text.kv", kv_dtype=wrong)
    assert not list(tmp_path.iterdir())


def test_an_unknown_answer_to_a_mismatch_is_refused_with_those_there_are(plain, tmp_path):
    path = saved(plain, tmp_path / "text.kv")
    with pytest.raises(InvalidArgumentError, match='"refuse", "approximate" or "convert"'):
        plain.restore(path, on_mismatch="yes")


def test_a_converted_file_is_sound_and_inspect_says_what_it_was(plain, tmp_path, capsys):
    path = str(saved(plain, tmp_path / "text.kv", kv_dtype="k8v4"))
    assert main(["snapshot", "verify", path]) == 0
    capsys.readouterr()
    assert main(["snapshot", "inspect", path, "--format", "json"]) == 0
    assert '"kv_converted": "bfloat16"' in capsys.readouterr().out
