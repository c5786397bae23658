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

Each was built tiny, with random weights in float32 and with short windows, and opened in an engine.
*equal* means: logits and K/V of a text longer than its windows and than several chunks are those of
transformers with its own attention, up to rounding, as `kvpager verify` measures it; and reusing,
decoding and packing give the bits of a cold run. Where options are named, it is so under them. A
model of another size, dtype or machine is proven again whenever an engine starts.

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
    lines += ["| architecture | model | verdict | options, or why |", "|---|---|---|---|"]
    for row in rows:
        why = "; ".join(filter(None, (row["options"], row["reason"]))).replace("|", "\\|")
        why = why.replace("<", "&lt;").replace(">", "&gt;")
        lines.append(f"| {row['architecture']} | {row['model']} | {row['verdict']} | {why} |")
    return "\n".join(lines) + "\n"
