"""The runtime: sessions of a model over a pager, in forwards of exactly M rows."""

from __future__ import annotations

from kvpager.runtime.engine import Engine
from kvpager.runtime.sampling import Sampling
from kvpager.runtime.saving import SaveHandle
from kvpager.runtime.score import Score
from kvpager.runtime.session import Session

__all__ = ["Engine", "Sampling", "SaveHandle", "Score", "Session"]
