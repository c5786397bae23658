"""A cache's text in snapshots."""

from __future__ import annotations

import os

from kvpager import fingerprint as fingerprints
from kvpager.errors import InvalidArgumentError
from kvpager.pager import SnapshotInfo
from kvpager.progress import Progress, reporting_bytes
from kvpager.released import ReleasedText
from kvpager.snapshots.converting import in_layout
from kvpager.snapshots.freezing import RELEASED_VERSION, SESSION_VERSION, destination
from kvpager.stores import SaveReport, SnapshotStore
from kvpager.transformers_cache.host import Host
from kvpager.transformers_cache.texts import Batch


def save_text(
    host: Host,
    batch: Batch,
    name_or_path: str | os.PathLike[str],
    store: SnapshotStore | None,
    progress: Progress,
) -> SaveReport:
    """See `Cache.save`."""
    if len(batch.sequences) != 1 or any(batch.pads) or any(batch.offsets):
        what = f"{len(batch.sequences)} texts" if len(batch.sequences) != 1 else "padding"
        raise InvalidArgumentError(
            f"save: the cache holds {what}; expected one text from position 0 on"
            + (": fork it and call batch_select_indices" if len(batch.sequences) > 1 else "")
        )
    sequence = batch.sequences[0]
    if not sequence.length:
        raise InvalidArgumentError("save: the cache is empty; call generate first")
    name, target = destination(name_or_path, store)
    host.known.watch.check(thorough=True)
    content = sequence.freeze()
    released = ReleasedText.of_content(content)
    version = SESSION_VERSION if released is None else RELEASED_VERSION
    with reporting_bytes(progress, "save") as report:

        def advance(done: int, total: int) -> None:
            report(done, total)

        return target.save(
            name,
            content,
            fingerprint=host.pager.fingerprint_json,
            session=sequence.session_text({"version": version, "pending": None}, content),
            progress=advance,
        )


def restored_batch(
    host: Host,
    name_or_path: str | os.PathLike[str],
    store: SnapshotStore | None,
    on_mismatch: str,
) -> Batch:
    """See `Cache.restore`."""
    name, source = destination(name_or_path, store)
    snapshot = SnapshotInfo.of(source.open(name))
    snapshot.require_restorable()
    provenance = fingerprints.compare(
        host.known.fingerprint, snapshot.fingerprint, on_mismatch=on_mismatch, source=snapshot.path
    )
    snapshot = in_layout(snapshot, host.pager.layout, salt="")
    sequence = host.pager.restore(snapshot, provenance=provenance)
    return Batch((sequence,), (0,), (0,), sequence.length)
