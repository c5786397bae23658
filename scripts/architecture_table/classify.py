"""What an engine does with a model: accepts it, under which options, or refuses it, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from architecture_table.build import NotBuiltError, build
from kvpager import PagerConfig, PagerError
from kvpager._model.seam.recurrent import is_recurrent
from kvpager._model.seam.support import has_experts
from kvpager.verify import Subject, relation, verify
from kvpager.verify.check import NOT_RUN

ACCEPTED, UNDER, REFUSED, UNTOLD, WRONG, NOT_BUILT, ERROR = (
    "equal",
    "equal with options",
    "refused",
    "not compared",
    "WRONG",
    "not built",
    "ERROR",
)
DTYPES = ("float32", "bfloat16", "float16")
_CHUNK, _ROWS = 16, 32
_RELATIONS = ("equal to transformers", "warm", "decoded", "packed")
_EXPERTS = "batched_mm"


@dataclass(frozen=True)
class Row:
    """One architecture.

    Attributes:
        architecture: its model_type.
        model: class of the model.
        verdict: one of this module's words.
        options: what it takes to be accepted.
        reason: why it is refused, wrong or not built, in one line.
        figures: how far it is from transformers, and how far it may be.
    """

    architecture: str
    model: str
    verdict: str
    options: str = ""
    reason: str = ""
    figures: str = ""

    def to_json(self) -> dict[str, str]:
        """JSON-able."""
        return asdict(self)


def classify(model_type: str, dtype: str = "float32") -> Row:
    """Builds a tiny model of an architecture, opens engines over it and verifies it.

    Args:
        model_type: the architecture.
        dtype: one of DTYPES, of the model's weights.
    """
    try:
        model = build(model_type).to(getattr(torch, dtype))
    except NotBuiltError as error:
        return Row(model_type, "", NOT_BUILT, reason=one_line(error))
    name = type(model).__name__
    reason = ""
    for options, changes in _ways(model):
        try:
            return _verified(model_type, model, options, changes)
        except PagerError as error:  # noqa: PERF203
            reason = one_line(error)
        except Exception as error:  # which no engine may let through
            return Row(
                model_type, name, ERROR, options, one_line(f"{type(error).__name__}: {error}")
            )
    return Row(model_type, name, REFUSED, reason=reason.removeprefix(f"{name}: "))


def _ways(model: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Options to try, the most that is promised first."""
    reuse = 'exact="reuse"', {"exact": "reuse"}
    yield "", {}
    if is_recurrent(model):  # whose experts may be of any implementation
        yield reuse
        return
    experts = has_experts(model) and _set_experts(model)
    if experts:
        yield f"experts {_EXPERTS}", {}
    yield (f"experts {_EXPERTS}, {reuse[0]}", reuse[1]) if experts else reuse


def _set_experts(model: Any) -> bool:
    try:
        model.set_experts_implementation(_EXPERTS)
    except Exception:  # transformers does not say of which kind
        return False
    return True


def _verified(model_type: str, model: Any, options: str, changes: dict[str, Any]) -> Row:
    rows = None if is_recurrent(model) else _ROWS
    config = PagerConfig(
        pool_tokens=16 * _CHUNK, chunk_tokens=_CHUNK, rows=rows, host_bytes="64MiB", **changes
    )
    name = type(model).__name__
    with Subject(model, config, effort="start") as subject:
        report = verify(subject, [relation(each) for each in _RELATIONS])
    stock = report.outcome("equal to transformers")
    figures = "; ".join(str(measure) for measure in stock.measures)
    others = [each for each in report.outcomes if each is not stock]
    if stock.status == NOT_RUN and all(each.kept for each in others):
        return Row(model_type, name, UNTOLD, options, one_line(stock.reason))
    if not report.kept:
        return Row(model_type, name, WRONG, options, one_line(report.verdict()), figures)
    return Row(model_type, name, UNDER if options else ACCEPTED, options, "", figures)


def one_line(what: object) -> str:
    """Without line breaks, and not longer than a table bears."""
    words = " ".join(str(what).split())
    return words if len(words) <= 400 else words[:397] + "..."
