"""The relations that make up the promise: each a function that compares bits with a cold run.

They are checked in this order; all others depend on the first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpager.errors import InvalidArgumentError
from kvpager.verify.check import Check
from kvpager.verify.relations.decoding import decoded, resealed, speculated
from kvpager.verify.relations.packing import packed
from kvpager.verify.relations.processes import kernel_tiers, rescored, restored
from kvpager.verify.relations.sessions import cold_again, forked, paged, trimmed, warm
from kvpager.verify.relations.stock import equal_to_transformers
from kvpager.verify.relations.training import trained

if TYPE_CHECKING:
    from kvpager.verify.subject import Subject


@dataclass(frozen=True)
class Relation:
    """A statement about bits, and the function that compares them.

    Attributes:
        name: short, as in the table.
        statement: one line that says which run equals a cold run.
        compare: makes the runs and compares them.
        of_all: promised with `exact="all"` alone.
        processes: whether it starts fresh processes.
        at_start: whether `verify_engine` checks it.
        once: whether it is checked under one selection alone: it is about kernels rather than
            what rows attend to, or compares with transformers, whose rows attend to everything.
    """

    name: str
    statement: str
    compare: Callable[[Subject, Check], None]
    of_all: bool = False
    processes: bool = False
    at_start: bool = False
    once: bool = False


RELATIONS: tuple[Relation, ...] = (
    Relation(
        "self-consistent",
        "a cold run gives the bits of another cold run",
        cold_again,
        at_start=True,
    ),
    Relation(
        "equal to transformers",
        "a cold run is, up to rounding, the forward of transformers with its own attention",
        equal_to_transformers,
        once=True,
    ),
    Relation(
        "warm",
        "a prompt whose beginning is reused gives the bits of computing all of it",
        warm,
        at_start=True,
    ),
    Relation(
        "decoded", "token by token gives the bits of a prefill", decoded, of_all=True, at_start=True
    ),
    Relation(
        "packed",
        "any row, any neighbour and any padding give the bits of a session alone",
        packed,
        of_all=True,
        at_start=True,
    ),
    Relation(
        "speculated",
        "proposed tokens give the text and the bits of plain decoding",
        speculated,
        of_all=True,
        at_start=True,
    ),
    Relation(
        "forked",
        "a fork and the session it is of go on with the bits of a cold run",
        forked,
        at_start=True,
    ),
    Relation(
        "trimmed",
        "a session that was cut back goes on with the bits of a cold run",
        trimmed,
        at_start=True,
    ),
    Relation("paged", "evictions and recalls through the smallest pool change no bit", paged),
    Relation("re-sealed", 'generated text is reusable to the bit with exact="reuse"', resealed),
    Relation(
        "restored",
        "a fresh process, another pool, tier or block order restore the same bits",
        restored,
        processes=True,
    ),
    Relation(
        "re-scored",
        "log-probabilities of generated tokens are those of scoring them in a fresh process",
        rescored,
        of_all=True,
        processes=True,
    ),
    Relation(
        "trained",
        "log-probabilities with gradients are those of a cold run",
        trained,
        of_all=True,
    ),
    Relation(
        "kernel tiers",
        "our kernels give the same bits in every instruction-set tier",
        kernel_tiers,
        processes=True,
        once=True,
    ),
)


def relation(name: str) -> Relation:
    """The relation of a name.

    Raises:
        InvalidArgumentError: there is none; names them all.
    """
    for known in RELATIONS:
        if known.name == name:
            return known
    raise InvalidArgumentError(
        f"relation {name!r} is not known; expected one of {', '.join(r.name for r in RELATIONS)}"
    )
