"""The runtime: sessions of a model over a pager, packed into forwards of proven row counts."""

from __future__ import annotations

from kvpager.runtime.agreement import Agreement
from kvpager.runtime.completion import Completion
from kvpager.runtime.engine import Engine
from kvpager.runtime.prompt_lookup import PromptLookup
from kvpager.runtime.request import Request
from kvpager.runtime.sampling import Sampling
from kvpager.runtime.saving import SaveHandle
from kvpager.runtime.scheduler import Scheduler
from kvpager.runtime.score import Score
from kvpager.runtime.session import Session
from kvpager.runtime.speculation import Proposer, SpeculationStats
from kvpager.runtime.stream import GeneratedToken

__all__ = [
    "Agreement",
    "Completion",
    "Engine",
    "GeneratedToken",
    "PromptLookup",
    "Proposer",
    "Request",
    "Sampling",
    "SaveHandle",
    "Scheduler",
    "Score",
    "Session",
    "SpeculationStats",
]
