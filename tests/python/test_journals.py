"""Journals of a directory store: one holder, whole parts, and a lease that ends with its holder.

What journals in a bucket have in common with them is tried here too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvpager.stores import DirectoryStore, journals
from kvpager.stores.encryption import Secret
from kvpager.stores.journals import DirectoryJournals


@pytest.fixture(params=["plain", "encrypted"])
def folder(request, tmp_path):
    secret = None if request.param == "plain" else Secret(bytes(32))
    return DirectoryJournals(str(tmp_path / "journals"), lambda: 0o640, secret)


@pytest.fixture(params=["plain", "encrypted", "bucket", "encrypted bucket"])
def any_folder(request, tmp_path):
    """Journals of each kind of store."""
    secret = Secret(bytes(32)) if "encrypted" in request.param else None
    if "bucket" not in request.param:
        return DirectoryJournals(str(tmp_path / "journals"), lambda: 0o640, secret)
    pytest.importorskip("obstore", reason="obstore, of kvpager[s3], needs Python 3.11 or later")
    from obstore.store import MemoryStore

    from kvpager.stores.bucket import Bucket
    from kvpager.stores.bucket_journals import BucketJournals

    return BucketJournals(Bucket(MemoryStore(), None, retry_seconds=1.0, timeout=1.0), secret)


def parts(folder, name="a"):
    return folder.read(name)[0]


def test_parts_are_read_in_their_order_from_any_cursor_on(folder):
    journal = folder.create("a", b"first")
    found, cursor = folder.read("a")
    assert found == [b"first"]
    assert journal.append(b"second")
    assert journal.append(b"third")
    assert folder.read("a", cursor)[0] == [b"second", b"third"]
    assert Path(folder._path("a")).stat().st_mode & 0o777 == 0o640
    journal.delete()
    assert folder.read("a") is None
    assert folder.take("a") is None
    assert not folder.delete("a")
    assert not journal.append(b"more")


def test_only_one_holds_a_journal_until_it_lets_go(any_folder):
    journal = any_folder.create("a", b"first")
    assert any_folder.take("a") is None
    journal.release()
    taken = any_folder.take("a")
    assert taken.append(b"second")
    assert any_folder.take("a") is None
    assert not journal.append(b"third")
    assert parts(any_folder) == [b"first", b"second"]


def test_whoever_loses_a_journal_cannot_write_or_remove_it(any_folder):
    journal = any_folder.create("a", b"first")
    taken = any_folder.take("a", force=True)
    assert not journal.append(b"second")
    journal.delete()
    assert taken.append(b"third")
    assert parts(any_folder) == [b"first", b"third"]
    any_folder.delete("a")
    assert not taken.append(b"fourth")
    assert any_folder.read("a") is None


DIES = """
import os, sys
from kvpager.stores.journals import DirectoryJournals
journal = DirectoryJournals(sys.argv[1], lambda: 0o600).create("a", b"first")
print(flush=True)
sys.stdin.read()
"""


def test_a_dead_holder_of_this_machine_is_known_at_once(tmp_path):
    folder = DirectoryJournals(str(tmp_path), lambda: 0o600)
    with subprocess.Popen(
        [sys.executable, "-c", DIES, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        holder.stdout.readline()
        assert folder.take("a") is None
        holder.kill()
        holder.wait(30)
        assert folder.take("a").append(b"second")


def test_a_holder_of_another_machine_is_dead_once_its_lease_is_over(folder, monkeypatch):
    now = 0.0
    monkeypatch.setattr(journals.time, "monotonic", lambda: now)
    monkeypatch.setattr(journals, "_machine", lambda: "another")
    journal = folder.create("a", b"first")
    journal.close()  # as a lock that the file system does not share
    monkeypatch.setattr(journals, "_machine", lambda: "this one")
    assert folder.take("a") is None
    now = journals.LEASE_SECONDS - 0.1
    assert folder.take("a") is None
    os.utime(folder._path("a"), (1, 1))  # it lives
    now = journals.LEASE_SECONDS + 0.1
    assert folder.take("a") is None
    now = 2 * journals.LEASE_SECONDS + 0.2
    assert folder.take("a") is not None


def test_a_holder_that_hangs_loses_its_journal_once_its_lease_is_over(folder, monkeypatch):
    now = 0.0
    monkeypatch.setattr(journals.time, "monotonic", lambda: now)
    journal = folder.create("a", b"first")
    assert folder.take("a") is None
    journal.renew()
    now = journals.LEASE_SECONDS + 0.1
    assert folder.take("a") is None
    assert folder.take("a") is None
    now *= 2
    taken = folder.take("a")
    assert not journal.append(b"second")
    journal.close()
    taken.renew()  # it has the lock from now on
    assert DirectoryJournals(folder._folder, lambda: 0o600, folder._secret).take("a") is None


@pytest.mark.parametrize("cut", range(2, 12))
def test_a_part_that_was_not_finished_or_is_damaged_is_left_out(folder, cut):
    journal = folder.create("a", b"first")
    journal.append(b"torn")
    journal.close()
    size = Path(folder._path("a")).stat().st_size
    os.truncate(folder._path("a"), size - cut)
    taken = folder.take("a")
    assert taken.append(b"second")
    assert parts(folder) == [b"first", b"second"]
    taken.close()
    with Path(folder._path("a")).open("r+b") as file:
        data = file.read()
        file.seek(len(data) - 3)
        file.write(b"X")
    assert parts(folder) == [b"first"]


def test_the_oldest_journals_that_nobody_holds_are_removed(folder, monkeypatch):
    monkeypatch.setattr(journals, "MOST", 2)
    monkeypatch.setattr(journals, "_PRUNE_EVERY", 2)
    held = folder.create("held", b"first")
    for number in range(6):
        folder.create(f"n{number}", b"first").release()
    assert len(list(Path(folder._folder).iterdir())) <= 5
    assert folder.read("held") is not None
    assert folder.read("n5") is not None
    held.delete()


def test_a_store_with_journals_is_a_store_and_a_full_disk_is_an_oserror(tmp_path, monkeypatch):
    store = DirectoryStore(tmp_path)
    journal = store.journals.create("a", b"first")
    DirectoryStore(tmp_path).gc()
    assert store.journals.read("a")[0] == [b"first"]
    monkeypatch.setattr(journals.os, "write", lambda _, data: len(data) // 2)
    with pytest.raises(OSError, match="No space"):
        journal.append(b"second")


def test_a_journal_of_an_encrypted_store_shows_neither_its_text_nor_its_name(tmp_path):
    store = DirectoryStore(tmp_path, key=bytes(32))
    store.journals.create("resp_secret", b"what was asked").release()
    for path in tmp_path.rglob("*"):
        assert "resp_secret" not in path.name
        assert path.is_dir() or b"what was asked" not in path.read_bytes()
    assert DirectoryStore(tmp_path, key=bytes(32)).journals.read("resp_secret")[0] == [
        b"what was asked"
    ]
    assert DirectoryJournals(str(tmp_path / "journals"), lambda: 0o600).read("resp_secret") is None


def test_a_part_that_was_moved_to_another_journal_is_left_out(tmp_path):
    folder = DirectoryJournals(str(tmp_path), lambda: 0o600, Secret(bytes(32)))
    for name in ("a", "b"):
        folder.create(name, name.encode()).close()
    moved = Path(folder._path("a")).read_bytes()
    Path(folder._path("b")).write_bytes(moved)
    assert parts(folder, "b") == []
