"""What a chunk is called: keyed BLAKE2b over all that it stands for, compared with Python's own."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import numpy as np
import pytest
from small_store import Author, C, text

from kvpager import PagerConfig
from kvpager.pager import Layout, Pager


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
