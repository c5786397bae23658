"""Mutants of what is told about measurements: pages, pictures, files to download."""

from __future__ import annotations

from mutants.mutant import Mutant

TABLES = "python/test_bench_tables.py::"
DOWNLOADS = "bench/kvpager_bench/downloads.py"

RESULTS = (
    Mutant(
        name="a-missed-aim-looks-like-one-that-was-met",
        breaks="aims that were missed are marked on the page of results",
        file="bench/kvpager_bench/benchmarks_page.py",
        old='"" if comparison.holds else ", **missed**"',
        new='""',
        killers=(
            TABLES + "TestThePageOfResults::"
            "test_figures_without_a_promise_stay_out_and_missed_aims_are_marked",
        ),
    ),
    Mutant(
        name="a-download-leaves-out-comparisons-with-an-aim",
        breaks="every comparison of every question is in one file",
        file=DOWNLOADS,
        old="        for c in report.comparisons\n",
        new="        for c in report.comparisons\n        if c.aim is None\n",
        killers=(
            TABLES + "test_every_comparison_of_every_question_is_in_one_file_with_its_machine",
        ),
    ),
    Mutant(
        name="a-download-has-no-units",
        breaks="the rows of a report have their units",
        file=DOWNLOADS,
        old="column.heading for column",
        new="column.name for column",
        killers=(TABLES + "test_every_row_of_a_report_is_in_its_file_with_units_and_every_digit",),
    ),
    Mutant(
        name="a-picture-does-not-know-its-figures",
        breaks="a picture says what it was drawn from, and changes with it",
        file="bench/kvpager_bench/pictures/gallery.py",
        old="[report.to_json(), self.title(report)]",
        new="[report.name, self.title(report)]",
        killers=(TABLES + "test_the_same_results_give_the_same_files_and_others_another_source",),
    ),
    Mutant(
        name="a-title-runs-out-of-its-picture",
        breaks="a title that does not fit its picture is refused",
        file="bench/kvpager_bench/pictures/canvas.py",
        old="x1 > figure.bbox.x1",
        new="x1 < figure.bbox.x0",
        killers=(TABLES + "test_a_title_that_does_not_fit_its_picture_is_refused",),
    ),
    Mutant(
        name="a-quick-question-is-asked-in-full",
        breaks="an option has the value of the size that is asked for",
        file="bench/kvpager_bench/study.py",
        old='{"quick": self.quick, "full": self.full}',
        new='{"quick": self.full, "full": self.quick}',
        killers=(
            "python/test_bench_study.py::test_an_option_has_a_value_by_size_unless_it_is_given",
        ),
    ),
)
