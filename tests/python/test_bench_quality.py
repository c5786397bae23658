"""Scores and budgets of the quality comparison."""

from __future__ import annotations

import pytest

pytest.importorskip("kvpager_bench")

from kvpager import TopK
from kvpager.config import Window
from kvpager_bench import budgets, harness
from kvpager_bench.budgets import Budget, found_of
from kvpager_bench.harness import Report
from kvpager_bench.questions import quality

PERCENTS = (2, 5, 6, 10, 20, 50)


def test_an_answer_counts_only_when_every_token_is_right() -> None:
    expected = [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert found_of(expected, expected) == 2
    assert found_of([[1, 2, 3, 9], [5, 6, 7, 8]], expected) == 1
    assert found_of([[1, 2, 3], [5, 6, 7, 8]], expected) == 1
    with pytest.raises(harness.MissingNumberError, match="1 answers to 2 questions"):
        found_of([[1, 2, 3, 4]], expected)


@pytest.mark.parametrize("percent", PERCENTS)
@pytest.mark.parametrize("context", [4096, 16384])
def test_every_policy_reads_at_most_what_a_press_keeps(percent: int, context: int) -> None:
    budget = Budget(context, percent)
    chunk = budgets.CHUNK_TOKENS
    assert round(context * (1 - budget.compression_ratio)) == budget.tokens
    assert budget.tokens <= context * percent / 100 or budget.chunks == 4
    # The furthest position of a chunk sees the most of its recent window.
    last = 10 * chunk - 1
    selection = budget.selection(budgets.OURS)
    assert isinstance(selection, TopK)
    assert selection.recent >= budgets.ROWS
    recent = 10 - (last - chunk + 1 - selection.recent + 1) // chunk
    assert selection.sinks // chunk + selection.chunks + recent == budget.chunks
    window = budget.selection(budgets.WINDOW)
    assert isinstance(window, Window)
    assert window.sinks + window.recent + chunk == budget.tokens


def test_a_press_that_keeps_more_than_its_budget_is_refused() -> None:
    budget = Budget(4096, 10)
    quality.require_equal_budget("any", budget, [budget.tokens, budget.tokens - 1])
    with pytest.raises(RuntimeError, match="any kept"):
        quality.require_equal_budget("any", budget, [budget.tokens, budget.tokens + 64])


def test_the_verdict_compares_with_a_press_and_with_full_attention() -> None:
    report = Report("quality-quick", "?", quality.COLUMNS, {}, {})

    def row(policy: str, budget: int, found: int) -> None:
        report.add(
            keys="trained", context=4096, policy=policy, budget=budget, kept=1, found=found,
            asked=16,
        )  # fmt: skip

    row(quality.FULL, 100, 16)
    row(quality.OURS, 6, 15)
    row(quality.OURS, 10, 15)
    row("kvpress KNorm", 10, 3)
    quality.judge(report)
    (press,) = report.comparisons
    assert press.ratio == pytest.approx(5)
    assert [verdict.holds for verdict in report.verdicts] == [False]
