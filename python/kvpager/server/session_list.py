"""A tenant's conversations, in memory and saved, as one list."""

from __future__ import annotations

import time
from typing import Any

from kvpager.server.conversations import Conversations, Kept
from kvpager.server.schema.sessions import SessionInfo
from kvpager.stores import StoreEntry


def listed(source: Conversations) -> list[SessionInfo]:
    """A tenant's conversations, the one used last first."""
    saved = source.entries()
    infos = []
    for name in {*source.names(), *saved}:
        kept = source.kept(name)
        if kept is not None or name in saved:
            infos.append(_info(name, kept, saved.get(name)))
    return sorted(infos, key=lambda info: -info.last_used)


def _info(name: str, kept: Kept | None, entry: StoreEntry | None) -> SessionInfo:
    tier: Any = "memory+disk" if kept and entry else "memory" if kept else "disk"
    used = max(kept.used if kept else 0.0, entry.last_used if entry else 0.0)
    tokens = kept.length if kept else entry.tokens if entry else 0
    return SessionInfo(
        id=name,
        tokens=tokens,
        bytes=entry.bytes_own if entry else 0,
        bytes_shared=entry.bytes_shared if entry else 0,
        tier=tier,
        created=entry.created if entry else kept.created if kept else used,
        last_used=used,
        age_s=max(0.0, time.time() - used),
        pinned=bool(entry and entry.pinned),
        ttl_s=entry.ttl_seconds if entry else None,
        error=entry.error if entry else None,
    )
