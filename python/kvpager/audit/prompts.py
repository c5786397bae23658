"""Texts of a wanted length that no server has seen."""

from __future__ import annotations

import random

_SYLLABLES = ("al", "bor", "cen", "dri", "el", "fa", "gur", "hin", "is", "jo", "kel", "lum", "mar")
_PLACES = ("the attic", "the cellar", "the garage", "the hall", "the kitchen", "the library")


def make_prompt(chance: random.Random, records: int) -> str:
    """A register of `records` lines that differ, and a question about an early one.

    The text begins with a number of 64 bits, so that no other text has a beginning in common with
    it. The answer depends on keys and values from all over the text.
    """
    names = [_name(chance) for _ in range(records)]
    lines = [
        f"{name} keeps box {chance.randrange(1000, 10000)} in {chance.choice(_PLACES)}."
        for name in names
    ]
    asked = names[chance.randrange(max(1, records // 2))]
    return "\n".join([f"Register {chance.getrandbits(64):016x}", *lines, f"{asked} keeps box"])


def _name(chance: random.Random) -> str:
    first, last = ("".join(chance.choices(_SYLLABLES, k=2)).title() for _ in range(2))
    return f"{first} {last}"
