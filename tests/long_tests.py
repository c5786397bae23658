"""Long tests: those that `make test` leaves to `make test-all`.

A test is long if it took more than LIMIT_S seconds of a processor, its own and its children's,
when tests were last timed (`make time-tests`), and no mutant needs it: of each mutant of the
catalogue, the cheapest of the tests that kill it stays in the fast suite. `long_tests.txt` lists
them, a test a line; a name without brackets stands for all of its cases. A long test that is named
on the command line runs.
"""

from __future__ import annotations

import resource
from collections import defaultdict
from pathlib import Path

import pytest

LIMIT_S = 0.6
KEPT_S = 10.0  # a test that takes longer is long also where a mutant needs it
LIST = Path(__file__).with_name("long_tests.txt")
TIMED = pytest.StashKey[float]()


def _cpu_s() -> float:
    """Seconds of a processor that this process and its ended children took."""
    usage = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in usage)


def _listed() -> set[str]:
    return {line for line in LIST.read_text().splitlines() if not line.startswith("#")}


def _name(nodeid: str) -> str:
    return nodeid.removeprefix("tests/")


def _function(name: str) -> str:
    return name.split("[")[0]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--time-tests", action="store_true", help=f"time the tests and write {LIST.name}"
    )


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if any("::" in argument for argument in config.args):
        return
    listed = _listed()
    for item in items:
        name = _name(item.nodeid)
        if name in listed or _function(name) in listed:
            item.add_marker("long")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    item.stash[TIMED] = _cpu_s()
    yield


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    result = yield
    if call.when == "teardown":
        result.get_result().cpu_s = _cpu_s() - item.stash[TIMED]


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--time-tests") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Timing(), "time-tests")


class Timing:
    """Collects what every test cost and writes the list."""

    def __init__(self) -> None:
        self.cost: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self.cost[_name(report.nodeid)] = report.cpu_s

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        long, survivors = choose(self.cost, killers())
        LIST.write_text(written(long, survivors, self.cost, not_run(self.cost)))
        terminalreporter.write_line(
            f"{len(long)} of {len(self.cost)} tests are long; the others take "
            f"{sum(cost for name, cost in self.cost.items() if name not in long):.0f} s, "
            f"all of them {sum(self.cost.values()):.0f} s"
        )


def killers() -> dict[str, list[str]]:
    """By mutant, the Python tests that kill it; those that C++ tests kill too are left out."""
    from mutants.catalogue import CATALOGUE

    return {
        mutant.name: list(mutant.killers)
        for mutant in CATALOGUE
        if not any(".cc::" in killer for killer in mutant.killers)
    }


def choose(cost: dict[str, float], killers: dict[str, list[str]]) -> tuple[set[str], list[str]]:
    """The long tests, and the mutants that only they kill."""
    cases = defaultdict(list)
    for name in cost:
        cases[_function(name)].append(name)
    long = {name for name, seconds in cost.items() if seconds > LIMIT_S}
    survivors = []
    for mutant, named in sorted(killers.items()):
        tests = [case for name in named for case in ([name] if name in cost else cases[name])]
        if not tests or any(name not in long for name in tests):
            continue
        cheapest = min(tests, key=lambda name: cost[name])
        if cost[cheapest] <= KEPT_S:
            long.discard(cheapest)
        else:
            survivors.append(mutant)
    return long, survivors


def not_run(cost: dict[str, float]) -> set[str]:
    """The lines of the list whose tests are still there and were not timed."""
    from mutants.mutant import ROOT, exists

    timed = {*cost, *map(_function, cost)}
    return {line for line in _listed() - timed if exists(line, ROOT)}


def written(
    long: set[str], survivors: list[str], cost: dict[str, float], kept: set[str] = frozenset()
) -> str:
    """The text of the list; `kept` are lines to keep as they are."""
    cases = defaultdict(set)
    for name in cost:
        cases[_function(name)].add(name)
    lines = {_function(name) if cases[_function(name)] <= long else name for name in long}
    head = f"# More than {LIMIT_S} s of a processor each. Written by `make time-tests`.\n"
    if survivors:
        head += f"# Mutants that no other test kills: {', '.join(survivors)}\n"
    return head + "".join(f"{line}\n" for line in sorted(lines | kept))
