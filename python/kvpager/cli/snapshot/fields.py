"""Fields of a fingerprint: what another value of each means to a restore."""

from __future__ import annotations

from collections.abc import Iterable

REFUSE, WAIVABLE = "refuse", "waivable"


def fingerprint_rules(names: Iterable[str]) -> dict[str, str]:
    """REFUSE or WAIVABLE, by name."""
    from kvpager.fingerprint import RULES  # loads torch, which most verbs can do without

    return {name: RULES[name].on_mismatch if name in RULES else REFUSE for name in names}
