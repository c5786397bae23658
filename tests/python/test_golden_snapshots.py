"""Every snapshot ever written stays readable: one file per version, never made again.

`tests/golden/expected.json` was written beside the files of format 1.0 by the code of that time,
`store-1.1/expected.json` when manifests came, `store-1.2/expected.json` with the names of 1.2,
`codes-1.3/expected.json` with keys and values in fewer bits.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from kvpager import FingerprintMismatchError, PagerConfig, TopK, _core
from kvpager.pager import Pager, SnapshotInfo, open_snapshot

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
FOLDERS = (GOLDEN, GOLDEN / "store-1.1", GOLDEN / "store-1.2", GOLDEN / "codes-1.3")
FILES = {
    f"{folder.name}/{name}": (folder / name, expected)
    for folder in FOLDERS
    for name, expected in json.loads((folder / "expected.json").read_text()).items()
}
FINGERPRINT = {"weights": "golden", "rows": 16}


@pytest.fixture(params=sorted(FILES))
def golden(request: pytest.FixtureRequest) -> tuple[Path, dict[str, Any]]:
    return FILES[request.param]


def pager_of(snapshot: SnapshotInfo) -> Pager:
    selection = TopK(chunks=4, sinks=16, recent=32, scorer="bits2")
    config = PagerConfig(
        pool_tokens=16 * 16, chunk_tokens=16, rows=16, selection=selection, host_bytes=1 << 20
    )
    return Pager(snapshot.layout, config, rows=16, fingerprint=FINGERPRINT)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def _xxh3(data: bytes | bytearray) -> int:
    return xxhash.xxh3_64_intdigest(bytes(data))


def rewritten(reader: _core.SnapshotReader, path: Path) -> bytes:
    writer = _core.SnapshotWriter(str(path), reader.layout)
    if reader.packs:
        writer.write_manifest(
            reader,
            reader.packs,
            reader.places,
            reader.summary_checksums,
            reader.fingerprint,
            reader.session,
        )
    else:
        which = np.arange(reader.chunks)
        writer.write_content(reader, which, reader.fingerprint, reader.session)
    writer.publish()
    writer.discard()
    return path.read_bytes()


def packs_of(version: str) -> list[Path]:
    return sorted((GOLDEN / f"store-{version}" / "packs").iterdir())


def test_no_golden_file_is_without_its_expectation() -> None:
    described = {path for path, _ in FILES.values()}
    packs = {path for version in ("1.1", "1.2") for path in packs_of(version)}
    assert set(GOLDEN.rglob("*.kvsnap")) == described | packs
    assert len(described) == 8
    assert len(packs) == 3


def test_every_field_is_what_was_saved(golden: tuple[Path, dict[str, Any]]) -> None:
    path, expected = golden
    snapshot = open_snapshot(path)
    reader = snapshot.reader
    assert snapshot.tokens.tolist() == expected["tokens"]
    assert snapshot.logical_digest == expected["logical_digest"]
    assert snapshot.fingerprint == expected["fingerprint"] == FINGERPRINT
    assert snapshot.session == expected["session"]
    assert snapshot.scorer == expected["scorer"]
    assert float(reader.qk_score.sum()) == expected["qk_score_sum"]
    assert reader.minor_version == expected.get("minor_version", 0)
    assert reader.packs == [tuple(pack) for pack in expected.get("packs", [])]
    assert reader.places.tolist() == expected.get("places", [])
    if "chain_hashes" in expected:
        assert [name.hex() for name in reader.chain_hashes] == expected["chain_hashes"]
    assert reader.verify(2) == []


def test_every_byte_of_k_and_v_is_what_was_saved(golden: tuple[Path, dict[str, Any]]) -> None:
    path, expected = golden
    snapshot = open_snapshot(path)
    pager = pager_of(snapshot)
    sequence = pager.restore(snapshot, salt=expected["salt"])
    digest = hashlib.sha256()
    for layer in range(snapshot.layout.layers):
        for part in sequence.read_kv(layer, 0, sequence.length):
            digest.update(raw(part))
    assert digest.hexdigest() == expected["kv_sha256"]
    assert sequence.tokens.tolist() == expected["tokens"]
    pager.check_invariants()


def test_reading_and_writing_gives_the_same_bytes(
    golden: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    path, _ = golden
    reader = _core.SnapshotReader.open(str(path))
    assert rewritten(reader, tmp_path / "again.kvsnap") == path.read_bytes()


@pytest.mark.parametrize(("version", "minor"), [("1.1", 0), ("1.2", 2)])
def test_packs_are_ordinary_files(version: str, minor: int, tmp_path: Path) -> None:
    for path in packs_of(version):
        reader = _core.SnapshotReader.open(str(path))
        assert reader.minor_version == minor
        assert json.loads(reader.session) == {"pack": True}
        assert reader.tail_tokens == 0
        assert reader.verify(1) == []
        assert rewritten(reader, tmp_path / path.name) == path.read_bytes()


def test_a_restored_golden_snapshot_is_saved_with_the_same_content(
    golden: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    path, expected = golden
    snapshot = open_snapshot(path)
    pager = pager_of(snapshot)
    frozen = pager.restore(snapshot, salt=expected["salt"]).freeze()
    writer = _core.SnapshotWriter(str(tmp_path / "saved.kvsnap"), snapshot.layout.native())
    reader = snapshot.reader
    writer.write_content(frozen, np.arange(frozen.chunks), reader.fingerprint, reader.session)
    writer.publish()
    saved = _core.SnapshotReader.open(str(tmp_path / "saved.kvsnap"))
    assert saved.minor_version == max(2, reader.minor_version)
    assert saved.chain_hashes == pager.chain_hashes(expected["tokens"], expected["salt"])
    assert saved.provenance == reader.provenance
    assert np.array_equal(saved.slice_checksums, reader.slice_checksums)
    if not reader.legacy_names:  # else every chunk has another name
        assert saved.logical_digest == expected["logical_digest"]
        assert saved.content_ids == reader.content_ids


@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_the_chain_of_hashes_of_an_old_snapshot_is_still_verified(
    damaged: int, tmp_path: Path
) -> None:
    path = tmp_path / "old.kvsnap"
    data = bytearray((GOLDEN / "snapshot-1.0.kvsnap").read_bytes())
    snapshot = open_snapshot(GOLDEN / "snapshot-1.0.kvsnap")
    expected = FILES["golden/snapshot-1.0.kvsnap"][1]
    entry = 64 + 32 * 6  # of the chunk table
    at, size = struct.unpack_from("<QQ", data, entry + 8)
    data[at + damaged * size // snapshot.reader.chunks + 8] ^= 1  # the hash of one chunk
    struct.pack_into("<Q", data, entry + 24, _xxh3(data[at : at + size]))
    struct.pack_into("<Q", data, 32, _xxh3(data[64 : 64 + 32 * data[16]]))
    struct.pack_into("<Q", data, 56, _xxh3(data[:56]))
    path.write_bytes(data)
    pager = pager_of(snapshot)
    with pytest.raises(FingerprintMismatchError, match=f"chunk {damaged} of"):
        pager.restore(open_snapshot(path), salt=expected["salt"])


def test_what_was_renamed_as_it_was_read_is_found_by_its_new_names() -> None:
    path, expected = FILES["golden/snapshot-1.0.kvsnap"]
    snapshot = open_snapshot(path)
    pager = pager_of(snapshot)
    restored = pager.restore(snapshot, salt=expected["salt"])
    whole = restored.length // 16 * 16
    other = pager.sequence(salt=expected["salt"])
    assert other.adopt_prefix(expected["tokens"][:whole]) == whole
    for layer in range(snapshot.layout.layers):
        ours, theirs = (one.read_kv(layer, 0, whole) for one in (other, restored))
        assert [raw(part) for part in ours] == [raw(part) for part in theirs]
    pager.check_invariants()
    assert set(snapshot.reader.chain_hashes) == set(
        pager.legacy_chain_hashes(expected["tokens"], expected["salt"])
    )


def test_a_manifest_and_the_file_it_was_made_from_are_one_content() -> None:
    whole = _core.SnapshotReader.open(str(GOLDEN / "snapshot-1.0.kvsnap"))
    manifest = _core.SnapshotReader.open(str(GOLDEN / "store-1.1/snapshots/turn-2.kvsnap"))
    assert manifest.logical_digest == whole.logical_digest
    assert manifest.content_ids == whole.content_ids
    for chunk in range(whole.chunks):
        assert np.array_equal(manifest.read_chunk(chunk), whole.read_chunk(chunk))


def test_damage_says_which_chunk_and_layer_it_hits(tmp_path: Path) -> None:
    path = tmp_path / "damaged.kvsnap"
    shutil.copyfile(GOLDEN / "snapshot-1.0.kvsnap", path)
    reader = _core.SnapshotReader.open(str(path))
    layout = reader.layout
    with path.open("r+b") as file:
        file.seek(4096 + 2 * layout.chunk_bytes + layout.slice_bytes(0) + 5)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(_core.CorruptSnapshotError, match=r"chunk 2 \(tokens \[32, 48\)\), layer 1"):
        reader.read_slice(2, 1)
    with pytest.raises(_core.PagerError) as caught:
        reader.read_chunk(2)
    assert isinstance(caught.value, _core.CorruptSnapshotError)
    assert (caught.value.chunk, caught.value.layer) == (2, 1)
    assert [where[:2] for where in reader.verify(2)] == [(2, 1)]
    path.write_bytes(b"not a snapshot")
    with pytest.raises(_core.CorruptSnapshotError) as whole:
        _core.SnapshotReader.open(str(path))
    assert whole.value.chunk is None
    assert whole.value.layer is None


def test_what_a_progress_callback_raises_ends_the_call_and_undoes_it(tmp_path: Path) -> None:
    reader = _core.SnapshotReader.open(str(GOLDEN / "snapshot-1.0.kvsnap"))
    seen: list[tuple[int, int]] = []
    reader.verify(2, lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] > 0

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reader.verify(1, stop)
    writer = _core.SnapshotWriter(str(tmp_path / "s.kvsnap"), reader.layout, 1 << 16)
    with pytest.raises(KeyboardInterrupt):
        writer.write_content(reader, np.arange(reader.chunks), "{}", "{}", stop)
    writer.discard()
    assert list(tmp_path.iterdir()) == []


def test_chunks_out_of_range_are_refused_and_nothing_is_allocated_for_them() -> None:
    reader = _core.SnapshotReader.open(str(GOLDEN / "snapshot-1.0.kvsnap"))
    for chunk in (-1, reader.chunks, 1 << 40):
        with pytest.raises(_core.InvalidArgumentError, match="chunk is"):
            reader.read_chunk(chunk)
        with pytest.raises(_core.InvalidArgumentError, match="chunk is"):
            reader.read_slice(chunk, 0)
    with pytest.raises(_core.InvalidArgumentError, match="layer is"):
        reader.read_slice(0, reader.layout.layers)
    assert reader.payload_bytes_read == 0
