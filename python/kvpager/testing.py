"""What any store must pass, for stores that are not kvpager's own.

@pytest.mark.parametrize("check", store_suite(), ids=lambda check: check.__name__)
def test_my_store(check, tmp_path):
    check(lambda: MyStore(tmp_path / "store"))
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from kvpager import _core
from kvpager.config import PagerConfig
from kvpager.errors import InvalidArgumentError, StorageError
from kvpager.pager import Layout, Pager, SnapshotInfo
from kvpager.stores import SaveReport, SnapshotStore
from kvpager.stores.companions import CompanionSnapshot, companion_name

# Returns a store object over the same place each time, as another process would open it. The place
# is empty at first.
OpenStore: TypeAlias = Callable[[], SnapshotStore]
StoreCheck: TypeAlias = Callable[[OpenStore], None]

_LAYERS, _DIM, _CHUNK, _TOKENS = 2, 16, 16, 256
_LAYOUT = Layout(_LAYERS, 1, _DIM, _DIM, chunk_tokens=_CHUNK)
_ROWS = np.random.default_rng(0).standard_normal((2, _LAYERS, _TOKENS, 1, _DIM), dtype=np.float32)


def store_suite() -> list[StoreCheck]:
    """Returns the checks of a store, each to be called with a function that opens a store.

    The function is called several times for one check and returns a store over the same place,
    which is empty when the check begins. Each check takes below a second with a local store. It
    raises AssertionError if the store does not do what `SnapshotStore` says, and lets errors of
    the store through.
    """
    if not __debug__:
        raise InvalidArgumentError("Python runs with -O, which leaves the checks' assertions out")
    return [
        a_snapshot_comes_back_with_every_bit,
        a_text_of_whole_chunks_and_one_of_less_than_a_chunk_come_back,
        a_save_replaces_the_snapshot_of_its_name,
        readers_go_on_after_their_snapshot_is_replaced_and_deleted,
        a_missing_name_is_a_storage_error,
        entries_are_sorted_and_say_what_was_saved,
        a_prefix_has_the_bits_of_the_text_it_begins,
        a_prefix_never_crosses_salts,
        a_save_that_is_stopped_leaves_what_was_there,
        companions_come_back_or_are_left_out,
        threads_save_and_read_at_once,
        one_reader_serves_several_threads,
        session_and_fingerprint_are_kept,
    ]


def _rows(tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """K and v [layers, n, 1, dim] float32 that are a function of token and position."""
    ids = np.asarray(tokens, dtype=np.int64)
    k, v = _ROWS[:, :, ids] + np.arange(len(ids), dtype=np.float32)[None, :, None, None]
    return k, v


def _text(count: int, seed: int = 0, start: Sequence[int] = ()) -> list[int]:
    """`count` token ids that begin with `start`."""
    more = np.random.default_rng(seed).integers(0, _TOKENS, max(0, count - len(start)))
    return [*start, *more.tolist()][:count]


class _Author:
    """A pager that makes what is saved, and checks what is read."""

    def __init__(self, salt: str = "") -> None:
        config = PagerConfig(pool_tokens=8 * _CHUNK, chunk_tokens=_CHUNK, host_bytes="8MiB")
        self.pager = Pager(_LAYOUT, config, rows=_CHUNK, fingerprint={"model": "suite"}, threads=1)
        self.salt = salt

    def save(
        self,
        store: SnapshotStore,
        name: str,
        tokens: Sequence[int],
        progress: Callable[[int, int], None] | None = None,
        companions: Sequence[CompanionSnapshot] = (),
    ) -> SaveReport:
        content, session = self.content(tokens)
        more: Any = {"companions": companions} if companions else {}
        return store.save(
            name,
            content,
            fingerprint=self.pager.fingerprint_json,
            session=session,
            progress=progress,
            **more,
        )

    def content(self, tokens: Sequence[int]) -> tuple[_core.SnapshotContent, str]:
        with contextlib.closing(self.pager.sequence(salt=self.salt)) as sequence:
            k, v = _rows(tokens)
            sequence.append(tokens, k, v, provenance="exact")
            content = sequence.freeze()
            return content, sequence.session_text({"note": "kept"}, content)

    def hashes(self, tokens: Sequence[int]) -> list[bytes]:
        return self.pager.core.chain_hashes(np.asarray(tokens, dtype=np.int32), self.salt)

    def check(self, reader: _core.SnapshotReader, tokens: Sequence[int]) -> None:
        """Asserts that a snapshot is sound, and a sequence restored from it has every bit."""
        assert reader.tokens.tolist() == list(tokens)
        assert list(reader.verify(1)) == []
        restored = self.pager.restore(SnapshotInfo.of(reader), salt=self.salt)
        with contextlib.closing(restored) as sequence:
            k, v = _rows(tokens)
            for layer in range(_LAYERS):
                got_k, got_v = sequence.read_kv(layer, 0, len(tokens))
                assert got_k.numpy().tobytes() == k[layer].tobytes()
                assert got_v.numpy().tobytes() == v[layer].tobytes()


def a_snapshot_comes_back_with_every_bit(open_store: OpenStore) -> None:
    """Saved by one object, opened by another and by the same one."""
    author, tokens, store = _Author(), _text(5 * _CHUNK + 3), open_store()
    report = author.save(store, "planner", tokens)
    assert (report.name, report.tokens, report.chunks) == ("planner", len(tokens), 6)
    for opened in (store, open_store()):
        reader = opened.open("planner")
        assert reader.logical_digest == report.logical_digest
        author.check(reader, tokens)


def a_text_of_whole_chunks_and_one_of_less_than_a_chunk_come_back(open_store: OpenStore) -> None:
    """Edges of what a snapshot holds."""
    author = _Author()
    for count in (1, _CHUNK - 1, _CHUNK, 4 * _CHUNK):
        author.save(open_store(), f"n{count}", _text(count, seed=count))
    for count in (1, _CHUNK - 1, _CHUNK, 4 * _CHUNK):
        author.check(open_store().open(f"n{count}"), _text(count, seed=count))


def a_save_replaces_the_snapshot_of_its_name(open_store: OpenStore) -> None:
    """By a longer text, a shorter one, and another one."""
    author, first = _Author(), _text(3 * _CHUNK + 5)
    for tokens in (first, _text(6 * _CHUNK, start=first), first[:_CHUNK], _text(40, seed=9)):
        author.save(open_store(), "planner", tokens)
        author.check(open_store().open("planner"), tokens)
        assert [entry.name for entry in open_store().entries()] == ["planner"]


def readers_go_on_after_their_snapshot_is_replaced_and_deleted(open_store: OpenStore) -> None:
    """A reader has the bytes that were there when it was opened."""
    author, old, new, store = _Author(), _text(70), _text(70, seed=1), open_store()
    author.save(store, "planner", old)
    first = open_store().open("planner")
    author.save(store, "planner", new)
    second = open_store().open("planner")
    open_store().delete("planner")
    author.check(first, old)
    author.check(second, new)
    assert open_store().entries() == []


def a_missing_name_is_a_storage_error(open_store: OpenStore) -> None:
    """Also of a name that was deleted."""
    author, store = _Author(), open_store()
    author.save(store, "gone", _text(20))
    store.delete("gone")
    for name in ("gone", "never"):
        for call in (store.open, store.delete, open_store().open, open_store().delete):
            message = _storage_error(call, name)
            assert name in message, f"expected the name {name!r} in {message!r}"


def entries_are_sorted_and_say_what_was_saved(open_store: OpenStore) -> None:
    """Names, tokens, chunks and digests, without an error."""
    author = _Author()
    saved = [author.save(open_store(), name, _text(20 + n)) for n, name in enumerate("cab")]
    expected = sorted((r.name, r.tokens, r.chunks, r.logical_digest, None) for r in saved)
    entries = open_store().entries()
    assert [(e.name, e.tokens, e.chunks, e.logical_digest, e.error) for e in entries] == expected


def a_prefix_has_the_bits_of_the_text_it_begins(open_store: OpenStore) -> None:
    """What is found is a beginning of the text; a store may find less than there is, or nothing."""
    author, shared = _Author(), _text(4 * _CHUNK)
    author.save(open_store(), "a", _text(6 * _CHUNK + 3, seed=1, start=shared))
    author.save(open_store(), "b", _text(5 * _CHUNK, seed=2, start=shared))
    for asked in (_text(9 * _CHUNK, seed=3, start=shared), _text(9 * _CHUNK, seed=4)):
        found = open_store().find_prefix(author.hashes(asked))
        if found is not None:
            count = len(found.tokens)
            assert count > 0
            assert count % _CHUNK == 0
            author.check(found, asked[:count])


def a_prefix_never_crosses_salts(open_store: OpenStore) -> None:
    """Equal tokens of another tenant are another text."""
    mine, theirs, tokens = _Author("mine" * 8), _Author("theirs" * 8), _text(4 * _CHUNK)
    mine.save(open_store(), "a", tokens)
    assert open_store().find_prefix(theirs.hashes(tokens)) is None


def a_save_that_is_stopped_leaves_what_was_there(open_store: OpenStore) -> None:
    """What a progress function raises comes out of `save`; a store need not call it."""
    author, old = _Author(), _text(70)
    author.save(open_store(), "planner", old)

    def stop(done: int, total: int) -> None:
        raise InterruptedError(f"{done} of {total}")

    for name, new in (("planner", _text(80, seed=5)), ("other", _text(80, seed=6))):
        with contextlib.suppress(InterruptedError):
            author.save(open_store(), name, new, progress=stop)
            return  # it calls no progress function
    author.check(open_store().open("planner"), old)
    assert [entry.name for entry in open_store().entries()] == ["planner"]


def companions_come_back_or_are_left_out(open_store: OpenStore) -> None:
    """A saved companion is a snapshot of its own, and goes with its primary."""
    author, tokens, beside = _Author(), _text(50), _text(40, seed=7)
    content, session = author.content(beside)
    given = CompanionSnapshot("draft", content, author.pager.fingerprint_json, session)
    report = author.save(open_store(), "planner", tokens, companions=[given])
    author.check(open_store().open("planner"), tokens)
    assert [entry.name for entry in open_store().entries()] == ["planner"]
    if not report.companions:
        return
    name = companion_name("planner", "draft")
    assert [companion.name for companion in report.companions] == [name]
    author.check(open_store().open(name), beside)
    open_store().delete("planner")
    _storage_error(open_store().open, name)


def threads_save_and_read_at_once(open_store: OpenStore) -> None:
    """Each its own name and one that all have; readers see whole snapshots alone."""
    texts = [_text(3 * _CHUNK + n, seed=n) for n in range(4)]
    shared = open_store()

    def work(n: int) -> None:
        author, store = _Author(), shared if n % 2 else open_store()
        for _ in range(4):
            author.save(store, f"own{n}", texts[n])
            author.save(store, "all", texts[n])
            author.check(store.open(f"own{n}"), texts[n])
            reader = store.open("all")
            author.check(reader, texts[len(reader.tokens) - 3 * _CHUNK])

    _in_threads(work)
    names = [entry.name for entry in open_store().entries()]
    assert names == ["all", *(f"own{n}" for n in range(4))]


def one_reader_serves_several_threads(open_store: OpenStore) -> None:
    """`SnapshotReader` may be used by several threads, and so the ranges behind it."""
    author, tokens = _Author(), _text(12 * _CHUNK)
    author.save(open_store(), "planner", tokens)
    reader = open_store().open("planner")
    expected = [reader.read_chunk(chunk).tobytes() for chunk in range(reader.chunks)]

    def work(n: int) -> None:
        for chunk in np.random.default_rng(n).permutation(reader.chunks).tolist():
            assert reader.read_chunk(chunk).tobytes() == expected[chunk]

    _in_threads(work)


def session_and_fingerprint_are_kept(open_store: OpenStore) -> None:
    """A store may add to the session section, and takes nothing from it."""
    author = _Author()
    author.save(open_store(), "planner", _text(20))
    reader = open_store().open("planner")
    assert json.loads(reader.fingerprint) == json.loads(author.pager.fingerprint_json)
    assert json.loads(reader.session)["note"] == "kept"


def _storage_error(call: Callable[[str], object], name: str) -> str:
    """Calls it with a name that is not there; returns the message of the StorageError."""
    try:
        call(name)
    except StorageError as error:
        return str(error)
    raise AssertionError(f"{call!r} of {name!r}, which is not there, raised nothing")


def _in_threads(work: Callable[[int], None]) -> None:
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))  # raises what the first of them raised
