"""Tables and figures from stored results, and what goes into docs/benchmarks.md."""

from __future__ import annotations

import csv
import json

import pytest
from bench_reports import decode_report, environment, make_report, warm_report, whole_suite

from kvpager_bench import limits, pages, places, tables
from kvpager_bench.pictures import canvas
from kvpager_bench.pictures.gallery import picture_of
from kvpager_bench.question import SETTLED
from kvpager_bench.report import MissingNumberError

PAGE = f"# A project\n\nBefore.\n\n{pages.BEGIN}\nold\n{pages.END}\n\nAfter.\n"
DRAWN = {"turn-cost", "decode-speed", "quality"}  # of the reports of `whole_suite`


@pytest.fixture
def results(tmp_path):
    folder = tmp_path / "results"
    for report in whole_suite():
        report.write(folder)
    return folder


@pytest.fixture
def undrawn(monkeypatch):
    """Without pictures, which take their time."""
    monkeypatch.setattr(tables, "draw_all", lambda reports, folder, suffix: [])


@pytest.fixture
def checkout(tmp_path, results, undrawn, monkeypatch):
    """A checkout with these results in the place of its own."""
    monkeypatch.setattr(places, "CHECKOUT", tmp_path)
    monkeypatch.setattr(places, "RESULTS_DIR", results)
    monkeypatch.setattr(places, "DOCS_DIR", tmp_path / "docs" / "results")
    page = tmp_path / "docs" / "benchmarks.md"
    page.parent.mkdir()
    page.write_text(PAGE)
    return tmp_path


@pytest.fixture
def written(results, undrawn):
    """Writes the tables of the results as they now are; returns the folder."""

    def write():
        tables.write_all(results, "")
        return results / "tables"

    return write


def csv_rows(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_every_comparison_of_every_question_is_in_one_file_with_its_machine(written):
    rows = csv_rows(written() / "comparisons.csv")
    told = [(r.name, c) for r in whole_suite() for c in r.comparisons]
    assert {(row["report"], row["figure"], row["peer"]) for row in rows} == {
        (name, c.figure, c.peer) for name, c in told
    }
    assert len(rows) == len(told)
    decode = next(row for row in rows if row["report"] == "decode")
    assert (float(decode["ratio"]), decode["met"], decode["unit"]) == (10.0, "yes", "tokens/s")
    assert (decode["commit"], decode["machine"]) == ("0123456789ab", "Test CPU, 1 cores")
    order = list(dict.fromkeys(row["report"] for row in rows))
    assert order == ["attention", "decode", "warm"]  # the registry's


def test_every_row_of_a_report_is_in_its_file_with_units_and_every_digit(written, results):
    report = decode_report()
    report.rows[0]["tokens_per_s"] = 1 / 3
    report.write(results)
    rows = csv_rows(written() / "decode.csv")
    assert len(rows) == len(report.rows)
    assert float(rows[0]["tokens_per_s [1/s]"]) == 0.333333333
    assert rows[0]["llama_tokens_per_s [1/s]"] == "n/a"


def test_aims_that_were_missed_and_peers_left_out_are_said(written, results):
    short = warm_report()
    short.compare("save", ours=1.0, theirs=2.0, peer="memcpy", unit="GB/s", aim=0.9)
    short.judge("it is flat", False, "it grows by 12%")
    short.write(results)
    folder = written()
    text = (folder / "benchmarks.md").read_text()
    assert "4 of 5 aims are met." in text
    short_of = "  - save: 0.5x memcpy, 0.9x aimed at\n  - it is flat: it grows by 12%\n"
    assert f"- warm: no limit was found\n{short_of}" in text
    assert "- llama.cpp 0.3.36: not installed" in text
    (claim,) = csv_rows(folder / "claims.csv")
    assert (claim["claim"], claim["holds"]) == ("it is flat", "no")


def test_figures_that_one_thing_limits_stand_together_below_it(written, results, monkeypatch):
    why = (("save", "the disk"), ("", "the memory"))
    monkeypatch.setattr(limits, "_LIMITS", {"warm": why})
    short = warm_report()
    for claim in ("save is fast", "restore is fast", "a save is flat"):
        short.judge(claim, False, "no")
    short.write(results)
    text = (written() / "benchmarks.md").read_text()
    assert "- warm: the disk\n  - save is fast: no\n  - a save is flat: no\n" in text
    assert "- warm: the memory\n  - restore is fast: no\n" in text


def test_each_picture_is_drawn_from_what_is_there_and_shown_with_its_message(results):
    written = tables.write_all(results, "")
    folder = results / "tables"
    assert {path.stem for path in folder.glob("*.png")} == DRAWN
    text = (folder / "benchmarks.md").read_text()
    for name in DRAWN:
        assert folder / f"{name}.png" in written.files
        assert f"]({name}.png)" in text
    assert "![A saved conversation of 32K tokens goes on after 6.0 ms, restored from disk" in text
    assert "`kvpager bench decode`; Test CPU, 1 cores, 1 thread, torch 2.13.0, 2026-11-22" in text
    assert "needles" in written.missing
    assert "warm" not in written.missing


def test_the_same_results_give_the_same_files_and_others_another_source(results, tmp_path):
    tables.write_all(results, "")
    first = {path.name: path.read_bytes() for path in (results / "tables").iterdir()}
    tables.write_all(results, "")
    for path in (results / "tables").iterdir():
        assert path.read_bytes() == first[path.name], path.name
    picture, report = picture_of("warm"), warm_report()
    assert picture.source(report).encode() in first["turn-cost.png"]
    report.rows[0]["cold_s"] = 0.125
    assert picture.source(report).encode() not in first["turn-cost.png"]


def test_a_result_without_comparisons_is_listed_with_its_local_changes(tmp_path):
    make_report("speculation", environment=environment(dirty=True)).write(tmp_path)
    tables.write_all(tmp_path, "")
    text = (tmp_path / "tables" / "benchmarks.md").read_text()
    assert "| [speculation](speculation.csv) | How fast is speculation? |" in text
    assert "0123456789ab, changed" in text
    assert "aims are met" not in text


def test_a_settled_result_says_the_release_that_measured_it(tmp_path):
    make_report("needles").write(tmp_path)
    tables.write_all(tmp_path, "")
    text = (tmp_path / "tables" / "benchmarks.md").read_text()
    assert f"release 0.1.0 (settled: {SETTLED['needles']})" in text


def test_a_result_that_lacks_a_number_stops_everything(results):
    path = results / "decode.json"
    data = json.loads(path.read_text())
    names = [column["name"] for column in data["columns"]]
    data["rows"][0][names.index("tokens_per_s")] = None
    path.write_text(json.dumps(data))
    with pytest.raises(MissingNumberError, match="tokens_per_s"):
        tables.write_all(results, "")
    assert not (results / "tables").exists()


def test_a_title_that_does_not_fit_its_picture_is_refused(tmp_path):
    figure, _ = canvas.blank("A title " * 30)
    with pytest.raises(ValueError, match="wider than it"):
        canvas.save(figure, tmp_path / "wide.png", "")
    assert not (tmp_path / "wide.png").exists()


class TestThePageOfResults:
    def test_promised_comparisons_replace_what_stood_between_the_markers(self, checkout, results):
        written = tables.write_all(results, "")
        text = (checkout / "docs" / "benchmarks.md").read_text()
        assert text.startswith(f"# A project\n\nBefore.\n\n{pages.BEGIN}\n| figure ")
        assert text.endswith(f"{pages.END}\n\nAfter.\n")
        assert "\nold\n" not in text
        assert "decode at 128K, bfloat16" in text
        assert "](results/comparisons.csv)" in text
        assert checkout / "docs" / "benchmarks.md" in written.files
        tables.write_all(results, "")
        assert (checkout / "docs" / "benchmarks.md").read_text() == text

    def test_figures_without_a_promise_stay_out_and_missed_aims_are_marked(self, checkout, results):
        report = decode_report()
        report.compare("prefill", ours=1.0, theirs=2.0, peer="torch", unit="s", aim=None)
        for size in ("4K", "64K"):  # the last promise per peer is shown
            report.compare(f"scan at {size}", 1.0, 2.0, "torch", "s", 0.75)
        report.write(results)
        tables.write_all(results, "")
        lines = (checkout / "docs" / "benchmarks.md").read_text().splitlines()
        assert not any(line.startswith("| prefill") for line in lines)
        (scan,) = (line for line in lines if line.startswith("| scan"))
        assert scan.startswith("| scan at 64K")
        assert "**missed**" in scan

    @pytest.mark.parametrize(
        "text",
        ["no markers", pages.BEGIN, f"{pages.END}\n{pages.BEGIN}", PAGE + pages.BEGIN],
    )
    def test_a_page_without_its_markers_is_left_alone_and_told(self, checkout, results, text):
        (checkout / "docs" / "benchmarks.md").write_text(text)
        with pytest.raises(MissingNumberError, match="markers"):
            tables.write_all(results, "")
        assert (checkout / "docs" / "benchmarks.md").read_text() == text

    def test_figures_of_another_folder_or_size_touch_no_page(self, checkout, results):
        other = checkout / "other"
        decode_report().write(other)
        written = tables.write_all(other, "")
        assert all(path.is_relative_to(other / "tables") for path in written.files)
        report = decode_report()
        report.name = "decode-quick"
        report.write(results)
        written = tables.write_all(results, "-quick")
        assert all(path.is_relative_to(results / "tables-quick") for path in written.files)
        assert (checkout / "docs" / "benchmarks.md").read_text() == PAGE
        assert [path.name for path in (checkout / "docs").iterdir()] == ["benchmarks.md"]
