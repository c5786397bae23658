"""Scores and budgets of the quality comparison."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("kvpager_bench")

from kvpager import TopK
from kvpager.config import Window
from kvpager_bench import budgets, harness
from kvpager_bench.budgets import Budget, found_of, mass_recall
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


def test_mass_recall_is_the_softmax_share_of_the_selected_chunks() -> None:
    random = np.random.default_rng(0)
    tokens, kv_heads, dim, group = 3 * budgets.CHUNK_TOKENS, 2, 8, 2
    k = random.standard_normal((tokens, kv_heads, dim), dtype=np.float32)
    q = random.standard_normal((kv_heads * group, dim), dtype=np.float32)
    assert mass_recall(q, k, [[0, 1, 2]] * kv_heads, 0.3) == pytest.approx(1)
    assert mass_recall(q, k, [[]] * kv_heads, 0.3) == 0
    chosen = [[0], [1, 2]]
    shares = []
    for head in range(kv_heads * group):
        weights = np.exp(0.3 * (k[:, head // group].astype(float) @ q[head].astype(float)))
        inside = np.repeat([c in chosen[head // group] for c in range(3)], budgets.CHUNK_TOKENS)
        shares.append(weights[inside].sum() / weights.sum())
    assert mass_recall(q, k, chosen, 0.3) == pytest.approx(np.mean(shares))


def test_mass_recall_survives_large_scores() -> None:
    k = np.zeros((2 * budgets.CHUNK_TOKENS, 1, 4), dtype=np.float32)
    k[70] = 100
    q = np.full((1, 4), 100, dtype=np.float32)
    assert mass_recall(q, k, [[1]], 1.0) == pytest.approx(1)


@pytest.mark.parametrize("percent", PERCENTS)
@pytest.mark.parametrize("context", [4096, 16384])
def test_every_policy_reads_at_most_what_a_press_keeps(percent: int, context: int) -> None:
    budget = Budget(context, percent)
    chunk = budgets.CHUNK_TOKENS
    assert round(context * (1 - budget.compression_ratio)) == budget.tokens
    assert budget.tokens <= context * percent / 100 or budget.chunks == 4
    # The furthest position of a chunk sees the most of its recent window.
    last = 10 * chunk - 1
    for policy in budgets.SCORERS:
        selection = budget.selection(policy)
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


def test_the_verdict_compares_with_the_oracle_and_with_full_attention() -> None:
    report = Report("quality-quick", "?", quality.COLUMNS, {}, {})

    def row(policy: str, budget: int, found: int) -> None:
        report.add(
            keys="trained", context=4096, policy=policy, budget=budget, kept=1, found=found,
            asked=16, mass_recall=quality.NOT_APPLICABLE,
        )  # fmt: skip

    row(quality.FULL, 100, 16)
    row(quality.OURS, 6, 15)
    row(quality.OURS, 10, 15)
    row(quality.ORACLE, 10, 16)
    row("kvpress KNorm", 10, 3)
    quality.judge(report)
    oracle, press = report.comparisons
    assert (oracle.peer, oracle.holds) == ("oracle", False)  # 15 / 16 is below 0.95
    assert press.ratio == pytest.approx(5)
    assert [verdict.holds for verdict in report.verdicts] == [False]


def test_a_press_that_the_model_does_not_suit_gets_no_figure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    budget = Budget(4096, 10)
    kept = [budget.tokens, budget.tokens]

    def call(name: str, script: str, task: dict[str, Any], timeout: float) -> dict[str, Any]:
        asked = [press for press, _ in task["presses"]]
        unsuited = {"ExpectedAttention": "its queries are others"}
        return {
            "answers": [[] if press in unsuited else [[1, 2, 3, 4]] for press in asked],
            "kept": [[] if press in unsuited else kept for press in asked],
            "unsuited": unsuited,
        }

    monkeypatch.setattr(quality.peers, "call", call)
    model = SimpleNamespace(stock=SimpleNamespace(save_pretrained=lambda path: None))
    document = SimpleNamespace(ids=np.arange(8))
    questions = SimpleNamespace(document=document, prompts=[[1]], answers=[[1, 2, 3, 4]])
    unsuited: dict[str, str] = {}
    told = list(quality.ask_kvpress(model, questions, [budget], 2, unsuited))  # type: ignore[arg-type]
    assert [press for press, *_ in told] == ["SnapKV", "KNorm", "StreamingLLM"]
    assert unsuited == {"ExpectedAttention": "its queries are others"}
