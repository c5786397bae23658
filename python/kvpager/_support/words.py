"""Formats numbers for people."""

from __future__ import annotations

_MINUTE, _HOUR, _DAY = 60, 3600, 86400


def byte_size(count: float) -> str:
    """512 B, 4.0 KiB, 64.2 MiB, 1.5 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def byte_rate(count: float, seconds: float) -> str:
    """Decimal megabytes per second, as storage is sold: 1,430 MB/s."""
    return f"{count / 1e6 / max(seconds, 1e-9):,.0f} MB/s"


def duration(seconds: float) -> str:
    """41 ms, 7.60 s."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def span(seconds: float) -> str:
    """A time long past or far ahead, in its largest unit: 12s, 5m, 3h, 9d."""
    for unit, name in ((_DAY, "d"), (_HOUR, "h"), (_MINUTE, "m")):
        if seconds >= unit:
            return f"{seconds / unit:.0f}{name}"
    return f"{max(0.0, seconds):.0f}s"


def counted(count: int, noun: str) -> str:
    """1 chunk, 2,048 chunks."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
