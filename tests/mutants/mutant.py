"""One deliberate defect, and the tests that are there to find it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Mutant:
    """A change of one place in one file that breaks a promise.

    name: short, unique. breaks: the promise, as a user or DESIGN.md would say it. file: from the
    repository's root. old: occurs exactly once in it. new: what takes its place; it still compiles.
    killers: tests that must fail, from the tests folder: "model/test_x.py::test_y", with parameters
    in brackets to run one case alone, "python/test_x.py::TestY::test_z" in a class, or
    "cpp/kernels/x_test.cc::name of the test case".
    """

    name: str
    breaks: str
    file: str
    old: str
    new: str
    killers: tuple[str, ...]

    @property
    def native(self) -> bool:
        """Whether C++ has to be built."""
        return self.file.startswith("csrc/")

    def applied_to(self, text: str) -> str:
        """The file's text with the defect in it; ValueError where it does not apply."""
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"{self.name}: the old text occurs {count} times in {self.file}")
        if self.old == self.new:
            raise ValueError(f"{self.name}: the new text is the old one")
        return text.replace(self.old, self.new)

    def problems(self, root: Path = ROOT) -> list[str]:
        """Why it does not apply to the tree at `root`; empty if it does."""
        found = []
        try:
            self.applied_to((root / self.file).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            found.append(str(error))
        if not self.killers:
            found.append(f"{self.name}: no test is named")
        found += [f"{self.name}: no test {name}" for name in self.killers if not exists(name, root)]
        return found


def exists(test: str, root: Path = ROOT) -> bool:
    """Whether a test of that name is written in that file."""
    file, _, name = test.partition("::")
    path = root / "tests" / file
    if not path.is_file():
        return False
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".cc":
        return _case(text, name) is not None
    scope, _, function = name.partition("[")[0].rpartition("::")
    begin = re.search(rf"^class {re.escape(scope)}\b", text, re.MULTILINE) if scope else None
    if scope and begin is None:
        return False
    line = rf"^{'    ' if scope else ''}def {re.escape(function)}\("
    return re.compile(line, re.MULTILINE).search(text, begin.end() if begin else 0) is not None


def is_long_case(test: str, root: Path = ROOT) -> bool:
    """Whether a test case of C++, "file::name", is in the test suite `long`."""
    file, _, name = test.partition("::")
    found = _case((root / "tests" / file).read_text(encoding="utf-8"), name)
    return found is not None and found["suite"] == "long"


def _case(text: str, name: str) -> re.Match[str] | None:
    """Where a file of C++ defines a test case; its group `suite` is its test suite, if any."""
    text = re.sub(r'"\s*\n\s*"', "", text)  # a name on two lines
    macro = "(?:TEST_CASE|PAGER_TEST|DEVICE_TEST)"
    suite = r'(?:\*\s*doctest::test_suite\("(?P<suite>\w+)"\)\s*)?'
    return re.search(rf'{macro}\(\s*"{re.escape(name)}"\s*{suite}\)', text)
