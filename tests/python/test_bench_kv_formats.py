"""What K/V in fewer bits cost in quality: windows, divergences, formats, other systems' caches."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from bench_reports import make_report
from transformers import Qwen3Config, Qwen3ForCausalLM

from kvpager import Engine, PagerConfig
from kvpager.config import KV_DTYPES
from kvpager_bench import divergence
from kvpager_bench.harness import Column
from kvpager_bench.questions import codes, formats
from kvpager_bench.questions.attention import Case
from kvpager_bench.questions.formats import (
    last_logits,
    logits_after_a_file,
    windows,
)


class TestDivergence:
    def test_kl_is_of_each_row_in_nats_and_never_below_zero(self):
        p, q = torch.tensor([[0.5, 0.5]] * 2).log(), torch.tensor([[0.5, 0.5], [0.25, 0.75]]).log()
        expected = [0, 0.5 * math.log(2) + 0.5 * math.log(2 / 3)]
        assert divergence.kl_divergences(p, q).tolist() == pytest.approx(expected)
        rounded = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
        assert (divergence.kl_divergences(rounded, rounded.float()) == 0).all()

    def test_perplexity_and_the_top_token_are_of_the_logits_that_are_scored(self):
        expected = torch.tensor([[0.0, 9.0], [0.0, 9.0]])
        logits = torch.tensor([[0.75, 0.25], [0.25, 0.75]]).log()
        one = divergence.sample(expected, logits, np.array([0, 1]))
        assert one.perplexity == pytest.approx(4 / 3)
        assert one.same_top.tolist() == [False, True]
        both = divergence.pooled([one, one])
        assert len(both.kl) == len(both.logprob) == 4
        assert both.perplexity == pytest.approx(one.perplexity)

    def test_the_standard_error_is_of_sets_and_not_of_what_is_in_them(self):
        assert divergence.standard_error(np.array([0.0, 0, 1, 1]), 2) == 0.5
        assert divergence.standard_error(np.array([0.0, 1, 0, 1]), 2) == 0

    def test_logits_of_another_shape_are_refused(self):
        with pytest.raises(ValueError, match=r"\[2, 8\] of 3 tokens beside \[2, 8\]"):
            divergence.sample(torch.zeros(2, 8), torch.zeros(2, 8), np.arange(3))


class TestWindows:
    MODULES = ([1] * 5, [2] * 30, [3] * 12, [4] * 20)

    def test_each_ends_with_another_module_the_longest_first(self):
        made = windows(self.MODULES, 10, 3)
        assert [set(window.tolist()) for window in made] == [{2}, {4}, {3}]
        assert all(len(window) == 10 for window in made)

    def test_a_short_module_has_those_that_follow_it_in_front(self):
        (_, window) = windows(self.MODULES, 40, 2)
        assert window.tolist() == [2] * 15 + [1] * 5 + [4] * 20

    @pytest.mark.parametrize(("tokens", "count"), [(10, 5), (10, 0), (68, 1)])
    def test_what_the_modules_do_not_give_is_refused(self, tokens, count):
        with pytest.raises(ValueError, match="modules"):
            windows(self.MODULES, tokens, count)


def test_native_comes_first_whether_it_is_named_or_not():
    assert [kept.name for kept in formats.formats_of(["q8", "bfloat16"])] == [
        "native", "bfloat16", "q8"
    ]  # fmt: skip
    assert formats.formats_of([]) == formats.formats_of(["native"])


@pytest.mark.parametrize("percent", [100, 10])
def test_a_config_reads_no_more_of_the_context_than_asked(percent):
    config = formats.config_of(formats.FORMATS["q8"], 4096, percent)
    assert config.kv_dtype == "q8"
    assert config.selection.kind == ("dense" if percent == 100 else "topk")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        initializer_range=0.2,
    )
    return Qwen3ForCausalLM(config).eval()


def engine_of(model, **fields):
    config = PagerConfig(pool_tokens=1024, rows=64, small_rows="fixed", **fields)
    return Engine(model, config)


class TestLogits:
    IDS = np.random.default_rng(0).integers(8, 128, 130, dtype=np.int32)

    def test_they_are_those_of_a_prefill_of_what_comes_before_each_token(self, model):
        with engine_of(model) as engine:
            logits = last_logits(engine, self.IDS, 70)
            assert logits.shape == (70, 128)
            for row in (0, 69):
                with engine.session() as session:
                    session.prefill(self.IDS[: len(self.IDS) - 70 + row])
                    assert torch.equal(session.logits, logits[row])

    def test_those_after_a_file_differ_only_if_the_file_has_other_numbers(self, model):
        with engine_of(model) as engine:
            logits = last_logits(engine, self.IDS, 70)
            same = logits_after_a_file(engine, self.IDS, 70, "float32")
            coded = logits_after_a_file(engine, self.IDS, 70, "q8")
        assert torch.equal(same, logits)
        assert not torch.equal(coded, logits)
        assert divergence.kl_divergences(logits, coded).max() < 0.01


def test_formats_are_judged_by_order():
    columns = (Column("format", text=True), *(Column(name) for name in ("context", "read", "kl")))
    kls = {"q8": 1e-4, "k8v4": 1e-3, "q4": 4e-3, "q4 not rotated": 2e-3}
    rows = [{"format": name, "context": 4096, "read": 100, "kl": kl} for name, kl in kls.items()]
    report = make_report("quality_formats", columns, [*rows, {**rows[0], "read": 10, "kl": 9.0}])
    formats.judge(report)
    assert {verdict.claim: verdict.holds for verdict in report.verdicts} == {
        "keys of 8 bits and values of 4 cost more than 8 bits for both": True,
        "4 bits for both cost more than for values alone": True,
        "q4 is nearer to native with rotation than without": False,
    }


def test_codes_measures_the_dtypes_that_the_pager_has():
    kept = [dtype for dtype in codes.AIMS if dtype in KV_DTYPES]
    assert kept[0] == "q8"
    sizes = [Case("16/8/128", dtype, 2048).row_bytes for dtype in (codes.PLAIN, *kept)]
    assert sizes == sorted(sizes, reverse=True)
    for dtype, size in zip(kept, sizes[1:]):
        assert sizes[0] / size >= codes.AIMS[dtype].smaller
