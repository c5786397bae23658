"""Long tests: those that `make test` leaves to `make test-all`.

A test is long if it took more than LIMIT_S seconds of a processor, its own and its children's,
when tests were last timed (`make time-tests`), and no mutant needs it: of each mutant of the
catalogue, the cheapest of the tests that kill it stays in the fast suite. What a fixture takes that
tests of a file share is divided among those that use it. `long_tests.txt` lists the long tests, a
test a line; a name without brackets stands for all of its cases. A long test that is named on the
command line runs.
"""

from __future__ import annotations

import resource
import time
from collections import defaultdict
from pathlib import Path

import pytest

LIMIT_S = 0.4
KEPT_S = 10.0  # a test that takes longer is long also where a mutant needs it
LIST = Path(__file__).with_name("long_tests.txt")
STARTED = pytest.StashKey[float]()
SHARED = pytest.StashKey[dict[str, float]]()  # by fixture that outlives the test, its seconds


def _cpu_s() -> float:
    """Seconds of a processor that this process and its ended children took."""
    usage = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in usage)


def listed() -> set[str]:
    """The lines of the list."""
    return {line for line in LIST.read_text().splitlines() if not line.startswith("#")}


def _name(nodeid: str) -> str:
    return nodeid.removeprefix("tests/")


def _function(name: str) -> str:
    return name.split("[")[0]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seconds", type=float, help="skip tests that would begin so long after the first"
    )
    parser.addoption(
        "--time-tests", action="store_true", help=f"time the tests and write {LIST.name}"
    )


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if any("::" in argument for argument in config.args):
        return
    lines = listed()
    for item in items:
        name = _name(item.nodeid)
        if name in lines or _function(name) in lines:
            item.add_marker("long")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--seconds") is not None:
        config.pluginmanager.register(Limit(config.getoption("--seconds")))
    if config.getoption("--time-tests"):
        config.pluginmanager.register(Clock())
        if not hasattr(config, "workerinput"):
            config.pluginmanager.register(Timing())


class Limit:
    """Skips the tests that would begin too late."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end: float | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        if self._end is None:  # the first test: finding them takes a minute of its own
            self._end = time.monotonic() + self._seconds
        elif time.monotonic() > self._end:
            pytest.skip("no time was left (--seconds)")


class Clock:
    """Says in the last report of each test what it cost; in every process that runs tests."""

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item):
        item.stash[STARTED] = _cpu_s()
        item.stash[SHARED] = {}
        yield

    @pytest.hookimpl(hookwrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef, request: pytest.FixtureRequest):
        before, shared = _cpu_s(), request._pyfuncitem.stash[SHARED]
        within = sum(shared.values())
        yield
        if fixturedef.scope != "function":
            nested = sum(shared.values()) - within
            shared[fixturedef.argname] = _cpu_s() - before - nested

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo):
        result = yield
        if call.when == "teardown":
            shared = item.stash[SHARED]
            report = result.get_result()
            report.cpu_s = _cpu_s() - item.stash[STARTED] - sum(shared.values())
            report.shared, report.uses = shared, list(item.fixturenames)


class Timing:
    """Collects what every test cost and writes the list."""

    def __init__(self) -> None:
        self._own: dict[str, float] = {}
        self._shared: dict[tuple[str, str], float] = defaultdict(float)  # by (file, fixture)
        self._users: dict[tuple[str, str], list[str]] = defaultdict(list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            name = _name(report.nodeid)
            file = name.split("::")[0]
            self._own[name] = report.cpu_s
            for fixture in report.uses:
                self._users[file, fixture].append(name)
            for fixture, seconds in report.shared.items():
                self._shared[file, fixture] += seconds

    def cost(self, *, alone: bool = False) -> dict[str, float]:
        """Seconds by test, with its part of what it shares; alone: with all of it."""
        cost = dict(self._own)
        for place, seconds in self._shared.items():
            users = self._users[place]
            for name in users:
                cost[name] += seconds if alone else seconds / len(users)
        return cost

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        cost = self.cost()
        kept = not_run(cost)
        long, survivors = choose(cost, self.cost(alone=True), killers(), kept)
        LIST.write_text(written(long, survivors, cost, kept))
        terminalreporter.write_line(
            f"{len(long)} of {len(cost)} tests are long; the others take "
            f"{sum(seconds for name, seconds in cost.items() if name not in long):.0f} s, "
            f"all of them {sum(cost.values()):.0f} s"
        )


def killers() -> dict[str, list[str]]:
    """By mutant, the Python tests that kill it; those that a fast C++ test kills are left out."""
    from mutants.catalogue import CATALOGUE
    from mutants.mutant import is_long_case

    found = {}
    for mutant in CATALOGUE:
        native = [killer for killer in mutant.killers if ".cc::" in killer]
        if all(is_long_case(killer) for killer in native):
            found[mutant.name] = [killer for killer in mutant.killers if killer not in native]
    return found


def choose(
    cost: dict[str, float],
    alone: dict[str, float],
    killers: dict[str, list[str]],
    kept: set[str],
) -> tuple[set[str], list[str]]:
    """The long tests, and the mutants that no fast test kills.

    cost, alone: seconds by test, with its part and with all of what it shares. killers: by mutant.
    kept: lines of the list whose tests were not timed; others that were not are fast.
    """
    cases = defaultdict(list)
    for name in cost:
        cases[_function(name)].append(name)
    long = {name for name, seconds in cost.items() if seconds > LIMIT_S}
    survivors = []
    for mutant, named in sorted(killers.items()):
        tests = [case for name in named for case in ([name] if name in cost else cases[name])]
        timed = {*tests, *map(_function, tests)}
        fast = [name for name in named if not {name, _function(name)} & (timed | kept)]
        if fast or any(name not in long for name in tests):
            continue
        cheapest = min(tests, key=lambda name: alone[name], default=None)
        if cheapest is not None and alone[cheapest] <= KEPT_S:
            long.discard(cheapest)
        else:
            survivors.append(mutant)
    return long, survivors


def not_run(cost: dict[str, float]) -> set[str]:
    """The lines of the list whose tests are still there and were not timed."""
    from mutants.mutant import ROOT, exists

    timed = {*cost, *map(_function, cost)}
    return {
        line
        for line in listed() - timed
        if line.endswith("::runTest") or exists(line, ROOT)  # hypothesis writes runTest
    }


def written(long: set[str], survivors: list[str], cost: dict[str, float], kept: set[str]) -> str:
    """The text of the list; `kept` are lines to keep as they are."""
    cases = defaultdict(set)
    for name in cost:
        cases[_function(name)].add(name)
    lines = {_function(name) if cases[_function(name)] <= long else name for name in long}
    head = f"# More than {LIMIT_S} s of a processor each. Written by `make time-tests`.\n"
    if survivors:
        head += f"# Mutants that no other test kills: {', '.join(survivors)}\n"
    return head + "".join(f"{line}\n" for line in sorted(lines | kept))
