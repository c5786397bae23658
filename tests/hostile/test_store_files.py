"""What a directory store keeps beside snapshots and packs, filled by somebody else.

store.json, the notes on a snapshot, the list of a pack's damaged chunks: any text in them is a
typed error or the careful reading, and the snapshots stay what they were.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from specimens import (
    LENGTHS_OF_STORE,
    UNDER_ADDRESS_SANITIZER,
    fill,
    listing,
    make_pager,
)

from kvpager.errors import CorruptSnapshotError, PagerError, StorageError
from kvpager.stores import DirectoryStore

NAMES = ("one", "two")
DEEP = "[" * 100_000
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["never", 10**400, -1, "1e999"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["pinned", "ttl_seconds", "kvpager_store", "byte_budget", "x"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)
TEXTS = (
    st.binary(max_size=40)
    | VALUES.map(lambda value: json.dumps(value).encode())
    | st.builds(
        lambda values, at, byte: json.dumps(values).encode()[:at] + byte,
        VALUES,
        st.integers(0, 60),
        st.binary(max_size=2),
    )
)
ODD = [DEEP.encode(), b'{"a":' * 100_000, b"", b"\xff", b"[Infinity]", b"[1e999]", b"9" * 5000]
FUZZ = settings(
    settings.default, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def examples(function):
    for odd in ODD:
        function = example(odd)(function)
    return function


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A store of two snapshots that share chunks."""
    folder = tmp_path_factory.mktemp("store") / "store"
    store, pager = DirectoryStore(folder), make_pager()
    for name, length in zip(NAMES, LENGTHS_OF_STORE):
        sequence = fill(pager.sequence(), length, seed=1)
        store.save(
            name,
            sequence.freeze(),
            fingerprint=pager.fingerprint_json,
            session=sequence.session_text(),
        )
        sequence.close()
    pager.close()
    return folder


@pytest.fixture
def folder(original, tmp_path):
    return shutil.copytree(original, tmp_path / "store", dirs_exist_ok=True)


def put(path, content):
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)
    path.write_bytes(content)


@contextmanager
def within(seconds, mebibytes):
    """Fails instead of hanging, and instead of taking the machine's memory."""

    def late(*_):
        raise AssertionError(f"still waiting after {seconds} s")

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    if not UNDER_ADDRESS_SANITIZER:
        resource.setrlimit(resource.RLIMIT_AS, (used + (mebibytes << 20), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def use_all(folder):
    """Everything a reader does; typed errors are answers. What can be read is sound."""
    found = 0
    try:
        store = DirectoryStore(folder, create=False)
        entries = store.entries()
        store.stats()
        for entry in entries:
            reader = store.open(entry.name)
            assert not reader.verify(1)
            found += 1
        store.gc()
    except PagerError:
        return found, False
    return found, True


# attack 84
@FUZZ
@examples
@given(TEXTS)
def test_any_text_in_store_json_is_a_typed_error_or_settings(folder, content):
    put(folder / "store.json", content)
    kept = listing(folder / "snapshots"), listing(folder / "packs")
    found, used = use_all(folder)
    if not used:
        assert found == 0
        now = listing(folder / "snapshots"), listing(folder / "packs")
        assert now == kept


# attack 85
@FUZZ
@examples
@given(TEXTS)
def test_any_text_in_the_notes_on_a_snapshot_never_loses_another_snapshot(
    folder, original, content
):
    shutil.rmtree(folder)
    shutil.copytree(original, folder)
    put(folder / "snapshots" / "one.json", content)
    store = DirectoryStore(folder, create=False)
    store.entries()
    store.gc()
    assert not store.open("two").verify(1)


# attack 86
@FUZZ
@examples
@given(TEXTS)
def test_any_text_in_a_list_of_damage_changes_no_byte_that_is_served(folder, content):
    pack = next((folder / "packs").glob("*.kvsnap"))
    put(pack.with_suffix(".damaged"), content)
    use_all(folder)
    store = DirectoryStore(folder, create=False)
    store.entries()
    for name in NAMES:
        check_served_or_said_damaged(store, name)


def check_served_or_said_damaged(store, name):
    try:
        reader = store.open(name)
    except (CorruptSnapshotError, StorageError) as error:
        message = str(error)
    else:
        assert not reader.verify(1)
        return
    assert "damaged" in message


# attack 87
@pytest.mark.parametrize("where", ["store.json", "snapshots/one.json", "damaged"])
@pytest.mark.parametrize("kind", ["folder", "fifo", "loop", "terabyte", "zeros"])
def test_a_folder_fifo_loop_or_endless_file_beside_the_snapshots_is_no_trap(folder, where, kind):
    pack = next((folder / "packs").glob("*.kvsnap"))
    path = pack.with_suffix(".damaged") if where == "damaged" else folder / where
    path.unlink(missing_ok=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "zeros":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 1 << 40)
    with within(10, 128):
        use_all(folder)
        if where == "store.json":
            with pytest.raises(PagerError, match=r"store\.json"):
                DirectoryStore(folder, create=False).entries()
        else:
            assert not DirectoryStore(folder, create=False).open("two").verify(1)


# attack 88
def test_files_of_odd_names_in_a_store_are_left_alone_and_believed_in_nothing(folder):
    pack = next((folder / "packs").glob("*.kvsnap"))
    odd = [
        folder / "packs" / pack.name.upper(),
        folder / "packs" / f"../snapshots/{'x' * 201}.kvsnap",
        folder / "packs" / "a\nb.kvsnap",
        folder / "snapshots" / "..kvsnap",
        folder / "snapshots" / "-rf.kvsnap",
        folder / "snapshots" / "a b.kvsnap",
        folder / "snapshots" / "\u202etxt.kvsnap",
        folder / "snapshots" / os.fsdecode(b"\xff.kvsnap"),
    ]
    for path in odd:
        shutil.copy(pack, path)
    store = DirectoryStore(folder, create=False)
    assert sorted(entry.name for entry in store.entries()) == sorted(NAMES)
    store.gc()
    assert all(path.exists() for path in odd)
    for name in NAMES:
        assert not store.open(name).verify(1)


# attack 64
@pytest.mark.parametrize("name", ["..", "../one", "/etc/passwd", "a/b", "", "a\0b", "one\n", ".x"])
def test_a_name_that_leads_elsewhere_is_refused(folder, name):
    store, pager = DirectoryStore(folder, create=False), make_pager()
    store.entries()
    before = sorted(str(p) for p in folder.parent.rglob("*"))
    sequence = fill(pager.sequence(), 20)
    text = pager.fingerprint_json, sequence.session_text()
    for call in (
        lambda: store.open(name),
        lambda: store.delete(name),
        lambda: store.pin(name),
        lambda: store.save(name, sequence.freeze(), fingerprint=text[0], session=text[1]),
    ):
        with pytest.raises(PagerError, match="name"):
            call()
    assert sorted(str(p) for p in folder.parent.rglob("*")) == before
    pager.close()
