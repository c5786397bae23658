"""The states of one text's recurrent layers: where it is, and where it can go back to."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvpager import fingerprint as fingerprints
from kvpager import pager
from kvpager.caches import NeedsCheckpoint, Ok, TrimAnswer
from kvpager.errors import CorruptSnapshotError
from kvpager.hf.state import EMPTY, RecurrentState
from kvpager.recurrent.checkpoints import Checkpoints
from kvpager.recurrent.saved_states import SavedStates, StateFormat, freeze_states
from kvpager.stores.companion import CompanionSnapshot
from kvpager.stores.companions import STATES


@dataclass(frozen=True)
class StateContext:
    """What the states of one engine's texts have in common.

    Attributes:
        pager: that holds the K/V beside them.
        checkpoints: states that are kept for all texts.
        format: how a state is saved.
        fingerprint: what states depend on.
        chunk_tokens: of the pager's layout.
        shared: whether texts may go on from states that others have computed.
    """

    pager: pager.Pager
    checkpoints: Checkpoints
    format: StateFormat
    fingerprint: Mapping[str, Any]
    chunk_tokens: int
    shared: bool


class StateCursor:
    """What recurrent layers know of a text, beside a sequence that holds its K/V.

        0        base             live
        | chunks | rows of a tail |
          ^ checkpoints, of all texts of the engine

    The *base* is the exact state at the last chunk boundary that the text has passed, *live* the
    one after its last committed row. Each holds for one position only and is void at any other, so
    that a commit or a cut of the sequence, whenever an exception strikes, leaves nothing wrong: a
    forward that fails has worked on a copy.
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
        """`namespace`: enters the name of each checkpoint; for states that are not exact."""
        self._context = context
        self._sequence = sequence
        self._base = base
        self._live = live
        self._saved = saved
        self._namespace = namespace
        self.kind = STATES  # of companion, when it is saved

    @property
    def length(self) -> int:
        """How far into the text it is."""
        return self._live.position

    def at(self, position: int) -> RecurrentState | None:
        """The state after the first `position` committed tokens, if it is held anywhere.

        One that a snapshot holds is read now. If it is damaged there, it is held no more.
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
        """The greatest position up to this one at which a state is held; 0 always is one."""
        return max(one for one in self.held(position) if one <= position)

    def held(self, position: int) -> set[int]:
        """Where states are held of the first `position` tokens, and maybe further on; 0 always."""
        hashes = self._hashes(position)
        held = {0, self._live.position, self._base.position}
        held.update(self._context.checkpoints.held(hashes))
        if self._saved is not None:
            held.update(self._saved.held(hashes))
        return held

    def trim(self, position: int) -> TrimAnswer:
        """Ok where a state is held, and a row can go on; else the nearest place where one is."""
        if position >= self.length:
            return Ok()
        nearest = self.nearest(position)
        if nearest != position:
            return NeedsCheckpoint(nearest)
        self.rewind(position)
        return Ok()

    def rewind(self, position: int) -> None:
        """Goes back to a position at which a state is held."""
        if self._live.position > position:
            self._live = self._base if self._base.position <= position else EMPTY
        if self._base.position > position:
            self._base = EMPTY

    def reset(self) -> None:
        """Forgets everything but what is kept for all texts."""
        self._base = self._live = EMPTY

    def advance(self, state: RecurrentState) -> None:
        """A forward has committed rows and left this state.

        At a chunk boundary it is exact, unless the text is not: no decoded row is sealed.
        """
        self._live = state
        if state.position % self._context.chunk_tokens:
            return
        self._base = state
        if self._context.checkpoints.due(state.position):
            self.keep_base()

    def keep_base(self) -> None:
        """Makes the base a checkpoint, as where a prompt ends that others may begin with."""
        if self._base.position and self._base.position <= self._sequence.length:
            self._context.checkpoints.put(self, self._hashes(self._base.position), self._base)

    def freeze(self, upto: int) -> CompanionSnapshot | None:
        """What is held of the first `upto` tokens, for a save; None if that is nothing."""
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
        )

    def attach(self, snapshot: pager.SnapshotInfo, hashes: Sequence[bytes]) -> None:
        """Goes back to what `freeze` kept as well, from now on.

        Args:
            snapshot: of the states, in today's terms.
            hashes: chain hashes of the text's chunks as the primary's snapshot has them; under
                another fingerprint they are others here.

        Raises:
            PagerError: it cannot be used; nothing was changed.
        """
        fingerprints.compare(
            self._context.fingerprint,
            snapshot.fingerprint,
            on_mismatch="approximate" if self._namespace else "refuse",
            source=snapshot.path,
        )
        if not self._namespace and set(snapshot.reader.provenance) - {"exact"}:
            raise CorruptSnapshotError(
                f"{snapshot.path}: its states are not exact, and the text they are of is"
            )
        here = self._hashes(self._sequence.length)
        names = dict(zip(hashes, here))
        self._saved = SavedStates(self._context.format, snapshot, names)

    def fork(self, sequence: pager.Sequence) -> StateCursor:
        """Those of a fork with the same text; states are shared."""
        return StateCursor(
            self._context,
            sequence,
            base=self._base,
            live=self._live,
            saved=self._saved,
            namespace=self._namespace,
        )

    def close(self) -> None:
        """The text is not in use any more."""
        self._context.checkpoints.forget_owner(self)
        self.reset()
        self._saved = None

    def _hashes(self, position: int) -> list[bytes]:
        """Names of the text's chunk boundaries up to a position that is committed."""
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
    """Of a sequence at whose beginning alone, or after whose adopted chunks, a state is held.

    States of a text that is not exact are its own: whoever shares them shares the sequence.
    """
    sealed = sequence.ledger()[: sequence.length // context.chunk_tokens]
    exact = context.shared and all(chunk.provenance == "exact" for chunk in sealed)
    return StateCursor(context, sequence, namespace=b"" if exact else uuid.uuid4().bytes)
