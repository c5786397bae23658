"""The protocol of leases.py in every order of its steps: no snapshot ever lacks a pack."""

from __future__ import annotations

import itertools
import json

import pytest

from kvpager.errors import StorageError
from kvpager.stores.bucket import ConflictError, ObjectVersion
from kvpager.stores.leases import Collector, Lease, condemned_packs, live_leases

OLD, NEW = "0" * 32, "1" * 32  # a pack that no snapshot needs any more, and one to be uploaded


class Memory:
    """The requests of a bucket to a dict. `before` is called before each one."""

    address = "memory"

    def __init__(self):
        self.objects, self.time, self.before = {}, 1000.0, lambda: None
        self._etags = itertools.count()

    def _version(self, path):
        data, etag, modified = self.objects[path]
        return ObjectVersion(path, len(data), str(etag), None, modified)

    def put(self, path, data):
        self.before()
        self.objects[path] = (data, next(self._etags), self.time)

    def replace(self, path, data, old):
        self.before()
        there = self._version(path) if path in self.objects else None
        if there != old:
            raise ConflictError(path)
        self.objects[path] = (data, next(self._etags), self.time)
        return self._version(path)

    def head(self, path):
        self.before()
        return self._version(path) if path in self.objects else None

    def get(self, path):
        self.before()
        return (self.objects[path][0], self._version(path)) if path in self.objects else None

    def list(self, prefix):
        self.before()
        return [self._version(path) for path in sorted(self.objects) if path.startswith(prefix)]

    def delete(self, path):
        self.before()
        self.objects.pop(path, None)

    def now(self, path):
        return self.time


def needed(bucket):
    """What the manifests need; one listing, as `ObjectStore.gc` makes."""
    listed = bucket.list("snapshots/")
    return {pack for one in listed for pack in json.loads(bucket.objects[one.path][0])}


def collect(bucket):
    """One run of a collector."""
    collector = Collector(bucket, grace=0, lease_seconds=3600)
    collector.begin(lambda: {one.path[6:]: one.size for one in bucket.list("packs/")})
    collector.finish(needed(bucket), lambda pack: bucket.delete(f"packs/{pack}"), dry_run=False)


def write(bucket, name="a"):
    """One writer, step by step; shares the old pack if it may."""
    lease = Lease(bucket, 3600)
    lease.cover({OLD, NEW}, {name})
    yield
    packs = {OLD, NEW} - condemned_packs(bucket)[0].keys()
    yield
    if OLD in packs and bucket.head(f"packs/{OLD}") is None:
        packs.remove(OLD)
    yield
    bucket.put(f"packs/{NEW}", b"new")
    yield
    bucket.put(f"snapshots/{name}", json.dumps(sorted(packs)).encode())
    yield
    lease.end()


def run(places):
    """Two runs of a collector, before whose n-th requests come the writer's steps of these places.

    Returns the bucket and the number of the collector's requests.
    """
    bucket, count, steps = Memory(), 0, iter(())
    bucket.put(f"packs/{OLD}", b"old")
    steps, taken = write(bucket), 0

    def before():
        nonlocal count, taken
        bucket.before = lambda: None
        while taken < len(places) and places[taken] <= count:
            next(steps, None)
            taken += 1
        count += 1
        bucket.before = before

    bucket.before = before
    collect(bucket)
    collect(bucket)
    bucket.before = lambda: None
    for _ in steps:
        pass
    return bucket, count


def test_no_order_of_the_steps_of_a_writer_and_two_collections_loses_a_pack():
    _, most = run(())
    outcomes = set()
    for places in itertools.combinations_with_replacement(range(most + 2), 6):
        bucket, _ = run(places)
        packs = needed(bucket)
        assert all(f"packs/{pack}" in bucket.objects for pack in packs), places
        outcomes.add((OLD in packs, f"packs/{OLD}" in bucket.objects))
        collect(bucket)
        collect(bucket)
        assert all(f"packs/{pack}" in bucket.objects for pack in packs), places
        assert {path for path in bucket.objects if path.startswith("packs/")} == {
            f"packs/{pack}" for pack in packs
        }
    assert outcomes == {(True, True), (False, False), (False, True)}


def test_a_condemned_pack_stays_condemned_while_a_snapshot_needs_it():
    bucket = Memory()
    bucket.put(f"packs/{OLD}", b"old")
    steps = write(bucket)
    next(steps)
    next(steps)
    bucket.objects.pop(next(path for path in bucket.objects if path.startswith("leases/")))
    collect(bucket)  # the lease has expired
    for _ in steps:
        pass
    assert OLD in needed(bucket)
    bucket.put("packs/" + "2" * 32, b"also condemned")
    collect(bucket)
    assert OLD in condemned_packs(bucket)[0]
    bucket.delete("snapshots/a")
    collect(bucket)
    assert f"packs/{OLD}" not in bucket.objects


def test_two_collectors_condemn_together():
    bucket, other = Memory(), "2" * 32
    bucket.put(f"packs/{OLD}", b"old")
    first, second = (Collector(bucket, grace=0, lease_seconds=3600) for _ in range(2))
    first.begin(lambda: {OLD: 3})
    second.begin(lambda: {OLD: 3, other: 3})
    first.finish(set(), bucket.delete, dry_run=False)
    second.finish(set(), bucket.delete, dry_run=False)
    assert condemned_packs(bucket)[0].keys() == {OLD, other}


def test_a_lease_ends_by_the_buckets_clock_and_is_not_used_after_half_of_it(monkeypatch):
    bucket, now = Memory(), 50.0
    monkeypatch.setattr("kvpager.stores.leases.time.monotonic", lambda: now)
    lease = Lease(bucket, 100)
    lease.cover({OLD}, {"a"})
    bucket.time += 100
    assert live_leases(bucket, bucket.time, 100) == ({OLD}, {"a"})
    now += 24
    lease.renew()
    assert live_leases(bucket, bucket.time + 1, 100) == (set(), set())
    lease.cover({OLD}, {"a"})
    now += 26
    bucket.time += 26
    lease.renew()
    assert live_leases(bucket, bucket.time + 100, 100) == ({OLD}, {"a"})
    now += 51
    with pytest.raises(StorageError, match="was last renewed 51 s ago"):
        lease.renew()
