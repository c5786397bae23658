"""Two chunks that XXH3-128 cannot tell apart, under any parent: nobody may take one for the other.

The ids were found by a search of a few seconds, from a vocabulary of 256. XXH3 reads an input of
more than 240 bytes in stripes of 64, as eight numbers each, and adds the product of the halves of
each number (XORed with a constant) to one sum and the number itself to another. Ids at positions 0,
1, 16, 17, 32 and 33 of a chunk of 64 are one such number in each of three stripes, behind the 16
bytes of a parent and 8 of provenance: six ids with equal sums give equal hashes, under any parent.
"""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from bits import assert_same_session
from reference_models import build, make_engine, prompt

from kvpager.stores import DirectoryStore

CHUNK = 64
POSITIONS = [0, 1, 16, 17, 32, 33]
FOUND = ([77, 17, 144, 161, 135, 183], [96, 113, 249, 56, 11, 192])
REST = prompt(CHUNK, seed=31)
BEHIND = prompt(2 * CHUNK, seed=32)
OPTIONS = {"chunk_tokens": CHUNK, "pool_tokens": 1024, "rows": 64}


def colliding(which):
    """One of the two chunks: what stands at the other positions is the same in both."""
    ids = np.array(REST, dtype=np.int32)
    ids[POSITIONS] = FOUND[which]
    return ids


D1, D2 = colliding(0), colliding(1)
TEXT1, TEXT2 = np.concatenate([D1, BEHIND]), np.concatenate([D2, BEHIND])


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture
def start(model, closing):
    def start(**options):
        return closing(make_engine(model, **OPTIONS, **options))

    return start


@pytest.fixture
def cold(start):
    def cold(ids):
        session = start().session()
        session.prefill(ids)
        return session

    return cold


def test_the_two_chunks_have_one_hash_under_every_parent_in_the_scheme_of_snapshots_1_1():
    generator = np.random.default_rng(5)
    assert D1.tolist() != D2.tolist()
    for _ in range(32):
        before = generator.bytes(16) + bytes(8)  # of parent and provenance
        hashes = {xxhash.xxh3_128_digest(before + ids.astype("<i4").tobytes()) for ids in (D1, D2)}
        assert len(hashes) == 1


def test_a_chunk_computed_after_a_colliding_one_is_not_adopted(start, cold):
    engine = start()
    for ids in (D2, TEXT1):
        with engine.session() as session:
            session.prefill(ids)
    session = engine.session()
    session.prefill(TEXT2)
    assert_same_session(session, cold(TEXT2), "after D2 and D1 + text")
    engine.pager.check_invariants()


def test_a_restored_text_is_not_joined_to_one_that_collides_with_it(start, cold, tmp_path):
    first, other = start(), start()
    session = first.session()
    session.prefill(TEXT1)
    session.save(tmp_path / "text1.kvsnap")
    with other.session() as before:
        before.prefill(D2)
    kept = other.restore(tmp_path / "text1.kvsnap")
    session = other.session()
    session.prefill(TEXT2)
    assert_same_session(session, cold(TEXT2), "after D2 and a restored text")
    assert_same_session(kept, cold(TEXT1), "the restored text")
    other.pager.check_invariants()


def test_a_store_serves_no_chunk_behind_a_colliding_prefix(start, cold, tmp_path):
    store = DirectoryStore(tmp_path / "store")
    engine = start(store=store)
    for name, ids in (("short", D2), ("long", TEXT1)):
        with engine.session() as session:
            session.prefill(ids)
            session.save(name, store=store)
    fresh = start(store=store)
    session = fresh.session()
    session.prefill(TEXT2)
    assert session.restored_tokens == CHUNK
    whole = cold(TEXT2)
    assert_same_session(session, whole, "with a store of D2 and D1 + text")
    session.save("third", store=store)
    restored = start().restore("third", store=store)
    assert_same_session(restored, whole, "saved and restored")
