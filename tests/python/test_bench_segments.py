"""Stitched documents in benchmarks: times to the first token, and the guide."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from bench_reports import environment

from kvpager_bench import places, subjects
from kvpager_bench.harness import Report
from kvpager_bench.questions import segments
from kvpager_bench.questions.segments import COLD, FLOOR, PREFIX, STITCHED, Turn


@pytest.fixture(scope="module")
def rounds() -> list[dict[str, Turn]]:
    model = subjects.load_model(subjects.SHIPPED)
    return segments.rounds_of(model, 1024, 2, 5)


def report_of(rounds: list[dict[str, Turn]], context: int) -> Report:
    report = Report("segments_first_token-quick", "?", segments.COLUMNS, {}, environment())
    segments.add_rows(report, "shipped", context, rounds)
    segments.judge(report)
    return report


def round_of(*seconds: float) -> list[dict[str, Turn]]:
    return [{way: Turn(s, 10, moved=90) for way, s in zip(segments.WAYS, seconds)}]


def test_every_repetition_has_documents_and_a_question_of_its_own() -> None:
    other: Any = SimpleNamespace(config=SimpleNamespace(vocab_size=4096))
    system, drawn = segments.texts(other, 2048, 1)
    first, second = next(drawn), next(drawn)
    for text in (first, second):
        assert len(system) + sum(map(len, text.documents)) == 2048
    assert not np.array_equal(first.documents[0][:8], second.documents[0][:8])
    assert first.question.tolist() != second.question.tolist()


def test_no_way_finds_what_another_one_has_computed(rounds: list[dict[str, Turn]]) -> None:
    rows = {way: {turns[way].rows for turns in rounds} for way in segments.WAYS}
    system, question = 1024 // segments.SYSTEM_SHARE, 16
    assert rows[COLD] == {1024 + question}
    assert rows[PREFIX] == {1024 + question - system}
    assert rows[FLOOR] == {question}
    for turns in rounds:
        turn = turns[STITCHED]
        assert turn.rows == turn.recomputed + question
        assert 0 < turn.probe_s < turn.assemble_s < turn.seconds
        assert turns[FLOOR].probe_rows == turns[COLD].assemble_s == 0


def test_times_faster_are_those_of_the_medians_with_an_aim_at_the_promised_length() -> None:
    report = report_of(round_of(9.0, 8.0, 1.0, 3.0), segments.FASTER_FROM)
    assert [row["faster"] for row in report.rows] == [1, 9 / 8, 9, 3]
    assert [c.ratio for c in report.comparisons] == [3, pytest.approx(8 / 3), 1 / 3]
    assert [c.aim for c in report.comparisons] == [segments.FASTER, None, None]
    short = report_of(round_of(9.0, 8.0, 1.0, 3.0), 4096)
    assert [c.aim for c in short.comparisons] == [None] * 3


def test_the_guide_names_every_policy() -> None:
    text = (places.CHECKOUT / "docs" / "segments.md").read_text(encoding="utf-8")
    for name in ("SegmentHead", "SeamTail", "Deviation", "QueryGuided", "FullRepair"):
        assert f"`{name}(" in text
