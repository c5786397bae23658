"""The relation "equal to transformers": it holds, it is tight, and it sees what all ways share."""

from __future__ import annotations

import pytest
import torch
from reference_models import CHUNK, ROWS, SHIPPED, build
from test_own_attention import WINDOW, phimoe, qwen2_moe

from kvpager import PagerConfig, TopK
from kvpager._model.seam import attention
from kvpager.verify import RELATIONS, Subject, check_relation, relation, verify
from kvpager.verify.relations.stock import stock_run

STOCK = relation("equal to transformers")
CONFIG = PagerConfig(pool_tokens=8 * CHUNK, rows=ROWS, chunk_tokens=CHUNK, host_bytes="256MiB")


def checked(model, config=CONFIG, **options):
    with Subject(model, config, **options) as subject:
        return check_relation(subject, STOCK)


@pytest.mark.parametrize(
    "architecture", ["llama", "gemma2", SHIPPED, pytest.param("gpt_oss", marks=pytest.mark.deep)]
)
def test_logits_and_keys_and_values_are_within_a_few_roundings_of_transformers(architecture):
    outcome = checked(build(architecture))
    assert outcome.status == "within", outcome.reason
    assert [measure.what for measure in outcome.measures] == ["keys", "values", "logits"]
    assert all(measure.apart <= measure.bound < 1e-3 for measure in outcome.measures)
    assert not outcome.comparison.elements  # no bits are promised, and none are counted
    assert "101 tokens" in outcome.notes


@pytest.mark.parametrize("architecture", ["mistral", SHIPPED])
def test_in_sixteen_bits_it_is_as_far_off_as_one_rounding_of_each_module(architecture):
    outcome = checked(build(architecture, "bfloat16"))
    assert outcome.status == "within", outcome.reason
    assert {"keys", "values"} <= {measure.what for measure in outcome.measures}


def test_a_window_longer_than_the_prompt_makes_it_longer():
    outcome = checked(build("mistral", sliding_window=150))
    assert outcome.status == "within", outcome.reason
    assert "225 tokens" in outcome.notes


def test_a_window_there_is_no_room_for_is_named():
    outcome = checked(phimoe(sliding_window=30_000, max_position_embeddings=65_536))
    assert outcome.status == "within", outcome.reason
    assert any("30000 are longer" in note for note in outcome.notes)


def test_chosen_chunks_are_not_held_to_it():
    config = CONFIG.replace(selection=TopK(chunks=2, sinks=CHUNK, recent=ROWS))
    assert checked(build(SHIPPED), config).status == "does not apply"


# What all ways of an engine have in common, so that no other relation can see it.


def test_a_window_that_is_lost_is_seen_by_it_alone(monkeypatch):
    model = qwen2_moe()
    with Subject(model, CONFIG, effort="start") as subject:
        monkeypatch.setattr(attention, "mask_window", lambda module: None)
        report = verify(subject, [each for each in RELATIONS if each.at_start or each is STOCK])
    assert [o.relation for o in report.outcomes if not o.kept] == [STOCK.name]
    outcome = report.outcome(STOCK.name)
    assert outcome.status == "failed"
    assert int(outcome.reason.split("position ")[1].split(")")[0]) >= WINDOW
    assert "NOT KEPT" in report.verdict()


@pytest.mark.parametrize("option", ["scaling", "softcap"])
def test_a_wrong_number_in_every_attention_is_seen(option, monkeypatch):
    from kvpager.pager import Forward

    original = Forward.attend

    def attend(self, *args, **call):
        if call.get(option) is not None:
            call[option] *= 1.001
        return original(self, *args, **call)

    monkeypatch.setattr(Forward, "attend", attend)
    outcome = checked(build("gemma2"))
    assert outcome.status == "failed"
    assert "layer" in outcome.reason or "position" in outcome.reason


def test_not_a_number_is_not_within(monkeypatch):
    from kvpager.verify.relations import stock

    original = stock.stock_run

    def broken(model, ids, **options):
        run = original(model, ids, **options)
        if not options.get("rounding"):
            run.logits[-1] = torch.nan
        return run

    monkeypatch.setattr(stock, "stock_run", broken)
    assert checked(build("llama")).status != "within"


def test_transformers_gets_the_model_as_it_was():
    model = build("llama")
    ids = torch.arange(5, 20).numpy()
    before = dict(model.config.to_dict())
    hooks = sum(len(module._forward_hooks) for module in model.modules())
    first = stock_run(model, ids, rounding=1e-3, seed=3)
    again = stock_run(model, ids)
    assert model.config._attn_implementation == "sdpa"
    assert dict(model.config.to_dict()) == before
    assert sum(len(module._forward_hooks) for module in model.modules()) == hooks
    assert not torch.equal(first.logits, again.logits)
