"""Freezes a transcript, so that it can be written while the session goes on.

A frozen state shares the sealed chunks, which never change, and owns a copy of the tail. Rows that
must not be saved are computed again before the freeze; neither the freeze nor the write runs a
forward, unless a chunk turns out to be damaged.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from kvpager import _core
from kvpager._model.layout import Layout
from kvpager._runtime.execution.core import EngineCore
from kvpager._runtime.released import ReleasedText
from kvpager._runtime.scheduling.prefill import prefill_all
from kvpager._runtime.scheduling.recompute import (
    recompute_chunk,
    recomputing_damage,
    require_repairable,
)
from kvpager._runtime.scheduling.trim import trim
from kvpager._runtime.snapshots.companions import freeze_companions
from kvpager._runtime.snapshots.converting import converted_content, layout_to_save, written
from kvpager._runtime.text.damage import DamageHandling
from kvpager._runtime.text.transcript import Transcript
from kvpager._support.arguments import as_flag, as_integer
from kvpager._support.tokens import TokenIds
from kvpager.companions import TrimCounters
from kvpager.errors import CorruptSnapshotError, InvalidArgumentError, damaged_chunk
from kvpager.pager import Sequence
from kvpager.stores import FileStore, SaveReport, SnapshotStore
from kvpager.stores.companions import CompanionSnapshot, session_of_primary

_HELD = "the tokens the session holds"
_Result = TypeVar("_Result")
SESSION_VERSION = 1  # of the session's own section of a snapshot


@dataclass(frozen=True)
class FrozenState:
    """A transcript at one moment, and the store and name to save it under."""

    core: EngineCore
    content: _core.SnapshotContent
    note: str  # JSON text, of the conversation
    salt: str  # of the chunks
    damage: DamageHandling
    name: str
    store: SnapshotStore
    companions: tuple[CompanionSnapshot, ...] = ()
    overwrite: bool = False
    released: ReleasedText | None = None  # before the content
    layout: Layout | None = None  # to convert to

    def image(self) -> _core.SnapshotImage:
        """Returns the file that a FileStore would write, without companions, to be read in pieces.

        Computes damaged chunks again if the transcript allows. REQUIRES: nothing is converted.
        """
        fingerprint, note = self.core.pager.fingerprint_json, session_of_primary(self.note, {})
        return self._repaired(lambda: _core.SnapshotImage(self.content, fingerprint, note))

    def write(self, report: Callable[[int, int], object]) -> SaveReport:
        """Saves it; computes damaged chunks again if the transcript allows."""
        return self._repaired(partial(self._save, report))

    # No function in here may close over `self`: the frames of an error keep their functions.
    def _save(self, report: Callable[[int, int], object]) -> SaveReport:
        def advance(done: int, total: int) -> None:
            report(done, total)

        content, fingerprint = self._to_save(advance)
        options: dict[str, Any] = {"companions": self.companions} if self.companions else {}
        if self.overwrite:
            options["overwrite"] = True
        return self.store.save(
            self.name,
            content,
            fingerprint=fingerprint,
            session=self.note,
            progress=advance,
            **options,
        )

    def _repaired(self, use: Callable[[], _Result]) -> _Result:
        """Returns `use()`; calls it again after each damaged chunk that was repaired."""
        repaired: set[int] = set()
        while True:
            try:
                return use()
            except CorruptSnapshotError as error:  # noqa: PERF203  # once per damaged chunk
                text, first = self._text()
                chunk = damaged_chunk(error)
                if chunk is None or chunk in repaired:
                    raise
                self.damage.report(chunk)
                provenance = self.content.provenance[chunk - first]
                require_repairable(error, self.damage.on_corrupt, provenance)
                self.damage.count(recompute_chunk(self.core, text, error, self.salt))
                repaired.add(chunk)

    def _to_save(self, progress: Callable[[int, int], None]) -> tuple[_core.SnapshotContent, str]:
        """The content, converted if requested, and its fingerprint."""
        if self.layout is None:
            return self.content, self.core.pager.fingerprint_json
        content, fingerprint = converted_content(
            self.content, self.layout, self.core.facts.fingerprint, self.salt, self.released
        )
        if isinstance(self.store, FileStore):
            return content, fingerprint
        # A store needs to know what it has already before it writes.
        return written(content, fingerprint, self.note, progress), fingerprint

    def _text(self) -> tuple[TokenIds, int]:
        """All token ids, and the number of chunks before the first of the content."""
        if self.released is None:
            return self.content.tokens, 0
        ids = self.released.tokens
        first = len(ids) // self.core.facts.layout.chunk_tokens
        return np.concatenate([ids, self.content.tokens]), first


def destination(name_or_path: object, store: SnapshotStore | None) -> tuple[str, SnapshotStore]:
    """The name and the store to use; without a store, the name is a file's path."""
    check_store(store)
    if not isinstance(name_or_path, (str, os.PathLike)):
        expected = "the path of a file" if store is None else "a name"
        raise InvalidArgumentError(f"name_or_path is {name_or_path!r}; expected {expected}")
    return os.fspath(name_or_path), FileStore() if store is None else store


def check_store(store: object) -> None:
    """Raises InvalidArgumentError unless `store` is a store or None."""
    if store is not None and not hasattr(store, "find_prefix"):
        raise InvalidArgumentError(
            f"store is {store!r}; expected a store, such as kvpager.stores.DirectoryStore(path)"
        )


def check_metadata(values: object) -> None:
    """Raises InvalidArgumentError unless `values` is a dict that JSON gives back as it is."""
    expected = "a dict of JSON values with strings as keys"
    if not isinstance(values, dict):
        raise InvalidArgumentError(f"metadata is {values!r}; expected {expected}")
    try:
        same = json.loads(json.dumps(values, allow_nan=False)) == values
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"metadata: {error}; expected {expected}") from error
    if not same:  # a tuple, or a key that is no string
        raise InvalidArgumentError(f"metadata is {values!r}; expected {expected}")


def freeze(
    core: EngineCore,
    transcript: Transcript,
    name_or_path: str | os.PathLike[str],
    *,
    store: SnapshotStore | None = None,
    upto: int | None = None,
    overwrite: bool = False,
    kv_dtype: object = None,
    extra: Mapping[str, object] = {},  # never changed
) -> FrozenState:
    """Freezes the transcript for a save. Arguments and errors: those of `Session.save`.

    extra: further entries about the conversation for the snapshot; JSON values.
    """
    core.check_open(transcript)
    if not transcript.length:
        raise InvalidArgumentError("save: the session is empty; call prefill(ids) first")
    name, target = destination(name_or_path, store)
    layout = layout_to_save(core, kv_dtype)
    length = transcript.length
    upto = length if upto is None else as_integer(upto, "upto", 1, length, what=_HELD)
    as_flag(overwrite, "overwrite")
    check_metadata(transcript.metadata)
    core.runner.unchanged.check_model(thorough=True)
    held = min(upto, transcript.next_position)
    with _exact_sequence(core, transcript, held) as sequence:
        content = recomputing_damage(core, [sequence], lambda: sequence.freeze(held))
    released = ReleasedText.of_content(content)
    values: dict[str, object] = {
        "version": SESSION_VERSION,
        "pending": transcript.pending if upto == length else None,
        "sampling": dict(sorted(transcript.sampling.to_json().items())),
        **extra,
    }
    if transcript.metadata:
        values["metadata"] = transcript.metadata
    if upto == length:
        conversation = transcript.conversation
        if conversation.messages:
            values["conversation"] = conversation.to_json(transcript.tokens, core.tokenizer)
        if transcript.pending is None and transcript.generated_last:
            values["goes_on"] = True
    if transcript.generation_start is not None and transcript.generation_start <= upto:
        values["generation_start"] = transcript.generation_start
    return FrozenState(
        core=core,
        content=content,
        released=released,
        layout=layout,
        note=transcript.sequence.session_text(values, content),
        salt=transcript.sequence.salt,
        damage=transcript.damage,
        name=name,
        store=target,
        companions=freeze_companions(transcript, upto),
        overwrite=overwrite,
    )


@contextmanager
def _exact_sequence(core: EngineCore, transcript: Transcript, upto: int) -> Iterator[Sequence]:
    """A sequence whose first `upto` rows may be saved: the transcript's own if possible.

    Otherwise that of a fork, in which uncomputed tokens and provisional rows are computed by exact
    forwards; the transcript keeps its rows, and so the bits of what it generates next.
    """
    transcript.drop_accepted()
    sealed = transcript.committed - transcript.committed % core.facts.layout.chunk_tokens
    if upto <= sealed or not (transcript.provisional or transcript.uncomputed.size):
        yield transcript.sequence
        return
    with closing(transcript.fork()) as exact:
        exact.trims = TrimCounters()  # the user's counters must not count this
        trim(core, exact, upto)
        prefill_all(core, [(exact, exact.tokens)], None)
        yield exact.sequence
