"""Comparisons and skipped peers in a report: what they say, and what is refused."""

from __future__ import annotations

import json
import math

import pytest
from bench_reports import make_report

from kvpager_bench.places import RESULTS_DIR
from kvpager_bench.report import MissingNumberError, load_report


def compare(report, **changes):
    values = {"ours": 30.0, "theirs": 40.0, "peer": "torch SDPA", "unit": "GB/s", "aim": 0.8}
    return report.compare(changes.pop("figure", "decode attention at 32K"), **(values | changes))


@pytest.mark.parametrize(
    ("values", "ratio", "holds"),
    [
        ({}, 0.75, False),
        ({"aim": 0.75}, 0.75, True),
        ({"ours": 80.0}, 2.0, True),
        ({"ours": 20.0, "lower_is_better": True}, 2.0, True),
        ({"ours": 80.0, "lower_is_better": True}, 0.5, False),
        ({"ours": 0.001, "aim": None}, 0.001 / 40, True),
    ],
)
def test_a_ratio_says_how_many_times_better_ours_is(values, ratio, holds):
    comparison = compare(make_report(), **values)
    assert (comparison.ratio, comparison.holds) == (ratio, holds)


@pytest.mark.parametrize("value", [0, 0.0, -1.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["ours", "theirs", "aim"])
def test_a_comparison_with_no_number_above_zero_is_refused(name, value):
    report = make_report()
    with pytest.raises(MissingNumberError, match=name):
        compare(report, **{name: value})
    assert report.comparisons == []


@pytest.mark.parametrize("name", ["figure", "peer"])
def test_a_comparison_without_a_name_is_refused(name):
    with pytest.raises(MissingNumberError, match=name):
        compare(make_report(), **{name: ""})


def test_a_figure_stands_beside_a_peer_once():
    report = make_report()
    compare(report)
    compare(report, peer="memory bandwidth")
    with pytest.raises(MissingNumberError, match="already"):
        compare(report, ours=90.0)
    assert [c.peer for c in report.comparisons] == ["torch SDPA", "memory bandwidth"]


def test_a_skipped_peer_has_one_reason_and_no_number():
    report = make_report()
    report.skip("vLLM 0.33.0", "not installed;\n  do this")
    report.skip("vLLM 0.33.0", "another")
    assert [(s.peer, s.reason) for s in report.skipped] == [
        ("vLLM 0.33.0", "not installed; do this")
    ]
    with pytest.raises(MissingNumberError, match="LMCache"):
        report.skip("LMCache 0.5.6", "")


def test_comparisons_and_skipped_peers_read_back_the_same(tmp_path):
    report = make_report()
    compare(report)
    compare(report, peer="bare forwards", unit="ms", aim=None, lower_is_better=True, digits=2)
    report.skip("vLLM 0.33.0", "not installed")
    assert load_report(report.write(tmp_path)) == report


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data["comparisons"][0].update(ours=0.0),
        lambda data: data["comparisons"][0].update(figure=""),
        lambda data: data["comparisons"][0].update(theirs=None),
        lambda data: data["skipped"][0].update(reason=""),
        lambda data: data.update(schema=2),
    ],
)
def test_a_file_whose_comparison_lacks_a_number_is_refused(tmp_path, damage):
    report = make_report()
    compare(report)
    report.skip("vLLM 0.33.0", "not installed")
    path = report.write(tmp_path)
    data = json.loads(path.read_text(encoding="utf-8"))
    damage(data)
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(MissingNumberError):
        load_report(path)


def test_a_file_keeps_a_row_in_a_line_and_no_digits_that_nothing_shows(tmp_path):
    report = make_report()
    report.rows[0] = {**report.rows[0], **dict.fromkeys(floats(report.rows[0]), 1 / 3)}
    text = report.write(tmp_path).read_text(encoding="utf-8")
    assert "0.333333333" in text
    assert "0.3333333333" not in text
    lines = text.splitlines()
    start = lines.index(' "rows": [')
    assert lines[start + 1 : start + 1 + len(report.rows)] == [
        f"  {json.dumps(row)}{',' * (i + 1 < len(report.rows))}"
        for i, row in enumerate(json.loads(text)["rows"])
    ]


def test_what_is_kept_of_the_questions_in_this_checkout_is_small():
    sizes = {path.name: path.stat().st_size for path in RESULTS_DIR.glob("*.json")}
    assert sum(sizes.values()) < 300 << 10
    assert {name: size for name, size in sizes.items() if size > 32 << 10} == {}


def floats(row):
    return [name for name, value in row.items() if isinstance(value, float)]


def test_a_report_prints_its_comparisons_and_who_was_left_out(capsys):
    report = make_report()
    compare(report)
    report.skip("vLLM 0.33.0", "not installed")
    report.print()
    out = capsys.readouterr().out
    (line,) = (line for line in out.splitlines() if "decode attention" in line)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == [
        "decode attention at 32K",
        "30.0 GB/s",
        "torch SDPA",
        "40.0 GB/s",
        "0.750x",
        ">= 0.8x",
        "**no**",
    ]
    assert "skipped: vLLM 0.33.0 (not installed)" in out


def test_a_report_goes_to_the_folder_that_the_environment_names(tmp_path, monkeypatch):
    monkeypatch.setenv("KVPAGER_BENCH_RESULTS", str(tmp_path / "elsewhere"))
    assert make_report().write() == tmp_path / "elsewhere" / "sample.json"
