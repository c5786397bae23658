"""The recurrent states of one text: the current ones, and those it can go back to."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvpager import pager
from kvpager._model.identity import fingerprint as fingerprints
from kvpager._model.seam.state import EMPTY, RecurrentState
from kvpager._runtime.recurrent.checkpoints import Checkpoints
from kvpager._runtime.recurrent.saved_states import SavedStates, StateFormat, freeze_states
from kvpager._support.salts import salt_digest
from kvpager.companions import NeedsCheckpoint, Ok, TrimAnswer
from kvpager.errors import CorruptSnapshotError, FingerprintMismatchError
from kvpager.stores.companions import STATES, CompanionSnapshot


@dataclass(frozen=True)
class StateContext:
    """Shared by the states of all texts of one engine.

    Attributes:
        pager: holds the texts' K/V.
        checkpoints: of all texts.
        format: how a state is saved.
        fingerprint: of the engine.
        chunk_tokens: of the pager's layout.
        shared: whether a text may go on from a state that another text computed.
    """

    pager: pager.Pager
    checkpoints: Checkpoints
    format: StateFormat
    fingerprint: Mapping[str, Any]
    chunk_tokens: int
    shared: bool


class StateCursor:
    """The states of a text's recurrent layers, next to the sequence with its K/V.

        0        base             live
        | chunks | rows of a tail |
          ^ checkpoints, of all texts of the engine

    *base* is the exact state at the last chunk boundary before the text's end, *live* the state
    after its last committed row. Each is stored with its position and ignored at any other. So an
    exception between a commit or cut of the sequence and the update here leaves no wrong state. A
    forward works on a copy.
    """

    def __init__(
        self,
        context: StateContext,
        sequence: pager.Sequence,
        *,
        base: RecurrentState = EMPTY,
        live: RecurrentState = EMPTY,
        saved: SavedStates | None = None,
        namespace: bytes = b"",
    ) -> None:
        """`namespace`: part of each checkpoint's name; keeps states apart that are not exact."""
        self._context = context
        self._sequence = sequence
        self._base = base
        self._live = live
        self._saved = saved
        self._namespace = namespace
        self.kind = STATES  # of companion, when it is saved

    @property
    def length(self) -> int:
        """Number of the text's tokens before the newest state."""
        return self._live.position

    def at(self, position: int) -> RecurrentState | None:
        """The state after the first `position` committed tokens, or None.

        Reads it from the snapshot if only that has it. If it is damaged there, the cursor drops it.
        """
        for state in (EMPTY, self._live, self._base):
            if state.position == position:
                return state
        hashes = self._hashes(position)
        if not hashes or len(hashes) * self._context.chunk_tokens != position:
            return None
        found = self._context.checkpoints.get(self, hashes[-1])
        if found is None and self._saved is not None:
            found = self._saved.read(hashes[-1])
            if found is not None:
                self._context.checkpoints.note_restored()
                self._context.checkpoints.put(self, hashes, found)
        if found is not None:
            self._base = found
        return found

    def nearest(self, position: int) -> int:
        """The greatest position up to `position` with a state; 0 always has one."""
        return max(one for one in self.held(position) if one <= position)

    def held(self, position: int) -> set[int]:
        """Positions with a state, up to `position` and maybe beyond; 0 is always one."""
        hashes = self._hashes(position)
        held = {0, self._live.position, self._base.position}
        held.update(self._context.checkpoints.held(hashes))
        if self._saved is not None:
            held.update(self._saved.held(hashes))
        return held

    def trim(self, position: int) -> TrimAnswer:
        """Ok if `position` has a state; else names the nearest position before it that has one."""
        if position >= self.length:
            return Ok()
        nearest = self.nearest(position)
        if nearest != position:
            return NeedsCheckpoint(nearest)
        self.rewind(position)
        return Ok()

    def rewind(self, position: int) -> None:
        """Goes back to a position with a state."""
        if self._live.position > position:
            self._live = self._base if self._base.position <= position else EMPTY
        if self._base.position > position:
            self._base = EMPTY

    def reset(self) -> None:
        """Drops its own states; checkpoints stay."""
        self._base = self._live = EMPTY

    def advance(self, state: RecurrentState) -> None:
        """Takes the state after rows that a forward has committed.

        At a chunk boundary it is exact if the text is: no decoded row is sealed.
        """
        self._live = state
        if state.position % self._context.chunk_tokens:
            return
        self._base = state
        if self._context.checkpoints.due(state.position):
            self.keep_base()

    def keep_base(self) -> None:
        """Makes the base a checkpoint, for example at the end of a prompt that others may share."""
        if self._base.position and self._base.position <= self._sequence.length:
            self._context.checkpoints.put(self, self._hashes(self._base.position), self._base)

    def freeze(self, upto: int) -> CompanionSnapshot | None:
        """The states of the first `upto` tokens, for a save; None if there are none."""
        hashes = self._hashes(min(upto, self._sequence.length))
        size = self._context.chunk_tokens
        found = self._context.checkpoints.states(hashes)
        if self._base.position and self._base.position <= len(hashes) * size:
            found[hashes[self._base.position // size - 1]] = self._base
        for key in hashes:
            if key not in found and self._saved is not None:
                saved = self._saved.read(key)
                if saved is not None:
                    found[key] = saved
        kept = [(bare, found[key]) for key, bare in zip(hashes, self._bare(hashes)) if key in found]
        if not kept:
            return None
        return freeze_states(
            self._context.format,
            kept,
            exact=not self._namespace,
            fingerprint=self._context.pager.fingerprint_json,
            salt=self._sequence.salt,
        )

    def attach(self, snapshot: pager.SnapshotInfo, hashes: Sequence[bytes]) -> None:
        """Adds the states that `freeze` saved.

        Args:
            snapshot: of the states.
            hashes: chain hashes of the text's chunks in the primary's snapshot; they differ from
                those here if the fingerprint does.

        Raises:
            PagerError: it cannot be used; nothing was changed.
        """
        fingerprints.compare(
            self._context.fingerprint,
            snapshot.fingerprint,
            on_mismatch="approximate" if self._namespace else "refuse",
            source=snapshot.path,
        )
        if snapshot.session.get(pager.SALT_FIELD) != salt_digest(self._sequence.salt):
            raise FingerprintMismatchError(
                f"salt: {snapshot.path} was saved under another salt; pass that one", field="salt"
            )
        if not self._namespace and set(snapshot.reader.provenance) - {"exact"}:
            raise CorruptSnapshotError(
                f"{snapshot.path}: its states are not exact, and the text they are of is"
            )
        here = self._hashes(self._sequence.length)
        names = dict(zip(hashes, here))
        self._saved = SavedStates(self._context.format, snapshot, names)

    def fork(self, sequence: pager.Sequence) -> StateCursor:
        """The cursor of a fork with the same text; both share the states."""
        return StateCursor(
            self._context,
            sequence,
            base=self._base,
            live=self._live,
            saved=self._saved,
            namespace=self._namespace,
        )

    def close(self) -> None:
        """Call when the text is closed."""
        self._context.checkpoints.forget_owner(self)
        self.reset()
        self._saved = None

    def _hashes(self, position: int) -> list[bytes]:
        """Names of the text's chunk boundaries up to a committed position."""
        size = self._context.chunk_tokens
        tokens = self._sequence.tokens[: position // size * size]
        if not len(tokens):
            return []
        hashes = self._context.pager.chain_hashes(tokens, self._sequence.salt)
        return [one + self._namespace for one in hashes] if self._namespace else hashes

    def _bare(self, hashes: Sequence[bytes]) -> list[bytes]:
        """The text's own chain hashes."""
        end = -len(self._namespace) or None
        return [one[:end] for one in hashes]


def state_cursor(context: StateContext, sequence: pager.Sequence) -> StateCursor:
    """The cursor of a sequence that is empty or has adopted chunks with a state at their end.

    States of a text that is not exact are shared with its forks only.
    """
    sealed = sequence.ledger()[: sequence.length // context.chunk_tokens]
    exact = context.shared and all(chunk.provenance == "exact" for chunk in sealed)
    return StateCursor(context, sequence, namespace=b"" if exact else uuid.uuid4().bytes)
