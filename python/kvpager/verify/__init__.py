"""The promise, checked: every way to the same tokens gives the bits of a cold run.

    with Subject(model, PagerConfig(pool_tokens=2048)) as subject:
        report = verify(subject)
    print(report)

`kvpager verify` is this as a command, and `Engine(verify=verify_engine)` a short form of it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpager.verify.bits import Comparison, Difference, compare_bits
    from kvpager.verify.check import Outcome
    from kvpager.verify.relations import RELATIONS, Relation, relation
    from kvpager.verify.report import Report
    from kvpager.verify.run import check_relation, verify, verify_engine, verify_selections
    from kvpager.verify.subject import Subject

__all__ = [
    "RELATIONS",
    "Comparison",
    "Difference",
    "Outcome",
    "Relation",
    "Report",
    "Subject",
    "check_relation",
    "compare_bits",
    "relation",
    "verify",
    "verify_engine",
    "verify_selections",
]

# Loaded when first used: comparing bits needs no model, and a runtime that is being made may ask.
_HOME = {
    "RELATIONS": "relations",
    "Comparison": "bits",
    "Difference": "bits",
    "Outcome": "check",
    "Relation": "relations",
    "Report": "report",
    "Subject": "subject",
    "check_relation": "run",
    "compare_bits": "bits",
    "relation": "relations",
    "verify": "run",
    "verify_engine": "run",
    "verify_selections": "run",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
