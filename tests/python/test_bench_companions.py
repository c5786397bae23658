"""Draft models in benchmarks: passes, resets, speculation; and turns of a hybrid model."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("kvpager_bench")

from kvpager import PagerConfig
from kvpager.speculation import SpeculationStats
from kvpager_bench import subjects
from kvpager_bench.harness import NOT_APPLICABLE, Report
from kvpager_bench.questions import companions, hybrid, speculation
from kvpager_bench.questions.companions import DENSE, KEPT, NONE, WINDOWED, WIPED, Size

SMALL = Size(prefix=768, passes=3, suffix=64, new_tokens=160, window=128)


@pytest.fixture(scope="module")
def shipped() -> Any:
    return subjects.load_model(subjects.SHIPPED)


@pytest.fixture(scope="module")
def passes(shipped: Any) -> Report:
    """With torch's products: how often guesses are right depends on the text, and that on bits."""
    report = Report("companions-quick", "?", companions.PASS_COLUMNS, {}, {})
    plain: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(companions, "PagerConfig", partial(PagerConfig, linear="torch"))
        for draft in companions.DRAFTS:
            told = companions.measure_passes(subjects.SHIPPED, shipped, draft, SMALL, plain, report)
            plain = plain or told
    return report


@pytest.fixture(scope="module")
def reset(shipped: Any) -> Report:
    report = Report("companions_reset-quick", "?", companions.RESET_COLUMNS, {}, {})
    for draft in (DENSE, WINDOWED):
        companions.measure_reset(shipped, draft, SMALL, report)
    return report


@pytest.fixture(scope="module")
def reports() -> tuple[Report, ...]:
    turns, costs, budget = (
        Report(f"{name}-quick", "?", columns, {}, {})
        for name, columns in (
            ("hybrid", hybrid.TURN_COLUMNS),
            ("hybrid_cost", hybrid.COST_COLUMNS),
            ("hybrid_budget", hybrid.BUDGET_COLUMNS),
        )
    )
    model = hybrid.load_model(4)
    hybrid.measure(model, 256, [1, 2], turns, costs)
    hybrid.measure_budget(model, 256, 3, budget)
    return turns, costs, budget


def row_of(report: Report, **values: Any) -> dict[str, Any]:
    (row,) = (r for r in report.rows if all(r[name] == value for name, value in values.items()))
    return row


class TestPasses:
    def test_each_pass_has_a_text_of_its_own_over_nearly_all_of_the_prefix(self, shipped):
        first, second, third = companions.texts(shipped, SMALL)
        assert companions.common_prefix(first, second) == 768 - companions.EDIT_BEFORE_END
        assert companions.common_prefix(second, third) >= 768
        assert companions.common_prefix(second, third) < len(third) == 768 + 64

    def test_a_windowed_draft_is_the_same_weights_with_a_window_in_every_layer(self, shipped):
        draft = companions.windowed(shipped, 128)
        assert [layer.self_attn.sliding_window for layer in draft.model.layers] == [128, 128]
        assert [layer.self_attn.sliding_window for layer in shipped.model.layers] == [None, None]
        theirs = dict(shipped.named_parameters())
        mine = draft.named_parameters()
        assert all(theirs[name].data_ptr() == value.data_ptr() for name, value in mine)
        assert companions.windowed(shipped, 128, layers=1).config.num_hidden_layers == 1

    def test_what_a_draft_refuses_costs_the_target_nothing(self, passes):
        plain = row_of(passes, draft=NONE)
        for draft in (DENSE, WINDOWED):
            assert row_of(passes, draft=draft, way=KEPT)["computed"] == plain["computed"]
        assert plain["computed"] == 2 * 64 + companions.EDIT_BEFORE_END
        assert plain["prompt_tokens"] == 2 * (768 + 64)

    def test_the_wiped_way_wipes_where_a_trim_was_refused_and_nowhere_else(self, passes):
        wiped = row_of(passes, draft=WINDOWED, way=WIPED)
        assert wiped["companion_refused"] == SMALL.passes - 1
        assert (wiped["computed"], wiped["reuse"]) == (wiped["prompt_tokens"], 0)
        dense = row_of(passes, draft=DENSE, way=WIPED)
        assert dense["companion_refused"] == 0
        assert dense["computed"] == row_of(passes, draft=DENSE, way=KEPT)["computed"]

    def test_both_ways_generate_what_plain_decode_does_with_guesses_that_are_right(self, passes):
        assert [row["differing_tokens"] for row in passes.rows] == [0] * 5
        assert row_of(passes, draft=NONE)["acceptance"] == NOT_APPLICABLE
        for row in passes.rows[1:]:
            assert row["acceptance"] > 50
            assert row["tokens_per_forward"] > 1.2

    def test_tokens_that_differ_or_are_missing_are_counted(self):
        assert companions.differing([1, 2, 3], [1, 2, 3]) == 0
        assert companions.differing([1, 9, 3], [1, 2, 3]) == 1
        assert companions.differing([1, 2], [1, 2, 3]) == 1

    def test_the_verdicts_are_about_windowed_drafts_and_the_promised_length(self, passes):
        report = Report("companions", "?", companions.PASS_COLUMNS, {}, {})
        for row in passes.rows:
            report.add(**{**row, "prefix": companions.CONTEXT})
        companions.judge_passes(report)
        tokens, seconds = report.comparisons
        assert tokens.peer == "wiping both caches"
        assert (tokens.aim, seconds.aim) == (companions.FEWER, None)
        assert tokens.ratio == pytest.approx(2 * (768 + 64) / (2 * 64 + 96))
        reuse, refused, same = report.verdicts
        assert not reuse.holds  # of so short a prefix 86.5% are reused
        assert refused.holds
        assert same.holds
        report.rows[-1]["differing_tokens"] = 1
        report.verdicts.clear()
        report.comparisons.clear()
        companions.judge_passes(report)
        assert not report.verdicts[-1].holds

    def test_a_prefix_shorter_than_the_promised_one_promises_nothing(self, passes):
        report = Report("companions", "?", companions.PASS_COLUMNS, {}, {})
        for row in passes.rows:
            report.add(**row)
        companions.judge_passes(report)
        assert [comparison.aim for comparison in report.comparisons] == [None, None]
        assert len(report.verdicts) == 2


class TestReset:
    def test_only_a_windowed_draft_begins_anew(self, reset):
        assert [row["refused"] for row in reset.rows if row["draft"] == DENSE] == [0] * 4
        assert [row["refused"] for row in reset.rows if row["draft"] == WINDOWED] == [0, 0, 1, 1]

    def test_one_chunk_after_a_reset_guesses_are_worth_what_they_were(self, reset):
        before, after = (row_of(reset, draft=WINDOWED, when=companions.WHEN[n]) for n in (1, 3))
        assert before["accepted"] > 0
        assert after["accepted"] >= companions.RECOVERED * before["accepted"]
        companions.judge_reset(reset)
        assert all(verdict.holds for verdict in reset.verdicts)

    def test_a_draft_that_does_not_come_back_is_said(self, reset):
        other = Report("companions_reset", "?", companions.RESET_COLUMNS, {}, {})
        for row in reset.rows:
            lost = row["when"] == companions.WHEN[3]
            other.add(**{**row, "accepted": 0 if lost else row["accepted"]})
        companions.judge_reset(other)
        assert [verdict.holds for verdict in other.verdicts] == [False, False]

    def test_a_stretch_without_guesses_has_no_acceptance(self):
        assert companions._percent(SpeculationStats(5, 0, 0, 5)) == NOT_APPLICABLE
        assert companions._percent(SpeculationStats(5, 4, 3, 8)) == 75


class TestSpeculation:
    def test_a_deeper_target_says_the_same_to_the_bit(self, shipped):
        deep = speculation.deepened(shipped, 5)
        assert len(deep.model.layers) == 5
        ids = torch.arange(8, 40)[None]
        with torch.inference_mode():
            assert torch.equal(deep(ids).logits, shipped(ids).logits)

    def test_a_draft_has_a_row_and_a_comparison_beside_prompt_lookup(self, shipped):
        deep = speculation.deepened(shipped, 6)
        case = speculation.continued("loop", speculation.DEEP, deep, 256, 64, 0.0)
        report = Report("speculation-quick", "?", speculation.COLUMNS, {}, {})
        speculation.measure(case, deep, 1, ("prompt-lookup", speculation.DRAFT), report)
        assert [row["proposer"] for row in report.rows] == ["prompt-lookup", "draft"]
        assert all(row["differing_bits"] == 0 < row["bits_compared"] for row in report.rows)
        assert report.number(report.rows[1], "tokens_per_forward") > 1.5
        assert [comparison.figure.split(",")[0] for comparison in report.comparisons] == [
            "speculation (prompt lookup)",
            "speculation (draft model)",
        ]


class TestHybrid:
    def test_every_turn_has_the_bits_of_a_cold_run(self, reports):
        turns = reports[0]
        assert len(turns.rows) == 6
        assert all(row["differing_bits"] == 0 < row["bits_compared"] for row in turns.rows)
        hybrid.judge_turns(turns)
        assert [verdict.holds for verdict in turns.verdicts] == [True, True]

    def test_a_cut_costs_at_most_the_chunks_between_two_states(self, reports):
        assert {(row["every"], row["at_most"]) for row in reports[0].rows} == {(1, 64), (2, 128)}
        assert all(row["recomputed"] <= row["at_most"] for row in reports[0].rows)
        edited = [row for row in reports[0].rows if row["turn"] == 3]
        assert [row["changed_at"] for row in edited] == [3 * (256 - hybrid.UNALIGNED) // 7] * 2
        assert all(row["recomputed"] > 0 for row in edited)

    def test_a_state_is_weighed_and_timed_once_for_each_distance(self, reports):
        one, two = reports[1].rows
        assert one["state_kib"] == two["state_kib"] > 0
        assert one["kib_per_token"] == 2 * two["kib_per_token"]
        assert one["states"] > two["states"]
        hybrid.judge_costs(reports[1])
        assert [row["worst_back"] for row in reports[1].rows] == [63, 127]
        assert [verdict.holds for verdict in reports[1].verdicts] == [True]
        (comparison,) = reports[1].comparisons
        assert comparison.peer == "a forward of one chunk"

    def test_memory_for_a_few_states_is_never_exceeded_and_gaps_are_told(self, reports):
        assert [(row["policy"], row["after"]) for row in reports[2].rows] == [
            (policy, after)
            for policy in ("smallest-gap", "lru")
            for after in ("a prompt", f"{hybrid.EDITS} edits")
        ]
        for row in reports[2].rows:
            assert row["held"] <= 3
            assert 0 < row["mean_back"] <= row["worst_back"] <= 256
        hybrid.judge_budget(reports[2])
        assert [comparison.aim for comparison in reports[2].comparisons] == [1.0, 1.0]

    def test_a_changed_token_is_another_one_of_the_vocabulary(self):
        ids = np.array([8, 1023, 500], np.int32)
        for position in range(3):
            changed = hybrid.change(ids, position)
            assert np.flatnonzero(changed != ids).tolist() == [position]
            assert 8 <= changed[position] < 1024
        assert ids.tolist() == [8, 1023, 500]

    def test_bits_that_differ_and_cuts_that_cost_more_are_said(self, reports):
        other = Report("hybrid", "?", hybrid.TURN_COLUMNS, {}, {})
        for row in reports[0].rows:
            other.add(**{**row, "differing_bits": 1, "recomputed": row["at_most"] + 1})
        hybrid.judge_turns(other)
        assert [verdict.holds for verdict in other.verdicts] == [False, False]
