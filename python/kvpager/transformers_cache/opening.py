"""How a cache gets its model and pager, and how its text is saved and restored."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from kvpager._model.facts import checked_model
from kvpager._model.facts.opening import fingerprint_of
from kvpager._model.facts.row_counts import conclude
from kvpager._model.identity import fingerprint as fingerprints
from kvpager._model.identity.behaviour import TOKENS, behave
from kvpager._model.identity.settled import require_known_reading
from kvpager._model.proof.own_attention import require_own_attention
from kvpager._model.seam.attach import attach, configurations
from kvpager._model.seam.recurrent import is_recurrent
from kvpager._model.seam.rows import RowCounts
from kvpager._model.seam.support import check_supported
from kvpager._model.watch.model_watch import ModelWatch
from kvpager._model.weights.digests import known_weights_digest
from kvpager._runtime.snapshots.converting import in_layout
from kvpager._runtime.snapshots.freezing import SESSION_VERSION, destination
from kvpager.config import PagerConfig, known_options
from kvpager.errors import InvalidArgumentError, UnsupportedModelError
from kvpager.pager import Pager, SnapshotInfo
from kvpager.pager.device import resolve
from kvpager.progress import Progress, reporting_bytes
from kvpager.stores import SaveReport, SnapshotStore
from kvpager.transformers_cache.hooks import Hooks
from kvpager.transformers_cache.host import Host, Known
from kvpager.transformers_cache.rows import TextBatch

_COUNTS = RowCounts(TOKENS)  # of the fingerprint: forwards of a cache have any number of rows


def configuration(config: PagerConfig | None, options: Mapping[str, Any]) -> PagerConfig:
    """The pager's options; forwards have as many rows as they have, so nothing is exact."""
    options = known_options(options)
    if options.get("exact", False) is not False:
        raise InvalidArgumentError(
            f"exact is {options['exact']!r}; forwards of transformers have row counts of their "
            "own, so a Cache promises no bits: leave it out, or use kvpager.Engine"
        )
    config = checked_model.configuration(config, {**options, "exact": False})
    if config.compress_weights:
        raise InvalidArgumentError(
            "compress_weights is True; forwards of a Cache are transformers' own and read no "
            "copies: leave it out, or use kvpager.Engine"
        )
    return config


def open_host(model: Any, config: PagerConfig, progress: Progress) -> Host:
    """Checks a model, hashes its weights and makes its pager.

    Raises UnsupportedModelError, InvalidArgumentError, CapacityError, DeviceError.
    """
    model = check_supported(model, one_at_a_time=True)
    if is_recurrent(model):
        raise UnsupportedModelError(
            f"{type(model).__name__}: some of its layers keep a state beside K/V, which a pager "
            'has no place for; use kvpager.Engine(model, exact="reuse")'
        )
    place = resolve(config.device, model.device)
    rows = checked_model.row_choices(config, model, gathers_experts=False)[0]
    watch = ModelWatch(model)
    attach(model)
    require_known_reading(model, watch)
    require_own_attention(model, config.chunk_tokens, packed=False)
    done, counts = behave(model, _COUNTS), RowCounts(rows)
    found = conclude(model, config, place, done.seen, counts, behaviour=done.digest)
    with reporting_bytes(progress, "hash weights") as report:
        weights = known_weights_digest(model, report)
    fingerprint = fingerprint_of(model, watch, found, _COUNTS, weights)
    pager = Pager(
        found.layout,
        found.config,
        rows=rows,
        fingerprint=fingerprint,
        window=found.window,
        device=place.name,
        q_heads=found.q_heads,
    )
    windows = tuple(done.seen.windows[layer] for layer in range(found.layout.layers))
    configs = frozenset(map(id, configurations(model)))
    known = Known(model, found.config, windows, configs, fingerprint, watch)
    return Host(known, pager, Hooks.of(model))


def save_text(
    host: Host,
    batch: TextBatch,
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
    with reporting_bytes(progress, "save") as report:

        def advance(done: int, total: int) -> None:
            report(done, total)

        return target.save(
            name,
            content,
            fingerprint=host.pager.fingerprint_json,
            session=sequence.session_text({"version": SESSION_VERSION, "pending": None}, content),
            progress=advance,
        )


def restored_batch(
    host: Host,
    name_or_path: str | os.PathLike[str],
    store: SnapshotStore | None,
    on_mismatch: str,
) -> TextBatch:
    """See `Cache.restore`."""
    name, source = destination(name_or_path, store)
    snapshot = SnapshotInfo.of(source.open(name))
    snapshot.require_restorable()
    provenance = fingerprints.compare(
        host.known.fingerprint, snapshot.fingerprint, on_mismatch=on_mismatch, source=snapshot.path
    )
    snapshot = in_layout(snapshot, host.pager.layout, salt="")
    sequence = host.pager.restore(snapshot, provenance=provenance)
    return TextBatch((sequence,), (0,), (0,), sequence.length)
