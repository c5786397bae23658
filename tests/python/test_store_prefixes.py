"""Prefixes: what a directory store has of a text, whichever snapshot it was saved with."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from small_store import Author, C, packs, text

from kvpager.stores import DirectoryStore


def test_the_longest_known_prefix_is_found_among_all_snapshots(
    author: Author, store: DirectoryStore
) -> None:
    prompt = text(4 * C, seed=1)
    for name, length in (("a", 6), ("b", 9), ("c", 12)):
        author.save(store, name, text(length * C + 3, seed=length, start=prompt))
    wanted = text(9 * C + 3, seed=9, start=prompt)[: 8 * C] + text(5 * C, seed=77)
    found = store.find_prefix(author.hashes(wanted))
    assert found is not None
    author.check(found, wanted[: 8 * C])
    Author().check_restored(found, wanted[: 8 * C])
    assert store.find_prefix(author.hashes(text(4 * C, seed=99))) is None
    assert store.find_prefix([]) is None
    shorter = store.find_prefix(author.hashes(prompt[: 3 * C + 5]))
    assert shorter is not None
    author.check(shorter, prompt[: 3 * C])


@pytest.mark.parametrize("ttl", ["never", "7d"])
def test_no_call_lists_folders_and_each_finds_what_others_saved(
    author: Author, folder: Path, monkeypatch: pytest.MonkeyPatch, ttl: str
) -> None:
    store, other = DirectoryStore(folder, ttl=ttl), DirectoryStore(folder)
    hashes = author.hashes(text(8 * C, seed=1))
    author.save(store, "a", text(4 * C, seed=1))
    listed: list[object] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(path) or scandir(path))
    assert store.find_prefix(hashes) is not None
    author.save(other, "b", text(6 * C, seed=1))
    found = store.find_prefix(hashes)
    assert found is not None
    assert found.sealed_chunks == 6
    other.delete("b")
    found = store.find_prefix(hashes)
    assert found is not None
    assert found.sealed_chunks == 4
    third = DirectoryStore(folder)
    assert [entry.name for entry in third.entries()] == ["a"]
    author.check(third.open("a"), text(4 * C, seed=1))
    third.gc()
    assert listed == []


def test_a_prefix_never_crosses_salts_or_fingerprints(store: DirectoryStore) -> None:
    tokens = text(6 * C)
    authors = [
        Author(fingerprint=model, salt=salt) for model in ("a", "b") for salt in ("", "tenant")
    ]
    for n, author in enumerate(authors):
        for other in authors[n:]:
            assert store.find_prefix(other.hashes(tokens)) is None
        author.save(store, f"s{n}", tokens)
    for author in authors:
        found = store.find_prefix(author.hashes(tokens))
        assert found is not None
        assert json.loads(found.fingerprint) == author.pager.fingerprint
        author.check_restored(found, tokens)


def test_a_deleted_snapshot_serves_no_prefix_though_its_pack_is_still_there(
    author: Author, store: DirectoryStore
) -> None:
    prompt = text(2 * C, seed=1)
    long = text(8 * C, seed=2, start=prompt)
    author.save(store, "long", long)
    author.save(store, "short", text(3 * C, seed=3, start=prompt))
    store.delete("long")
    assert len(packs(store.path)) == 2
    found = store.find_prefix(author.hashes(long))
    assert found is not None
    author.check(found, prompt)


def test_a_found_prefix_outlives_its_snapshot(author: Author, store: DirectoryStore) -> None:
    tokens = text(5 * C)
    author.save(store, "turn", tokens)
    found = store.find_prefix(author.hashes(tokens))
    assert found is not None
    store.delete("turn")
    store.gc()
    author.check(found, tokens)
