"""Tables and figures from stored results, and what goes into docs/benchmarks.md."""

from __future__ import annotations

import json

import pytest
from bench_reports import decode_report, environment, make_report, warm_report, whole_suite

from kvpager_bench import headline, pages, places, tables
from kvpager_bench.report import MissingNumberError
from kvpager_bench.suite import SUITE_FILE

PAGE = f"# A project\n\nBefore.\n\n{pages.BEGIN}\nold\n{pages.END}\n\nAfter.\n"
FIGURES = {
    "bench-first-token.png",
    "bench-decode-speed.png",
    "bench-quality.png",
    "bench-attention.png",
    "bench-aims.png",
}


@pytest.fixture
def results(tmp_path):
    folder = tmp_path / "results"
    for report in whole_suite():
        report.write(folder)
    return folder


@pytest.fixture
def undrawn(monkeypatch):
    """Without figures, which take their time."""
    monkeypatch.setattr(headline, "DRAWINGS", ())
    monkeypatch.setattr(tables, "DRAWINGS", {})


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


def test_the_one_table_holds_every_comparison_of_every_question(results, undrawn, tmp_path):
    tables.render(results, tmp_path / "docs", "")
    text = (tmp_path / "docs" / "bench.md").read_text()
    for report in whole_suite():
        for comparison in report.comparisons:
            (line,) = (row for row in text.splitlines() if row.startswith(f"| {comparison.figure}"))
            assert f" {comparison.peer} " in line
    lines = text.splitlines()
    attention, decode, warm = (
        next(i for i, line in enumerate(lines) if line.startswith(f"| {start}"))
        for start in ("attention of 1", "decode at 128K", "first token after")
    )
    assert attention < decode < warm  # the registry's order


def test_aims_that_were_missed_and_peers_left_out_are_said(results, undrawn, tmp_path):
    short = warm_report()
    short.compare("save", ours=1.0, theirs=2.0, peer="memcpy", unit="GB/s", aim=0.9)
    short.judge("it is flat", False, "it grows by 12%")
    short.write(results)
    tables.render(results, tmp_path / "docs", "")
    text = (tmp_path / "docs" / "bench.md").read_text()
    assert "4 of 5 aims are met." in text
    assert "- warm: save: 0.5x memcpy, 0.9x aimed at" in text
    assert "- warm: it is flat: it grows by 12%" in text
    assert "- llama.cpp 0.3.36: not installed" in text


def test_each_figure_is_drawn_from_what_is_there_and_named_in_the_text(results, tmp_path):
    written = tables.render(results, tmp_path / "docs", "")
    names = {path.name for path in (tmp_path / "docs").glob("*.png")}
    assert names >= FIGURES
    assert {path.name for path in written.files} >= FIGURES
    text = (tmp_path / "docs" / "bench.md").read_text()
    assert all(f"]({name})" in text for name in FIGURES)
    assert "needles" in written.missing
    assert "warm" not in written.missing


def test_the_same_results_give_the_same_files(results, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    tables.render(results, first, "")
    tables.render(results, second, "")
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes(), path.name


def test_what_the_last_suite_took_is_said(results, undrawn, tmp_path):
    (results / SUITE_FILE).write_text(json.dumps({"seconds": 2040.0}))
    tables.render(results, tmp_path / "docs", "")
    assert "The suite took 34 minutes." in (tmp_path / "docs" / "bench.md").read_text()


def test_a_result_without_comparisons_is_listed_in_full_all_the_same(tmp_path):
    make_report("save_beside").write(tmp_path / "results")
    tables.render(tmp_path / "results", tmp_path / "docs", "")
    assert "How fast is save_beside?" in (tmp_path / "docs" / "results.md").read_text()
    assert "aims are met" not in (tmp_path / "docs" / "bench.md").read_text()


def test_a_report_measured_with_local_changes_says_so(tmp_path):
    make_report("save_beside", environment=environment(dirty=True)).write(tmp_path / "results")
    tables.render(tmp_path / "results", tmp_path / "docs", "")
    assert "0123456789ab, changed" in (tmp_path / "docs" / "bench.md").read_text()


def test_a_result_that_lacks_a_number_stops_everything(results, tmp_path):
    path = results / "decode.json"
    data = json.loads(path.read_text())
    names = [column["name"] for column in data["columns"]]
    data["rows"][0][names.index("tokens_per_s")] = None
    path.write_text(json.dumps(data))
    with pytest.raises(MissingNumberError, match="tokens_per_s"):
        tables.render(results, tmp_path / "docs", "")


class TestThePageOfResults:
    def test_promised_comparisons_replace_what_stood_between_the_markers(self, checkout, results):
        written = tables.write_all(results, "")
        text = (checkout / "docs" / "benchmarks.md").read_text()
        assert text.startswith(f"# A project\n\nBefore.\n\n{pages.BEGIN}\n| figure ")
        assert text.endswith(f"{pages.END}\n\nAfter.\n")
        assert "\nold\n" not in text
        assert "decode at 128K, bfloat16" in text
        assert "](results/bench.md)" in text
        assert checkout / "docs" / "benchmarks.md" in written.files
        tables.write_all(results, "")
        assert (checkout / "docs" / "benchmarks.md").read_text() == text

    def test_figures_without_a_promise_stay_out_and_missed_aims_are_marked(self, checkout, results):
        report = decode_report()
        report.compare("prefill", ours=1.0, theirs=2.0, peer="torch", unit="s", aim=None)
        report.compare("scan", ours=1.0, theirs=2.0, peer="torch", unit="s", aim=0.75)
        report.write(results)
        tables.write_all(results, "")
        lines = (checkout / "docs" / "benchmarks.md").read_text().splitlines()
        assert not any(line.startswith("| prefill") for line in lines)
        (scan,) = (line for line in lines if line.startswith("| scan"))
        assert "**missed**" in scan

    def test_of_a_question_the_last_promise_per_peer_is_shown(self, checkout, results):
        report = decode_report()
        for size in ("4K", "64K"):
            report.compare(f"scan at {size}", ours=1, theirs=2, peer="torch", unit="s", aim=1.0)
        report.write(results)
        tables.write_all(results, "")
        text = (checkout / "docs" / "benchmarks.md").read_text()
        assert "scan at 64K" in text
        assert "scan at 4K" not in text

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

    def test_nothing_promised_leaves_the_page_as_it_is(self, checkout, results):
        for path in results.iterdir():
            path.unlink()
        make_report("save_beside").write(results)
        tables.write_all(results, "")
        assert (checkout / "docs" / "benchmarks.md").read_text() == PAGE


@pytest.mark.parametrize("page", ["docs/benchmarks.md", "docs/segments.md"])
def test_a_page_of_this_checkout_has_the_markers(page):
    text = (places.CHECKOUT / page).read_text(encoding="utf-8")
    assert (text.count(pages.BEGIN), text.count(pages.END)) == (1, 1)
