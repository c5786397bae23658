"""Comparisons and skipped peers in a report: what they say, and what is refused."""

from __future__ import annotations

import json
import math

import pytest
from bench_reports import make_report

from kvpager_bench.places import RESULTS_DIR
from kvpager_bench.report import NOT_APPLICABLE, SCHEMA, Column, MissingNumberError, load_report


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
    report.judge("it is short", True, "1.25 ms")
    again = load_report(report.write(tmp_path))
    assert again == report
    assert again.markdown() == report.markdown()


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


def sample():
    columns = (Column("shape", text=True), Column("time_ms", "ms"))
    report = make_report(columns=(*columns, Column("scan_ms", "ms", optional=True)),
                         rows=[{"shape": "a", "time_ms": 1.0, "scan_ms": 1.0}])  # fmt: skip
    report.rows.clear()
    return report


class TestRows:
    @pytest.mark.parametrize("row", [{}, {"time_ms": 1.0, "tme_ms": 1.0}])
    def test_a_row_has_the_declared_columns_and_no_others(self, row):
        with pytest.raises(MissingNumberError, match="me_ms"):
            sample().add(shape="a", scan_ms=1.0, **row)

    @pytest.mark.parametrize("value", [math.nan, math.inf, None, "n/a", "", True])
    def test_what_is_no_finite_number_is_refused(self, value):
        report = sample()
        with pytest.raises(MissingNumberError, match="time_ms"):
            report.add(shape="a", time_ms=value, scan_ms=NOT_APPLICABLE)
        assert report.rows == []

    def test_na_is_never_read_as_a_number(self):
        report = sample()
        row = report.add(shape="a", time_ms=0.5, scan_ms=NOT_APPLICABLE)
        assert report.number(row, "time_ms") == 0.5
        for name in ("scan_ms", "shape", "unknown"):
            with pytest.raises(MissingNumberError):
                report.number(row, name)

    def test_a_report_without_rows_is_not_written(self, tmp_path):
        with pytest.raises(MissingNumberError, match="no rows"):
            sample().write(tmp_path)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        "damage",
        [
            lambda data: data["comparisons"][0].update(ours=0.0),
            lambda data: data["comparisons"][0].update(figure=""),
            lambda data: data["comparisons"][0].update(theirs=None),
            lambda data: data["skipped"][0].update(reason=""),
            lambda data: data["rows"][0].pop(),
            lambda data: data["rows"][0].__setitem__(1, None),
            lambda data: data["rows"].clear(),
            lambda data: data["environment"].pop("commit"),
            lambda data: data["environment"].update(isa=""),
            lambda data: data.update(schema=SCHEMA + 1),
        ],
    )
    def test_a_damaged_file_is_refused_when_read(self, tmp_path, damage):
        report = sample()
        report.add(shape="a", time_ms=1.25, scan_ms=3)
        compare(report)
        report.skip("vLLM 0.33.0", "not installed")
        path = report.write(tmp_path)
        data = json.loads(path.read_text(encoding="utf-8"))
        damage(data)
        path.write_text(json.dumps(data), encoding="utf-8")
        with pytest.raises(MissingNumberError):
            load_report(path)

    @pytest.mark.parametrize(
        ("value", "printed"),
        [(0.0, "0"), (0.0123, "0.0123"), (1.0, "1.00"), (12.34, "12.3"), (1234.5, "1234")],
    )
    def test_numbers_print_with_three_significant_digits(self, value, printed):
        report = make_report(columns=(Column("x"),), rows=[{"x": 1.0}])
        report.rows.clear()
        report.add(x=value)
        assert report.markdown().splitlines()[-1].strip("| ") == printed
