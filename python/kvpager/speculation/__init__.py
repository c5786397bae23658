"""Cheap guesses of the next tokens, and records of how many the model accepted."""

from __future__ import annotations

from kvpager.speculation.prompt_lookup import PromptLookup
from kvpager.speculation.speculation import Proposer, SpeculationStats

__all__ = ["PromptLookup", "Proposer", "SpeculationStats"]
