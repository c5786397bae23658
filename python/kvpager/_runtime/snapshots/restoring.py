"""Checks a snapshot and makes a transcript of it."""

from __future__ import annotations

import logging
import os
from typing import Any, NamedTuple

import numpy as np

from kvpager._model.fingerprint_rules import RULES
from kvpager._model.identity import fingerprint as fingerprints
from kvpager._runtime.execution.core import EngineCore
from kvpager._runtime.scheduling.recompute import extend, recomputing_damage, require_repairable
from kvpager._runtime.snapshots.companions import restore_companions
from kvpager._runtime.snapshots.converting import in_layout
from kvpager._runtime.snapshots.freezing import SESSION_VERSION, destination
from kvpager._runtime.text.conversation import Conversation
from kvpager._runtime.text.damage import ON_CORRUPT, RECOMPUTE, DamageHandling
from kvpager._runtime.text.transcript import Transcript
from kvpager._support.arguments import is_one_of
from kvpager._support.salts import StretchedSalt, salt_digest
from kvpager.errors import (
    CorruptSnapshotError,
    FingerprintMismatchError,
    InvalidArgumentError,
    UnsupportedVersionError,
    explain_damage,
)
from kvpager.pager import SALT_FIELD, Sequence, SnapshotInfo
from kvpager.sampling import Sampling
from kvpager.stores import SnapshotStore

_log = logging.getLogger(__name__)


def restore_transcript(
    core: EngineCore,
    name_or_path: str | os.PathLike[str],
    store: SnapshotStore | None,
    on_mismatch: str,
    on_corrupt: str,
    tenant: StretchedSalt,
) -> Transcript:
    """See `Engine.restore`."""
    if not is_one_of(on_corrupt, ON_CORRUPT):
        raise InvalidArgumentError(f'on_corrupt is {on_corrupt!r}; expected "fail" or "recompute"')
    core.runner.unchanged.check_model(thorough=True)
    name, source = destination(name_or_path, store)
    snapshot = SnapshotInfo.of(source.open(name))
    snapshot.require_restorable()
    provenance = fingerprints.compare(
        core.facts.fingerprint, snapshot.fingerprint, on_mismatch=on_mismatch, source=snapshot.path
    )
    _require_salt(snapshot, tenant)
    state = SavedState.of(snapshot, core.facts.vocab_size, has_text=core.tokenizer is not None)
    damage: CorruptSnapshotError | None = None
    salt = tenant.namespace
    snapshot = in_layout(snapshot, core.facts.layout, salt)
    try:
        sequence = core.pager.restore(snapshot, salt=salt, provenance=provenance)
    except CorruptSnapshotError as error:  # in the tail: no sealed chunk is read yet
        if on_corrupt != RECOMPUTE:
            raise
        damage = error
        sequence = _without_tail(core, snapshot, error, provenance, salt)
    transcript = core.transcripts.adopt(
        sequence,
        sampling=state.sampling,
        restored_tokens=len(snapshot.tokens),
        damage=DamageHandling(
            on_corrupt,
            source,
            snapshot.reader,
            first=len(snapshot.released_tokens) // core.facts.layout.chunk_tokens,
        ),
    )
    try:
        if damage is not None:
            _recompute_tail(core, transcript, snapshot, damage)
        transcript.set_pending(state.pending)
        transcript.generated_last = state.goes_on
        transcript.generation_start = state.generation_start
        transcript.conversation = state.conversation
        transcript.metadata = state.metadata
        restore_companions(core, transcript, snapshot, name, source, tenant)
    except BaseException:
        transcript.close()
        raise
    return transcript


def _require_salt(snapshot: SnapshotInfo, tenant: StretchedSalt) -> None:
    """Raises FingerprintMismatchError, field "salt", if it was saved under another salt."""
    own, found = salt_digest(tenant.namespace), snapshot.session.get(SALT_FIELD)
    if found not in (None, own):
        raise FingerprintMismatchError(
            f"{snapshot.path} was saved with salt {found!r} (a digest), and this is {own!r}; "
            f"{RULES['salt'].remedy}",
            field="salt",
            expected=own,
            found=found,
        )


class SavedState(NamedTuple):
    """A session's own section of a snapshot; a snapshot by `Pager` has none.

    Attributes:
        pending: the pending token, if any.
        goes_on: whether a generation goes on with the last one: see `Session.generate`.
        sampling: options of the last generation.
        generation_start: where that began; None if it was cut or there was none.
        metadata: the user's.
        conversation: the messages and their text.
    """

    pending: int | None
    goes_on: bool
    sampling: Sampling
    generation_start: int | None
    metadata: dict[str, Any]
    conversation: Conversation

    @classmethod
    def of(cls, snapshot: SnapshotInfo, vocab_size: int, *, has_text: bool = True) -> SavedState:
        """Raises CorruptSnapshotError, UnsupportedVersionError.

        has_text: whether the engine has a tokenizer.
        """
        state, path = snapshot.session, snapshot.path
        version = state.get("version", SESSION_VERSION)
        if version != SESSION_VERSION:
            raise UnsupportedVersionError(
                f"{path}: session.version is {version!r}; this release reads {SESSION_VERSION}"
            )
        pending = state.get("pending")
        if pending is not None and (type(pending) is not int or not 0 <= pending < vocab_size):
            raise CorruptSnapshotError(
                f"{path}: session.pending is {pending!r}; expected a token id below {vocab_size}"
            )
        goes_on = state.get("goes_on", pending is not None)
        if type(goes_on) is not bool:
            raise CorruptSnapshotError(
                f"{path}: session.goes_on is {goes_on!r}; expected true or false"
            )
        start, length = state.get("generation_start"), len(snapshot.tokens) + (pending is not None)
        if start is not None and (type(start) is not int or not 0 <= start <= length):
            raise CorruptSnapshotError(
                f"{path}: session.generation_start is {start!r}; expected 0 to {length}"
            )
        sampling = state.get("sampling", {})
        if not isinstance(sampling, dict):
            raise CorruptSnapshotError(
                f"{path}: session.sampling is {sampling!r}; expected an object"
            )
        metadata = state.get("metadata", {})
        if not isinstance(metadata, dict):
            raise CorruptSnapshotError(
                f"{path}: session.metadata is {metadata!r}; expected an object"
            )
        conversation = Conversation()
        if "conversation" in state:
            last = [] if pending is None else [pending]
            text = np.append(snapshot.tokens, np.array(last, dtype=np.int32))
            conversation = Conversation.from_json(
                state["conversation"], text, path, vocab_size, has_text=has_text
            )
        try:
            options = Sampling.from_json(sampling)
        except InvalidArgumentError as error:
            raise CorruptSnapshotError(f"{path}: session.sampling: {error}") from error
        outside = [
            token
            for token in (*options.logit_bias, *options.begin_suppress_tokens)
            if token >= vocab_size
        ]
        if outside:
            raise CorruptSnapshotError(
                f"{path}: session.sampling names token id {outside[0]}; expected ids below "
                f"{vocab_size}"
            )
        return cls(pending, goes_on, options, start, metadata, conversation)


def _without_tail(
    core: EngineCore,
    snapshot: SnapshotInfo,
    error: CorruptSnapshotError,
    provenance: str,
    salt: str,
) -> Sequence:
    """The sealed chunks of a snapshot whose tail is damaged; `_recompute_tail` adds the rest.

    provenance: of the snapshot's K/V under this engine's fingerprint.
    """
    worth = snapshot.reader.provenance[-1] if provenance == "exact" else provenance
    if core.facts.recurrence is None:  # with recurrent layers a saved tail is never used
        require_repairable(error, RECOMPUTE, worth)
    whole = snapshot.reader.sealed_chunks * core.facts.layout.chunk_tokens
    return core.pager.restore(snapshot, salt=salt, upto=whole)


def _recompute_tail(
    core: EngineCore, transcript: Transcript, snapshot: SnapshotInfo, error: CorruptSnapshotError
) -> None:
    """Computes the tail's tokens again and compares the K/V with the saved checksums.

    With recurrent layers it only makes the tokens uncomputed.
    """
    tokens, start = snapshot.tokens, transcript.committed
    if core.facts.recurrence is not None:
        transcript.set_text(tokens)
        transcript.damage.count(len(tokens) - start)
        _log.warning("%s; tokens [%d, %d) will be computed again", error, start, len(tokens))
        return
    extend(core, transcript.sequence, tokens)
    saved = snapshot.reader.slice_checksums[-1]
    frozen = recomputing_damage(core, [transcript.sequence], transcript.sequence.freeze)
    if (frozen.slice_checksums[-1] != saved).any():
        raise explain_damage(
            error,
            f"tokens [{start}, {len(tokens)}) computed again are not what was saved either",
        ) from error
    transcript.damage.count(len(tokens) - start)
    _log.warning("%s; tokens [%d, %d) were computed again", error, start, len(tokens))
