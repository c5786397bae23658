"""A file store: whole files under paths."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from small_store import Author, C, text

from kvpager.errors import InvalidArgumentError, StorageError
from kvpager.stores import FileStore, SnapshotStore


def test_a_file_store_keeps_whole_files_under_paths(author: Author, tmp_path: Path) -> None:
    store: SnapshotStore = FileStore(tmp_path)
    tokens = text(2 * C + 3)
    report = author.save(store, "a.kvsnap", tokens)
    assert report.bytes_written == (tmp_path / "a.kvsnap").stat().st_size
    assert report.chunks_written == report.chunks == 3
    author.check(store.open("a.kvsnap"), tokens)
    author.check(FileStore().open(os.fspath(tmp_path / "a.kvsnap")), tokens)
    assert store.find_prefix(author.hashes(tokens)) is None
    (tmp_path / "b.kvsnap").write_bytes(b"no snapshot")
    a, b = store.entries()
    assert (a.name, a.tokens, a.error, a.logical_digest) == (
        *("a.kvsnap", len(tokens), None, report.logical_digest),
    )
    assert b.error is not None
    assert "b.kvsnap" in b.error
    store.delete("a.kvsnap")
    with pytest.raises(StorageError, match=os.strerror(errno.ENOENT)):
        store.delete("a.kvsnap")


def test_a_file_store_without_a_folder_has_nothing_to_list(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"entries\(\) needs FileStore\(folder\)"):
        FileStore().entries()
    with pytest.raises(StorageError, match=os.strerror(errno.ENOENT)):
        FileStore(tmp_path / "missing").entries()
    with pytest.raises(InvalidArgumentError, match="name is empty"):
        FileStore().open("")
