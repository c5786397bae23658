"""What became of every chunk of a session over time: where it was, when it was read."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvpager.stores.permissions import open_private

if TYPE_CHECKING:
    from kvpager.pager import Sequence

Tiers = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Episode:
    """A stretch of forwards, a prefill or one turn's questions, as [moments, chunks] arrays.

    tiers: TIER_* bits, 0 where the chunk did not exist yet. selected: read by a forward since the
    moment before. recalled: brought back into the pool since then. asked: (moment, chunk) of every
    needle asked for.
    """

    label: str
    tiers: Tiers
    selected: Flags
    recalled: Flags
    asked: list[tuple[int, int]] = field(default_factory=list)


class Trace:
    """Notes a sequence's residency when told to, and turns the notes into an Episode."""

    def __init__(self, label: str, sequence: Sequence) -> None:
        self._label = label
        self._sequence = sequence
        self._tiers: list[Tiers] = []
        self._selected: list[Flags] = []
        self._recalled: list[Flags] = []
        self._asked: list[tuple[int, int]] = []
        self._before = sequence.residency()

    def note(self) -> None:
        """One moment: how things are, and what happened since the note before."""
        now = self._sequence.residency()
        self._tiers.append(now["tiers"])
        self._selected.append(_grown(now["selected"], self._before["selected"]))
        self._recalled.append(_grown(now["recalled"], self._before["recalled"]))
        self._before = now

    def ask(self, chunk: int) -> None:
        """The next moment is when a needle in this chunk is asked for."""
        self._asked.append((len(self._tiers), chunk))

    def episode(self) -> Episode:
        """All notes so far."""
        return Episode(
            self._label,
            _table(self._tiers, np.uint8),
            _table(self._selected, np.bool_),
            _table(self._recalled, np.bool_),
            self._asked,
        )


def save_episodes(path: Path, episodes: list[Episode]) -> None:
    """Keeps episodes for another process; `load_episodes` is the inverse."""
    arrays: dict[str, Any] = {"labels": np.array([episode.label for episode in episodes])}
    for number, episode in enumerate(episodes):
        arrays[f"tiers{number}"] = episode.tiers
        arrays[f"selected{number}"] = episode.selected
        arrays[f"recalled{number}"] = episode.recalled
        arrays[f"asked{number}"] = np.array(episode.asked, np.int64).reshape(-1, 2)
    with open_private(path) as file:
        np.savez(file, **arrays)


def load_episodes(path: Path) -> list[Episode]:
    """What `save_episodes` kept."""
    with np.load(path) as arrays:
        return [
            Episode(
                str(label),
                arrays[f"tiers{number}"],
                arrays[f"selected{number}"],
                arrays[f"recalled{number}"],
                [(int(moment), int(chunk)) for moment, chunk in arrays[f"asked{number}"]],
            )
            for number, label in enumerate(arrays["labels"])
        ]


def _grown(now: npt.NDArray[Any], before: npt.NDArray[Any]) -> Flags:
    earlier = np.zeros_like(now)
    common = min(len(now), len(before))
    earlier[:common] = before[:common]
    grown: Flags = now > earlier
    return grown


def _table(rows: list[npt.NDArray[Any]], dtype: Any) -> npt.NDArray[Any]:
    table = np.zeros((len(rows), max(map(len, rows), default=0)), dtype)
    for moment, row in enumerate(rows):
        table[moment, : len(row)] = row
    return table
