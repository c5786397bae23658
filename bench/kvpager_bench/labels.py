"""Names in reports that both a question and its plot know."""

from __future__ import annotations

# residency_traffic
AGREE, INDEPENDENT = "8B, heads agree", "8B, heads independent"
PRINTED_POOL = 4096
# Of the plot: its label, the unit, and how misses, policy and recall are.
PLOTTED_WAYS = (
    ("chunks, scores, recall 4 (the pager)", "chunk", ("in place", "qk", 4)),
    ("chunks, nothing recalled", "chunk", ("in place", "qk", 0)),
    ("pages, scores", "page", ("in place", "qk", 4)),
    ("pages, LRU", "page", ("in place", "lru", 4)),
    ("pages, LRU, promoted before use", "page", ("promote", "lru", 0)),
)
# segments
NO_REPAIR = "none"
