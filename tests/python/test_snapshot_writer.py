"""The writer of snapshots as stores use it, when several calls meet."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_store import Author, C, text

from kvpager import _core
from kvpager.errors import InvalidArgumentError


def writing(author: Author, path: Path, progress: Any) -> tuple[_core.SnapshotWriter, Any]:
    """A writer, and a call that writes all of a content with it."""
    content = author.content(text(4 * C))
    writer = _core.SnapshotWriter(str(path), content.layout)
    which = np.arange(4, dtype=np.int64)
    call = lambda: writer.write_content(content, which, "{}", "{}", progress)  # noqa: E731
    return writer, call


def test_a_writer_that_is_discarded_while_it_writes_refuses_and_finishes(
    author: Author, tmp_path: Path
) -> None:
    path = tmp_path / "turn.kvsnap"
    met, go_on = threading.Event(), threading.Event()

    def progress(done: int, total: int) -> None:
        met.set()
        assert go_on.wait(30)

    writer, write = writing(author, path, progress)
    thread = threading.Thread(target=write)
    thread.start()
    assert met.wait(30)
    for call in (writer.discard, writer.publish, write, lambda: writer.logical_digest):
        with pytest.raises(InvalidArgumentError, match="in use by another call"):
            call()
    go_on.set()
    thread.join()
    writer.publish()
    writer.discard()
    assert _core.SnapshotReader.open(str(path)).verify(1) == []
    with pytest.raises(InvalidArgumentError, match="was discarded"):
        write()


def test_a_progress_callback_cannot_discard_its_writer_but_can_end_it(
    author: Author, tmp_path: Path
) -> None:
    def progress(done: int, total: int) -> None:
        with pytest.raises(InvalidArgumentError, match="in use by another call"):
            writer.discard()
        raise KeyboardInterrupt

    writer, write = writing(author, tmp_path / "turn.kvsnap", progress)
    with pytest.raises(KeyboardInterrupt):
        write()
    writer.discard()
    assert list(tmp_path.iterdir()) == []
