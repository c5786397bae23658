"""Names that the server gives."""

from __future__ import annotations

import secrets


def new_id(prefix: str) -> str:
    """A name that nobody can guess."""
    return prefix + secrets.token_hex(16)
