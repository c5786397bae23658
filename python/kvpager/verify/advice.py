"""Advice on the findings of a verification."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvpager.verify.check import DIFFERS, FAILED
from kvpager.verify.relations import RELATIONS
from kvpager.verify.report import Report

if TYPE_CHECKING:
    from kvpager._model.proof.shapes import ShapeReport
    from kvpager.engine import Engine

_SMALL = 16  # more decode rows than this cost noticeably more than one


def advice_for(report: Report, engine: Engine) -> list[str]:
    """Sentences on a finished report; `engine` is the subject's own."""
    return [*_on_relations(report, engine), *_on_shapes(report.shapes), *_on_speed(report, engine)]


def advice_on_refusal(model: Any, reason: str) -> list[str]:
    """Sentences on a model that an engine refuses."""
    advice = []
    if "experts" in reason:
        advice.append(
            'choose experts that treat each row alone: model.set_experts_implementation("batched_mm'
            '"), or --experts batched_mm here'
        )
    if "RoPE" in reason:
        advice.append(
            'choose frequencies that do not follow the longest row: rope_type "default", "linear", '
            '"llama3" or "yarn" in config.rope_parameters'
        )
    if "row" in reason and not advice:
        advice.append(
            "try one torch thread (--threads 1), rows that are a multiple of 64 (--rows 64), or "
            f"another dtype than {str(model.dtype).removeprefix('torch.')} (--dtype)"
        )
    return advice


def _on_relations(report: Report, engine: Engine) -> Iterator[str]:
    broken = {o.relation for o in report.outcomes if o.status in (DIFFERS, FAILED)}
    if "self-consistent" in broken:
        yield (
            "the same forward gives other bits each time: one thread (--threads 1) and the same "
            "libraries in all processes are the first things to try"
        )
        return
    if broken and engine.row_counts.smaller:
        yield 'forwards of fewer rows can be ruled out with --small-rows fixed (small_rows="fixed")'
    if broken and broken <= {relation.name for relation in RELATIONS if relation.of_all}:
        yield (
            'prompts and sealed chunks are exact as they are: exact="reuse" promises these alone, '
            "and decodes one row at a time"
        )
    if "kernel tiers" in broken:
        yield "use processors of one kind, or set KVPAGER_ISA to the same tier everywhere"


def _on_shapes(shapes: list[ShapeReport]) -> Iterator[str]:
    for shape in shapes:
        what = f"{shape.kind} {shape.in_features} x {shape.out_features} ({shape.modules[0]})"
        if shape.row_dependent:
            yield (
                f"{what}: bits depend on the row's index; set rows to a multiple of 64, or use one "
                "thread"
            )
        if shape.neighbour_dependent:
            yield (
                f"{what}: bits depend on other rows; for experts choose batched_mm, otherwise "
                "another dtype or architecture"
            )
    threads = sum(shape.thread_dependent is True for shape in shapes)
    if threads:
        yield (
            f"{threads} of {len(shapes)} shapes of layer have other bits with another number of "
            "threads: keep it the same in every process (threads=, or torch.set_num_threads)"
        )


def _on_speed(report: Report, engine: Engine) -> Iterator[str]:
    counts = engine.row_counts
    if engine.config.exact != "all" or counts.ladder[0] <= _SMALL:
        return
    on_cpu = engine.model.device.type == "cpu"
    if on_cpu and report.about["dtype"] == "float32" and not os.environ.get("MKL_CBWR"):
        yield (
            f"every forward has {counts.ladder[0]} rows or more: MKL_CBWR=AUTO,STRICT in the "
            "environment, before torch is loaded, gives float32 products one class of row counts"
        )
    yield (
        f"a lone session decodes in forwards of {counts.ladder[0]} rows: run several at once, or "
        'use exact="reuse" if re-scoring and speculation are not needed'
    )
