"""What a chunk is called: keyed BLAKE2b over all that it stands for, compared with Python's own."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from small_store import Author, C, text

from kvpager import PagerConfig, _core
from kvpager.pager import Layout, Pager, SnapshotInfo, open_snapshot
from kvpager.stores import DirectoryStore

STORE_1_1 = Path(__file__).resolve().parent.parent / "golden" / "store-1.1"


def names_of(namespace: str, salt: str, tokens: Sequence[int], size: int) -> list[bytes]:
    """As docs/snapshot_format.md has it, of chunks that are exact."""
    texts = [namespace.encode(), salt.encode()]
    message = struct.pack("<2Q", *map(len, texts)) + b"".join(texts)
    key = hashlib.blake2b(message, digest_size=32, person=b"kvpager key").digest()
    name, out = bytes(32), []
    for at in range(0, len(tokens) // size * size, size):
        ids = np.array(tokens[at : at + size], dtype="<i4").tobytes()
        message = name + struct.pack("<2Q", 0, size) + ids
        name = hashlib.blake2b(message, key=key, digest_size=32, person=b"kvpager chunk").digest()
        out.append(name)
    return out


@pytest.mark.parametrize("size", [16, 32, 64, 128, 256])
def test_names_are_those_of_blake2b_over_random_texts(size: int) -> None:
    random = np.random.default_rng(size)
    for round_ in range(4):
        salt = bytes(random.integers(97, 123, 30 * round_)).decode()
        config = PagerConfig(pool_tokens=8 * size, chunk_tokens=size)
        fingerprint = {"model": "f" * int(random.integers(0, 200))}
        layout = Layout(1, 1, 16, 16, chunk_tokens=size)
        pager = Pager(layout, config, rows=size, fingerprint=fingerprint, threads=1)
        tokens = random.integers(0, 2**31, 5 * size + size // 2)
        expected = names_of(pager.fingerprint_json, salt, tokens.tolist(), size)
        assert pager.chain_hashes(tokens, salt) == expected
        assert len(set(expected)) == 5


def test_nobody_without_the_salt_can_compute_a_name() -> None:
    author = Author(salt="secret")
    tokens = text(3 * C)
    names = author.hashes(tokens)
    for guess in ("", "secre", "secret ", "Secret"):
        assert not set(names) & set(author.pager.chain_hashes(tokens, guess))
    # A key of another salt and the first name do not give the second either.
    chained = author.pager.chain_hashes(tokens[C:], "")
    assert not set(names) & set(chained)


@pytest.fixture
def old_store(tmp_path: Path) -> DirectoryStore:
    """A store that was written in format 1.1."""
    store = DirectoryStore(tmp_path / "store")
    for folder in ("packs", "snapshots"):
        for path in (STORE_1_1 / folder).iterdir():
            shutil.copy(path, tmp_path / "store" / folder / path.name)
    return store


def pager_of(snapshot: SnapshotInfo) -> Pager:
    from test_golden_snapshots import pager_of

    return pager_of(snapshot)


def test_a_prefix_of_a_store_of_1_1_is_found_by_its_old_hashes_alone(
    old_store: DirectoryStore,
) -> None:
    expected = json.loads((STORE_1_1 / "expected.json").read_text())["snapshots/turn-2.kvsnap"]
    tokens, salt = expected["tokens"], expected["salt"]
    pager = pager_of(SnapshotInfo.of(old_store.open("turn-2")))
    assert old_store.find_prefix(pager.chain_hashes(tokens, salt)) is None
    found = old_store.find_prefix(pager.legacy_chain_hashes(tokens[:48], salt))
    assert found is not None
    assert found.legacy_names
    assert found.tokens.tolist() == tokens[:48]
    sequence = pager.restore(SnapshotInfo.of(found), salt=salt)
    names = [bytes.fromhex(info.chain_hash) for info in sequence.ledger()]
    assert names == pager.chain_hashes(tokens[:48], salt)


def test_a_turn_saved_into_a_store_of_1_1_is_written_anew_once_and_shared_from_then_on(
    old_store: DirectoryStore,
) -> None:
    old = SnapshotInfo.of(old_store.open("turn-2"))
    expected = json.loads((STORE_1_1 / "expected.json").read_text())["snapshots/turn-2.kvsnap"]
    pager = pager_of(old)
    restored = pager.restore(old, salt=expected["salt"])
    content, session = restored.freeze(), old.reader.session
    texts = {"fingerprint": old.reader.fingerprint, "session": session}
    first = old_store.save("turn-3", content, **texts)
    assert first.bytes_shared == 0
    second = old_store.save("turn-4", content, **texts)
    assert second.bytes_shared == content.sealed_chunks * content.layout.chunk_bytes
    assert old_store.open("turn-2").minor_version == 1
    assert old_store.open("turn-3").minor_version == 2
    found = old_store.find_prefix(pager.chain_hashes(expected["tokens"], expected["salt"]))
    assert found is not None
    assert not found.legacy_names
    # What is copied as it is keeps its version, and shares the old packs.
    copied = old_store.save("copy", old_store.open("turn-2"), **texts)
    assert copied.bytes_shared == second.bytes_shared
    assert old_store.open("copy").minor_version == 1
    old_store.gc()
    for name in ("turn-2", "turn-3", "turn-4", "copy"):
        assert old_store.verify(name) == []
    old_store.delete("turn-2", force=True)
    old_store.delete("copy", force=True)
    old_store.gc()
    assert old_store.verify("turn-3") == []
    assert open_snapshot(old_store.path + "/snapshots/turn-3.kvsnap").tokens.tolist() == list(
        expected["tokens"]
    )


def test_chunks_of_before_and_since_1_2_are_never_gathered_into_one_pack(
    old_store: DirectoryStore, author: Author
) -> None:
    old = old_store.open("turn-2")
    author.save(old_store, "new", text(4 * C))
    new = old_store.open("new")
    with pytest.raises(_core.InvalidArgumentError):
        _core.SnapshotReader.gather([(old, 0), (new, 0)], "both")
