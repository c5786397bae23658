"""A small file beside a snapshot: whether it is pinned, and its own time to live.

The sidecar's modification time is the snapshot's last use; the manifest's is the time of the save.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass

from kvpager.stores.durable import read_json, write_atomically
from kvpager.stores.settings import NEVER, is_duration

SIDECAR_BYTES = 256  # more than any sidecar has


@dataclass(frozen=True)
class Sidecar:
    """The sidecar of one snapshot.

    Attributes:
        pinned: whether it never expires and is never evicted.
        ttl_seconds: its time to live; None: the store's; infinity: it never expires.
        error: why the file could not be read; then the snapshot counts as pinned, to be safe.
    """

    pinned: bool = False
    ttl_seconds: float | None = None
    error: str | None = None

    def write(self, path: str, last_used_ns: int, mode: int) -> None:
        """Writes the file, with the given last use as its time."""
        ttl = NEVER if self.ttl_seconds == math.inf else self.ttl_seconds
        text = json.dumps({"pinned": self.pinned, "ttl_seconds": ttl}) + "\n"
        write_atomically(path, text, mode)
        os.utime(path, ns=(last_used_ns, last_used_ns))

    @classmethod
    def read(cls, path: str) -> Sidecar:
        """Reads the file; returns the defaults if there is none."""
        try:
            values = read_json(path)
            pinned, ttl = values["pinned"], values["ttl_seconds"]
        except FileNotFoundError:
            return cls()
        except OSError as error:
            return cls(pinned=True, error=f"{path}: cannot be read: {error.strerror}")
        except (ValueError, TypeError, KeyError) as error:
            return cls(pinned=True, error=f"{path}: not the notes of a snapshot: {error}")
        number = is_duration(ttl)
        if ttl == NEVER:
            ttl, number = math.inf, True
        if type(pinned) is not bool or not (ttl is None or number):
            return cls(pinned=True, error=f"{path}: not the notes of a snapshot: {values!r}")
        return cls(pinned, ttl)
