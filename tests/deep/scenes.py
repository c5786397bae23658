"""What two threads share, and everything that one of them can do to it."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from small_store import DIM, LAYERS, LAYOUT, C, rows, text

from kvpager import _core
from kvpager.config import PagerConfig
from kvpager.pager import ROW_COMMIT, Pager, SnapshotInfo
from kvpager.stores import DirectoryStore, FileStore

TOKENS = text(3 * C + 5, seed=1)
OTHER = text(2 * C, seed=2)
Action = Callable[[Any], object]


class PagerScene:
    """A pager with a disk spill and little room, two sequences, a snapshot file, a view of one."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=folder))
        chunk = LAYOUT.chunk_bytes
        config = PagerConfig(
            pool_tokens=8 * C,
            chunk_tokens=C,
            host_bytes=6 * chunk,
            disk_bytes=32 * chunk,
            disk_path=self.folder,
            summary_bytes=2**20,
        )
        self.pager = Pager(LAYOUT, config, rows=C, fingerprint={"model": "m"}, threads=1)
        self.sequence, self.other = self.pager.sequence(), self.pager.sequence()
        for sequence, tokens in ((self.sequence, TOKENS), (self.other, OTHER)):
            k, v = rows(tokens)
            sequence.append(tokens, k, v, provenance="exact")
        self.core, self.uid = self.pager.core, self.sequence.uid
        self.path = self.folder / "saved.kvsnap"
        self.sequence.save(self.path)
        self.snapshot = self.pager.open_snapshot(self.path)
        self.view = self.sequence.freeze()
        self.pinned = self.sequence.pin(0, C)
        self.forward: Any = None
        self.query = torch.from_numpy(rows([1])[0][0, 0])

    def ends(self) -> None:
        """What has to hold when both threads are done."""
        self.forward = None
        if self.pager._core is not None:
            self.pager.check_invariants()
        self.view = self.snapshot = None  # type: ignore[assignment]
        self.pinned.release()
        self.sequence.close()
        self.other.close()
        if self.pager._core is not None:
            self.pager.check_invariants()


def _append(scene: PagerScene) -> None:
    k, v = rows(OTHER)
    scene.sequence.append(OTHER, k, v)


def _begin(scene: PagerScene) -> Any:
    start = scene.sequence.length
    return scene.pager.begin(
        [scene.sequence] * C, range(start, start + C), text(C, seed=5), [ROW_COMMIT] * C
    )


def _attend(forward: Any, layer: int) -> None:
    k, v = (torch.from_numpy(one[layer]) for one in rows(text(C, seed=5)))
    forward.attend(layer, k, k, v, scaling=1.0)


def _whole_forward(scene: PagerScene) -> None:
    with _begin(scene) as forward:
        for layer in range(LAYERS):
            _attend(forward, layer)
        forward.commit()


def _shared_forward(scene: PagerScene) -> None:
    """Begins a forward that the other thread may see, and may end."""
    scene.forward = forward = _begin(scene)
    for layer in range(LAYERS):
        _attend(forward, layer)
    forward.commit()


def _on_forward(action: Action) -> Action:
    def act(scene: PagerScene) -> None:
        if (forward := scene.forward) is not None:
            action(forward)

    return act


def _give(forward: Any) -> None:
    k, v = rows(OTHER)
    forward.give(k, v)


def _fork(scene: PagerScene) -> None:
    scene.sequence.fork().close()


def _pin(scene: PagerScene) -> None:
    with scene.other.pin(0, C):
        pass


def _restore(scene: PagerScene) -> None:
    sequence = scene.pager.restore(scene.snapshot)
    sequence.read_kv(0, 0, sequence.length)
    sequence.close()


def _read_view(scene: PagerScene) -> None:
    scene.view.tokens, scene.view.chain_hashes, scene.view.hashes  # noqa: B018
    scene.view.slice_checksums, scene.view.last_use, scene.view.qk_score  # noqa: B018


def _new_view(scene: PagerScene) -> None:
    scene.view = scene.sequence.freeze()


def _save(scene: PagerScene) -> None:
    FileStore(scene.folder).save("more.kvsnap", scene.view, fingerprint="{}", session="{}")


def _read_both(scene: PagerScene) -> None:
    length = scene.sequence.length
    k, v = scene.sequence.read_kv(1, 0, length)
    assert k.shape == v.shape == (length, 1, DIM)


def _mark_replayed(scene: PagerScene) -> None:
    scene.core.mark_replayed(scene.core.generation())


PAGER_LOOKS: dict[str, Action] = {
    "Sequence.length": lambda s: s.sequence.length,
    "Sequence.tokens": lambda s: s.sequence.tokens,
    "Sequence.released": lambda s: s.sequence.released,
    "Sequence.earliest_trim": lambda s: s.sequence.earliest_trim,
    "Sequence.closed": lambda s: (s.sequence.closed, s.sequence.salt, s.sequence.pager),
    "Sequence.select": lambda s: s.sequence.select(0, s.query),
    "Sequence.read_kv": _read_both,
    "Sequence.ledger": lambda s: [repr(chunk) for chunk in s.sequence.ledger()],
    "Sequence.residency": lambda s: s.sequence.residency(),
    "Sequence.freeze": lambda s: s.sequence.freeze(),
    "Sequence.save": lambda s: s.sequence.save(s.folder / "again.kvsnap"),
    "Pager.chain_hashes": lambda s: s.pager.chain_hashes(TOKENS),
    "Pager.stats": lambda s: s.pager.stats(),
    "Pager.check_invariants": lambda s: s.pager.check_invariants(),
    "Pager.generation": lambda s: (s.core.generation(), s.core.forward_running(), s.core.device),
    "Pager.attention": lambda s: s.core.attention("float32"),
    "SnapshotContent": _read_view,
    "FileStore.save": _save,
}
PAGER_CHANGES: dict[str, Action] = {
    "Sequence": lambda s: s.pager.sequence().close(),
    "Sequence.reserve": lambda s: s.sequence.reserve(8 * C),
    "Sequence.adopt_prefix": lambda s: s.pager.sequence().adopt_prefix(TOKENS),
    "Sequence.append": _append,
    "Sequence.pin": _pin,
    "Pin.release": lambda s: s.pinned.release(),
    "Sequence.trim": lambda s: s.sequence.trim(C),
    "Sequence.fork": _fork,
    "Sequence.close": lambda s: s.sequence.close(),
    "Pager.begin": _whole_forward,
    "Pager.begin, shared": _shared_forward,
    "Forward.attend": _on_forward(lambda forward: _attend(forward, 0)),
    "Forward.write": _on_forward(lambda f: f.write(0, *(one[0] for one in rows(text(C, seed=5))))),
    "Forward.give": _on_forward(_give),
    "Forward.commit": _on_forward(lambda forward: forward.commit()),
    "Forward.abort": _on_forward(lambda forward: forward.abort()),
    "Pager.mark_replayed": _mark_replayed,
    "Pager.restore": _restore,
    "Pager.evict_all": lambda s: s.pager.evict_all(),
    "Pager.reset": lambda s: s.pager.reset(),
    "Pager.close": lambda s: s.pager.close(),
    "SnapshotContent, dropped": _new_view,
}


class FileScene:
    """A writer of a file that is half done, a reader, a store, a lock and an open file."""

    def __init__(self, folder: Path) -> None:
        self.pagers = PagerScene(folder)
        self.folder = self.pagers.folder
        self.content, self.texts = self.pagers.view, (self.pagers.pager.fingerprint_json, "{}")
        self.reader = _core.SnapshotReader.open(os.fspath(self.pagers.path))
        self.writer = _core.SnapshotWriter(os.fspath(self.folder / "w.kvsnap"), LAYOUT.native())
        self.store = DirectoryStore(self.folder / "store")
        self.files = FileStore(self.folder)
        self.save()
        lock = os.fspath(self.folder / "lock")
        self.lock = _core.ExclusiveLock(lock, 10)
        self.file = _core.OwnedFile(lock, os.O_RDWR | os.O_CREAT)
        self.turns = _core.Turns()
        self.place = _core.Place()
        self.claim = _core.Claim(self.place)

    def save(self) -> None:
        fingerprint, session = self.texts
        self.store.save("a", self.content, fingerprint=fingerprint, session=session)

    def ends(self) -> None:
        for entry in self.store.entries():
            assert entry.error is None, entry.error
            assert list(self.store.open(entry.name).verify(1)) == []
        self.content = self.reader = None  # type: ignore[assignment]
        self.writer.discard()
        self.pagers.ends()


def _all_chunks(scene: FileScene) -> None:
    for chunk in range(scene.reader.chunks):
        scene.reader.read_chunk(chunk)
        scene.reader.read_slice(chunk, 1)


def _gather(scene: FileScene) -> None:
    _core.SnapshotReader.gather([(scene.reader, 0), (scene.reader, 1)], "two").read_chunk(1)


def _write(scene: FileScene) -> None:
    chunks = list(range(scene.content.chunks))
    scene.writer.write_content(scene.content, chunks, *scene.texts)


def _write_manifest(scene: FileScene) -> None:
    sealed = scene.content.sealed_chunks
    places = np.array([[0, chunk] for chunk in range(sealed)], dtype=np.uint32)
    checksums = np.zeros(sealed, dtype=np.uint64)
    scene.writer.write_manifest(
        scene.content, [("0" * 32, sealed)], places, checksums, *scene.texts
    )


def _new_writer(scene: FileScene) -> None:
    scene.writer = _core.SnapshotWriter(os.fspath(scene.folder / "w.kvsnap"), LAYOUT.native())


def _locked(scene: FileScene) -> None:
    with scene.lock:
        pass


def _in_turn(scene: FileScene) -> None:
    with scene.turns:
        assert scene.turns.held_here


def _claimed(scene: FileScene) -> None:
    with _core.Claim(scene.place):
        pass


def _own_lock(scene: FileScene) -> None:
    with _core.ExclusiveLock(os.fspath(scene.folder / "lock"), 10):
        pass


FILE_LOOKS: dict[str, Action] = {
    "SnapshotReader.read_chunk": _all_chunks,
    "SnapshotReader.verify": lambda s: s.reader.verify(1),
    "SnapshotReader.gather": _gather,
    "SnapshotReader": lambda s: (s.reader.packs, s.reader.places, s.reader.logical_digest),
    "SnapshotInfo.of": lambda s: SnapshotInfo.of(s.reader),
    "SnapshotWriter": lambda s: (s.writer.summary_checksums, s.writer.logical_digest),
    "DirectoryStore.open": lambda s: s.store.open("a").read_chunk(0),
    "DirectoryStore.entries": lambda s: s.store.entries(),
    "DirectoryStore.stats": lambda s: s.store.stats(),
    "DirectoryStore.verify": lambda s: s.store.verify("a"),
    "DirectoryStore.find_prefix": lambda s: s.store.find_prefix(s.content.chain_hashes),
    "FileStore.entries": lambda s: s.files.entries(),
    "OwnedFile.fileno": lambda s: s.file.fileno(),
    "Turns": _in_turn,
    "Claim": _claimed,
}
FILE_CHANGES: dict[str, Action] = {
    "SnapshotWriter.write_content": _write,
    "SnapshotWriter.write_manifest": _write_manifest,
    "SnapshotWriter.publish": lambda s: s.writer.publish(),
    "SnapshotWriter.discard": lambda s: s.writer.discard(),
    "SnapshotWriter, new": _new_writer,
    "DirectoryStore.save": lambda s: s.save(),
    "DirectoryStore.delete": lambda s: s.store.delete("a"),
    "DirectoryStore.pin": lambda s: (s.store.pin("a"), s.store.unpin("a")),
    "DirectoryStore.gc": lambda s: s.store.gc(),
    "ExclusiveLock": _locked,
    "ExclusiveLock, another": _own_lock,
    "OwnedFile.lock": lambda s: (s.file.lock(fcntl.LOCK_EX | fcntl.LOCK_NB), s.file.unlock()),
    "OwnedFile.close": lambda s: s.file.close(),
    "Turns.end": lambda s: s.turns.end(),
    "Claim, shared": lambda s: (s.claim.__enter__(), s.claim.__exit__(None, None, None)),
}
SCENES: dict[str, tuple[type, dict[str, Action], dict[str, Action]]] = {
    "pager": (PagerScene, PAGER_LOOKS, PAGER_CHANGES),
    "files": (FileScene, FILE_LOOKS, FILE_CHANGES),
}
