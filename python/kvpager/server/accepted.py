"""Responses that were accepted to be computed in the background, on disk until a snapshot has them.

So that one which a drain or a kill cuts off is found afterwards, incomplete.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

MOST = 1024  # of a tenant; the oldest ones go
STOPPED = {"reason": "server_stopped"}


class Accepted:
    """Records of responses, a file each. Any thread may use it; one at a time for one response."""

    def __init__(self, folder: str | None) -> None:
        """folder: of the tenants' stores; None: nothing is written."""
        self._folder = None if folder is None else Path(folder) / ".responses"

    def write(self, tenant: str, response: dict[str, Any], input_items: list[Any]) -> None:
        """Keeps a response as it is now. Raises OSError."""
        path = self._path(tenant, response["id"])
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        half = path.with_suffix(".half")
        with os.fdopen(os.open(half, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump({"response": response, "input_items": input_items}, file)
        half.replace(path)
        known = sorted(path.parent.glob("*.json"), key=lambda one: one.stat().st_mtime_ns)
        for old in known[:-MOST]:
            old.unlink(missing_ok=True)

    def read(self, tenant: str, response_id: str) -> dict[str, Any] | None:
        """The response and its input items; one that nobody computes any more is incomplete."""
        path = self._path(tenant, response_id)
        if path is None:
            return None
        with contextlib.suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads(path.read_text())
            response = found["response"]
            if response["status"] == "in_progress":
                response |= {"status": "incomplete", "incomplete_details": STOPPED}
            return found
        return None

    def remove(self, tenant: str, response_id: str) -> bool:
        """Forgets a response; whether it was known."""
        path = self._path(tenant, response_id)
        if path is None or not path.exists():
            return False
        path.unlink(missing_ok=True)
        return True

    def _path(self, tenant: str, response_id: str) -> Path | None:
        return None if self._folder is None else self._folder / tenant / f"{response_id}.json"
