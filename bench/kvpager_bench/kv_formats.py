"""What K/V are kept in: the formats whose cost in quality is measured, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvpager import PagerConfig
from kvpager.errors import InvalidArgumentError

NATIVE = "native"


class UnknownFormatError(Exception):
    """No such format, or PagerConfig does not have it."""


@dataclass(frozen=True)
class Format:
    """name: in tables. fields: of the PagerConfig.

    saved: the dtype of a file in which what comes before the scored tokens was meanwhile.
    """

    name: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    saved: str | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """For a report."""
        return dict(self.fields) if self.saved is None else {"saved": self.saved}


FORMATS: Mapping[str, Format] = {
    kept.name: kept
    for kept in (
        Format(NATIVE),
        Format("bfloat16", {"kv_dtype": "bfloat16"}),
        Format("q8", {"kv_dtype": "q8"}),
        Format("q8 not rotated", {"kv_dtype": "q8", "kv_rotation": False}),
        Format("k8v4", {"kv_dtype": "k8v4"}),
        Format("q4", {"kv_dtype": "q4"}),
        Format("q4 not rotated", {"kv_dtype": "q4", "kv_rotation": False}),
        Format("q4 every layer", {"kv_dtype": "q4", "float_layers": ()}),
        Format("saved in q8", saved="q8"),
        Format("saved in q4", saved="q4"),
    )
}


def formats_of(names: Sequence[str]) -> tuple[Format, ...]:
    """The formats of these names behind the native one, in the order of FORMATS.

    Raises UnknownFormatError for a name that is none, and for a format that PagerConfig refuses.
    """
    for name in names:
        if name not in FORMATS:
            raise UnknownFormatError(f"format {name!r}; expected some of {', '.join(FORMATS)}")
    chosen = tuple(kept for kept in FORMATS.values() if kept.name in (NATIVE, *names))
    for kept in chosen:
        _require_known(kept)
    return chosen


def _require_known(kept: Format) -> None:
    known = {option.name for option in PagerConfig.options()}
    for name in kept.fields:
        if name not in known:
            raise UnknownFormatError(
                f"format {kept.name!r} sets PagerConfig.{name}, which this version does not have; "
                "name others with --formats"
            )
    try:
        PagerConfig(**kept.fields)
    except InvalidArgumentError as error:
        raise UnknownFormatError(
            f"format {kept.name!r}: {error}; name others with --formats"
        ) from error
