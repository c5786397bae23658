"""An object store's local folder, with a bucket in memory; and what any store must do, there."""

from __future__ import annotations

import errno
import os
import sqlite3
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("obstore", reason="obstore, of kvpager[s3], needs Python 3.11 or later")

from obstore.store import MemoryStore
from small_store import CHUNK, Author, C, names, text

from kvpager.errors import InvalidArgumentError, StorageError, UnsupportedVersionError
from kvpager.stores import ObjectStore, bucket, holes
from kvpager.testing import store_suite

LIFE = text(5 * C + 3, seed=1)
MORE = text(8 * C + 2, seed=2, start=LIFE)


@pytest.mark.parametrize("write_back", [False, True])
@pytest.mark.parametrize("check", store_suite(), ids=lambda check: check.__name__)
def test_a_bucket_in_memory_does_what_a_store_must(check, write_back, tmp_path):
    memory, stores = MemoryStore(), []

    def open_store():
        # One folder for all if saves may only be there.
        folder = tmp_path / ("one" if write_back else f"cache{len(stores)}")
        stores.append(ObjectStore(memory, cache=folder, refresh_seconds=0, write_back=write_back))
        return stores[-1]

    check(open_store)
    for store in stores:
        store.close()


@pytest.fixture
def author():
    return Author()


@pytest.fixture
def opened(tmp_path):
    """A function that opens the test's store, each time with a cache of its own."""
    memory, stores = MemoryStore(), []

    def open_store(cache=None, address=memory, **options):
        folder = tmp_path / (cache or f"cache{len(stores)}")
        stores.append(ObjectStore(address, cache=folder, **options))
        return stores[-1]

    yield open_store
    for store in stores:
        store.close()


def gets(store):
    return store.stats()["requests"]["get"]["requests"]


def test_what_a_reader_will_need_is_fetched_before_it_is_read(opened, author):
    author.save(opened(), "life", LIFE)
    store = opened()
    reader = store.open("life")
    (pack,) = Path(store.path, "mirror", "packs").glob("*.kvsnap")
    ranges = store.mirror.opened(str(pack))
    before = gets(store)
    ranges.will_need(4096, 2 * CHUNK)
    until = time.monotonic() + 10
    while store.stats()["cache_bytes"] < 2 * CHUNK and time.monotonic() < until:
        time.sleep(0.01)
    assert gets(store) == before + 1
    reader.read_chunk(0)
    reader.read_chunk(1)
    assert gets(store) == before + 1


def test_a_range_that_is_evicted_while_it_is_read_is_fetched_again(opened, author, monkeypatch):
    author.save(opened(), "life", LIFE)
    store = opened()
    reader = store.open("life")
    reader.read_chunk(0)
    cache, seen = store.mirror.cache, []
    covering = cache.covering

    def evicting(pack, start, end):
        rows = covering(pack, start, end)
        if rows and not seen:
            seen.extend(rows)
            cache.forget(pack)  # as another process may
        return rows

    monkeypatch.setattr(cache, "covering", evicting)
    assert reader.verify(1) == []
    assert len(seen) == 1


def test_what_was_saved_here_leaves_the_cache_too_once_it_is_in_the_bucket(opened, author):
    store = opened(cache_bytes="36KiB")
    texts = [text(6 * C, seed=seed) for seed in range(3)]
    for seed, tokens in enumerate(texts):
        author.save(store, f"s{seed}", tokens)
        assert store.stats()["cache_bytes"] <= 36 << 10
    packs = list(Path(store.path, "mirror", "packs").glob("*.kvsnap"))
    assert sum(512 * pack.stat().st_blocks for pack in packs) < 3 * 6 * CHUNK
    for seed, tokens in enumerate(texts):
        author.check(store.open(f"s{seed}"), tokens)


def test_after_a_reboot_what_was_fetched_is_dropped_and_what_was_saved_stays(opened, author):
    author.save(opened(), "life", LIFE)
    store = opened("cache")
    author.check(store.open("life"), LIFE)
    fetched = store.stats()["cache_bytes"]
    author.save(store, "own", text(4 * C, seed=3))
    saved = store.stats()["cache_bytes"] - fetched
    store.close()
    with sqlite3.connect(f"{store.path}/cache.sqlite3") as database:
        database.execute("UPDATE state SET boot = 'another'")
    database.close()
    again = opened("cache")
    assert 4 * CHUNK <= again.stats()["cache_bytes"] == saved
    payload = sum(512 * one.stat().st_blocks for one in Path(store.path, "payload").iterdir())
    assert payload <= 4096  # a block that is partly free
    author.check(again.open("life"), LIFE)


def test_a_folder_whose_database_is_gone_is_cleared(opened, author, caplog):
    store = opened("cache")
    author.save(store, "life", LIFE)
    store.close()
    for file in Path(store.path).glob("cache.sqlite3*"):
        file.unlink()
    again = opened("cache")
    assert "its database is gone; it is cleared" in caplog.text
    assert again.stats()["cache_bytes"] == again.stats()["snapshots"] == 0
    author.check(again.open("life"), LIFE)


def test_a_damaged_copy_of_metadata_is_fetched_again(opened, author):
    author.save(opened(), "life", LIFE)
    store = opened()
    store.open("life")
    manifest = Path(store.path, "mirror", "snapshots", "life.kvsnap")
    data = bytearray(manifest.read_bytes())
    data[-100] ^= 1
    manifest.write_bytes(data)
    author.check(store.open("life"), LIFE)


def test_the_folder_of_another_bucket_is_refused(opened):
    opened("cache")
    with pytest.raises(InvalidArgumentError, match=r"cache is .*, which is the cache of"):
        opened("cache", address=MemoryStore())


def test_a_folder_that_cannot_have_holes_is_refused(opened, monkeypatch):
    def refuse(path, ranges):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), path)

    monkeypatch.setattr(holes, "punch", refuse)
    with pytest.raises(StorageError, match="cannot free a part of a file"):
        opened()


def test_a_missing_package_or_an_old_python_is_named(opened, monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(StorageError, match=r"install kvpager\[s3\]"):
        opened()
    monkeypatch.setattr(bucket, "_HAS_BUCKETS", False)
    with pytest.raises(StorageError, match=r"need Python 3\.11 or later"):
        opened()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"address": "file:///tmp"}, "address is 'file:///tmp'; expected s3:// or gs:// or az://"),
        ({"cache_bytes": "much"}, "cache_bytes is 'much'"),
        ({"ttl": "soon"}, "ttl is 'soon'"),
        ({"refresh_seconds": -1}, "refresh_seconds is -1; expected a number of seconds"),
        ({"address": "s3://b", "options": {"colour": "red"}}, "s3://b: .*colour"),
    ],
)
def test_arguments_are_checked(opened, options, message):
    with pytest.raises(InvalidArgumentError, match=message):
        opened(**options)


def test_a_save_waits_for_nobody_and_its_pack_is_known_at_once(opened, author, monkeypatch):
    def wait(seconds):
        raise AssertionError(f"waits {seconds} s")

    store = opened()
    monkeypatch.setattr("kvpager.stores.access.time.sleep", wait)
    author.save(store, "life", LIFE)
    assert store.stats()["damaged"] == 0
    assert author.save(store, "other", LIFE).chunks_written == 1


def test_a_newer_store_is_refused(opened):
    store = opened()
    store.bucket.put("store.json", b'{"kvpager_bucket": 2, "ttl_seconds": null}')
    with pytest.raises(UnsupportedVersionError, match="kvpager_bucket is 2"):
        opened()


def test_prefixes_of_other_machines_are_learnt_and_their_deletion_is_noticed(opened, author):
    writer, store = opened(), opened(refresh_seconds=0)
    author.save(writer, "life", LIFE)
    author.check(store.find_prefix(author.hashes(MORE)), LIFE[: 5 * C])
    knowing = opened(refresh_seconds=3600)
    assert names(knowing) == ["life"]
    author.check(knowing.find_prefix(author.hashes(MORE)), LIFE[: 5 * C])
    writer.delete("life")
    assert knowing.find_prefix(author.hashes(MORE)) is None


def test_a_store_that_is_closed_while_it_lists_in_the_background_ends_cleanly(opened, author):
    writer = opened()
    for seed in range(20):
        author.save(writer, f"s{seed}", text(2 * C, seed=seed))
    store = opened()
    assert store.find_prefix(author.hashes(text(2 * C, seed=3))) is None  # begins a listing
    store.close()
    assert store.stats()["snapshots"] == 20


def test_a_pack_that_another_machine_deleted_is_not_shared(opened, author):
    collecting, knowing = opened(), opened()
    author.save(collecting, "life", LIFE)
    author.check(knowing.open("life"), LIFE)
    collecting.delete("life")
    collecting.gc(grace=0)
    # Condemned: its chunks are written again, though this machine has them.
    assert author.save(knowing, "condemned", LIFE).chunks_written == 6
    collecting.delete("condemned")
    for _ in range(3):
        collecting.gc(grace=0)
    assert knowing.bucket.list("packs/") == []
    author.save(knowing, "deleted", LIFE)  # written or uploaded again
    author.check(opened().open("deleted"), LIFE)


def test_a_deleted_companion_of_a_replaced_snapshot_is_deleted(opened, author):
    from kvpager.stores.companions import CompanionSnapshot

    draft = CompanionSnapshot(
        "draft", author.content(MORE), author.pager.fingerprint_json, '{"tokens": 1}'
    )
    author.save(opened(), "life", LIFE, companions=[draft])
    store = opened()
    author.check(store.open("life.draft"), MORE)
    author.save(opened(), "life", MORE)
    with pytest.raises(StorageError, match="no snapshot"):
        store.open("life.draft")
