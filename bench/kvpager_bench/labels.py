"""Names in reports that both a question and its picture know."""

from __future__ import annotations

# residency: what a row follows
PREFILL, QUESTION = "prefill", "question"
# segments
NO_REPAIR = "none"
# quality_formats: who keeps the K/V
KVPAGER = "kvpager"
