"""Snapshots in another dtype than the K/V were computed in: an approximation, on request.

What converted K/V are written to or read by has the bits that its own engine stores for the same
numbers. They are approximate all the same: the tokens after them were, or will be, computed from
other numbers.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvpager import _core
from kvpager._model.fingerprint_rules import CONVERTED
from kvpager._model.identity.fingerprint import dtypes_of
from kvpager._model.layout import Layout
from kvpager._runtime.execution.core import EngineCore
from kvpager._runtime.released import ReleasedText
from kvpager._support.arguments import is_one_of
from kvpager.config import KV_DTYPES
from kvpager.errors import InvalidArgumentError
from kvpager.pager import SnapshotInfo
from kvpager.stores import FileStore


def layout_to_save(core: EngineCore, kv_dtype: object) -> Layout | None:
    """The layout that `Session.save(kv_dtype=...)` asks for; None: the engine's own.

    Raises InvalidArgumentError: no such dtype, or a model whose states cannot be converted.
    """
    if kv_dtype is None:
        return None
    if not is_one_of(kv_dtype, KV_DTYPES):
        raise InvalidArgumentError(
            f"kv_dtype is {kv_dtype!r}; expected None, or one of {', '.join(map(repr, KV_DTYPES))}"
        )
    if core.facts.recurrence is not None:
        raise InvalidArgumentError(
            f"kv_dtype is {kv_dtype!r}, and {type(core.model).__name__} has recurrent layers, "
            "whose states are exact only beside exact K/V; expected None"
        )
    dtype = str(core.model.dtype).removeprefix("torch.")
    own = replace(
        core.facts.layout,
        k_dtype=dtype,
        v_dtype=dtype,
        k_rotated=False,
        v_rotated=False,
        float_layers=(),
        float_dtype="float32",
    )
    layout = own.kept_as(str(kv_dtype))
    return None if layout == core.facts.layout else layout


def fingerprint_of_converted(
    fingerprint: Mapping[str, Any], found: Layout, layout: Layout
) -> dict[str, Any]:
    """The fingerprint of K/V that were computed as `found` and are kept as `layout`."""
    without = {name: fingerprint[name] for name in fingerprint if name not in dtypes_of(found)}
    before = fingerprint.get(CONVERTED)
    return {
        **without,
        **dtypes_of(layout),
        CONVERTED: found.format if before is None else f"{before}, {found.format}",
    }


def converted_content(
    content: _core.SnapshotContent,
    layout: Layout,
    fingerprint: Mapping[str, Any],
    salt: str,
    released: ReleasedText | None,
) -> tuple[_core.SnapshotContent, str]:
    """The content in the dtypes of `layout`, and the JSON text of its fingerprint.

    Chunks are converted when they are read. Only a file of its own can be made of it.

    Args:
        content: of K/V under `fingerprint` and `salt`.
        layout: of the same shape.
        fingerprint: what the K/V were computed under.
        salt: of the chunks' names.
        released: what of the text `content` does not have.
    """
    now = fingerprint_of_converted(fingerprint, Layout.of(content.layout), layout)
    namespace = json.dumps(now, sort_keys=True, separators=(",", ":"))
    before = None
    if released is not None:
        before = (released.tokens, released.provenance, released.window)
    made = _core.converted_content(content, layout.native(), namespace, salt, before)
    return made, namespace


def written(
    content: _core.SnapshotContent,
    fingerprint: str,
    session: str,
    progress: Callable[[int, int], None] | None = None,
) -> _core.SnapshotReader:
    """The content as an opened file that has no name any more.

    It is in the folder for temporary files, as large as a saved file, for as long as it is open.
    """
    with tempfile.TemporaryDirectory(prefix="kvpager-") as folder:
        path = str(Path(folder) / "converted.kvsnap")
        FileStore().save(path, content, fingerprint=fingerprint, session=session, progress=progress)
        return _core.SnapshotReader.open(path)


def in_layout(snapshot: SnapshotInfo, layout: Layout, salt: str) -> SnapshotInfo:
    """The snapshot with its K/V in the dtypes of `layout`, read and converted now.

    Raises:
        CorruptSnapshotError: a chunk of it is damaged.
        StorageError: there is no room for the converted file.
    """
    if snapshot.layout == layout:
        return snapshot
    content, fingerprint = converted_content(
        snapshot.reader, layout, snapshot.fingerprint, salt, snapshot.released
    )
    reader = written(content, fingerprint, snapshot.reader.session)
    return replace(SnapshotInfo.of(reader), path=snapshot.path)
