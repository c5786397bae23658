"""Builds kvpager on a machine with a GPU and runs every test that needs one.

    python scripts/gpu_test.py                    # everything, under 8 minutes
    python scripts/gpu_test.py --only compile,cpp
    python scripts/gpu_test.py --device shim      # the same on a machine without a GPU

Uses the Python it is started with and what is installed beside it (torch, scikit-build-core,
pybind11, cmake, ninja, pytest); nothing is fetched and no virtual environment is made. The package
goes to build/gpu-site, the C++ tests to build/gpu. A step that passes its time limit, or in which
no test ran, has failed. Ends with a table and build/gpu-test.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
SITE = BUILD / "gpu-site"
CPP = BUILD / "gpu"
LOGS = BUILD / "gpu-test-logs"
TOTAL_SECONDS = 470  # a little less than 8 minutes
TAIL_LINES = 40
STEPS = ("package", "compile", "cpp", "python", "memcheck", "racecheck")
NO_TIME = "no time was left"


@dataclass
class Step:
    """What came of one step. detail: one line for the table."""

    name: str
    ok: bool
    seconds: float
    limit: float
    detail: str


@dataclass
class Session:
    """The steps so far, and the time they share."""

    device: str
    jobs: int
    start: float = field(default_factory=time.monotonic)
    steps: list[Step] = field(default_factory=list)

    def run(
        self,
        name: str,
        command: Sequence[str],
        limit: float,
        judge: Callable[[int, str], str],
        env: Mapping[str, str] | None = None,
    ) -> Step:
        """Runs a command; `judge` says of its status and output what is wrong, or nothing."""
        limit = min(limit, TOTAL_SECONDS - (time.monotonic() - self.start))
        begin = time.monotonic()
        if limit <= 0:
            return self.add(Step(name, False, 0.0, 0.0, NO_TIME))
        print(f"== {name}: {' '.join(command)}", flush=True)
        log = LOGS / f"{name.replace(' ', '-')}.log"
        status, output = _run(command, limit, log, {**os.environ, **(env or {})})
        seconds = time.monotonic() - begin
        wrong = f"stopped after {limit:.0f} s" if status is None else judge(status, output)
        if wrong:
            print("\n".join(output.splitlines()[-TAIL_LINES:]), flush=True)
        return self.add(Step(name, not wrong, seconds, limit, wrong or _summary(output)))

    def add(self, step: Step) -> Step:
        """Keeps a step and says how it went."""
        self.steps.append(step)
        print(
            f"   {'ok' if step.ok else 'FAILED'} ({step.seconds:.0f} s) {step.detail}", flush=True
        )
        return step


def _run(
    command: Sequence[str], limit: float, log: Path, env: Mapping[str, str]
) -> tuple[int | None, str]:
    """Exit status (None: it was stopped) and output, which is also in `log`."""
    with log.open("w", encoding="utf-8", errors="replace") as out:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=dict(env),
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with all that it started
            process.wait()
            status = None
    return status, log.read_text(encoding="utf-8", errors="replace")


def _summary(output: str) -> str:
    """The line of a test runner that counts."""
    for pattern in (
        r"^(?:=+ )?((?:\d+ [a-z]+, )*\d+ (?:passed|failed|errors?)\b.*?)(?: =+)?$",
        r"(\d+% tests passed.*)",
        r"(RACECHECK SUMMARY.*)",
        r"(ERROR SUMMARY.*)",
    ):
        found = re.findall(pattern, output, flags=re.MULTILINE)
        if found:
            return str(found[-1])
    return ""


def succeeded(status: int, output: str) -> str:
    """What is wrong, by the exit status alone."""
    del output
    return f"exit status {status}" if status else ""


def pytest_passed(status: int, output: str) -> str:
    """What is wrong with a run of pytest."""
    if status:
        return f"exit status {status}; {_summary(output)}"
    return "" if re.search(r"\b[1-9]\d* passed", output) else "no test ran"


def ctest_passed(status: int, output: str) -> str:
    """What is wrong with a run of ctest."""
    if status:
        return f"exit status {status}; {_summary(output)}"
    return "" if re.search(r"out of [1-9]", output) else "no test ran"


def sanitizer_passed(status: int, output: str) -> str:
    """compute-sanitizer around a doctest executable: both have to say that all is well."""
    if status:
        return f"exit status {status}; {_summary(output)}"
    if not re.search(r"test cases: +[1-9]\d* ", output):
        return "no test ran"
    clean = r"ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards"
    return "" if re.search(clean, output) else f"not clean: {_summary(output)}"


def architecture() -> str:
    """What CMake calls machine code for the first GPU of this machine."""
    line = subprocess.run(
        ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()[0]
    number = line.strip().replace(".", "")
    return f"{number}a-real" if number == "90" else f"{number}-real"


def build_options(device: str) -> list[str]:
    """Of CMake: both plug-ins, the GPU's for the GPU at hand alone."""
    options = ["-DKVPAGER_SHIM=ON", "-DCMAKE_BUILD_TYPE=Release"]
    if device == "cuda":
        return [*options, "-DKVPAGER_CUDA=ON", f"-DCMAKE_CUDA_ARCHITECTURES={architecture()}"]
    return [*options, "-DKVPAGER_CUDA=OFF"]


def package(session: Session) -> None:
    """Installs the package into a folder of its own."""
    shutil.rmtree(SITE, ignore_errors=True)
    options = [option.removeprefix("-D") for option in build_options(session.device)]
    command = [
        sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet",
        "--no-build-isolation", "--no-deps", "--no-index", "--target", str(SITE),
        "--config-settings=build-dir=build/gpu-python",
        *(f"--config-settings=cmake.define.{option}" for option in options),
        ".",
    ]  # fmt: skip
    env = {"CMAKE_BUILD_PARALLEL_LEVEL": str(session.jobs)}
    session.run("package", command, 280, succeeded, env)


def compile_tests(session: Session) -> None:
    """The C++ tests of the device, the kernels and the pager, and the plug-ins they look for."""
    configure = [
        "cmake", "-S", ".", "-B", str(CPP), "-G", "Ninja", "--log-level=WARNING",
        "-DKVPAGER_PYTHON=OFF", "-DKVPAGER_TESTS=ON", *build_options(session.device),
    ]  # fmt: skip
    targets = ["device_test", "cuda_test", "pager_test", "kvpager_shim"]
    targets += ["kvpager_cuda"] if session.device == "cuda" else []
    command = ["cmake", "--build", str(CPP), "--parallel", str(session.jobs), "--target", *targets]
    if session.run("configure", configure, 60, succeeded).ok:
        session.run("compile", command, 280, succeeded)


def environment(session: Session, *, small: bool = False) -> dict[str, str]:
    """Of tests: they run on this device or fail. small: sizes that a sanitizer can cope with."""
    env = {"KVPAGER_TEST_DEVICES": session.device, "PYTHONPATH": str(SITE)}
    return env | {"KVPAGER_TEST_SMALL": "1"} if small else env


def cpp(session: Session) -> None:
    """The C++ tests of the device, of the kernels and of the pager."""
    command = [
        "ctest", "--test-dir", str(CPP), "--no-tests=error", "--output-on-failure",
        "-R", "^(device|cuda|pager)/", "--timeout", "100",
    ]  # fmt: skip
    session.run("C++ tests", command, 120, ctest_passed, environment(session))


def python(session: Session) -> None:
    """The Python tests that need the device."""
    where = [str(path) for path in (ROOT / "tests/python", ROOT / "tests/model") if path.is_dir()]
    mark = "cuda" if session.device == "cuda" else "not deep and not bench and not cuda"
    only = [] if session.device == "cuda" else ["-k", "device or shim"]
    command = [
        sys.executable, "-m", "pytest", "-q", "-m", mark, *only, "-p", "no:cacheprovider", *where,
    ]  # fmt: skip
    session.run("Python tests", command, 180, pytest_passed, environment(session))


def sanitize(session: Session, tool: str) -> None:
    """Small cases of the C++ tests under compute-sanitizer."""
    for name in ("device_test", "cuda_test") if tool == "memcheck" else ("cuda_test",):
        if shutil.which("compute-sanitizer") is None:
            session.add(Step(f"{tool} {name}", False, 0.0, 0.0, "there is no compute-sanitizer"))
            continue
        command = [
            "compute-sanitizer", "--tool", tool, "--error-exitcode", "99",
            str(CPP / "tests/cpp" / name),
        ]  # fmt: skip
        env = environment(session, small=True)
        session.run(f"{tool} {name}", command, 75, sanitizer_passed, env)


def report(session: Session) -> bool:
    """Prints the table and writes the JSON; whether every step went well."""
    width = max(len(step.name) for step in session.steps)
    total = time.monotonic() - session.start
    print()
    for step in session.steps:
        mark = "ok" if step.ok else "FAILED"
        print(f"{step.name:{width}}  {mark:6}  {step.seconds:6.1f} s  {step.detail}")
    good = all(step.ok for step in session.steps)
    print(f"{'total':{width}}  {'ok' if good else 'FAILED':6}  {total:6.1f} s")
    (BUILD / "gpu-test.json").write_text(
        json.dumps(
            {
                "device": session.device,
                "ok": good,
                "seconds": total,
                "steps": [asdict(step) for step in session.steps],
            },
            indent=1,
        )
        + "\n",
        encoding="utf-8",
    )
    return good


def main() -> int:
    """Exit status: 0 if every step went well."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(STEPS), help=f"some of {', '.join(STEPS)}")
    parser.add_argument("--device", choices=("cuda", "shim"), default="cuda")
    parser.add_argument("--jobs", type=int, default=max(2, (os.cpu_count() or 2) // 2))
    parser.add_argument("--no-report", action="store_true", help="no table and no JSON")
    options = parser.parse_args()
    wanted = [name.strip() for name in options.only.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in STEPS]
    if unknown or not wanted:
        parser.error(f"--only {options.only}: expected some of {', '.join(STEPS)}")
    LOGS.mkdir(parents=True, exist_ok=True)
    session = Session(options.device, options.jobs)
    if options.device == "cuda" and shutil.which("nvidia-smi") is None:
        print("no nvidia-smi: no GPU here (--device shim runs the same on the processor)")
        return 1
    with ThreadPoolExecutor(2) as pool:  # side by side
        builds = {"package": package, "compile": compile_tests}
        running = [pool.submit(build, session) for name, build in builds.items() if name in wanted]
        for build in running:
            build.result()
    steps: dict[str, Callable[[Session], None]] = {"cpp": cpp, "python": python}
    if options.device == "cuda":
        steps["memcheck"] = lambda session: sanitize(session, "memcheck")
        steps["racecheck"] = lambda session: sanitize(session, "racecheck")
    if all(step.ok for step in session.steps):  # else there is nothing to test
        for name, step in steps.items():
            if name in wanted:
                step(session)
    good = all(step.ok for step in session.steps)
    return 0 if (good if options.no_report else report(session)) else 1


if __name__ == "__main__":
    sys.exit(main())
