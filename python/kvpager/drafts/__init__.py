"""A draft model that guesses tokens for all texts of an engine."""

from __future__ import annotations

from kvpager.drafts.model import DraftModel

__all__ = ["DraftModel"]
