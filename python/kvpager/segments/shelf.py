"""The segments of an engine, by name and by content, and in a store."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvpager._model.identity import fingerprint as fingerprints
from kvpager._runtime.execution.core import EngineCore
from kvpager._runtime.scheduling.prefill import prefill_all
from kvpager._runtime.snapshots.freezing import check_store, freeze
from kvpager._runtime.text.damage import RECOMPUTE, DamageHandling
from kvpager._runtime.text.transcript import Transcript
from kvpager._support.tokens import TextOrIds, TokenIds
from kvpager.errors import InvalidArgumentError, StorageError, UnsupportedModelError
from kvpager.pager import SnapshotInfo
from kvpager.progress import Progress, check_progress, reporting_bytes
from kvpager.segments.saved import SavedSegment, segment_note
from kvpager.segments.segment import Segment, digest_of, namespace_of, padded
from kvpager.stores import SaveReport, SnapshotStore
from kvpager.stores.names import check_name
from kvpager.stores.segments import stored_name

_MOST_NAMED = 8  # of all names, in a message


class Segments:
    """`Engine.segments`: the segments that `Engine.cache_segment` has made.

    A mapping from name to `Segment`. A segment's digest is a key too, and so is the name of a
    segment in the engine's store, which is then loaded.
    """

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._by_name: dict[str, Segment] = {}

    def cache(
        self, ids: TextOrIds, name: str | None = None, *, progress: Progress = None
    ) -> Segment:
        """See `Engine.cache_segment`: the same `ids`, `name`, `progress` and errors."""
        core = self.core
        core.check_open()
        check_progress(progress)
        require_segments(core)
        tokens = as_segment_ids(core, ids)
        digest = digest_of(tokens)
        if name is None:
            known = self._by_digest(digest)
            if known is not None:
                return known
            name = digest
        segment = self._by_name.get(check_name(name))
        if segment is None:
            segment = Segment(core, name, tokens, self._computed(name, tokens, progress))
            self._by_name[name] = segment
        elif not np.array_equal(segment.tokens, tokens):
            raise InvalidArgumentError(
                f"name is {name!r}, which is another text of {len(segment)} tokens; call "
                f"engine.segments.remove({name!r}) first, or use another name"
            )
        return segment

    def remove(self, name: str) -> None:
        """Releases a segment's chunks; a saved copy stays in its store.

        Raises:
            InvalidArgumentError: no segment has this name.
        """
        segment = self._by_name.pop(name, None)
        if segment is None:
            raise InvalidArgumentError(f"name is {name!r}; expected one of {self._names(name)}")
        segment.close()

    def save(
        self,
        name: str,
        store: SnapshotStore | None = None,
        *,
        progress: Progress = None,
        overwrite: bool = False,
    ) -> SaveReport:
        """Saves a segment into a store, as the snapshot `segment-NAME`.

        Args:
            name: of the segment.
            store: None: the engine's.
            progress: as for `Session.save`.
            overwrite: also replace a snapshot of another salt or model.

        Raises:
            InvalidArgumentError: no segment has this name, it has no tokens, or there is no
                store.
            CapacityError, StorageError: as for `Session.save`.
        """
        segment = self[name]
        if segment.transcript is None:
            raise InvalidArgumentError(f"{segment!r} has nothing to save")
        state = freeze(
            self.core,
            segment.transcript,
            stored_name(segment.name),
            store=self._store(store),
            overwrite=overwrite,
            extra=segment_note(segment),
        )
        with reporting_bytes(progress, "save") as report:
            return state.write(report)

    def load(self, name: str, store: SnapshotStore | None = None) -> Segment:
        """Loads a segment from a store; its chunks are read when first needed.

        Raises:
            StorageError: the store has no segment of this name.
            FingerprintMismatchError: another model, or other numerics, computed it.
            CorruptSnapshotError, UnsupportedVersionError: it cannot be used, or is the segment of
                another name.
            CapacityError: its summaries do not fit.
            InvalidArgumentError: another text has this name here, or there is no store.
        """
        core = self.core
        core.check_open()
        require_segments(core)
        core.runner.unchanged.check_model(thorough=True)
        source = self._store(store)
        snapshot = SnapshotInfo.of(source.open(stored_name(name)))
        snapshot.require_restorable()
        fingerprints.compare(
            core.facts.fingerprint, snapshot.fingerprint, can_waive=False, source=snapshot.path
        )
        saved = SavedSegment.of(snapshot.session, snapshot.tokens, snapshot.path, name)
        known = self._by_name.get(saved.name)
        if known is not None:
            if np.array_equal(known.tokens, saved.tokens):
                return known
            raise InvalidArgumentError(
                f"name is {saved.name!r}, which is another text here than in the store; call "
                f"engine.segments.remove({saved.name!r}) first"
            )
        sequence = core.pager.restore(snapshot, salt=namespace_of(core.tenant.namespace))
        transcript = core.transcripts.adopt(
            sequence,
            restored_tokens=sequence.length,
            damage=DamageHandling(RECOMPUTE, source, snapshot.reader),
        )
        segment = Segment(core, saved.name, saved.tokens, transcript)
        self._by_name[saved.name] = segment
        return segment

    def get(self, name: str) -> Segment | None:
        """The segment of this name or digest in memory, or None."""
        found = self._by_name.get(name)
        return self._by_digest(name) if found is None else found

    def __getitem__(self, name: str) -> Segment:
        """Finds a segment by name or digest, in memory or in from the engine's store.

        Raises:
            InvalidArgumentError: there is no such segment.
        """
        found = self.get(name)
        if found is None and self.core.store is not None:
            try:
                found = self.load(name)
            except StorageError as error:
                raise InvalidArgumentError(
                    f"segment is {name!r}; expected one of {self._names(name)}, or one that is "
                    f"saved in the engine's store ({error})"
                ) from error
        if found is None:
            raise InvalidArgumentError(
                f"segment is {name!r}; expected one of {self._names(name)}: cache it first with "
                "engine.cache_segment(ids, name=...)"
            )
        return found

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.get(name) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._by_name))

    def __len__(self) -> int:
        return len(self._by_name)

    def forget(self) -> None:
        """Drops the chunks of all segments, after the engine has opened a new pager."""
        self._by_name.clear()

    def _computed(self, name: str, tokens: TokenIds, progress: Progress) -> Transcript | None:
        """Makes a transcript with the tokens and their padding, in the namespace of segments."""
        if not len(tokens):
            return None
        core = self.core
        transcript = core.transcripts.adopt(
            core.pager.sequence(salt=namespace_of(core.tenant.namespace))
        )
        try:
            ids = padded(tokens, core.facts.layout.chunk_tokens)
            prefill_all(core, [(transcript, ids)], progress)
        except BaseException:
            transcript.close()
            raise
        return transcript

    def _by_digest(self, digest: str) -> Segment | None:
        for segment in self._by_name.values():
            if segment.digest == digest:
                return segment
        return None

    def _store(self, store: SnapshotStore | None) -> SnapshotStore:
        check_store(store)
        chosen = self.core.store if store is None else store
        if chosen is None:
            raise InvalidArgumentError(
                "store is None, and so is the engine's; give one here, or Engine(..., store=...)"
            )
        return chosen

    def _names(self, name: str) -> str:
        """The names there are, for a message about one that is not: of many, those like it."""
        names = list(self._by_name)
        if not names:
            return "the cached ones, of which there are none"
        if len(names) <= _MOST_NAMED:
            return ", ".join(map(repr, names))
        near = difflib.get_close_matches(name, names, n=3) or names[:3]
        return f"{len(names):,} names, such as {', '.join(map(repr, near))}"


def require_segments(core: EngineCore) -> None:
    """Raises UnsupportedModelError for a model whose K/V cannot be moved."""
    if core.facts.recurrence is not None:
        raise UnsupportedModelError(
            "segments: the model has recurrent layers, whose state is a function of all tokens "
            "before it and cannot be put together; prefill the whole text"
        )
    if core.pager.window:
        raise UnsupportedModelError(
            f"segments: every layer of the model looks back {core.pager.window} tokens at most "
            "and lets go of what is behind, so that a segment's beginning is not kept; prefill the "
            "whole text"
        )
    core.key_mover  # noqa: B018  # raises where keys do not move by a rotation


def as_segment_ids(core: EngineCore, ids: Any, name: str = "ids") -> TokenIds:
    """Checks text or token ids, which may be empty."""
    listed = isinstance(ids, (list, tuple, str))
    if (listed and not ids) or tuple(getattr(ids, "shape", ())) == (0,):
        return np.zeros(0, dtype=np.int32)
    return core.read_ids(ids, name, special_tokens=False)
