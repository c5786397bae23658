"""Which of several servers should answer a request: the one that holds most of its prompt."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable

# Fields that name what a server may hold, and those whose items begin the prompt.
_NAMES = ("previous_response_id", "session_id", "prompt_cache_key", "conversation")
_ITEMS = ("messages", "input", "prompt")


def beginnings_of(body: bytes, tenant: str) -> tuple[tuple[str, float], ...]:
    """Digests of what a request's prompt begins with, and the share of the prompt that each is.

    tenant: tells tenants apart; any text that a tenant's requests have in common.
    """
    try:
        fields = json.loads(body)
    except ValueError:
        return ()
    if not isinstance(fields, dict):
        return ()
    names = [(name, fields[name]) for name in _NAMES if fields.get(name)]
    found = [(_digest(tenant, *map(str, name)), 1.0) for name in names]
    for name in _ITEMS:
        items = fields.get(name)
        items = items if isinstance(items, list) else [] if items is None else [items]
        texts = [json.dumps(item, sort_keys=True) for item in items]
        total, so_far, chain = sum(map(len, texts)) or 1, 0, _digest(tenant, name)
        for text in texts:
            chain, so_far = _digest(chain, text), so_far + len(text)
            found.append((chain, so_far / total))
    return tuple(found)


def preference(
    beginnings: Iterable[tuple[str, float]], held: Collection[str], running: int, most: int
) -> float:
    """Share of a prompt that a server holds, less the share of its places that are taken.

    Args:
        beginnings: of the prompt, as `beginnings_of` returns them.
        held: digests of beginnings that the server holds.
        running: requests that it runs.
        most: requests that it runs at once.
    """
    share = max((share for digest, share in beginnings if digest in held), default=0.0)
    return share - running / max(1, most)


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=12).hexdigest()
