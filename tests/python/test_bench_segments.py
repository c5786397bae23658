"""Repair of stitched documents in benchmarks: answers, statistics, verdicts, times, the guide."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from bench_reports import environment

pytest.importorskip("kvpager_bench")

from kvpager import Engine, PagerConfig
from kvpager.segments import Assembly, FullRepair, QueryGuided, SeamTail
from kvpager_bench import pages, places, repairs, stitched_quality, stitched_turns, subjects
from kvpager_bench.harness import (
    NOT_APPLICABLE,
    MissingNumberError,
    NondeterministicSubjectError,
    Report,
)
from kvpager_bench.pictures import gallery
from kvpager_bench.pictures.gallery import picture_of
from kvpager_bench.questions import segments
from kvpager_bench.repairs import Estimate, Outcome, Way
from kvpager_bench.stitched_quality import Answers
from kvpager_bench.stitched_turns import COLD, FLOOR, PREFIX, STITCHED

PER_SET = segments.PER_SET
WAYS = [
    Way(repairs.NONE),
    Way(repairs.FULL),
    Way(repairs.DEFAULT),
    Way(repairs.TAIL_TOKENS),
    Way(repairs.QUESTION, 0.05),
    Way(repairs.QUESTION, 1.0),
]
WRONG = Outcome(False, 8.0, 2.0, 9.0, 0, 100, 36, 0.0, False)
RIGHT = Outcome(True, 0.001, 0.01, 0.05, 15, 85, 51, 4.0, False)
WHOLE = Outcome(True, 0.0, 0.0, 0.0, 100, 0, 136, 0.0, True)


@pytest.fixture(scope="module")
def model() -> Any:
    return subjects.load_model(subjects.TWO_HOP)


@pytest.fixture(scope="module")
def answers(model: Any) -> Answers:
    return stitched_quality.measure(model, 768, 2, 2, WAYS, 3)


@pytest.fixture(scope="module")
def turns(model: Any) -> dict[str, stitched_turns.Turns]:
    return stitched_turns.measure(subjects.TWO_HOP, model, 1024, 2, 5)


def quality_of(answers: Answers, name: str = "segments-quick") -> Report:
    report = Report(name, "?", segments.COLUMNS, {}, environment())
    segments.add_quality(report, 1024, answers)
    return report


def made_up(**changes: Outcome) -> Answers:
    """Eight prompts of which all ways but `none` and the tails are right."""
    ways = repairs.ways((0.05, 0.15, 1.0))
    told = {}
    for way in ways:
        outcome = WRONG if way.policy == repairs.NONE or "tail" in way.policy else RIGHT
        if way.share == 1 or way.policy == repairs.FULL:
            outcome = WHOLE
        told[way] = [changes.get(way.policy, outcome)] * (2 * PER_SET)
    return Answers([True] * (2 * PER_SET), told)


def times_of(turns: dict[str, stitched_turns.Turns], monkeypatch: Any, context: int) -> Report:
    report = Report(
        "segments_first_token-quick", "?", segments.FIRST_TOKEN_COLUMNS, {}, environment()
    )
    monkeypatch.setattr(stitched_turns, "measure", lambda *_: turns)
    segments.measure_first_token("two-hop", None, context, 2, 1, report)
    return report


def turns_of(**seconds: float) -> dict[str, stitched_turns.Turns]:
    """One turn in each way, of so many seconds."""
    return {
        way: stitched_turns.Turns((stitched_turns.Turn(seconds[name], 10, moved=90),))
        for way, name in zip(stitched_turns.WAYS, ("cold", "prefix", "floor", "stitched"))
    }


class TestAnswers:
    def test_what_stitching_loses_a_repair_brings_back(self, answers):
        def right(way: Way) -> int:
            return sum(outcome.right for outcome in answers.told[way])

        assert sum(answers.full) >= 3
        assert right(Way(repairs.NONE)) == 0
        assert right(Way(repairs.TAIL_TOKENS)) <= 1
        assert right(Way(repairs.DEFAULT)) == sum(answers.full)

    def test_recomputing_everything_gives_the_bits_of_a_full_prefill(self, answers):
        for way in (Way(repairs.FULL), Way(repairs.QUESTION, 1.0)):
            assert all(one.same_bits and one.kl == 0 for one in answers.told[way])
            assert all((one.moved, one.max_error) == (0, 0) for one in answers.told[way])
        assert not any(one.same_bits for one in answers.told[Way(repairs.NONE)])

    def test_rows_are_all_that_was_not_moved_whoever_computed_it_before(self, answers):
        question = 4
        for outcomes in answers.told.values():
            for one in outcomes:
                assert one.recomputed + one.moved == 768 - stitched_quality.SYSTEM_TOKENS
                assert one.rows == stitched_quality.SYSTEM_TOKENS + question + one.recomputed
        assert all(one.probe_rows == 0 for one in answers.told[Way(repairs.NONE)])
        assert all(one.probe_rows >= question for one in answers.told[Way(repairs.DEFAULT)])

    def test_a_tail_as_large_as_the_default_recomputes_as_many_tokens_up_to_rounding(self, answers):
        pairs = zip(answers.told[Way(repairs.DEFAULT)], answers.told[Way(repairs.TAIL_TOKENS)])
        for default, tail in pairs:
            assert default.recomputed <= tail.recomputed
            assert tail.recomputed < default.recomputed + stitched_quality.DOCUMENTS

    def test_prompts_over_the_same_documents_differ_in_order_and_question(self):
        task = stitched_quality.TwoHopTask(1024, 1)
        generator = np.random.default_rng(1)
        text = stitched_quality.draw(task, 1024, generator)
        assert len(text.ids) == 1024
        prompts = stitched_quality.prompts_of(text, PER_SET, generator)
        assert len({tuple(prompt.question) for prompt in prompts}) == PER_SET
        for half in (slice(0, 3), slice(3, 6)):
            assert len({prompt.order[half] for prompt in prompts}) > 1
        for prompt in prompts:
            assert sorted(prompt.order[:3]) == [0, 1, 2]  # what is referred to stands before
            assert sorted(prompt.order[3:]) == [3, 4, 5]

    def test_a_repair_computes_its_bits_itself_and_the_same_when_asked_again(self, model):
        task = stitched_quality.TwoHopTask(1024, 1)
        generator = np.random.default_rng(1)
        text = stitched_quality.draw(task, 768, generator)
        (prompt,) = stitched_quality.prompts_of(text, 1, generator)
        with Engine(model, PagerConfig(pool_tokens=4096, chunk_tokens=64)) as engine:
            asked = stitched_quality.Asked(engine, text, 0)
            asked.full(prompt)
            whole = asked.stitched(prompt, FullRepair())[2]
            assert (whole.shared, whole.rows) == (0, 768 + 4)  # it finds nothing of the prefill
            asked.require_deterministic(prompt)
            asked.stitched = lambda *_: (torch.rand(4), True, None)  # type: ignore[method-assign]
            with pytest.raises(NondeterministicSubjectError, match="the default repair"):
                asked.require_deterministic(prompt)
            asked.close()
            assert len(engine.segments) == 0


class TestStatistics:
    def test_the_divergence_is_of_the_full_prefill_from_the_stitched_text(self):
        full, other = torch.tensor([0.0, 0.0]), torch.tensor([0.0, np.log(3.0)])
        assert repairs.kl_divergence(full, other) == pytest.approx(np.log(2) - np.log(3) / 2)
        assert repairs.kl_divergence(other, full) == pytest.approx(0.75 * np.log(3) - np.log(2))
        assert repairs.kl_divergence(full, full) == 0

    def test_bits_tell_zeros_apart(self):
        assert repairs.same_bits(torch.zeros(2), torch.zeros(2))
        assert not repairs.same_bits(torch.zeros(2), -torch.zeros(2))

    def test_an_error_is_of_the_sets_and_not_of_the_prompts_in_them(self):
        alike = np.array([0.0, 0, 0, 0, 1, 1, 1, 1])
        assert repairs.estimate(alike, 4) == Estimate(0.5, 0.5)
        assert repairs.estimate(np.array([0.0, 1] * 4), 4) == Estimate(0.5, 0.0)
        for values in (np.zeros(4), np.zeros(9)):
            with pytest.raises(ValueError, match="sets of 4"):
                repairs.estimate(values, 4)

    def test_a_gap_is_closed_in_part_and_an_absent_one_has_no_part(self):
        none, full = np.zeros(8), np.ones(8)
        half = np.array([0.0, 0, 1, 1, 0, 0, 1, 1])
        assert repairs.recovered(half, none, full, 4) == Estimate(0.5, 0.0)
        # Of a mean the jackknife's error is the usual one.
        uneven = np.array([0.0, 0, 1, 0])
        told = repairs.recovered(uneven, np.zeros(4), np.ones(4), 1)
        assert told == Estimate(0.25, pytest.approx(repairs.estimate(uneven, 1).error))
        assert repairs.recovered(half, full, full, 4) is None

    def test_a_step_is_paired_prompt_by_prompt(self):
        before = [replace(RIGHT, mean_error=error) for error in (1.0, 5.0, 2.0, 9.0)]
        after = [replace(one, mean_error=one.mean_error + 0.5) for one in before]
        assert repairs.step(before, after, 2) == Estimate(0.5, 0.0)

    def test_what_became_exact_counts_as_recomputed_and_what_was_shared_as_computed(self):
        assembly = Assembly(132, 132, 0, 0, 0, 64, 68, 4.0, 1, "p", 0.1)
        logits = torch.tensor([1.0, 2.0])
        told = repairs.outcome(logits, logits + 1, True, assembly, 100)
        assert (told.recomputed, told.rows, told.probe_rows) == (100, 132, 4.0)
        assert (told.mean_error, told.max_error, told.same_bits) == (1.0, 1.0, False)


class TestWays:
    def test_every_family_is_asked_for_every_share(self):
        ways = repairs.ways((0.1, 1.0))
        assert [w.share for w in ways if w.policy == repairs.TAIL] == [0.1, 1.0]
        assert len(set(ways)) == len(ways)
        names = [way.policy for way in ways]
        assert names.index(repairs.DEFAULT) < names.index(repairs.TAIL_TOKENS)
        for way in ways:
            assert way.repair([200, 300], RIGHT) is not None

    def test_a_share_is_of_all_segments_and_at_one_of_the_longest(self):
        tail = Way(repairs.TAIL, 0.1).repair([200, 300])
        assert tail == SeamTail(25)
        assert Way(repairs.TAIL, 1.0).repair([200, 300]) == SeamTail(300)
        assert Way(repairs.QUESTION, 0.1).repair([200, 300]) == QueryGuided(0.1)

    def test_a_tail_of_as_many_rows_has_the_probes_on_top(self):
        default = replace(RIGHT, recomputed=30, probe_rows=10.5)
        assert Way(repairs.TAIL_TOKENS).repair([1, 1, 1], default) == SeamTail(10)
        assert Way(repairs.TAIL_ROWS).repair([1, 1, 1], default) == SeamTail(14)
        with pytest.raises(ValueError, match="what the default came to"):
            Way(repairs.TAIL_ROWS).repair([1, 1, 1])


class TestVerdicts:
    def test_made_up_answers_bear_out_every_claim(self):
        report = quality_of(made_up())
        segments.judge_quality(report)
        assert [verdict.holds for verdict in report.verdicts] == [True] * 8
        exact = {c.peer: c for c in report.comparisons if c.figure.startswith("exact match")}
        assert list(exact) == ["full prefill"]  # a tail has none right, and no ratio
        assert exact["full prefill"].aim == segments.RECOVERED
        kl = {c.peer: c.ratio for c in report.comparisons if c.figure.startswith("KL")}
        assert set(kl) == {repairs.TAIL_TOKENS, repairs.TAIL_ROWS, repairs.TAIL_16}
        assert all(ratio == pytest.approx(8000) for ratio in kl.values())

    def test_rows_say_what_was_asked_recomputed_and_recovered(self):
        rows = {(r["policy"], r["share"]): r for r in quality_of(made_up()).rows}
        default = rows[repairs.DEFAULT, NOT_APPLICABLE]
        assert (default["recomputed"], default["recovered"]) == (15, 100)
        assert default["cost"] == pytest.approx(100 * 55 / 136)
        assert rows[repairs.QUESTION, 5.0]["change"] == pytest.approx(-1.99)
        assert rows[repairs.QUESTION, 15.0]["change"] == 0
        assert rows[repairs.FULL, NOT_APPLICABLE]["same_bits"] == 2 * PER_SET

    def test_bits_that_differ_are_said(self):
        report = quality_of(made_up(**{repairs.FULL: replace(WHOLE, same_bits=False)}))
        segments.judge_quality(report)
        assert [verdict.holds for verdict in report.verdicts] == [False] + [True] * 7

    def test_an_error_that_grows_by_more_than_its_standard_error_is_said(self):
        answers = made_up()
        grown = [replace(RIGHT, mean_error=0.5)] * (2 * PER_SET)
        answers.told[Way(repairs.DEVIATION, 0.15)] = grown
        report = quality_of(answers)
        segments.judge_quality(report)
        (short,) = (verdict for verdict in report.verdicts if not verdict.holds)
        assert repairs.DEVIATION in short.claim
        assert "to 15%: +0.49" in short.evidence

    def test_a_growth_within_its_standard_error_is_none(self):
        answers = made_up()
        noisy = [replace(RIGHT, mean_error=0.0)] * PER_SET
        noisy += [replace(RIGHT, mean_error=0.03)] * PER_SET
        answers.told[Way(repairs.DEVIATION, 0.15)] = noisy
        report = quality_of(answers)
        segments.judge_quality(report)
        assert all(verdict.holds for verdict in report.verdicts)

    def test_a_default_that_recovers_too_little_is_said(self):
        report = quality_of(made_up(**{repairs.DEFAULT: WRONG}))
        segments.judge_quality(report)
        (short,) = (verdict for verdict in report.verdicts if not verdict.holds)
        assert short.claim.startswith("1K: the default repair recovers 90%")

    def test_where_nothing_is_lost_nothing_is_recovered(self):
        lossless = {way: [WHOLE] * (2 * PER_SET) for way in made_up().told}
        report = quality_of(Answers([True] * (2 * PER_SET), lossless))
        assert {row["recovered"] for row in report.rows} == {NOT_APPLICABLE}
        segments.judge_quality(report)
        assert not any("recovers" in verdict.claim for verdict in report.verdicts)


class TestFirstToken:
    def test_every_repetition_has_documents_and_a_question_of_its_own(self, model):
        system, drawn = stitched_turns.texts(subjects.TWO_HOP, model, 2048, 1)
        first, second = next(drawn), next(drawn)
        for text in (first, second):
            assert len(system) + sum(map(len, text.documents)) == 2048
        assert all((a[:8] != b[:8]).any() for a, b in zip(first.documents, second.documents))
        assert first.question.tolist() != second.question.tolist()
        other = SimpleNamespace(config=SimpleNamespace(vocab_size=4096))
        system, drawn = stitched_turns.texts("gqa8-bf16", other, 2048, 1)
        assert len(system) + sum(map(len, next(drawn).documents)) == 2048

    def test_no_way_finds_what_another_one_has_computed(self, turns):
        rows = {way: {turn.rows for turn in turns[way].turns} for way in stitched_turns.WAYS}
        system, question = 1024 // stitched_turns.SYSTEM_SHARE, 4
        assert rows[COLD] == {1024 + question}
        assert rows[PREFIX] == {1024 + question - system}
        assert rows[FLOOR] == {question}
        for turn in turns[STITCHED].turns:
            assert turn.rows == turn.recomputed + question

    def test_the_parts_of_a_turn_are_within_it_and_only_a_policy_that_measures_probes(self, turns):
        for turn in turns[STITCHED].turns:
            assert 0 < turn.probe_s < turn.assemble_s < turn.seconds
            assert turn.probe_rows >= 4
        assert all(turn.probe_rows == 0 for turn in turns[FLOOR].turns)
        assert all(turn.assemble_s == 0 for turn in turns[COLD].turns)

    def test_a_row_per_way_and_an_aim_beside_a_cold_prefill_of_the_promised_length(
        self, turns, monkeypatch
    ):
        report = times_of(turns, monkeypatch, segments.FASTER_FROM)
        assert [row["way"] for row in report.rows] == list(stitched_turns.WAYS)
        assert report.rows[0]["faster"] == 1
        assert report.rows[0]["recomputed"] == 100
        segments.judge_first_token(report)
        assert [c.aim for c in report.comparisons] == [segments.FASTER, None, None]
        assert [c.peer for c in report.comparisons] == [COLD, PREFIX, FLOOR]
        short = times_of(turns, monkeypatch, 4096)
        segments.judge_first_token(short)
        assert [c.aim for c in short.comparisons] == [None] * 3

    def test_times_faster_are_those_of_the_medians(self, monkeypatch):
        told = turns_of(cold=9.0, prefix=8.0, floor=1.0, stitched=3.0)
        report = times_of(told, monkeypatch, segments.FASTER_FROM)
        segments.judge_first_token(report)
        assert [row["faster"] for row in report.rows] == [1, 9 / 8, 9, 3]
        assert [c.ratio for c in report.comparisons] == [3, pytest.approx(8 / 3), 1 / 3]
        assert report.comparisons[0].holds


class TestPages:
    def test_the_picture_is_drawn_from_the_rows(self, tmp_path):
        quality = quality_of(made_up())
        assert gallery.draw_all({"segments": quality}, tmp_path, "-quick") == ["segments-quick.png"]
        assert (tmp_path / "segments-quick.png").read_bytes().startswith(b"\x89PNG")
        assert "% of the answers are right" in picture_of("segments").message(quality)

    def test_the_guide_has_both_tables_and_says_what_fell_short(self, monkeypatch):
        quality = quality_of(made_up(**{repairs.DEFAULT: WRONG}))
        segments.judge_quality(quality)
        told = turns_of(cold=9.0, prefix=8.0, floor=1.0, stitched=4.0)
        times = times_of(told, monkeypatch, segments.FASTER_FROM)
        segments.judge_first_token(times)
        text = pages.segments_text({"segments": quality, "segments_first_token": times})
        assert text is not None
        assert "1K tokens, 8 prompts" in text
        assert "| question, 15%" in text
        assert "| default " in text
        assert "100.0 ± 0.0%" in text
        assert "- 1K: the default repair recovers 90%" in text
        assert "2.25x full prefill, 3x aimed at" in text
        assert "9000 ms" in text

    def test_the_guide_waits_for_both_reports(self):
        assert pages.segments_text({"segments": quality_of(made_up())}) is None

    def test_a_page_is_replaced_between_its_markers_only(self, tmp_path):
        page = tmp_path / "page.md"
        page.write_text(f"a\n{pages.BEGIN}\nold\n{pages.END}\nb\n")
        pages.replace_between(page, "new")
        assert page.read_text() == f"a\n{pages.BEGIN}\nnew\n{pages.END}\nb\n"
        page.write_text(page.read_text() + pages.END)
        with pytest.raises(MissingNumberError, match="once each"):
            pages.replace_between(page, "new")

    def test_the_guide_names_every_policy_of_the_question(self):
        text = (places.CHECKOUT / "docs" / "segments.md").read_text(encoding="utf-8")
        for name in ("SegmentHead", "SeamTail", "Deviation", "QueryGuided", "FullRepair"):
            assert f"`{name}(" in text
