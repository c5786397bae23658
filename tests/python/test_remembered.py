"""What is remembered on disk is what was found, or nothing."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from kvpager._support import remembered
from kvpager._support.remembered import own_number, recall, remember

KEY = {"model": "a", "threads": [1, 2]}
VALUE = {"rows": 32, "smaller": [1, 4, 16], "where": "mlp.gate"}


@pytest.fixture
def path(tmp_path, monkeypatch):
    """Of the file in which the value is kept."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("KVPAGER_CACHE", str(folder))
    remembered._warn.cache_clear()
    assert recall("counts", KEY) is None
    remember("counts", KEY, VALUE)
    (file,) = (folder / "counts").iterdir()
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
    "text", ["", "null", "[]", "{}", "[" * 100_000, '{"value": 1}', '{"value": 1, "code": 2}']
)
def test_what_is_no_such_file_is_nothing(path, text):
    path.write_text(text)
    assert recall("counts", KEY) is None


def test_a_pipe_in_the_place_of_the_file_is_not_waited_for(path):
    path.unlink()
    os.mkfifo(path)
    assert recall("counts", KEY) is None


def forge(path, secret=b"", **changes):
    """Writes the file with other contents, as somebody does who knows all but the secret."""
    found = {**json.loads(path.read_text()), **changes}
    del found["code"]
    path.write_text(json.dumps({**found, "code": remembered._code(found, secret)}))


@pytest.mark.parametrize(
    "changes", [{"value": {"rows": 64}}, {}, {"kind": "digests"}, {"key": {"model": "b"}}]
)
def test_a_file_that_was_written_without_the_secret_is_nothing(path, changes):
    forge(path, **changes)
    assert recall("counts", KEY) is None


def test_an_entry_of_one_kind_is_none_of_another(path):
    shutil.copytree(path.parent, path.parent.with_name("digests"))
    assert recall("digests", KEY) is None


def test_entries_of_another_folder_are_nothing(path, monkeypatch, tmp_path):
    monkeypatch.setenv("KVPAGER_CACHE", str(tmp_path / "other"))
    remember("counts", KEY, VALUE)
    (file,) = (tmp_path / "other" / "counts").iterdir()
    assert recall("counts", KEY) == VALUE
    shutil.copy(path, file)
    assert recall("counts", KEY) is None


@pytest.mark.parametrize("secret", [b"", b"short", bytes(33), None])
def test_without_its_secret_all_is_found_out_anew_and_remembered_again(path, secret):
    file = path.parents[1] / "secret"
    file.unlink()
    if secret is not None:
        file.write_bytes(secret)
        file.chmod(0o600)
    forge(path, secret or b"")
    assert recall("counts", KEY) is None
    remember("counts", KEY, VALUE)
    assert recall("counts", KEY) == VALUE
    assert file.stat().st_mode & 0o777 == 0o600


WRONG = {
    "the folder is open": lambda path: path.parents[1].chmod(0o777),
    "the kind's folder is open": lambda path: path.parent.chmod(0o777),
    "the file is open": lambda path: path.chmod(0o666),
    "the secret is read by others": lambda path: (path.parents[1] / "secret").chmod(0o644),
    "the file has two names": lambda path: os.link(path, path.with_name("other")),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_what_others_may_have_written_is_nothing_and_is_said_once(path, caplog, wrong):
    wrong(path)
    for _ in range(3):
        assert recall("counts", KEY) is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "KVPAGER_CACHE" in record.message


def test_a_link_to_the_folder_is_nothing(path, monkeypatch, tmp_path, caplog):
    (tmp_path / "link").symlink_to(path.parents[1])
    monkeypatch.setenv("KVPAGER_CACHE", str(tmp_path / "link"))
    assert recall("counts", KEY) is None
    remember("counts", KEY, VALUE)
    assert "link is a symbolic link" in caplog.text


def test_a_folder_that_cannot_be_written_is_read_and_breaks_nothing(path, monkeypatch):
    def refused(*_, **__):
        raise PermissionError(30, "Read-only file system")

    for name in ("mkdir", "replace", "unlink"):
        monkeypatch.setattr(os, name, refused)
    assert recall("counts", KEY) == VALUE
    remember("counts", KEY, {"rows": 1})
    assert recall("counts", KEY) == VALUE
    assert own_number("a") is None


def test_numbers_of_the_user_differ_by_purpose_and_folder(path, monkeypatch, tmp_path):
    first = own_number("a")
    assert own_number("a") == first
    assert own_number("b") != first
    monkeypatch.setenv("KVPAGER_CACHE", str(tmp_path / "other"))
    assert own_number("a") != first
    monkeypatch.setenv("KVPAGER_CACHE", "off")
    assert own_number("a") is None
