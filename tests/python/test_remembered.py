"""What is remembered on disk is what was found, or nothing."""

from __future__ import annotations

import os

import pytest

from kvpager.remembered import recall, remember

KEY = {"model": "a", "threads": [1, 2]}
VALUE = {"rows": 32, "smaller": [1, 4, 16], "where": "mlp.gate"}


@pytest.fixture
def path(tmp_path, monkeypatch):
    """Of the file in which the value is kept."""
    monkeypatch.setenv("KVPAGER_CACHE", str(tmp_path))
    assert recall("counts", KEY) is None
    remember("counts", KEY, VALUE)
    (file,) = (tmp_path / "counts").iterdir()
    return file


def test_a_value_comes_back_under_its_key_alone(path):
    assert recall("counts", KEY) == VALUE
    assert recall("counts", {**KEY, "model": "b"}) is None
    assert recall("digests", KEY) is None


def test_a_file_with_any_other_bit_is_nothing_unless_it_says_the_same(path):
    written = path.read_bytes()
    for at in range(len(written)):
        for bit in range(8):
            damaged = bytearray(written)
            damaged[at] ^= 1 << bit
            path.write_bytes(damaged)
            assert recall("counts", KEY) in (None, VALUE)


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "{}", "[" * 100_000, '{"value": 1}', '{"value": 1, "digest": 2}']
)
def test_what_is_no_such_file_is_nothing(path, text):
    path.write_text(text)
    assert recall("counts", KEY) is None


def test_a_pipe_in_the_place_of_the_file_is_not_waited_for(path):
    path.unlink()
    os.mkfifo(path)
    assert recall("counts", KEY) is None
