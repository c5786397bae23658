"""Encrypted stores: nothing of a text is in any file, and nothing that was changed is read."""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_store import SLACK, Author, C, files, names, needles, packs, size, text

from kvpager import CapacityError, CorruptSnapshotError, InvalidArgumentError, StorageError
from kvpager.cli import main
from kvpager.stores import DirectoryStore, FileStore, StoreKey, encryption
from kvpager.stores.companions import CompanionSnapshot
from kvpager.testing import store_suite

pytest.importorskip("cryptography")
KEY, OTHER = bytes(range(32)), bytes(range(1, 33))
ENDS = (0, 3, 5 * C, 6 * C + 7)


@pytest.fixture
def author() -> Author:
    return Author()


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "store", key=KEY)


def reopened(store: DirectoryStore, **options: Any) -> DirectoryStore:
    return DirectoryStore(store.path, **{"key": KEY} | options)


def every_file(folder: Path | str) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


@pytest.mark.parametrize("check", store_suite(), ids=lambda check: check.__name__)
def test_an_encrypted_store_passes_what_every_store_must(check: Any, tmp_path: Path) -> None:
    check(lambda: DirectoryStore(tmp_path / "store", key=StoreKey(KEY, tenant="acme")))


def found_in(folder: Path | str, wanted: list[bytes]) -> set[bytes]:
    return {one for data in every_file(folder).values() for one in wanted if one in data}


def test_no_file_has_a_token_a_key_a_value_or_a_name_of_a_text(
    author: Author, store: DirectoryStore, tmp_path: Path
) -> None:
    tokens = text(9 * C + 7)
    wanted = needles(tokens)
    plain = DirectoryStore(tmp_path / "plain")
    seen: set[bytes] = set()

    def look(done: int, total: int) -> None:
        seen.update(found_in(store.path, wanted))

    for one in (plain, store):
        beside = author.content(tokens[:40])
        draft = CompanionSnapshot("draft", beside, author.pager.fingerprint_json, "{}")
        author.save(one, "my-planner", tokens, companions=[draft])
        author.save(one, "my-planner", text(12 * C, start=tokens), progress=look)
        one.pin("my-planner")
    assert {b"my-planner", b'"tokens":', *wanted[:3]} <= found_in(plain.path, wanted)
    assert found_in(store.path, wanted) == seen == set()
    assert not any("planner" in path.name for path in every_file(store.path))


def test_a_segments_name_is_in_no_file(store: DirectoryStore, author: Author) -> None:
    note = {"segment": {"name": "secret-document", "tokens": 32, "digest": "00" * 16}}
    content = author.content(text(2 * C))
    fingerprint = author.pager.fingerprint_json
    store.save(
        "segment-secret-document", content, fingerprint=fingerprint, session=json.dumps(note)
    )
    assert names(reopened(store)) == ["segment-secret-document"]
    assert found_in(store.path, [b"secret-document"]) == set()


def test_equal_texts_have_no_equal_blocks(author: Author, tmp_path: Path) -> None:
    blocks: list[bytes] = []
    for name in ("a.kvsnap", "b.kvsnap"):
        store = FileStore(tmp_path, key=KEY)
        author.save(store, name, text(8 * C))
        data = (tmp_path / name).read_bytes()[encryption.HEADER_BYTES :]
        blocks += [data[at : at + 16] for at in range(0, len(data) - 16, 16)]
    assert len(blocks) > 1000
    assert len(set(blocks)) == len(blocks)


@pytest.mark.parametrize("what", ["packs", "snapshots"])
def test_any_changed_byte_of_a_snapshots_files_is_refused(
    author: Author, store: DirectoryStore, what: str
) -> None:
    tokens = text(3 * C + 5)
    author.save(store, "planner", tokens)
    (path,) = Path(store.path, what).glob("*.kvsnap")
    sound = path.read_bytes()
    header = [*range(0, 60, 4), *range(111, 129)]
    for at in [*header, *range(130, len(sound), len(sound) // 20), len(sound) - 1]:
        damaged = bytearray(sound)
        damaged[at] ^= 4
        path.write_bytes(damaged)
        assert damage_of(store, "planner"), f"byte {at}"
    path.write_bytes(sound)
    author.check(reopened(store).open("planner"), tokens)


def damage_of(store: DirectoryStore, name: str) -> list[Any]:
    """What is wrong with a snapshot, at open or in its chunks."""
    try:
        return list(reopened(store).open(name).verify(1))
    except (CorruptSnapshotError, StorageError) as error:
        return [str(error)]


def test_a_file_in_anothers_place_or_cut_off_is_refused(
    author: Author, store: DirectoryStore
) -> None:
    for seed, name in enumerate("ab"):
        author.save(store, name, text(40 * C, seed=seed))
    first, second = packs(store.path)
    sound = second.read_bytes()
    start = encryption.HEADER_BYTES + 4096 + encryption.TAG_BYTES
    step = encryption.BLOCK_BYTES + encryption.TAG_BYTES
    one, two = sound[start : start + step], sound[start + step : start + 2 * step]
    assert len(two) == step
    moved = sound[:start] + two + one + sound[start + 2 * step :]
    for other in (first.read_bytes(), sound[:-1], sound[:-step], sound + b"\0", moved):
        second.write_bytes(other)
        assert sorted(bool(damage_of(store, name)) for name in "ab") == [False, True]
    second.write_bytes(sound)
    (a, b) = sorted(Path(store.path, "snapshots").glob("*.kvsnap"))
    bytes_a, bytes_b = a.read_bytes(), b.read_bytes()
    a.write_bytes(bytes_b)
    b.write_bytes(bytes_a)
    errors = [entry.error or "" for entry in reopened(store).entries()]
    assert len([e for e in errors if "its header is not what was encrypted" in e]) == 2


def test_without_its_key_a_store_is_refused_by_name(
    author: Author, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    author.save(store, "planner", text(20))
    cases: list[tuple[Any, type, str]] = [
        (None, InvalidArgumentError, "key is None, and .* is encrypted"),
        (OTHER, StorageError, "encrypted with key [0-9a-f]{16}, and the given ones are"),
        (StoreKey(KEY, tenant="acme"), StorageError, "the master key and the tenant"),
        (b"short", InvalidArgumentError, "key 0 is 5 bytes; expected 32"),
        ("text", InvalidArgumentError, "key 0 is <class 'str'>"),
    ]
    for key, kind, words in cases:
        with pytest.raises(kind, match=words):
            reopened(store, key=key)
    with pytest.raises(CorruptSnapshotError, match="this file is encrypted"):
        FileStore().open(str(packs(store.path)[0]))
    plain = DirectoryStore(tmp_path / "plain")
    with pytest.raises(InvalidArgumentError, match=r"key is given, and .* without encryption"):
        DirectoryStore(plain.path, key=KEY)
    monkeypatch.setenv("KVPAGER_STORE_KEY", KEY.hex())
    assert names(reopened(store, key=None)) == ["planner"]
    assert names(DirectoryStore(plain.path)) == []  # the environment's key is for encrypted ones
    monkeypatch.setenv("KVPAGER_STORE_KEY", "ab" * 31)
    with pytest.raises(InvalidArgumentError, match="KVPAGER_STORE_KEY: key 1 has 62 characters"):
        reopened(store, key=None)


def test_a_new_master_key_opens_what_an_older_one_encrypted(
    author: Author, store: DirectoryStore, tmp_path: Path
) -> None:
    tokens = text(4 * C + 3)
    author.save(store, "planner", tokens)
    before = every_file(f"{store.path}/packs") | every_file(f"{store.path}/snapshots")
    file = tmp_path / "keys"
    file.write_text(f"{KEY.hex()}\n")
    key = StoreKey.from_file(file)
    file.write_text(f"{OTHER.hex()}\n{KEY.hex()}\n")  # read again when a key is missing
    both = StoreKey.from_file(file)
    reopened(store, key=both).rewrap(both)
    author.check(reopened(store, key=key).open("planner"), tokens)
    author.check(reopened(store, key=OTHER).open("planner"), tokens)
    with pytest.raises(StorageError, match="encrypted with key"):
        reopened(store, key=KEY)
    after = every_file(f"{store.path}/packs") | every_file(f"{store.path}/snapshots")
    assert before == after
    with pytest.raises(InvalidArgumentError, match="without encryption"):
        DirectoryStore(tmp_path / "plain").rewrap(KEY)
    author.save(store, "planner", text(6 * C, start=tokens))  # an object that was open meanwhile
    author.check(reopened(store, key=OTHER).open("planner"), text(6 * C, start=tokens))


def test_a_key_from_a_callback_is_asked_for_again_when_one_is_missing(tmp_path: Path) -> None:
    given = [[KEY], [OTHER, KEY]]
    store = DirectoryStore(tmp_path / "s", key=OTHER)
    key = StoreKey(lambda: given.pop(0))
    assert names(reopened(store, key=key)) == []
    assert given == []


def test_two_stores_of_one_key_read_nothing_of_each_other(author: Author, tmp_path: Path) -> None:
    a, b = (DirectoryStore(tmp_path / name, key=KEY) for name in "ab")
    author.save(a, "planner", text(3 * C))
    author.save(b, "planner", text(3 * C))
    for room in ("packs", "snapshots"):
        for path in Path(a.path, room).glob("*.kvsnap"):
            shutil.copy(path, Path(b.path, room, path.name))
    errors = [entry.error for entry in reopened(b).entries() if entry.error]
    assert len(errors) == 1
    assert "it is encrypted for another store" in errors[0]


def test_a_budget_counts_encrypted_bytes_and_reports_have_the_names(
    author: Author, tmp_path: Path
) -> None:
    measured = DirectoryStore(tmp_path / "m", key=KEY)
    author.save(measured, "s0", text(4 * C))
    budget = 3 * size(measured.path) + SLACK
    store = DirectoryStore(tmp_path / "s", key=KEY, byte_budget=budget)
    for n in range(6):
        author.save(store, f"s{n}", text(4 * C, seed=n))
        assert size(store.path) <= budget
    assert names(store) == ["s3", "s4", "s5"]
    for name in names(store):
        store.pin(name)
    with pytest.raises(CapacityError, match="pinned: s3, s4, s5"):
        author.save(store, "s6", text(4 * C, seed=6))
    store.unpin("s3")
    store.set_ttl("s3", 0)
    assert store.gc().expired == ("s3",)


def test_packs_are_compacted_and_companions_kept(author: Author, store: DirectoryStore) -> None:
    tokens = text(12 * C)
    author.save(store, "long", tokens)
    author.save(store, "short", tokens[: 3 * C])
    store.delete("long")
    report = store.gc()
    assert report.packs_compacted == 1
    author.check(reopened(store).open("short"), tokens[: 3 * C])
    author.check(reopened(store).find_prefix(author.hashes(tokens)), tokens[: 3 * C])


def test_names_are_listed_in_their_order_page_by_page(
    author: Author, store: DirectoryStore
) -> None:
    for n, name in enumerate(["d", "b", "a", "c", "b.draft.states"]):
        author.save(store, name, text(20, seed=n))
    again = reopened(store)
    assert names(again) == ["a", "b", "b.draft.states", "c", "d"]
    assert [e.name for e in again.entries(after="a", limit=2)] == ["b", "b.draft.states"]
    last = again.entries(latest_first=True, limit=2)
    rest = again.entries(latest_first=True, after=(last[-1].last_used, last[-1].name))
    assert [e.name for e in last + rest] == ["b.draft.states", "c", "a", "b", "d"]
    for latest_first in (False, True):
        named = again.entries(named=lambda name: name < "b", latest_first=latest_first)
        assert [e.name for e in named] == ["a"]
    with pytest.raises(StorageError, match=r"there is no snapshot 'e'$"):
        again.open("e")


def test_an_index_that_was_changed_is_made_anew(author: Author, store: DirectoryStore) -> None:
    author.save(store, "planner", text(20))
    with sqlite3.connect(f"{store.path}/index.sqlite3") as index:
        index.execute("UPDATE snapshot SET names = x'00'")
    with pytest.raises(CorruptSnapshotError, match="index"):
        reopened(store).entries()
    again = reopened(store)
    again.reindex()
    assert names(again) == ["planner"]


def test_a_file_that_cannot_be_read_is_listed_and_deleted_by_its_files_name(
    author: Author, store: DirectoryStore
) -> None:
    author.save(store, "planner", text(20))
    (path,) = Path(store.path, "snapshots").glob("*.kvsnap")
    path.write_bytes(path.read_bytes()[:-1])
    (entry,) = reopened(store).entries()
    assert entry.name == path.stem
    assert entry.error
    reopened(store).delete(entry.name)
    reopened(store).gc()
    assert files(store.path) == {}


def test_single_files_are_encrypted_and_may_be_renamed(author: Author, tmp_path: Path) -> None:
    tokens = text(5 * C + 3)
    sealed, plain = FileStore(tmp_path, key=KEY), FileStore(tmp_path)
    author.save(sealed, "a.kvsnap", tokens)
    author.save(plain, "plain.kvsnap", tokens)
    sealed_bytes, plain_bytes = ((tmp_path / f"{n}.kvsnap").read_bytes() for n in ("a", "plain"))
    assert any(one in plain_bytes for one in needles(tokens))
    assert not any(one in sealed_bytes for one in needles(tokens))
    (tmp_path / "a.kvsnap").rename(tmp_path / "b.kvsnap")
    author.check(sealed.open("b.kvsnap"), tokens)
    author.check(sealed.open("plain.kvsnap"), tokens)
    assert [entry.error for entry in sealed.entries()] == [None, None]
    with pytest.raises(CorruptSnapshotError, match="this file is encrypted"):
        plain.open("b.kvsnap")
    with pytest.raises(StorageError, match="the given ones are"):
        FileStore(tmp_path, key=OTHER).open("b.kvsnap")
    both = FileStore(tmp_path, key=StoreKey([OTHER, KEY]))
    author.check(both.open("b.kvsnap"), tokens)


class Held:
    def __init__(self, data: bytes) -> None:
        self.data, self.size = data, len(data)

    def read(self, offset: int, size: int) -> bytes:
        assert 0 <= offset <= offset + size <= self.size
        return self.data[offset : offset + size]

    def will_need(self, offset: int, size: int) -> None:
        self.read(offset, size)


@given(st.integers(0, 3 * 65536 + 9), st.data())
def test_every_range_of_a_file_is_what_was_written(rest: int, data: st.DataObject) -> None:
    secret = encryption.Secret(KEY)
    plain = np.random.default_rng(rest).bytes(4096 + rest)
    cipher = secret.cipher("packs/a")
    front, body = bytearray(4096 + 16), bytearray(rest + 16 * -(-rest // 65536))
    cipher.encrypt(1, memoryview(plain)[4096:], memoryview(body))
    cipher.encrypt(0, memoryview(plain)[:4096], memoryview(front))
    whole = cipher.header(len(plain)) + front + body
    ranges = secret.plain(Held(whole), "a", "packs/a")
    assert ranges.size == len(plain)
    edges = [0, 1, 4095, 4096, 4097, 4096 + 65535, 4096 + 65536, len(plain) - 1, len(plain)]
    edge = st.sampled_from([e for e in edges if 0 <= e <= len(plain)]) | st.integers(0, len(plain))
    start, end = sorted((data.draw(edge), data.draw(edge)))
    assert bytes(ranges.read(start, end - start)) == plain[start:end]
    ranges.will_need(start, end - start)
    assert all(bytes(ranges.read(at, 0)) == b"" for at in (0, 4096, len(plain)))
    with pytest.raises(CorruptSnapshotError):
        ranges.read(start, len(plain) - start + 1)


def test_no_nonce_is_used_twice_under_one_key(
    author: Author, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[tuple[bytes, bytes]] = []
    real = encryption._aead

    def noted(key: bytes) -> Any:
        aead = real(key)

        class Noting:
            def encrypt(self, nonce: bytes, *rest: Any) -> Any:
                used.append((key, bytes(nonce)))
                return aead.encrypt(nonce, *rest)

            def encrypt_into(self, nonce: bytes, *rest: Any) -> Any:
                used.append((key, bytes(nonce)))
                return aead.encrypt_into(nonce, *rest)

            def __getattr__(self, name: str) -> Any:
                return getattr(aead, name)

        return Noting()

    monkeypatch.setattr(encryption, "_aead", noted)
    tokens = text(40 * C)
    for count in (10 * C + 3, 20 * C, 40 * C, 10 * C):
        author.save(store, "planner", tokens[:count])
        author.save(store, f"other{count}", tokens[:count])
    store.delete("other640")
    store.gc()
    assert len(used) > 30
    assert len(set(used)) == len(used)


def run_cli(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(list(words))
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_commands_read_an_encrypted_store_with_the_key_of_the_environment(
    author: Author,
    store: DirectoryStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tokens = text(6 * C + 3)
    beside = author.content(tokens[:40])
    draft = CompanionSnapshot("draft", beside, author.pager.fingerprint_json, "{}")
    author.save(store, "planner", tokens, companions=[draft])
    planner = f"{store.path}/planner"
    monkeypatch.delenv("KVPAGER_STORE_KEY", raising=False)
    code, _, errors = run_cli(capsys, "snapshot", "ls", store.path)
    assert code == 1
    assert "key is None" in errors
    file = tmp_path / "keys"
    file.write_text(f"{OTHER.hex()}\n{KEY.hex()}\n")
    monkeypatch.setenv("KVPAGER_STORE_KEY_FILE", str(file))
    for words in (
        ("ls", store.path),
        ("inspect", planner),
        ("verify", planner),
        ("verify", store.path),
        ("export", planner, str(tmp_path / "out.kvsnap")),
        ("diff", planner, str(tmp_path / "out.kvsnap")),
        ("import", str(tmp_path / "out.kvsnap"), f"{store.path}/again"),
        ("pin", planner),
        ("rekey", store.path),
    ):
        code, out, errors = run_cli(capsys, "snapshot", *words)
        assert (code, errors) == (0, ""), words
    assert not any(one in (tmp_path / "out.kvsnap").read_bytes() for one in needles(tokens))
    file.write_text(f"{OTHER.hex()}\n")
    code, out, _ = run_cli(capsys, "snapshot", "ls", store.path)
    assert "planner" in out
    assert "again" in out
    code, _, errors = run_cli(capsys, "snapshot", "inspect", f"{store.path}/plannner")
    assert "planner" in errors
