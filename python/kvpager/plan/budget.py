"""The memory there is, the workload, and the margin that stays free."""

from __future__ import annotations

from dataclasses import dataclass

from kvpager.errors import InvalidArgumentError

MARGIN_SHARE = 16  # a sixteenth of a memory stays free,
LEAST_MARGIN = 256 << 20  # and at least this many bytes


@dataclass(frozen=True)
class Budget:
    """Bytes that model and pager may take.

    Attributes:
        device: of the memory that weights and pool are in. On a CPU that is all there is.
        host: for the arena on a GPU's host; on a CPU of no meaning.
        disk: for spilled chunks; 0: none.
    """

    device: int
    host: int = 0
    disk: int = 0


@dataclass(frozen=True)
class Workload:
    """What is to run at once: sessions of so many tokens each, answers included."""

    context: int
    sessions: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise InvalidArgumentError(f"{name} is {value}; expected 1 or more")


def margin_of(memory: int) -> int:
    """Bytes of a memory that stay free, for the framework, fragmentation and everything else."""
    return max(LEAST_MARGIN, memory // MARGIN_SHARE)
