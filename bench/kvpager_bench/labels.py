"""Names in reports that both a question and its plot know."""

from __future__ import annotations

# residency_traffic
AGREE, INDEPENDENT = "8B, heads agree", "8B, heads independent"
PRINTED_POOL = 4096
# segments
NO_REPAIR = "none"
