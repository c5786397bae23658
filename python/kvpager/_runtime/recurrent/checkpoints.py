"""Checkpoints: states of recurrent layers at chunk boundaries, of all texts of an engine.

A state is a function of the tokens before it and is found by their chain hash: by the session that
made it, by its forks, and by every text with the same prefix. The number of checkpoints only
affects memory and speed: after a missing one, tokens are computed again, with the same bits.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass

from kvpager._model.seam.state import RecurrentState
from kvpager.errors import InvalidArgumentError


@dataclass
class Checkpoint:
    """One checkpoint.

    Attributes:
        state: the state, on the CPU.
        before: chain hash of the previous checkpoint of its text, if known; None: the text's
            beginning.
        used: time of its last use, on a counter.
    """

    state: RecurrentState
    before: bytes | None
    used: int

    @property
    def position(self) -> int:
        """Number of tokens before it."""
        return self.state.position


# Chooses the checkpoint to evict. REQUIRES: at least one may go.
Policy = Callable[[Mapping[bytes, Checkpoint], Collection[bytes]], bytes]


def _least_recently_used(held: Mapping[bytes, Checkpoint], may_go: Collection[bytes]) -> bytes:
    """The least recently used one."""
    return min(may_go, key=lambda key: held[key].used)


def _smallest_gap(held: Mapping[bytes, Checkpoint], may_go: Collection[bytes]) -> bytes:
    """The one whose removal leaves the smallest gap between its two neighbours.

    If it is the last one of its text, the gap ends at itself. Of equals the least recently used.
    """
    after: dict[bytes, int] = {}  # position of the next checkpoint of a text through it
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
    """Counters of checkpoints, over all texts.

    Attributes:
        checkpoint_states: states held now.
        checkpoint_bytes: their size.
        checkpoints_evicted: states evicted for others.
        checkpoints_not_kept: states for which there was no room.
        checkpoints_restored: how often a session went on from one, in memory or in a snapshot.
        state_tokens_recomputed: tokens computed again because a later state was missing.
    """

    checkpoint_states: int = 0
    checkpoint_bytes: int = 0
    checkpoints_evicted: int = 0
    checkpoints_not_kept: int = 0
    checkpoints_restored: int = 0
    state_tokens_recomputed: int = 0


class Checkpoints:
    """All checkpoints of one engine, within a byte budget. Thread-safe.

    The newest checkpoint of each open text is never evicted: without it the session would have to
    compute its whole text again. If none may be evicted, a new state is not kept.
    """

    def __init__(
        self, *, budget_bytes: int, every: int, chunk_tokens: int, policy: str = "smallest-gap"
    ) -> None:
        """`every`: chunks between two checkpoints. Raises InvalidArgumentError: unknown policy."""
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
        """Whether a state at this position should be kept."""
        return position > 0 and position % (self._every * self._size) == 0

    def put(self, owner: object, hashes: Sequence[bytes], state: RecurrentState) -> None:
        """Keeps a state, if there is room or eviction can make some.

        Args:
            owner: its text; from now on this is the owner's newest checkpoint.
            hashes: chain hashes of the text's chunks up to the state's position.
            state: an exact state at a chunk boundary.
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
        """The state with the chain hash `key`, from which the owner goes on; None if not held.

        From now on it is the owner's newest checkpoint.
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
        """Positions of a text's chunk boundaries that have a state, ascending."""
        with self._lock:
            return [(i + 1) * self._size for i, key in enumerate(hashes) if key in self._held]

    def states(self, hashes: Sequence[bytes]) -> dict[bytes, RecurrentState]:
        """The states of a text, by chain hash; does not count as a use."""
        with self._lock:
            return {key: self._held[key].state for key in hashes if key in self._held}

    def forget_owner(self, owner: object) -> None:
        """Call when a text is closed; its checkpoints stay while there is room."""
        with self._lock:
            self._newest.pop(owner, None)

    def note_restored(self) -> None:
        """Counts a session that goes on from a state in a snapshot."""
        with self._lock:
            self._counters.checkpoints_restored += 1

    def note_recomputed(self, tokens: int) -> None:
        """Counts tokens to compute again because a state is missing."""
        with self._lock:
            self._counters.state_tokens_recomputed += tokens

    def stats(self) -> dict[str, int]:
        """The counters by name."""
        with self._lock:
            return asdict(self._counters)

    def clear(self) -> None:
        """Drops all states."""
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
