"""Nothing that a caller passes to the native module, or does beside a call, ends the process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_store import LAYERS, LAYOUT, Author, C, text

from kvpager import PagerConfig, _core
from kvpager.pager import ROW_COMMIT, ROW_GIVEN, Layout, Pager

HERE = Path(__file__).parent
DIM = LAYOUT.k_dim


def test_every_wrong_argument_of_every_binding_is_a_typed_error(tmp_path: Path) -> None:
    """In a process of its own: what is looked for ends it."""
    last = tmp_path / "last-call"
    folder = tmp_path / "files"
    folder.mkdir()
    child = subprocess.run(
        [sys.executable, "-X", "faulthandler", HERE / "any_arguments.py", folder, last],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert child.returncode == 0, f"ended by {last.read_text()}\n{child.stderr[-3000:]}"
    *untyped, count = child.stdout.splitlines()
    assert untyped == []
    assert int(count.removesuffix(" calls")) > 5000


def test_rows_read_while_the_sequence_grows_have_room() -> None:
    """What sizes the arrays and what fills them look at the sequence one after the other."""
    pager = Author(host_bytes="64MiB").pager
    sequence = pager.sequence()
    tokens = text(40 * C)
    rows = np.zeros((LAYERS, len(tokens), 1, DIM), np.float32)
    done = threading.Event()

    def grow() -> None:
        for _ in range(150):
            for start in range(0, len(tokens), C):
                part = slice(start, start + C)
                sequence.append(tokens[part], rows[:, part], rows[:, part])
            sequence.trim(0)
        done.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=grow)
    thread.start()
    wrong = []
    try:
        while not done.is_set():
            stop = sequence.length + 1  # which it grows into
            try:
                k, v = pager.core.read_kv(sequence.uid, 0, 0, stop)
            except _core.InvalidArgumentError:
                continue
            if {k.shape, v.shape} != {(stop, 1, DIM)}:
                wrong.append((stop, k.shape, v.shape))
    finally:
        sys.setswitchinterval(interval)
        thread.join()
    assert wrong == []


class Emptying:
    """A tensor whose export empties the lists that it was passed in."""

    def __init__(self, tensor: np.ndarray[Any, Any], lists: list[list[Any]]) -> None:
        self.tensor = tensor
        self.lists = lists
        self.kept: list[torch.Tensor] = []

    def __dlpack__(self) -> Any:
        for passed in self.lists:
            passed.clear()
        # Takes the place of what nobody owns any more.
        self.kept = [torch.full((C, 1, DIM), 7.0) for _ in range(64)]
        return self.tensor.__dlpack__()


def test_two_threads_may_close_a_sequence_at_once() -> None:
    pager = Pager(LAYOUT, PagerConfig(pool_tokens=1024, chunk_tokens=C), rows=16)
    errors: list[Exception] = []
    for _ in range(300):
        sequence, together = pager.sequence(), threading.Barrier(2)

        def close(sequence: Any = sequence, together: Any = together) -> None:
            together.wait()
            try:
                sequence.close()
            except Exception as error:  # told below
                errors.append(error)

        threads = [threading.Thread(target=close) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sequence.closed
    assert errors == []


def test_lists_that_are_emptied_during_a_give_lose_nothing() -> None:
    author = Author()
    pager = author.pager
    sequence = pager.sequence()
    values = np.random.default_rng(0).standard_normal((2, LAYERS, C, 1, DIM), dtype=np.float32)
    k: list[Any] = [torch.from_numpy(row).clone() for row in values[0]]
    v: list[Any] = [torch.from_numpy(row).clone() for row in values[1]]
    v[-1] = Emptying(values[1, -1], [k, v])
    sequence.reserve(C)
    with pager.begin_spans(
        [(sequence, 0, C, ROW_GIVEN)], (), given=list(range(C)), dense=True
    ) as forward:
        pager.core.give(k, v)
        forward.commit()
    assert k == []
    assert v == []
    for layer in range(LAYERS):
        got = [part.numpy().tobytes() for part in sequence.read_kv(layer, 0, C)]
        assert got == [values[0, layer].tobytes(), values[1, layer].tobytes()]


def long_attention() -> tuple[Pager, threading.Event, Callable[[], None]]:
    """A pager, and a call of its core that keeps its lock for a good part of a second.

    The event is set in the instant before it.
    """
    heads, dim, rows, length = 8, 64, 512, 32768
    layout = Layout(1, 1, dim, dim, chunk_tokens=64)
    config = PagerConfig(length + rows + 1024, chunk_tokens=64, host_bytes="64MiB")
    pager = Pager(layout, config, rows=rows, threads=1, q_heads=heads)
    sequence = pager.sequence()
    kv = np.random.default_rng(0).standard_normal((1, length, 1, dim), dtype=np.float32)
    sequence.append(list(range(length)), kv, kv)
    q = np.random.default_rng(1).standard_normal((rows, heads, dim), dtype=np.float32)
    begun = threading.Event()

    def attend() -> None:
        spans = [(sequence, length, rows, ROW_COMMIT)]
        with pager.begin_spans(spans, list(range(rows)), dense=True) as forward:
            begun.set()
            forward.attend(0, q, kv[0, :rows], kv[0, :rows], scaling=0.125)

    return pager, begun, attend


@contextmanager
def ticking() -> Iterator[list[float]]:
    """Moments at which another thread ran."""
    moments: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.is_set():
            moments.append(time.monotonic())
            time.sleep(0.002)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        yield moments
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("what", ["save", "sequence"])
def test_other_threads_go_on_while_a_drop_waits_for_an_attention_call(what: str) -> None:
    pager, attending, attend = long_attention()
    started = time.monotonic()
    attend()
    alone = time.monotonic() - started
    held: list[Any] = [pager.sequence()]
    held[0].append([1], *np.zeros((2, 1, 1, 1, 64), np.float32))
    if what == "save":
        held[0] = pager.core.freeze(held[0].uid, -1)
    attending.clear()
    thread = threading.Thread(target=attend)
    with ticking() as moments:
        thread.start()
        attending.wait()
        time.sleep(alone / 8)
        begun = time.monotonic()
        held.clear()
        ended = time.monotonic()
        thread.join()
    pauses = np.diff([begun, *[m for m in moments if begun < m < ended], ended])
    assert ended - begun > alone / 3, "the drop did not wait, so that this shows nothing"
    assert pauses.max() < alone / 3, f"nobody else ran for {pauses.max():.3f} s of {alone:.3f}"


def test_no_constructor_releases_the_gil_around_pybind11s_own_work() -> None:
    """A call guard on an init spans the table of objects, which the GIL guards."""
    definition = re.compile(r"\.def\(py::init.*?(?=\n      \.def|;\n)", re.DOTALL)
    sources = Path(__file__).parents[2] / "csrc" / "bindings"
    found = [
        (source.name, text)
        for source in sorted(sources.glob("*.cc"))
        for text in definition.findall(source.read_text())
    ]
    assert len(found) > 5
    assert [name for name, text in found if "py::call_guard" in text] == []
