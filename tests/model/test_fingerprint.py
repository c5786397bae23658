"""Sessions are refused wherever their K/V would mean something else, naming the field."""

from __future__ import annotations

import json

import pytest
import torch
from bits import assert_same_session
from reference_models import build, make_engine, prompt

from kvpager import FingerprintMismatchError, InvalidArgumentError, TopK
from kvpager._model.identity.fingerprint import RULES, WAIVABLE, compare
from kvpager._model.weights.digests import weights_digest


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture(scope="module")
def snapshot(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("snapshots") / "turn.kvsnap"
    with make_engine(model, salt="tenant") as engine, engine.session() as session:
        session.prefill(prompt(60))
        session.save(path)
    return path


def changed_weights():
    model = build("llama")
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight[100, 100] += 1e-6
    return model


OTHERS = {
    "weights": lambda model: make_engine(changed_weights(), salt="tenant"),
    "architecture": lambda model: make_engine(build("qwen3"), salt="tenant"),
    "rope": lambda model: make_engine(
        build("llama", rope_parameters={"rope_type": "default", "rope_theta": 5e5}), salt="tenant"
    ),
    "salt": lambda model: make_engine(model, salt="another"),
    "chunk_tokens": lambda model: make_engine(
        model, salt="tenant", chunk_tokens=32, pool_tokens=128
    ),
    "selection": lambda model: make_engine(
        model, salt="tenant", selection=TopK(chunks=2, recent=32)
    ),
    "k_dtype": lambda model: make_engine(model, salt="tenant", kv_dtype="bfloat16"),
}


@pytest.mark.parametrize("field", OTHERS)
def test_a_session_saved_under_another_field_is_refused_naming_it(field, model, snapshot, closing):
    engine = closing(OTHERS[field](model))
    for on_mismatch in ("refuse", "approximate"):
        with pytest.raises(FingerprintMismatchError, match="saved with") as refused:
            engine.restore(snapshot, on_mismatch=on_mismatch)
        assert refused.value.expected != refused.value.found
        fields = {"rope": ("rope", "weights")}.get(field, (field,))  # inv_freq is a buffer
        assert refused.value.field in fields
    assert engine.stats()["forwards"] == 0


@pytest.mark.parametrize(
    ("field", "options"), [("rows", {"small_rows": "fixed"}), ("exact", {"exact": False})]
)
def test_a_session_of_other_row_counts_is_accepted_only_as_approximate(
    field, options, model, snapshot, closing
):
    engine = closing(make_engine(model, salt="tenant", **options))
    with pytest.raises(FingerprintMismatchError, match=f"PagerConfig.{field}") as refused:
        engine.restore(snapshot)
    assert refused.value.field == field
    session = engine.restore(snapshot, on_mismatch="approximate")
    assert {chunk.provenance for chunk in session.ledger()} == {"approximate"}


def test_reuse_seals_what_all_does_and_has_its_fingerprint(model, snapshot, closing):
    engine = closing(make_engine(model, salt="tenant", exact="reuse"))
    assert engine.fingerprint["exact"] == "rows"
    assert {chunk.provenance for chunk in engine.restore(snapshot).ledger()} == {"exact"}


def test_the_most_rows_of_a_forward_are_no_part_of_it_where_both_are_proven_to_be_of_one_class(
    model, snapshot, closing
):
    """By default they follow the pool's size, which must never show."""
    engine = closing(make_engine(model, salt="tenant"))
    more = closing(make_engine(model, salt="tenant", rows=64, pool_tokens=256))
    assert more.rows == 2 * engine.rows
    assert more.fingerprint == engine.fingerprint
    session = engine.session()
    session.prefill(prompt(120))
    restored = more.restore(snapshot)
    restored.append(prompt(120)[60:])
    assert {chunk.provenance for chunk in restored.ledger()} == {"exact"}
    assert_same_session(restored, session, "restored where forwards have more rows")


def test_residency_settings_are_no_part_of_it(model, snapshot, closing):
    engine = closing(
        make_engine(
            model, salt="tenant", pool_tokens=512, host_bytes=0, policy="lru", hysteresis=0.5
        )
    )
    assert engine.restore(snapshot).length == 60


@pytest.mark.parametrize("field", WAIVABLE)
def test_numerics_are_refused_unless_approximate_results_are_accepted(field):
    expected = {"weights": "abc", field: 1}
    found = {"weights": "abc", field: 2}
    with pytest.raises(FingerprintMismatchError, match="approximate") as refused:
        compare(expected, found)
    assert (refused.value.field, refused.value.expected, refused.value.found) == (field, 1, 2)
    assert compare(expected, found, on_mismatch="approximate") == "approximate"
    assert compare(expected, expected, on_mismatch="approximate") == "exact"


def test_behaviour_is_waived_with_numerics_and_never_alone():
    expected = {"weights": "abc", "threads": 1, "behaviour": "x"}
    with pytest.raises(FingerprintMismatchError, match="behaviour") as refused:
        compare(expected, {**expected, "behaviour": "y"}, on_mismatch="approximate")
    assert "approximate" not in str(refused.value)
    both = {**expected, "threads": 2, "behaviour": "y"}
    with pytest.raises(FingerprintMismatchError, match="approximate") as refused:
        compare(expected, both)
    assert refused.value.field == "threads"
    assert compare(expected, both, on_mismatch="approximate") == "approximate"


def test_every_field_has_its_rule_in_the_order_they_are_written(model, closing):
    fields = list(closing(make_engine(model, linear="torch")).fingerprint)
    assert fields == [name for name, rule in RULES.items() if not rule.only_on]
    for name, rule in RULES.items():
        assert rule.meaning, name
        assert rule.remedy, name
        assert rule.on_mismatch == ("waivable" if name in WAIVABLE else "refuse")


@pytest.mark.parametrize("field", RULES)
def test_a_mismatch_follows_the_fields_rule_and_names_its_remedy(field):
    rule = RULES[field]
    expected, found = {field: 1}, {field: 2}
    with pytest.raises(FingerprintMismatchError) as refused:
        compare(expected, found)
    assert rule.remedy in str(refused.value)
    assert ("approximate" in str(refused.value)) == rule.waivable
    if rule.waivable:
        assert compare(expected, found, on_mismatch="approximate") == "approximate"
    else:
        with pytest.raises(FingerprintMismatchError):
            compare(expected, found, on_mismatch="approximate")


def test_what_cannot_be_waived_is_named_before_what_can():
    expected = {"threads": 1, "weights": "abc"}
    with pytest.raises(FingerprintMismatchError) as refused:
        compare(expected, {"threads": 2, "weights": "abd"})
    assert refused.value.field == "weights"
    assert "approximate" not in str(refused.value)


@pytest.mark.parametrize(("expected", "found"), [({"a": 1}, {}), ({}, {"a": 1})])
def test_a_field_that_one_side_lacks_is_a_mismatch(expected, found):
    with pytest.raises(FingerprintMismatchError) as refused:
        compare(expected, found, on_mismatch="approximate")
    assert refused.value.field == "a"


def test_other_words_for_on_mismatch_are_refused(model, snapshot, closing):
    with pytest.raises(InvalidArgumentError, match="on_mismatch is 'maybe'"):
        compare({}, {}, on_mismatch="maybe")


def test_a_session_restored_as_approximate_shares_nothing_as_exact(
    model, snapshot, closing, monkeypatch
):
    monkeypatch.setattr(torch, "__version__", "0.0.0")
    engine = closing(make_engine(model, salt="tenant"))
    with pytest.raises(FingerprintMismatchError, match="torch_version"):
        engine.restore(snapshot)
    session = engine.restore(snapshot, on_mismatch="approximate")
    session.append(prompt(40, seed=1))
    other = engine.session()
    other.prefill(session.tokens)
    assert engine.stats()["prefix_tokens_reused"] == 0
    assert {chunk.provenance for chunk in session.ledger()} == {"approximate"}


def test_the_digest_sees_every_weight_and_survives_a_round_trip():
    model, same = build("llama"), build("llama")
    assert weights_digest(model) == weights_digest(same)
    before = weights_digest(model)
    for change in (
        lambda: model.lm_head.weight.data[0, 0].neg_(),
        lambda: model.model.rotary_emb.inv_freq[3].mul_(1.5),  # a buffer no checkpoint holds
        lambda: model.half(),
    ):
        change()
        after = weights_digest(model)
        assert after != before
        before = after


def test_hashing_the_weights_tells_how_far_it_is(model, closing, capsys):
    calls = []
    engine = closing(make_engine(model, progress=lambda *call: calls.append(call)))
    total = sum(p.nbytes for p in [*model.parameters(), *model.buffers()])
    assert calls[0] == (0, total)
    assert calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert engine.fingerprint["weights"] == weights_digest(model)
    closing(make_engine(model, progress=True))
    assert "hash weights" in capsys.readouterr().err
    with pytest.raises(InvalidArgumentError, match="progress is 3"):
        make_engine(model, progress=3)


def test_an_engine_whose_progress_callback_raises_gives_the_model_back(model):
    def stop(done, total):
        raise KeyError("enough")

    before = model.config._attn_implementation
    with pytest.raises(KeyError, match="enough"):
        make_engine(model, progress=stop)
    assert model.config._attn_implementation == before


def test_one_element_changed_in_place_changes_the_digest():
    """What a merged low-rank adapter does, at its smallest."""
    model = build("llama")
    before = weights_digest(model)
    weight = model.model.layers[1].self_attn.v_proj.weight
    with torch.no_grad():
        kept = weight[3, 5].clone()
        weight[3, 5] += 2**-12
        assert weights_digest(model) != before
        weight[3, 5] = kept
    assert weights_digest(model) == before


def test_an_adapter_in_memory_changes_the_digest():
    model = build("llama")
    before = weights_digest(model)
    model.model.layers[0].mlp.register_parameter("adapter", torch.nn.Parameter(torch.zeros(3)))
    assert weights_digest(model) != before


def test_a_tensor_that_is_not_contiguous_has_the_digest_of_its_elements():
    model = build("llama")
    before = weights_digest(model)
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data = weight.data.t().contiguous().t()
    assert not weight.is_contiguous()
    assert weights_digest(model) == before


def test_how_a_model_is_named_and_used_is_no_part_of_it(model, closing):
    before = closing(make_engine(model)).fingerprint
    other = build("llama")
    other.config.pad_token_id = 5
    other.config.eos_token_id = [2, 7]
    other.config.use_cache = False
    other.config.architectures = ["LlamaForCausalLM"]
    other.config.name_or_path = "somewhere/else"
    assert closing(make_engine(other)).fingerprint == before
    other.config.rms_norm_eps = 1e-5
    assert closing(make_engine(other)).fingerprint != before


def test_a_fingerprint_is_flat_json_and_does_not_tell_the_salt(model, closing):
    engine = closing(make_engine(model, salt="very secret"))
    text = json.dumps(dict(engine.fingerprint))
    assert "very secret" not in text
    assert all(isinstance(value, (str, int)) for value in engine.fingerprint.values())
