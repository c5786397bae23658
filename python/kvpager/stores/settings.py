"""The recorded settings of a directory store, for all who open it: STORE/store.json."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvpager.arguments import is_finite, is_one_of
from kvpager.errors import CorruptSnapshotError, InvalidArgumentError, UnsupportedVersionError
from kvpager.option_table import parse_bytes
from kvpager.stores.durable import read_json, write_atomically
from kvpager.stores.names import SETTINGS_FILE
from kvpager.stores.permissions import PRIVATE, parse_mode

if TYPE_CHECKING:
    from typing_extensions import TypeIs

STORE_VERSION = 1
UNLIMITED = "unlimited"
NEVER = "never"

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_DURATION = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]?)\s*")


@dataclass(frozen=True)
class StoreSettings:
    """Budget and time to live (None: unlimited), and permissions of new files."""

    byte_budget: int | None = None
    ttl_seconds: float | None = None
    mode: int = PRIVATE

    def updated(self, byte_budget: object, ttl: object, mode: object = None) -> StoreSettings:
        """A copy with the given values; None keeps the old one."""
        changed = self
        if byte_budget is not None:
            changed = replace(changed, byte_budget=parse_budget(byte_budget))
        if ttl is not None:
            changed = replace(changed, ttl_seconds=parse_ttl("ttl", ttl))
        if mode is not None:
            changed = replace(changed, mode=parse_mode("mode", mode))
        return changed

    def write(self, folder: str) -> None:
        """Makes these the store's, atomically."""
        values: dict[str, Any] = {
            "kvpager_store": STORE_VERSION,
            "byte_budget": self.byte_budget,
            "ttl_seconds": self.ttl_seconds,
        }
        if self.mode != PRIVATE:
            values["mode"] = f"{self.mode:o}"
        write_atomically(f"{folder}/{SETTINGS_FILE}", json.dumps(values) + "\n", self.mode)

    @classmethod
    def read(cls, folder: str) -> StoreSettings:
        """Reads the store's file.

        Raises:
            FileNotFoundError: the folder is no store.
            UnsupportedVersionError: a newer version made it.
            CorruptSnapshotError: the file is damaged.
        """
        path = f"{folder}/{SETTINGS_FILE}"
        try:
            values = read_json(path)
            version, budget, ttl = (
                values["kvpager_store"],
                values.get("byte_budget"),
                values.get("ttl_seconds"),
            )
            mode = parse_mode("mode", values.get("mode", PRIVATE))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CorruptSnapshotError(
                f"{path}: not the settings of a store ({error}); write "
                f'{{"kvpager_store": {STORE_VERSION}}} to it, or restore it from a copy'
            ) from error
        if type(version) is int and version > STORE_VERSION:
            raise UnsupportedVersionError(
                f"{path}: kvpager_store is {version}, this version knows {STORE_VERSION}; use the "
                "version of kvpager that made the store, or a newer one"
            )
        sound = (ttl is None or is_duration(ttl)) and (
            budget is None or (type(budget) is int and budget >= 0)
        )
        if version != STORE_VERSION or not sound:
            raise CorruptSnapshotError(
                f"{path}: holds {values!r}; expected kvpager_store {STORE_VERSION}, and "
                "byte_budget and ttl_seconds, each null or a number, 0 or more"
            )
        return cls(budget, ttl, mode)


def parse_budget(value: object) -> int | None:
    """Bytes from an int, "50GiB" or "unlimited"."""
    return None if is_one_of(value, (UNLIMITED,)) else parse_bytes("byte_budget", value)


def parse_ttl(field: str, value: object) -> float | None:
    """Seconds from a number, "90s", "30m", "12h", "7d", "2w" or "never".

    Raises:
        InvalidArgumentError: names `field`, for anything else.
    """
    if is_one_of(value, (NEVER,)):
        return None
    seconds: float = -1.0
    if is_duration(value):
        seconds = float(value)
    elif isinstance(value, str) and (match := _DURATION.fullmatch(value)) and match[2] in _UNITS:
        seconds = float(match[1]) * _UNITS[match[2]]
    if not math.isfinite(seconds) or seconds < 0:
        raise InvalidArgumentError(
            f'{field} is {value!r}; expected seconds, a duration such as "90s", "30m", "12h", "7d" '
            'or "2w", or "never"'
        )
    return seconds


def is_duration(value: object) -> TypeIs[float]:
    """Whether a value is a finite number, 0 or more, that a float has room for."""
    return is_finite(value) and value >= 0
