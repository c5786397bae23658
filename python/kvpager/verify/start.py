"""The short verification of an engine that has just been made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpager.errors import VerificationError
from kvpager.verify.relations import RELATIONS
from kvpager.verify.report import Report
from kvpager.verify.run import verify
from kvpager.verify.subject import Subject

if TYPE_CHECKING:
    from kvpager.engine import Engine


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
            "has advice, verify=False uses the engine nevertheless",
            report=report,
        )
    return report
