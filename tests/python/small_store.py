"""Small snapshots for tests of stores: keys and values that are a function of token and position,
so that what comes out of a store can be told from its tokens alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvpager import _core
from kvpager.config import PagerConfig
from kvpager.pager import Layout, Pager, SnapshotInfo
from kvpager.stores import DirectoryStore, SnapshotStore

LAYERS, DIM, C = 2, 16, 16
LAYOUT = Layout(LAYERS, 1, DIM, DIM, chunk_tokens=C)
CHUNK = LAYOUT.chunk_bytes
TOKENS = 256
FRONT = 4096  # of a file that holds nothing yet
SLACK = 2048  # by which a save asks for more room than it then takes
_TABLE = np.random.default_rng(0).standard_normal((2, LAYERS, TOKENS, 1, DIM), dtype=np.float32)


def rows(tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """k and v [layers, n, 1, DIM] float32 of a sequence with these tokens."""
    ids = np.asarray(tokens, dtype=np.int64)
    positions = np.arange(len(ids), dtype=np.float32)[None, :, None, None]
    k, v = _TABLE[:, :, ids] + positions
    return k, v


def text(count: int, seed: int = 0, start: Sequence[int] = ()) -> list[int]:
    """`count` token ids that begin with `start`."""
    more = np.random.default_rng(seed).integers(0, TOKENS, max(0, count - len(start)))
    return [*start, *more.tolist()][:count]


class Author:
    """A pager that makes contents to save, and checks what is read back."""

    def __init__(self, *, fingerprint: str = "model", salt: str = "", **options: Any) -> None:
        config = PagerConfig(
            **{"pool_tokens": 8 * C, "chunk_tokens": C, "host_bytes": "8MiB"} | options
        )
        self.pager = Pager(LAYOUT, config, rows=C, fingerprint={"model": fingerprint}, threads=1)
        self.salt = salt

    def content(self, tokens: Sequence[int]) -> Any:
        """A frozen sequence of these tokens."""
        sequence = self.pager.sequence(salt=self.salt)
        try:
            adopted = sequence.adopt_prefix(tokens)
            k, v = rows(tokens)
            sequence.append(tokens[adopted:], k[:, adopted:], v[:, adopted:], provenance="exact")
            return self.pager.core.freeze(sequence.uid, -1)
        finally:
            sequence.close()

    def save(self, store: Any, name: str, tokens: Sequence[int], **more: Any) -> Any:
        """Saves a sequence of these tokens; returns the report."""
        with_sequence = self.pager.sequence(salt=self.salt)
        session = with_sequence.session_text({"tokens": len(tokens)})
        with_sequence.close()
        content = self.content(tokens)
        return store.save(
            name, content, fingerprint=self.pager.fingerprint_json, session=session, **more
        )

    def hashes(self, tokens: Sequence[int]) -> list[bytes]:
        """Chain hashes of the full chunks of a text."""
        return self.pager.core.chain_hashes(np.asarray(tokens, dtype=np.int32), self.salt)

    def check(self, reader: _core.SnapshotReader, tokens: Sequence[int]) -> None:
        """Asserts that a snapshot holds exactly these tokens, and every bit of their rows."""
        assert reader.tokens.tolist() == list(tokens)
        assert list(reader.verify(1)) == []
        k, v = rows(tokens)
        payload = np.stack([reader.read_chunk(chunk) for chunk in range(reader.chunks)])
        for layer in range(LAYERS):
            pages = payload[:, layer * CHUNK // LAYERS : (layer + 1) * CHUNK // LAYERS]
            pages = pages.copy().view(np.float32).reshape(-1, 2, C * DIM)
            keys = pages[:, 0].reshape(-1, DIM, C).transpose(0, 2, 1).reshape(-1, DIM)
            values = pages[:, 1].reshape(-1, DIM)
            assert keys[: len(tokens)].tobytes() == k[layer, :, 0].tobytes()
            assert values[: len(tokens)].tobytes() == v[layer, :, 0].tobytes()

    def check_restored(self, reader: _core.SnapshotReader, tokens: Sequence[int]) -> None:
        """Asserts that a sequence restored from it has every bit of these tokens' rows."""
        sequence = self.pager.restore(SnapshotInfo.of(reader), salt=self.salt)
        k, v = rows(tokens)
        for layer in range(LAYERS):
            got_k, got_v = sequence.read_kv(layer, 0, len(tokens))
            assert got_k.numpy().tobytes() == k[layer].tobytes()
            assert got_v.numpy().tobytes() == v[layer].tobytes()
        sequence.close()


def fill(author: Author, store: DirectoryStore, count: int, chunks: int = 4) -> None:
    for n in range(count):
        author.save(store, f"s{n}", text(chunks * C, seed=n))


def one(author: Author, tmp_path: Path, chunks: int = 4) -> int:
    """Bytes that a snapshot of so many chunks takes."""
    store = DirectoryStore(tmp_path / "measured")
    author.save(store, "s0", text(chunks * C))
    return size(store.path)


def needles(tokens: list[int]) -> list[bytes]:
    """Bytes that a plain store has somewhere: ids, keys and values, names, the session's notes."""
    ids = np.asarray(tokens, dtype=np.int32)
    k, v = rows(tokens)
    return [
        *(ids[at : at + 4].tobytes() for at in range(0, len(ids) - 4, 5)),
        *(row.tobytes()[:16] for row in (*k[0, ::7, 0], *v[1, ::7, 0])),
        b"my-planner",
        b'"tokens":',
    ]


def names(store: SnapshotStore) -> list[str]:
    return [entry.name for entry in store.entries()]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def files(folder: Path | str) -> dict[str, int]:
    """Size of every file below a store's packs and snapshots, by relative path."""
    return {
        f"{room}/{entry.name}": entry.stat().st_size
        for room in ("packs", "snapshots")
        for entry in os.scandir(Path(folder) / room)
    }


def size(folder: Path | str) -> int:
    """Bytes that count against a store's budget."""
    return sum(files(folder).values())


def packs(folder: Path | str) -> list[Path]:
    """The packs of a store."""
    return sorted(Path(folder).glob("packs/*.kvsnap"))
