"""One relation: its name, what it says, and how it is checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpager.verify.check import Check

if TYPE_CHECKING:
    from kvpager.verify.subject import Subject


@dataclass(frozen=True)
class Relation:
    """A statement about bits, and the function that compares them.

    Attributes:
        name: short, as in the table.
        statement: the same in a line; what it says is equal to a cold run.
        compare: makes the runs and compares them.
        of_all: promised with `exact="all"` alone.
        processes: whether it starts fresh processes.
        at_start: whether `Engine(verify=True)` checks it.
        of_kernels: about our kernels rather than what rows attend to: checked once.
        up_to_rounding: compared with transformers, whose rows attend to everything: checked once.
    """

    name: str
    statement: str
    compare: Callable[[Subject, Check], None]
    of_all: bool = False
    processes: bool = False
    at_start: bool = False
    of_kernels: bool = False
    up_to_rounding: bool = False
