"""States of recurrent layers that are kept, at chunk boundaries, of all texts of an engine.

A state is a function of the tokens before it, so it is found by their chain hash: by the session
that made it, by its forks, and by any other whose text begins alike. How many are kept is a matter
of memory alone; what is missing costs tokens to compute again, and never a bit.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass

from kvpager.errors import InvalidArgumentError
from kvpager.hf.state import RecurrentState


@dataclass
class Checkpoint:
    """One state that is kept.

    Attributes:
        state: it, on the CPU.
        before: chain hash of the one before it along its text, as far as is known; None: the
            text's beginning.
        used: when it was last asked for; a count that goes up.
    """

    state: RecurrentState
    before: bytes | None
    used: int

    @property
    def position(self) -> int:
        """Tokens behind it."""
        return self.state.position


# Chooses which of some checkpoints goes. REQUIRES: some may go.
Policy = Callable[[Mapping[bytes, Checkpoint], Collection[bytes]], bytes]


def _least_recently_used(held: Mapping[bytes, Checkpoint], may_go: Collection[bytes]) -> bytes:
    """The one that nobody asked for since longest ago."""
    return min(may_go, key=lambda key: held[key].used)


def _smallest_gap(held: Mapping[bytes, Checkpoint], may_go: Collection[bytes]) -> bytes:
    """The one without which the way from the one before to the one after it is shortest.

    Where a text ends at a checkpoint, the way is to itself. Of equals the one not used for longest.
    """
    after: dict[bytes, int] = {}  # position of the nearest one whose text goes through it
    for checkpoint in held.values():
        if (one := checkpoint.before) is not None:
            after[one] = min(after.get(one, checkpoint.position), checkpoint.position)

    def gap(key: bytes) -> int:
        start = 0 if (one := held[key].before) is None else held[one].position
        return after.get(key, held[key].position) - start

    return min(may_go, key=lambda key: (gap(key), held[key].used))


POLICIES: Mapping[str, Policy] = {
    "smallest-gap": _smallest_gap,
    "lru": _least_recently_used,
}


@dataclass
class CheckpointCounters:
    """What checkpoints have cost and saved, of all texts.

    Attributes:
        checkpoint_states: states held now.
        checkpoint_bytes: bytes of them.
        checkpoints_evicted: states that gave way to others.
        checkpoints_not_kept: states for which there was no room.
        checkpoints_restored: times a session went on from one, or from one in a snapshot.
        state_tokens_recomputed: tokens computed again because no state was held behind them.
    """

    checkpoint_states: int = 0
    checkpoint_bytes: int = 0
    checkpoints_evicted: int = 0
    checkpoints_not_kept: int = 0
    checkpoints_restored: int = 0
    state_tokens_recomputed: int = 0


class Checkpoints:
    """Kept states of one engine, in a byte budget. Thread-safe.

    The newest checkpoint of each text in use never goes: a session without it would have to begin
    anew. Where nothing may go, a new state is not kept.
    """

    def __init__(
        self, *, budget_bytes: int, every: int, chunk_tokens: int, policy: str = "smallest-gap"
    ) -> None:
        """`every`: chunks from one to the next. Raises InvalidArgumentError: unknown policy."""
        if policy not in POLICIES:
            raise InvalidArgumentError(
                f"checkpoint_policy is {policy!r}; expected one of {', '.join(map(repr, POLICIES))}"
            )
        self._policy = POLICIES[policy]
        self._budget = budget_bytes
        self._every = every
        self._size = chunk_tokens
        self._held: dict[bytes, Checkpoint] = {}
        self._newest: weakref.WeakKeyDictionary[object, bytes] = weakref.WeakKeyDictionary()
        self._clock = 0
        self._lock = threading.Lock()
        self._counters = CheckpointCounters()

    def due(self, position: int) -> bool:
        """Whether a state at this position is one of those that are to be kept."""
        return position > 0 and position % (self._every * self._size) == 0

    def put(self, owner: object, hashes: Sequence[bytes], state: RecurrentState) -> None:
        """Keeps a state, if there is room or can be made.

        Args:
            owner: whose text it is; from here on this is its newest checkpoint.
            hashes: chain hashes of the text's chunks up to the state's position, which they end at.
            state: exact; at a chunk boundary.
        """
        key = hashes[-1]
        with self._lock:
            before = next((one for one in reversed(hashes[:-1]) if one in self._held), None)
            self._clock += 1
            if key in self._held:
                self._newest[owner] = key
                self._held[key].used, self._held[key].before = self._clock, before
                return
            others = {held for other, held in self._newest.items() if other is not owner}
            needed = state.nbytes + sum(self._held[held].state.nbytes for held in others)
            if needed > self._budget:
                self._counters.checkpoints_not_kept += 1
                return
            self._newest[owner] = key
            self._held[key] = Checkpoint(state.to("cpu"), before, self._clock)
            self._counters.checkpoint_states += 1
            self._counters.checkpoint_bytes += state.nbytes
            while self._counters.checkpoint_bytes > self._budget:
                self._drop(self._policy(self._held, self._held.keys() - others - {key}))
                self._counters.checkpoints_evicted += 1

    def get(self, owner: object, key: bytes) -> RecurrentState | None:
        """The state after the tokens that `key` is the chain hash of, which its owner goes on from.

        From here on it is the owner's newest one.
        """
        with self._lock:
            found = self._held.get(key)
            if found is None:
                return None
            self._clock += 1
            found.used = self._clock
            self._newest[owner] = key
            self._counters.checkpoints_restored += 1
            return found.state

    def held(self, hashes: Sequence[bytes]) -> list[int]:
        """Which of a text's chunk boundaries have a state: positions, ascending."""
        with self._lock:
            return [(i + 1) * self._size for i, key in enumerate(hashes) if key in self._held]

    def states(self, hashes: Sequence[bytes]) -> dict[bytes, RecurrentState]:
        """What is held of a text, by chain hash; changes nothing."""
        with self._lock:
            return {key: self._held[key].state for key in hashes if key in self._held}

    def forget_owner(self, owner: object) -> None:
        """Its text is not in use any more; its checkpoints stay while there is room."""
        with self._lock:
            self._newest.pop(owner, None)

    def note_restored(self) -> None:
        """A session goes on from a state that a snapshot holds."""
        with self._lock:
            self._counters.checkpoints_restored += 1

    def note_recomputed(self, tokens: int) -> None:
        """Tokens are to be computed again for want of a state."""
        with self._lock:
            self._counters.state_tokens_recomputed += tokens

    def stats(self) -> dict[str, int]:
        """The counters by name."""
        with self._lock:
            return asdict(self._counters)

    def clear(self) -> None:
        """Forgets all states."""
        with self._lock:
            self._held.clear()
            self._newest.clear()
            self._counters.checkpoint_states = self._counters.checkpoint_bytes = 0

    def _drop(self, key: bytes) -> None:
        dropped = self._held.pop(key)
        for checkpoint in self._held.values():
            if checkpoint.before == key:
                checkpoint.before = dropped.before
        self._counters.checkpoint_states -= 1
        self._counters.checkpoint_bytes -= dropped.state.nbytes
