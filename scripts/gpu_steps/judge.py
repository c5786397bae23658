"""What the output of a part of a step says: what is wrong, or how much was tested."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

_CASE = re.compile(r"^TEST CASE: +(.*)$", re.MULTILINE)
_COUNT = re.compile(r"^\[doctest\] test cases: +([1-9]\d*) .*$", re.MULTILINE)
_CLEAN = re.compile(r"ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards")
_KERNEL = re.compile(r"^=+ .*?\bat (.+?)\+0x", re.MULTILINE)
_PYTEST = re.compile(r"^(?:=+ )?((?:\d+ [a-z]+, )*[1-9]\d* passed\b.*?)(?: =+)?$", re.MULTILINE)
_PYTEST_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
_GATE = re.compile(r"^(?:holds|FAILS|MISSING|measured): .*$", re.MULTILINE)
_WRONG = re.compile(r"^WRONG: (.*)$", re.MULTILINE)
_STOPPED = re.compile(r"^(?:section .* stopped|cannot measure): .*$", re.MULTILINE)


@dataclass(frozen=True)
class Judgement:
    """wrong: what is, or nothing. said: what else is worth a line."""

    wrong: str
    said: str = ""


Judge = Callable[[int, str], Judgement]


def failing_cases(output: str) -> list[str]:
    """Names of the cases of doctest in whose output there is an error."""
    blocks = re.split(r"^={20,}$", output, flags=re.MULTILINE)
    names = [
        _CASE.findall(block)[0] for block in blocks if " ERROR: " in block and "TEST CASE:" in block
    ]
    return list(dict.fromkeys(names))


def last_case(output: str) -> str:
    """The case of doctest that was the last to end, or nothing."""
    names = _CASE.findall(output)
    return names[-1] if names else ""


def command(status: int, output: str) -> Judgement:
    """By the exit status alone."""
    del output
    return Judgement(f"exit status {status}" if status else "")


def told(status: int, output: str) -> Judgement:
    """Of a command that says in its last line what is wrong, or what there is."""
    last = output.strip().splitlines()[-1:]
    said = last[0] if last else f"exit status {status}"
    return Judgement(said) if status else Judgement("", said if last else "")


def doctest(status: int, output: str) -> Judgement:
    """Of an executable of C++ tests."""
    if status:
        cases = failing_cases(output)
        named = "; ".join(f'"{case}"' for case in cases) or f'after "{last_case(output)}"'
        return Judgement(f"exit status {status}: {named}")
    counted = _COUNT.search(output)
    if counted is None:
        return Judgement("no test ran")
    return Judgement("", f"{counted[1]} cases")


def sanitizer(status: int, output: str) -> Judgement:
    """compute-sanitizer around such an executable: both have to say that all is well."""
    clean = _CLEAN.search(output)
    if clean is None:
        kernels = ", ".join(dict.fromkeys(_KERNEL.findall(output)))
        return Judgement(f"not clean: {kernels or f'exit status {status}, see the log'}")
    tested = doctest(status, output)
    return tested if tested.wrong else Judgement("", f"{tested.said}, {clean[0]}")


def pytest(status: int, output: str) -> Judgement:
    """Of a run of pytest."""
    counted = _PYTEST.search(output)
    if status:
        failed = ", ".join(_PYTEST_FAILED.findall(output))
        return Judgement(f"exit status {status}: {failed or 'see the log'}")
    return Judgement("", counted[1]) if counted else Judgement("no test ran")


def measurement(status: int, output: str) -> Judgement:
    """Of kvpager_bench.gpu: a wrong result before a section that only stopped."""
    gates = "\n".join(_GATE.findall(output))
    if not status:
        return Judgement("", gates)
    wrong = _WRONG.findall(output) or _STOPPED.findall(output)
    return Judgement("; ".join(wrong) or f"exit status {status}, see the log", gates)
