"""Pictures and results in the documents: few, small, shown, and those of the committed figures."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from kvpager_bench import downloads, pages, places, tables
from kvpager_bench.pictures.gallery import PICTURES, Picture
from kvpager_bench.report import Report

DOCS = places.CHECKOUT / "docs"
RESULTS = DOCS / "results"
ENDINGS = {".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp"}
MOST, MOST_BYTES, MOST_PIXELS = 12, 150_000, 1600


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    return tables.load_all(places.RESULTS_DIR, "")


RECORDING = DOCS / "screens" / "chat.svg"  # of scripts/record_chat.py


def pictures() -> list[Path]:
    found = {path for path in DOCS.rglob("*") if path.suffix.lower() in ENDINGS}
    return sorted(found - {RECORDING})


def drawn() -> list[Path]:
    """Those of figures; others, in `docs/screens`, are of programs."""
    return [path for path in pictures() if path.parent != DOCS / "screens"]


def shown_by_pages() -> dict[Path, list[str]]:
    """The alternative texts of each picture that a page shows."""
    shown: dict[Path, list[str]] = {}
    for page in [places.CHECKOUT / "README.md", *DOCS.rglob("*.md")]:
        text = page.read_text(encoding="utf-8")
        for alt, target in re.findall(r"!\[([^\]]*)\]\(([^)#]+)\)", text):
            if not re.match(r"[a-z]+:", target):
                shown.setdefault((page.parent / target).resolve(), []).append(alt)
    return shown


def between_markers(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    return text.split(f"{pages.BEGIN}\n")[1].split(f"\n{pages.END}")[0]


def test_there_are_few_pictures_and_each_of_figures_is_one_of_the_gallery() -> None:
    assert len(pictures()) <= MOST
    assert drawn() == sorted(RESULTS / f"{picture.name}.png" for picture in PICTURES)


@pytest.mark.parametrize("path", pictures(), ids=lambda path: path.name)
def test_a_picture_is_small_and_shown_with_a_text_for_who_cannot_see_it(path: Path) -> None:
    data = path.read_bytes()
    assert len(data) <= MOST_BYTES
    assert max(struct.unpack(">II", data[16:24])) <= MOST_PIXELS
    assert all(len(alt) > 40 for alt in shown_by_pages()[path])


def test_the_recording_shows_a_kill_and_a_conversation_that_goes_on() -> None:
    data = RECORDING.read_text(encoding="utf-8")
    assert len(data) <= MOST_BYTES
    shown = "".join(re.findall(r"<text[^>]*>([^<]*)</text>", data)).replace("&#160;", " ")
    for words in ("kvpager chat", "SmolLM2-135M-Instruct", "Killed", "tokens restored in"):
        assert words in shown
    assert all(len(alt) > 40 for alt in shown_by_pages()[RECORDING])


def test_the_four_pictures_that_a_newcomer_looks_for_are_there() -> None:
    names = {picture.name for picture in PICTURES}
    assert names >= {"turn-cost", "decode-speed", "quality", "residency"}


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_a_picture_was_drawn_from_the_figures_that_are_committed(
    picture: Picture, reports: dict[str, Report]
) -> None:
    drawn = (RESULTS / f"{picture.name}.png").read_bytes()
    source = picture.source(reports[picture.report])
    assert source.encode() in drawn, "draw it again: kvpager bench tables"


def test_pages_say_what_the_committed_figures_say(reports: dict[str, Report]) -> None:
    told = tables.checkout_pages(reports)
    marked = {page for page in DOCS.glob("*.md") if pages.BEGIN in page.read_text("utf-8")}
    assert set(told) == marked >= {DOCS / "benchmarks.md", DOCS / "segments.md"}
    for path, text in told.items():
        assert between_markers(path) == text, "write it again: kvpager bench tables"


def test_files_to_download_are_those_of_the_committed_figures(
    tmp_path: Path, reports: dict[str, Report]
) -> None:
    names = downloads.write_downloads(reports, tmp_path, "")
    for name in names:
        assert (RESULTS / name).read_bytes() == (tmp_path / name).read_bytes(), name
    there = {path.name for path in RESULTS.iterdir() if path.is_file()}
    assert there == {*names, *(path.name for path in drawn())}


def test_every_report_is_a_download_of_the_page_of_results(reports: dict[str, Report]) -> None:
    page = between_markers(DOCS / "benchmarks.md")
    for name in (*reports, downloads.COMPARISONS, downloads.CLAIMS):
        assert f"](results/{name}.csv)" in page


def test_every_picture_says_its_message_in_two_lines(reports: dict[str, Report]) -> None:
    for picture in PICTURES:
        title = picture.title(reports[picture.report])
        assert len(title.splitlines()) <= 2
        assert re.search(r"\d", title)
