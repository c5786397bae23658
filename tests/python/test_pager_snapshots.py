"""Snapshots without an engine: frozen states, parts of them, what readers say and refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpager import (
    CorruptSnapshotError,
    FingerprintMismatchError,
    InvalidArgumentError,
    Layout,
    Pager,
    PagerConfig,
    StorageError,
    open_snapshot,
)
from kvpager.pager import Sequence, SnapshotInfo
from kvpager.stores import DirectoryStore, FileStore

C = 16
LAYOUT = Layout(layers=2, kv_heads=1, k_dim=16, v_dim=16, chunk_tokens=C)
LENGTH = 5 * C + 3
PAYLOAD_AT = 4096


def make(layout: Layout = LAYOUT, model: str = "a", **options: Any) -> Pager:
    config = PagerConfig(
        **{"pool_tokens": 6 * C, "chunk_tokens": C, "host_bytes": "1MiB"} | options
    )
    return Pager(layout, config, rows=16, fingerprint={"model": model}, threads=1)


def fill(pager: Pager, length: int = LENGTH, seed: int = 0, salt: str = "") -> Sequence:
    random = np.random.default_rng(seed)
    k, v = random.standard_normal((2, LAYOUT.layers, length, 1, 16), dtype=np.float32)
    sequence = pager.sequence(salt=salt)
    sequence.append(random.integers(0, 1000, length), k, v, provenance="exact")
    return sequence


def kv(sequence: Sequence) -> list[Any]:
    return [
        part.numpy().tobytes()
        for layer in range(LAYOUT.layers)
        for part in sequence.read_kv(layer, 0, sequence.length)
    ]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    fill(make()).save(tmp_path / "turn.kvsnap", session={"n": 1})
    return tmp_path / "turn.kvsnap"


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "store")


def keep(store: DirectoryStore, name: str, sequence: Sequence) -> None:
    store.save(
        name,
        sequence.freeze(),
        fingerprint='{"model":"a"}',
        session=sequence.session_text({"n": 1}),
    )


def flip(path: Path, offset: int) -> None:
    with path.open("r+b", buffering=0) as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


def test_a_manifest_is_opened_and_restored_as_any_file(path: Path, store: DirectoryStore) -> None:
    sequence = fill(make())
    keep(store, "turn", sequence)
    manifest, whole = open_snapshot(Path(store.path) / "snapshots/turn.kvsnap"), open_snapshot(path)
    assert manifest.logical_digest == whole.logical_digest
    assert manifest.fingerprint == whole.fingerprint
    assert manifest.session == {**whole.session, "stored_as": "turn"}
    assert manifest.tokens.tolist() == whole.tokens.tolist()
    assert (manifest.layout, manifest.scorer) == (whole.layout, whole.scorer)
    assert kv(make().restore(manifest)) == kv(sequence)
    assert SnapshotInfo.of(store.open("turn")).logical_digest == whole.logical_digest


def test_a_pack_is_refused_by_name(store: DirectoryStore) -> None:
    keep(store, "turn", fill(make()))
    (pack,) = Path(store.path).glob("packs/*.kvsnap")
    info = open_snapshot(pack)  # to look into
    assert info.is_pack
    pager = make()
    with pytest.raises(InvalidArgumentError, match=r"is a pack of a store; restore the snapshot"):
        pager.restore(info)
    assert pager.stats()["sequences"] == 0


@pytest.mark.parametrize("upto", [0, 1, C - 1, C, 3 * C + 5, 5 * C, LENGTH, None])
def test_any_first_part_can_be_restored(path: Path, upto: int | None) -> None:
    pager, whole = make(), fill(make())
    part = pager.restore(pager.open_snapshot(path), upto=upto)
    whole.trim(LENGTH if upto is None else upto)
    assert part.tokens.tolist() == whole.tokens.tolist()
    assert kv(part) == kv(whole)
    pager.check_invariants()


@pytest.mark.parametrize("upto", [-1, LENGTH + 1])
def test_a_part_outside_the_snapshot_is_refused(path: Path, upto: int) -> None:
    pager = make()
    with pytest.raises(InvalidArgumentError, match=f"upto is {upto}; expected 0 to {LENGTH}"):
        pager.restore(pager.open_snapshot(path), upto=upto)
    assert pager.stats()["sequences"] == 0


@pytest.mark.parametrize("upto", [1, C, 3 * C + 5, 5 * C, LENGTH])
def test_any_first_part_can_be_saved(tmp_path: Path, upto: int) -> None:
    pager = make()
    sequence = fill(pager)
    report = sequence.save(tmp_path / "part", upto=upto)
    assert (report.tokens, report.chunks) == (upto, -(-upto // C))
    assert report.bytes_written == (tmp_path / "part").stat().st_size
    sequence.trim(upto)
    assert sequence.save(tmp_path / "trimmed").logical_digest == report.logical_digest
    assert kv(make().restore(open_snapshot(tmp_path / "part"))) == kv(sequence)


@pytest.mark.parametrize("upto", [0, -1, LENGTH + 1])
def test_a_part_outside_the_sequence_cannot_be_saved(tmp_path: Path, upto: int) -> None:
    sequence = fill(make())
    with pytest.raises(InvalidArgumentError, match=f"upto is {upto}; expected 1 to {LENGTH}"):
        sequence.save(tmp_path / "part", upto=upto)
    assert list(tmp_path.iterdir()) == []


def test_a_frozen_sequence_stays_as_it_was(tmp_path: Path) -> None:
    pager = make()
    sequence = fill(pager)
    sequence.save(tmp_path / "now")
    frozen = sequence.freeze()
    sequence.trim(20)
    fill(pager, seed=5)
    sequence.close()
    pager.evict_all()
    pager.check_invariants()
    FileStore().save(
        str(tmp_path / "later"),
        frozen,
        fingerprint=pager.fingerprint_json,
        session=sequence.session_text(),
    )
    assert (tmp_path / "later").read_bytes() == (tmp_path / "now").read_bytes()
    pager.close()
    assert len(frozen.tokens) == LENGTH  # it may outlive everything


def test_chain_hashes_name_the_full_chunks_and_depend_on_all_before(path: Path) -> None:
    pager = make()
    tokens = fill(pager).tokens
    hashes = pager.chain_hashes(tokens)
    assert hashes == list(open_snapshot(path).reader.chain_hashes)
    assert [len(name) for name in hashes] == [32] * 5
    other = tokens.copy()
    other[2 * C] += 1
    changed = pager.chain_hashes(other.tolist())
    assert changed[:2] == hashes[:2]
    assert not set(changed[2:]) & set(hashes)
    assert not set(pager.chain_hashes(tokens, "tenant")) & set(hashes)
    config = PagerConfig(pool_tokens=6 * C, chunk_tokens=C)
    stranger = Pager(LAYOUT, config, rows=16, fingerprint={"model": "b"}, threads=1)
    assert not set(stranger.chain_hashes(tokens)) & set(hashes)


def test_a_damaged_chunk_says_which_tokens_it_holds_wherever_it_is_met(path: Path) -> None:
    def restore() -> Sequence:
        pager = make()
        return pager.restore(pager.open_snapshot(path))

    chunk_bytes = LAYOUT.native().chunk_bytes
    flip(path, PAYLOAD_AT + 3 * chunk_bytes + LAYOUT.native().slice_bytes(0) + 1)
    for meet in (
        lambda sequence: sequence.read_kv(1, 0, LENGTH),
        lambda sequence: sequence.trim(3 * C + 1),
        lambda sequence: sequence.pin(3 * C, 4 * C),
        lambda sequence: sequence.freeze(3 * C + 1),
    ):
        with pytest.raises(CorruptSnapshotError) as found:
            meet(restore())
        error: Any = found.value
        assert (error.chunk, error.layer, error.start, error.stop) == (3, 1, 3 * C, 4 * C)
    flip(path, PAYLOAD_AT + 5 * chunk_bytes)
    with pytest.raises(CorruptSnapshotError) as found:
        restore()
    error = found.value
    assert (error.chunk, error.layer, error.start, error.stop) == (5, 0, 5 * C, LENGTH)


def test_damage_of_the_file_as_a_whole_names_no_chunk(path: Path) -> None:
    flip(path, 0)
    with pytest.raises(CorruptSnapshotError) as found:
        open_snapshot(path)
    error: Any = found.value
    assert (error.chunk, error.layer, error.start, error.stop) == (None,) * 4


@pytest.mark.parametrize(
    ("session", "message"),
    [
        ("[" * 100_000, "not JSON"),
        ('{"a": 1, "a": 2}', "'a' occurs twice"),
        ('{"a": {"b": 1, "b": 1}}', "'b' occurs twice"),
        ('{"a": NaN}', "NaN"),
        ('{"a": -Infinity}', "Infinity"),
        ("[1]", "holds a list"),
        ("nonsense", "not JSON"),
    ],
)
@pytest.mark.parametrize("section", ["session", "fingerprint"])
def test_a_section_two_readers_could_take_differently_is_refused(
    tmp_path: Path, section: str, session: str, message: str
) -> None:
    texts = {"session": "{}", "fingerprint": "{}", section: session}
    FileStore().save(str(tmp_path / "odd"), fill(make()).freeze(), **texts)  # type: ignore[arg-type]
    with pytest.raises(CorruptSnapshotError, match=message) as found:
        open_snapshot(tmp_path / "odd")
    assert section in str(found.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}, b"x"])
def test_a_session_that_is_no_json_is_refused_before_anything_is_written(
    tmp_path: Path, value: object
) -> None:
    with pytest.raises(InvalidArgumentError, match="session cannot be written as JSON"):
        fill(make()).save(tmp_path / "turn", session={"x": value})
    assert list(tmp_path.iterdir()) == []


def test_a_progress_callback_hears_of_all_bytes_and_can_stop_the_save(tmp_path: Path) -> None:
    sequence, calls = fill(make()), []
    sequence.save(tmp_path / "turn", progress=lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1] > 0

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    before = (tmp_path / "turn").read_bytes()
    with pytest.raises(KeyboardInterrupt):
        sequence.save(tmp_path / "turn", upto=3, progress=stop)
    assert (tmp_path / "turn").read_bytes() == before
    assert list(tmp_path.iterdir()) == [tmp_path / "turn"]


def test_what_a_pager_saves_is_named_in_the_session_with_its_salt(tmp_path: Path) -> None:
    sequence = fill(make(), salt="tenant")
    sequence.save(tmp_path / "turn", session={"n": 1})
    info = open_snapshot(tmp_path / "turn")
    assert info.session["n"] == 1
    assert "tenant" not in json.dumps(info.session)
    assert not info.is_pack
    assert make().restore(info, salt="tenant").length == LENGTH


def test_a_missing_file_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="nothing-here"):
        open_snapshot(tmp_path / "nothing-here")


@pytest.mark.parametrize("length", [5, 2 * C + 8], ids=["tail only", "sealed chunks"])
@pytest.mark.parametrize(
    ("field", "pager", "salt"),
    [
        ("salt", {}, "other"),
        ("layout", {"layout": Layout(2, 1, 32, 16, chunk_tokens=C)}, "tenant"),
        ("model", {"model": "b"}, "tenant"),
    ],
)
def test_another_salt_layout_or_model_is_refused_by_name(
    tmp_path: Path, length: int, field: str, pager: dict[str, Any], salt: str
) -> None:
    fill(make(), length, salt="tenant").save(tmp_path / "turn.kvsnap")
    other = make(**pager)
    before = other.stats()
    with pytest.raises(FingerprintMismatchError) as refused:
        other.restore(other.open_snapshot(tmp_path / "turn.kvsnap"), salt=salt)
    assert refused.value.field == field
    assert other.stats() == before
    other.check_invariants()
