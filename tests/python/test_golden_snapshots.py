"""Snapshots of each kind of content in format 1.0 are read to the bit; none is ever made again."""

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

from kvpager import FingerprintMismatchError, PagerConfig, TopK, UnsupportedVersionError, _core
from kvpager.pager import Pager, SnapshotInfo, open_snapshot

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "format-1.0"
FLOATS = GOLDEN / "floats.kvsnap"
FILES = {
    name: (GOLDEN / name, expected)
    for name, expected in json.loads((GOLDEN / "expected.json").read_text()).items()
}
PACKS = sorted((GOLDEN / "packs").iterdir())
FINGERPRINT = {"weights": "golden", "rows": 16}


@pytest.fixture(params=sorted(FILES))
def golden(request: pytest.FixtureRequest) -> tuple[Path, dict[str, Any]]:
    return FILES[request.param]


def pager_of(snapshot: SnapshotInfo) -> Pager:
    selection = TopK(chunks=4, sinks=16, recent=32)
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


def test_no_golden_file_is_without_its_expectation() -> None:
    described = {path for path, _ in FILES.values()}
    assert set(GOLDEN.rglob("*.kvsnap")) == {*described, *PACKS}
    assert len(described) == 5
    assert len(PACKS) == 1


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


def test_packs_are_ordinary_files(tmp_path: Path) -> None:
    for path in PACKS:
        reader = _core.SnapshotReader.open(str(path))
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
    assert saved.chain_hashes == pager.chain_hashes(expected["tokens"], expected["salt"])
    assert saved.provenance == reader.provenance
    assert np.array_equal(saved.slice_checksums, reader.slice_checksums)
    assert saved.logical_digest == expected["logical_digest"]
    assert saved.hashes == reader.hashes


@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_the_chain_of_names_is_verified(damaged: int, tmp_path: Path) -> None:
    path = tmp_path / "changed.kvsnap"
    data = bytearray(FLOATS.read_bytes())
    snapshot = open_snapshot(FLOATS)
    expected = FILES[FLOATS.name][1]
    entry = 64 + 32 * 6  # of the chunk table
    at, size = struct.unpack_from("<QQ", data, entry + 8)
    data[at + damaged * size // snapshot.reader.chunks + 8] ^= 1  # the name of one chunk
    struct.pack_into("<Q", data, entry + 24, _xxh3(data[at : at + size]))
    struct.pack_into("<Q", data, 32, _xxh3(data[64 : 64 + 32 * data[16]]))
    struct.pack_into("<Q", data, 56, _xxh3(data[:56]))
    path.write_bytes(data)
    pager = pager_of(snapshot)
    with pytest.raises(FingerprintMismatchError, match=f"chunk {damaged} of"):
        pager.restore(open_snapshot(path), salt=expected["salt"])


def test_a_manifest_and_the_file_it_was_made_from_are_one_content() -> None:
    whole = _core.SnapshotReader.open(str(FLOATS))
    manifest = _core.SnapshotReader.open(str(GOLDEN / "snapshots/turn-2.kvsnap"))
    assert manifest.logical_digest == whole.logical_digest
    assert manifest.hashes == whole.hashes
    for chunk in range(whole.chunks):
        assert np.array_equal(manifest.read_chunk(chunk), whole.read_chunk(chunk))


@pytest.mark.parametrize("version", [(1, 1), (1, 2), (1, 3), (1, 65535), (0, 0), (2, 0)])
def test_another_version_is_refused_by_name_with_the_remedy(
    version: tuple[int, int], tmp_path: Path
) -> None:
    path = tmp_path / "other.kvsnap"
    data = bytearray(FLOATS.read_bytes())
    struct.pack_into("<2H", data, 8, *version)
    struct.pack_into("<Q", data, 56, _xxh3(data[:56]))
    path.write_bytes(data)
    words = rf"header\.version is {version[0]}\.{version[1]}, expected 1\.0.*compute the text again"
    with pytest.raises(UnsupportedVersionError, match=words):
        open_snapshot(path)


def test_damage_says_which_chunk_and_layer_it_hits(tmp_path: Path) -> None:
    path = tmp_path / "damaged.kvsnap"
    shutil.copyfile(FLOATS, path)
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
    reader = _core.SnapshotReader.open(str(FLOATS))
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
    reader = _core.SnapshotReader.open(str(FLOATS))
    for chunk in (-1, reader.chunks, 1 << 40):
        with pytest.raises(_core.InvalidArgumentError, match="chunk is"):
            reader.read_chunk(chunk)
        with pytest.raises(_core.InvalidArgumentError, match="chunk is"):
            reader.read_slice(chunk, 0)
    with pytest.raises(_core.InvalidArgumentError, match="layer is"):
        reader.read_slice(0, reader.layout.layers)
    assert reader.payload_bytes_read == 0
