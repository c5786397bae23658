"""The picture of a snapshot's chunks, in characters and as a PNG."""

from __future__ import annotations

import re

import numpy as np
import pytest

from kvpager.cli.pictures import ChunkTable, draw_strip, draw_strip_png


def table(chunks, *, scores=None, ages=None, grades=None, chunk_tokens=64):
    none = np.zeros(0)
    return ChunkTable(
        tokens=chunks * chunk_tokens,
        chunk_tokens=chunk_tokens,
        scores=none if scores is None else np.asarray(scores, np.float64),
        ages=none.astype(np.uint64) if ages is None else np.asarray(ages, np.uint64),
        grades=np.zeros(chunks, np.uint8) if grades is None else np.asarray(grades, np.uint8),
    )


def cells(picture, name):
    """What a row shows right of its axis."""
    (line,) = [line for line in picture.splitlines() if line.startswith(name)]
    return re.split("[│|]", line)[1]


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("chunks", [1, 5, 67, 68, 69, 4096])
def test_no_line_is_wider_than_the_terminal(width, chunks):
    random = np.random.default_rng(0)
    full = table(chunks, scores=random.random(chunks), ages=random.integers(0, 99, chunks))
    for unicode in (True, False):
        picture = draw_strip(full, width, colour=False, unicode=unicode)
        lines = [line for line in picture.splitlines() if re.search("[│|]|tokens$", line)]
        assert max(map(len, lines)) <= width
        assert picture.isascii() is not unicode


def test_one_needle_among_thousands_of_chunks_is_seen():
    scores = np.zeros(4096)
    scores[1000] = 0.5
    picture = draw_strip(table(4096, scores=scores), 100, colour=False, unicode=True)
    top = cells(picture, "score")
    assert top.count("█") == 1
    assert top.index("█") == 1000 * 88 // 4096
    assert "0.500" in picture


def test_the_worst_provenance_of_a_group_is_shown():
    grades = np.zeros(4096, np.uint8)
    grades[5] = 2
    grades[4095] = 1
    row = cells(draw_strip(table(4096, grades=grades), 100, colour=False, unicode=True), "prov")
    assert (row[0], row[-1], row.count("·")) == ("a", "d", 86)


def test_chunks_used_lately_are_darker():
    picture = draw_strip(table(4, ages=[900, 7, 9, 8]), 44, colour=False, unicode=True)
    row = cells(picture, "last use")
    shades = [row[8 * chunk] for chunk in range(4)]
    assert shades == ["░", "█", "▒", "▓"]
    assert "7 (dark) to 900 (light) forwards before the save" in picture


def test_what_was_not_saved_is_not_drawn():
    picture = draw_strip(table(3), 80, colour=False, unicode=True)
    assert "last use" not in picture
    assert "score" not in picture
    assert "no hints were saved" in picture
    unused = draw_strip(table(3, scores=[0, 0, 0]), 80, colour=False, unicode=True)
    assert "score: none yet" in unused


def test_an_empty_snapshot_has_a_picture_too():
    assert draw_strip(table(0), 80, colour=False, unicode=True) == "no chunks"


def test_colours_are_only_there_when_asked_for():
    full = table(3, scores=[0.1, 0.2, 0.3], ages=[1, 2, 3])
    assert "\x1b[" not in draw_strip(full, 80, colour=False, unicode=True)
    assert "\x1b[38;5;" in draw_strip(full, 80, colour=True, unicode=True)


@pytest.mark.parametrize("chunks", [1, 3, 5000])
@pytest.mark.parametrize("hints", [True, False])
def test_a_png_is_drawn_of_any_table(chunks, hints):
    values = {"scores": np.ones(chunks), "ages": np.arange(chunks)} if hints else {}
    data = draw_strip_png(table(chunks, **values), "a title")
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(data) > 5000
