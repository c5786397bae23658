"""The catalogue of mutants does not rot: each still applies, and the tests it names exist."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from mutants import __main__ as runner
from mutants.catalogue import CATALOGUE
from mutants.mutant import Mutant, exists
from mutants.workshop import BuildError, outcomes_in

KEPT_BY_TESTS = {"4", "5", "6", "7", "8", "9", "10", "11", "12", "13", "14"}


@pytest.mark.parametrize("mutant", CATALOGUE, ids=lambda mutant: mutant.name)
def test_every_mutant_applies_and_names_tests_that_exist(mutant):
    assert mutant.problems() == []


def test_names_are_unique():
    names = [mutant.name for mutant in CATALOGUE]
    assert len(set(names)) == len(names)


def test_every_invariant_that_tests_keep_has_a_mutant():
    numbers = {match[1] for m in CATALOGUE if (match := re.match(r"(\d+): ", m.breaks))}
    assert numbers >= KEPT_BY_TESTS


def sample(**changes):
    values = {
        "name": "sample",
        "breaks": "nothing",
        "file": "src.py",
        "old": "one",
        "new": "two",
        "killers": ("python/test_x.py::test_y",),
    }
    return Mutant(**{**values, **changes})


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "src.py").write_text("a = one\n")
    (tmp_path / "tests" / "python").mkdir(parents=True)
    (tmp_path / "tests" / "python" / "test_x.py").write_text("def test_y(case):\n    pass\n")
    (tmp_path / "tests" / "x_test.cc").write_text('TEST_CASE(\n    "rows, "\n    "and more") {}\n')
    return tmp_path


def test_a_mutant_that_does_not_apply_says_why(tree):
    assert sample().problems(tree) == []
    assert sample(killers=("python/test_x.py::test_y[case]",)).problems(tree) == []
    for change, reason in (
        ({"old": "none"}, "occurs 0 times in src.py"),
        ({"old": "a"}, None),
        ({"old": "e"}, None),
        ({"old": "n", "new": "n"}, "the new text is the old one"),
        ({"file": "gone.py"}, "gone.py"),
        ({"killers": ()}, "no test is named"),
        ({"killers": ("python/test_x.py::test_z",)}, "no test python/test_x.py::test_z"),
    ):
        problems = " ".join(sample(**change).problems(tree))
        assert problems == "" if reason is None else reason in problems
    (tree / "src.py").write_text("one one")
    assert "occurs 2 times" in sample().problems(tree)[0]


def test_a_test_case_is_found_on_the_lines_after_its_macro(tree):
    assert exists("x_test.cc::rows, and more", tree)
    assert not exists("x_test.cc::rows", tree)


def test_a_test_in_a_class_is_found_in_that_class_alone(tree):
    (tree / "tests" / "python" / "test_x.py").write_text(
        "def test_y():\n    pass\n\n\nclass TestZ:\n    def test_w(self):\n        pass\n"
    )
    assert exists("python/test_x.py::TestZ::test_w[one::two]", tree)
    assert not exists("python/test_x.py::test_w", tree)
    assert not exists("python/test_x.py::TestZ::test_y", tree)
    assert not exists("python/test_x.py::TestY::test_w", tree)


def test_the_reports_of_pytest_are_read_case_by_case():
    report = ET.fromstring(
        """<testsuites><testsuite>
        <testcase classname="tests.model.test_a" name="test_one[x]"/>
        <testcase classname="tests.model.test_a" name="test_one[y]"><failure/></testcase>
        <testcase classname="tests.model.test_a" name="test_two"/>
        <testcase classname="tests.model.test_a" name="test_three"><skipped/></testcase>
        <testcase classname="tests.model.test_b" name="test_two"><error/></testcase>
        <testcase classname="tests.model.test_b.TestC" name="test_two"/>
        </testsuite></testsuites>"""
    )
    nodes = [
        "model/test_a.py::test_one",
        "model/test_a.py::test_one[x]",
        "model/test_a.py::test_two",
        "model/test_a.py::test_three",
        "model/test_b.py::test_two",
        "model/test_b.py::test_none",
        "model/test_b.py::TestC::test_two",
    ]
    expected = ["failed", "passed", "passed", "not found", "failed", "not found", "passed"]
    assert list(outcomes_in(report, nodes).values()) == expected


class FakeWorkshop:
    """Has the results it is given."""

    def __init__(self, results=None, error=None):
        self.results, self.error = results, error
        self.open = False

    def changed(self, mutant):
        return self

    def __enter__(self):
        if self.error is not None:
            raise self.error
        self.open = True

    def __exit__(self, *_):
        self.open = False

    def run(self, tests, timeout_s):
        assert self.open
        return dict(zip(tests, self.results))


MUTANT = CATALOGUE[0]
SOUND = dict.fromkeys(MUTANT.killers, "passed")


@pytest.mark.parametrize(
    ("workshop", "sound", "outcome"),
    [
        (FakeWorkshop(["failed"] * len(SOUND)), SOUND, "killed"),
        (FakeWorkshop(["passed"] + ["failed"] * (len(SOUND) - 1)), SOUND, "SURVIVED"),
        (FakeWorkshop(["timed out"] * len(SOUND)), SOUND, "killed"),
        (FakeWorkshop(["failed"] * len(SOUND)), {}, "no verdict"),
        (FakeWorkshop(error=BuildError("syntax")), SOUND, "does not build"),
    ],
)
def test_only_a_mutant_that_every_named_test_finds_counts_as_killed(workshop, sound, outcome):
    finding = runner.judge(workshop, MUTANT, sound)
    assert finding.outcome == outcome
    assert MUTANT.name in runner.table([finding])
    assert outcome in runner.table([finding])
    assert bool(finding.detail) == (outcome != "killed")


def test_an_unknown_part_of_a_name_is_refused(capsys):
    with pytest.raises(SystemExit) as stopped:
        runner.main(["--only", "no such mutant"])
    assert stopped.value.code == 2
    assert "no such mutant" in capsys.readouterr().err


def test_what_needs_a_build_is_not_tried_with_the_installed_extension(capsys):
    native = next(mutant for mutant in CATALOGUE if mutant.native)
    with pytest.raises(SystemExit):
        runner.main(["--installed", "--only", native.name])
    assert "no mutant" in capsys.readouterr().err
    assert runner.main(["--installed", "--list"]) == 0
    assert native.name not in capsys.readouterr().out


@pytest.mark.deep
def test_a_mutant_of_python_is_tried_without_a_build(capsys, tmp_path):
    wanted = ["--only", "a-dead-writers-file-is-left", "--keep", str(tmp_path)]
    assert runner.main(["--installed", *wanted]) == 0
    assert "1 of 1 mutants killed" in capsys.readouterr().out
