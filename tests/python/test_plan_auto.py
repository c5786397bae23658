"""`pool_tokens="auto"`: the choice follows from the model and free memory, bits from neither."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from kvpager import Engine, Layout, Pager, PagerConfig, TopK
from kvpager._model.facts import checked_model as opening
from kvpager.config import config_from_json, config_to_json, free_memory, physical_memory
from kvpager.errors import CapacityError, InvalidArgumentError
from kvpager.plan import choose_pool

MIB = 1 << 20
AUTO = PagerConfig(pool_tokens="auto")
LAYOUT = Layout(layers=4, kv_heads=2, k_dim=64, v_dim=64)
IDS = [3 + i % 50 for i in range(700)]

free_bytes = st.integers(min_value=0, max_value=64 << 30)


def choice(config=AUTO, *, free=8 << 30, rows=256, positions=8192, device="cpu"):
    return choose_pool(
        config,
        LAYOUT.native(),
        rows=rows,
        max_positions=positions,
        free_bytes=free,
        device=device,
    )


def choice_or_none(**arguments):
    try:
        return choice(**arguments)
    except CapacityError:
        return None


@pytest.fixture
def model(model_dir):
    return AutoModelForCausalLM.from_pretrained(model_dir)


def with_free(monkeypatch, count):
    monkeypatch.setattr(opening, "free_memory", lambda: count)


class TestChoice:
    def test_with_room_the_longest_context_and_a_forward_fit(self):
        chosen = choice()
        assert chosen.complete
        assert chosen.pool_tokens == chosen.wanted_tokens == 8192 + 64 * 6
        assert chosen.pool_bytes == chosen.pool_tokens * LAYOUT.token_bytes

    def test_without_it_what_fits(self):
        chosen = choice(free=600 * MIB, positions=131072)
        assert not chosen.complete
        assert chosen.least_tokens <= chosen.pool_tokens < chosen.wanted_tokens
        taken = chosen.pool_bytes + chosen.other_bytes + chosen.margin_bytes
        assert 0 <= chosen.free_bytes - taken < LAYOUT.chunk_bytes

    @given(free_bytes, free_bytes, st.sampled_from(["cpu", "cuda"]))
    def test_more_free_memory_never_gives_a_smaller_pool(self, first, second, device):
        less, more = sorted((first, second))
        small = choice_or_none(free=less, device=device, positions=10**7)
        large = choice_or_none(free=more, device=device, positions=10**7)
        if small is not None:
            assert large is not None
            assert large.pool_tokens >= small.pool_tokens

    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    def test_pools_grow_with_free_memory_from_nothing_to_plenty(self, device):
        pools = [
            found.pool_tokens
            for free in range(0, 64 << 30, 256 * MIB)
            if (found := choice_or_none(free=free, device=device, positions=10**7))
        ]
        assert len(pools) > 200
        assert pools == sorted(pools)

    # The longest of contexts takes all that is to be had.
    @given(free_bytes, st.sampled_from(["cpu", "cuda"]), st.integers(0, 200_000) | st.just(10**9))
    def test_what_is_chosen_fits_beside_everything_else(self, free, device, positions):
        chosen = choice_or_none(free=free, device=device, positions=positions)
        if chosen is not None:
            assert chosen.pool_bytes + chosen.other_bytes + chosen.margin_bytes <= free
            assert chosen.pool_tokens % 64 == 0
            assert chosen == choice(free=free, device=device, positions=positions)

    def test_too_little_memory_is_refused_with_what_is_missing(self):
        with pytest.raises(CapacityError, match=r"too few for the least pool of 1,024 tokens"):
            choice(free=256 * MIB)

    def test_what_the_host_arena_takes_is_not_the_pools(self):
        with_arena = choice(PagerConfig(pool_tokens="auto", host_bytes="3GiB"), positions=10**7)
        without = choice(PagerConfig(pool_tokens="auto", host_bytes=0), positions=10**7)
        difference = without.pool_bytes - with_arena.pool_bytes
        assert difference == pytest.approx(3 << 30, rel=0.01)


class TestConfig:
    def test_anything_but_a_number_or_auto_is_refused(self):
        with pytest.raises(InvalidArgumentError, match=r'expected an integer .* or "auto"'):
            PagerConfig(pool_tokens="aut")

    def test_rows_never_follow_from_free_memory(self):
        assert AUTO.row_choices() == PagerConfig(pool_tokens=1 << 20).row_choices()
        assert AUTO.least_pool(256) == 1024
        assert PagerConfig(pool_tokens="auto", rows=64).least_pool(64) == 192

    def test_a_pager_without_a_model_says_what_to_do(self):
        with pytest.raises(
            InvalidArgumentError, match=r"pool_tokens.*only an Engine.*kvpager plan"
        ):
            Pager(Layout(layers=1, kv_heads=1, k_dim=64, v_dim=64), AUTO, rows=64)

    def test_it_survives_a_trip_through_json(self):
        assert config_from_json(config_to_json(AUTO)) == AUTO

    def test_free_memory_is_a_part_of_the_machines(self):
        assert 0 < free_memory() <= physical_memory()


class TestEngine:
    def test_the_pool_is_what_the_plan_says_and_says_why(self, model, monkeypatch, caplog):
        with_free(monkeypatch, 4 << 30)
        with caplog.at_level(logging.INFO, logger="kvpager"):
            engine = Engine(model, pool_tokens="auto")
        with engine:
            assert engine.plan.pool_tokens == engine.config.pool_tokens == 8192 + 64 * 6
            assert engine.stats()["pool_bytes"] == engine.plan.pool_bytes
            assert engine.plan.free_bytes == 4 << 30
        assert str(engine.plan) in caplog.text
        assert "the longest context and a forward" in caplog.text
        assert "4.0 GiB free, " in str(engine.plan)
        without_unit = r"\d(?![\d.,]| ?([KMG]i)?B\b| tokens)"
        assert re.search(without_unit, str(engine.plan)) is None

    def test_with_a_number_there_is_no_plan(self, model):
        with Engine(model, pool_tokens=1024) as engine:
            assert engine.plan is None
            assert engine.config.pool_tokens == 1024

    def test_fingerprint_and_bits_do_not_depend_on_free_memory(self, model, monkeypatch):
        fingerprints, logits, pools = [], [], []
        for free in (260 * MIB, 8 << 30):
            with_free(monkeypatch, free)
            with Engine(model, pool_tokens="auto", selection=TopK(chunks=2)) as engine:
                session = engine.session()
                session.prefill(IDS)
                fingerprints.append(dict(engine.fingerprint))
                logits.append(session.logits.clone())
                pools.append(engine.config.pool_tokens)
        assert pools[0] < pools[1]
        assert fingerprints[0] == fingerprints[1]
        assert torch.equal(logits[0].view(torch.int32), logits[1].view(torch.int32))

    def test_too_little_memory_leaves_the_model_as_it_was(self, model, monkeypatch):
        with_free(monkeypatch, 100 * MIB)
        before = model.config._attn_implementation
        with pytest.raises(CapacityError, match='pool_tokens is "auto"'):
            Engine(model, pool_tokens="auto")
        assert model.config._attn_implementation == before
