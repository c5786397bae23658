"""Pages, pictures and files to download from what the benchmarks wrote: `kvpager bench tables`.

    benchmarks.md    the page of results, between its two markers
    segments.md      the results of the question `segments`, between two such markers
    kv_formats.md    what K/V in fewer bits cost in quality, likewise
    results/*.png    the pictures (pictures/gallery.py)
    results/*.csv    every report's rows, all comparisons, all claims

That is for a checkout's own folder of results. What is made of others, and of quick and full runs,
goes beside them, with a page of its own. A result that is missing is left out and named; one that
lacks a number is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvpager_bench import places
from kvpager_bench.benchmarks_page import Links, benchmarks_text
from kvpager_bench.downloads import write_downloads
from kvpager_bench.pages import kv_formats_text, replace_between, segments_text
from kvpager_bench.pictures.gallery import draw_all
from kvpager_bench.places import write_text
from kvpager_bench.question import REPORTS
from kvpager_bench.report import MissingNumberError, Report, load_report


@dataclass(frozen=True)
class Written:
    """What was written, and the reports that were not there to be read."""

    files: tuple[Path, ...]
    missing: tuple[str, ...]


def write_all(source: Path, suffix: str) -> Written:
    """Of the results in `source` with names that end in `suffix`.

    Raises MissingNumberError where there are none, or one lacks a number.
    """
    kept = source == places.RESULTS_DIR.resolve() and not suffix
    reports = load_all(source, suffix)
    if kept:
        pages = checkout_pages(reports)
        files = render(reports, places.DOCS_DIR, suffix)
        for path, text in pages.items():
            replace_between(path, text)
        files += pages
    else:
        folder = source / f"tables{suffix}"
        files = render(reports, folder, suffix)
        page = folder / f"benchmarks{suffix}.md"
        write_text(page, f"# Results\n\n{benchmarks_text(reports, Links('', suffix))}\n")
        files.append(page)
    return Written(tuple(files), tuple(name for name in REPORTS if name not in reports))


def load_all(source: Path, suffix: str) -> dict[str, Report]:
    """The reports that are there by name, in the order of REPORTS.

    Raises MissingNumberError where there are none.
    """
    paths = {name: source / f"{name}{suffix}.json" for name in REPORTS}
    reports = {name: load_report(path) for name, path in paths.items() if path.is_file()}
    if not reports:
        raise MissingNumberError(f"no results in {source.name}/: run the benchmarks first")
    return reports


def checkout_pages(reports: Mapping[str, Report]) -> dict[Path, str]:
    """What stands between the markers of this checkout's pages, by page."""
    docs = places.CHECKOUT / "docs"
    told = {
        docs / "benchmarks.md": benchmarks_text(reports, Links()),
        docs / "segments.md": segments_text(reports),
        docs / "kv_formats.md": kv_formats_text(reports),
    }
    return {path: text for path, text in told.items() if text is not None}


def render(reports: Mapping[str, Report], folder: Path, suffix: str) -> list[Path]:
    """Writes pictures and files to download to `folder`; returns them."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [*draw_all(reports, folder, suffix), *write_downloads(reports, folder, suffix)]
    return [folder / name for name in names]
