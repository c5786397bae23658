"""Journals in a bucket: whole parts, and a lease that ends with its holder.

What they have in common with those of a directory store is in `test_journals.py`.
"""

from __future__ import annotations

import threading

import pytest

pytest.importorskip("obstore", reason="obstore, of kvpager[s3], needs Python 3.11 or later")

from obstore.store import MemoryStore

from kvpager.stores import bucket_journals, journals
from kvpager.stores.bucket import Bucket
from kvpager.stores.bucket_journals import BucketJournals


@pytest.fixture
def bucket():
    return Bucket(MemoryStore(), None, retry_seconds=1.0, timeout=1.0)


@pytest.fixture
def folder(bucket):
    return BucketJournals(bucket)


@pytest.fixture
def clock(monkeypatch):
    """A list with the time that journals see."""
    now = [0.0]
    monkeypatch.setattr(journals.time, "monotonic", lambda: now[0])
    return now


def parts(folder):
    return folder.read("a")[0]


def test_parts_are_read_in_their_order_from_any_cursor_on(folder, bucket):
    journal = folder.create("a", b"first")
    found, cursor = folder.read("a")
    assert found == [b"first"]
    assert journal.append(b"second")
    assert folder.read("a", cursor)[0] == [b"second"]
    journal.delete()
    assert folder.read("a") is None
    assert folder.read("a", cursor) is None
    assert folder.take("a") is None
    assert not folder.delete("a")
    assert not journal.append(b"more")
    assert bucket.list("journals/") == []


def test_a_dead_holder_loses_its_journal_once_its_lease_is_over(bucket, clock):
    holder, other = BucketJournals(bucket), BucketJournals(bucket)
    journal = holder.create("a", b"first")
    assert other.take("a") is None
    for _ in range(3):
        clock[0] += journals.LEASE_SECONDS - 0.1
        journal.renew()
        assert other.take("a") is None
    clock[0] += journals.LEASE_SECONDS - 0.1
    assert other.take("a") is None
    clock[0] += 0.2
    assert other.take("a") is not None
    assert not journal.append(b"second")


def test_of_eight_that_take_a_journal_at_once_one_has_it(bucket, clock):
    BucketJournals(bucket).create("a", b"first")
    folders, taken = [BucketJournals(bucket) for _ in range(8)], []
    for folder in folders:
        assert folder.take("a") is None
    clock[0] += journals.LEASE_SECONDS
    threads = [threading.Thread(target=lambda f=f: taken.append(f.take("a"))) for f in folders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len([one for one in taken if one is not None]) == 1


def test_a_part_whose_answer_was_lost_is_there_once(folder, monkeypatch):
    journal = folder.create("a", b"first")
    put = Bucket._put

    def twice(*arguments):
        put(*arguments)
        return put(*arguments)

    monkeypatch.setattr(Bucket, "_put", twice)
    assert journal.append(b"second")
    monkeypatch.setattr(Bucket, "_put", put)
    assert journal.append(b"third")
    assert parts(folder) == [b"first", b"second", b"third"]


def test_a_damaged_part_is_left_out(folder, bucket):
    journal = folder.create("a", b"first")
    journal.append(b"second")
    bucket.put("journals/a/00000001", b"00000000 second")
    assert parts(folder) == [b"first"]


def test_the_oldest_journals_are_removed(folder, bucket, monkeypatch):
    monkeypatch.setattr(bucket_journals, "MOST", 2)
    monkeypatch.setattr(bucket_journals, "_PRUNE_EVERY", 4)
    monkeypatch.setattr(bucket_journals, "_PRUNED_SECONDS", -1.0)
    for number in range(4):
        folder.create(f"n{number}", b"first")
    assert [folder.read(f"n{i}") is not None for i in range(4)] == [False, True, True, True]
