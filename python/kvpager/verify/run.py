"""Checks the relations of a subject one after another, self-consistency first."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from kvpager import __version__, _core
from kvpager._support.children import ChildError
from kvpager.config import Dense, TopK, describe_selection
from kvpager.errors import CapacityError, PagerError, StorageError, VerificationError
from kvpager.verify.check import (
    DIFFERS,
    FAILED,
    NOT_APPLICABLE,
    NOT_RUN,
    SAME,
    WITHIN,
    Check,
    DoesNotApplyError,
    NotRunError,
    Outcome,
    Status,
)
from kvpager.verify.relations import RELATIONS, Relation
from kvpager.verify.report import Report
from kvpager.verify.subject import Subject

if TYPE_CHECKING:
    from kvpager.engine import Engine


# Called with a relation's name, the selection, and how many are done, of how many in all.
OnRelation: TypeAlias = Callable[[str, str, int, int], object] | None

# Errors that are no statement about bits: the relation could not be checked here.
_NO_ROOM = (CapacityError, StorageError, OSError, MemoryError)
_NO_ROOM_NAMES = frozenset(kind.__name__ for kind in _NO_ROOM)


_MOVED = "calls moved"
_HELD_TENSORS, _MOST_BYTES = 64, 1 << 16


def verify(
    subject: Subject,
    relations: Iterable[Relation] = RELATIONS,
    *,
    on_relation: OnRelation = None,
) -> Report:
    """Compares every relation's bits with a cold run's.

    The first relation is self-consistency. If it does not hold or could not be checked, no other
    relation is: there are no bits to compare with.

    Args:
        subject: model, configuration and prompts.
        relations: to check; self-consistency is always checked first.
        on_relation: called before each one.

    Returns:
        The report; `report.kept` only if every relation was checked and holds.
    """
    start = time.perf_counter()
    report = Report(about=_about(subject))
    first, chosen = RELATIONS[0], [each for each in relations if each is not RELATIONS[0]]
    agreed = _announced_outcome(subject, first, on_relation, 0, 1 + len(chosen))
    report.outcomes.append(agreed)
    for done, relation in enumerate(chosen, start=1):
        if not agreed.kept:
            reason = f"there is nothing to compare with: {first.name} {agreed.status}"
            report.outcomes.append(_not_run(subject.selection, relation, reason))
        else:
            report.outcomes.append(
                _announced_outcome(subject, relation, on_relation, done, 1 + len(chosen))
            )
    report.lengths = sorted(subject.lengths)
    report.seconds = time.perf_counter() - start
    return report


def verify_selections(subject: Subject, *, on_relation: OnRelation = None) -> Report:
    """`verify`, a second pass, and under a top-k selection that has to choose, if rows see all.

    The second pass calls in another order. In the short form the relations that need
    fresh processes are checked once. `subject` and `on_relation` are as for `verify`.
    """
    start = time.perf_counter()
    report = verify(subject, on_relation=on_relation)
    with subject.again(_MOVED) as other, memory_moved(other.seed):
        second = verify(other, moved_order(other.seed), on_relation=on_relation)
    report.outcomes += second.outcomes
    report.lengths = sorted({*report.lengths, *second.lengths})
    report.seconds = time.perf_counter() - start
    if not isinstance(subject.config.selection, Dense):
        return report
    relations = [relation for relation in RELATIONS if not relation.once]
    if subject.effort != "full":
        relations = [relation for relation in relations if not relation.processes]
    sweep = subject.sweep
    chosen = TopK(chunks=2, sinks=sweep.chunk, recent=sweep.rows)
    try:
        with subject.under(selection=chosen) as other:
            third = verify(other, relations, on_relation=on_relation)
        report.outcomes += third.outcomes
        report.lengths = sorted({*report.lengths, *third.lengths})
    except PagerError as error:  # no engine under this selection
        report.outcomes += [
            _not_run(describe_selection(chosen), relation, _error_text(error))
            for relation in relations
        ]
    report.seconds = time.perf_counter() - start
    return report


def moved_order(seed: int) -> list[Relation]:
    """The relations that a second pass checks, in an order of its own.

    A defect that depends on earlier calls, on the content of freed blocks or on addresses shows in
    few calls, and always in the same ones if their order never changes.

    Leaves out relations that start fresh processes, which have no earlier calls.
    """
    again = [relation for relation in RELATIONS if not (relation.processes or relation.once)]
    order = again[1:]
    random.Random(seed).shuffle(order)
    if order == again[1:]:
        order.reverse()
    return [again[0], *order]


@contextmanager
def memory_moved(seed: int) -> Iterator[Sequence[torch.Tensor]]:
    """While open, memory is fragmented: tensors of odd sizes, and holes where some were freed."""
    draw = random.Random(seed)
    sizes = [draw.randrange(1, _MOST_BYTES) for _ in range(_HELD_TENSORS)]
    held = [torch.full((size,), 0xA5, dtype=torch.uint8, device="cpu") for size in sizes]
    draw.shuffle(held)
    del held[_HELD_TENSORS // 2 :]
    yield held


def _announced_outcome(
    subject: Subject, relation: Relation, on_relation: OnRelation, done: int, total: int
) -> Outcome:
    if on_relation is not None:
        on_relation(relation.name, subject.selection, done, total)
    return check_relation(subject, relation)


def check_relation(subject: Subject, relation: Relation) -> Outcome:
    """Checks one relation of the subject; an error that is no interrupt is part of the outcome."""
    if relation.of_all and not subject.all_exact:
        reason = f"not promised with exact={subject.config.exact!r}"
        return _outcome(subject.selection, relation, NOT_APPLICABLE, Check(), 0.0, reason)
    start = time.perf_counter()
    check = Check(subject.cold if subject.engine().core.facts.recurrence is not None else None)
    status, reason = SAME, ""
    try:
        relation.compare(subject, check)
    except DoesNotApplyError as error:
        status, reason = NOT_APPLICABLE, str(error)
    except (NotRunError, *_NO_ROOM) as error:
        status, reason = NOT_RUN, _error_text(error)
    except ChildError as error:
        unable = not error.kind or error.kind in _NO_ROOM_NAMES
        status, reason = (NOT_RUN if unable else FAILED), str(error)
    except Exception as error:  # a refusal or a crash breaks the promise
        status, reason = FAILED, _error_text(error)
    if not check.comparison.same:  # whatever came afterwards
        status = DIFFERS
    elif check.broken:
        status, reason = FAILED, check.broken
    elif status == SAME and check.measures and not check.comparison.elements:
        status = WITHIN
    elif status == SAME and not check.comparison.elements:
        status, reason = NOT_RUN, "nothing was compared"
    seconds = time.perf_counter() - start
    return _outcome(subject.selection, relation, status, check, seconds, reason)


def _not_run(selection: str, relation: Relation, reason: str) -> Outcome:
    return _outcome(selection, relation, NOT_RUN, Check(), 0.0, reason)


def _outcome(
    selection: str,
    relation: Relation,
    status: Status,
    check: Check,
    seconds: float,
    reason: str,
) -> Outcome:
    return Outcome(
        relation=relation.name,
        statement=relation.statement,
        selection=selection,
        status=status,
        reason=reason,
        comparison=check.comparison,
        cases=check.cases,
        notes=(*check.notes, *map(str, check.measures)),
        seconds=seconds,
        measures=tuple(check.measures),
    )


def _error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _about(subject: Subject) -> dict[str, Any]:
    engine = subject.engine()
    return {
        "version": __version__,
        "architecture": type(subject.model).__name__,
        "dtype": str(subject.model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "device": subject.device,
        "isa": _core.isa_name(),
        "torch": torch.__version__,
        "exact": subject.config.exact,
        "rows": engine.rows,
        "row_counts": list(engine.row_counts.ladder),
        "head_rows": list(engine.row_counts.head),
        "chunk_tokens": subject.config.chunk_tokens,
        "effort": subject.effort,
        "prompt_tokens": len(subject.prompt),
    }


def verify_engine(engine: Engine) -> Report:
    """Checks the relations that need no other process or engine; takes about a second.

    Leaves chunks and counters behind: reset the pager afterwards.

    Raises:
        InvalidArgumentError: the engine promises nothing (`exact=False`).
        VerificationError: a relation does not hold, or could not be checked; `.report` says all.
    """
    with Subject(engine.model, engine.config, effort="start", engine=engine) as subject:
        report = verify(subject, [relation for relation in RELATIONS if relation.at_start])
    if not report.kept:
        raise VerificationError(
            f"{type(engine.model).__name__} does not keep the promise of exact="
            f"{engine.config.exact!r} here: {report.verdict()}; `kvpager verify` tells more and "
            "has advice, verify=None uses the engine nevertheless",
            report=report,
        )
    return report
