"""docs/snapshot_attacks.md and the tests say the same: every number has its tests, and vice versa.

A test carries its numbers in a comment above it: `attack 7`, `attacks 1, 2`, `attacks 15 to 40`.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOG = ROOT / "docs" / "snapshot_attacks.md"
_MARK = re.compile(r"^(?:#|//) attacks? ([0-9][0-9, to]*)$")
_TEST = re.compile(r'^(?:def (test_\w+)\(|TEST_CASE\("(\w+)"\))')
_ROW = re.compile(r"^\| ([0-9]+) \|.*\| ([^|]*) \|$", re.MULTILINE)


def numbers_of(text):
    first, to, last = text.partition(" to ")
    if to:
        return range(int(first), int(last) + 1)
    return [int(n) for n in text.split(", ")]


def numbered_tests():
    """The names of the tests that carry each number."""
    found = {}
    sources = [*ROOT.glob("tests/hostile/test_*.py"), *ROOT.glob("tests/cpp/snapshot/*_test.cc")]
    for source in sources:
        pending = []
        for line in source.read_text(encoding="utf-8").splitlines():
            if mark := _MARK.match(line):
                pending = numbers_of(mark[1])
            elif test := _TEST.match(line):
                for n in pending:
                    found.setdefault(n, set()).add(test[1] or test[2])
                pending = []
        assert not pending, f"{source.name}: numbers above no test"
    return found


def logged():
    rows = _ROW.findall(LOG.read_text(encoding="utf-8"))
    numbers = [int(n) for n, _ in rows]
    assert len(numbers) == len(set(numbers)), "a number twice"
    return {int(n): set(re.findall(r"`(\w+)`", tests)) for n, tests in rows}


def test_every_attack_of_the_log_has_its_tests_and_every_test_is_in_the_log():
    assert logged() == numbered_tests()


def test_the_numbers_have_no_holes():
    assert sorted(logged()) == list(range(1, len(logged()) + 1))
