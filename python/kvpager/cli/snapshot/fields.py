"""Fields of a fingerprint: what another value of each means to a restore."""

from __future__ import annotations

from collections.abc import Iterable

from kvpager.fingerprint_rules import RULES

REFUSE, WAIVABLE = "refuse", "waivable"


def fingerprint_rules(names: Iterable[str]) -> dict[str, str]:
    """REFUSE or WAIVABLE, by name."""
    return {name: RULES[name].on_mismatch if name in RULES else REFUSE for name in names}
