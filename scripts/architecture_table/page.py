"""The page of the documentation that shows the table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

DOCS = Path(__file__).resolve().parents[2] / "docs"

_HEAD = """\
# Architectures

What kvpager does with every architecture of `AutoModelForCausalLM` in transformers {release}:
{counts}.

Each was built tiny, with random weights and with short windows, and opened in an engine, once in
each of three dtypes; the counts are of float32.
*equal* means: logits and K/V of a text longer than its windows and than several chunks are those of
transformers with its own attention, up to rounding, as `kvpager verify` measures it; and reusing,
decoding and packing give the bits of a cold run. Where options are named, it is so under them.
*not compared*: so they do, and rounding in this dtype moves the model's logits too far for them to
be compared with transformers'. A model of another size, dtype or machine is proven again whenever
an engine starts.

This page is made by `python scripts/architectures.py`, and tests hold it to what the code does.
"""


def text_architectures() -> list[str]:
    """Every model_type that AutoModelForCausalLM knows, in order."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def page(told: Mapping[str, Any]) -> str:
    """Markdown of the table's JSON."""
    rows = told["architectures"]
    counts = Counter(row["verdict"] for row in rows)
    words = ", ".join(f"{number} {verdict}" for verdict, number in counts.most_common())
    lines = [_HEAD.format(release=told["transformers"], counts=words)]
    lines += [
        "| architecture | model | float32 | bfloat16 | float16 | options, or why |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        found = [row, *(row.get(dtype) for dtype in ("bfloat16", "float16"))]
        verdicts = " | ".join("not tried" if each is None else each["verdict"] for each in found)
        lines.append(f"| {row['architecture']} | {row['model']} | {verdicts} | {_why(row)} |")
    return "\n".join(lines) + "\n"


def _why(row: Mapping[str, Any]) -> str:
    """Options and reasons, in float32 and, where these differ, in other dtypes."""
    first = _words(row)
    told = [first]
    for dtype in ("bfloat16", "float16"):
        words = _words(row[dtype]) if dtype in row else first
        # Numbers within a reason differ with the dtype, and say the same.
        if words.split(":")[0] != first.split(":")[0]:
            told.append(f"{dtype}: {words or 'no options'}")
    why = "; ".join(filter(None, told)).replace("|", "\\|")
    return why.replace("<", "&lt;").replace(">", "&gt;")


def _words(found: Mapping[str, str]) -> str:
    return "; ".join(filter(None, (found["options"], found["reason"])))
