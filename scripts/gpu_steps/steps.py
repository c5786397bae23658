"""The steps, in their order."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gpu_steps import judge
from gpu_steps.part import Part
from gpu_steps.place import PLUGIN, ROOT, Place, architecture

LIMIT = 480.0  # seconds of a step


@dataclass(frozen=True)
class KernelTest:
    """A file of tests/cpp/cuda, the kernel it tests, and which of its cases a sanitizer runs.

    Cases are patterns of doctest; those that run a kernel in each of its shapes once.
    """

    file: str
    kernel: str
    cases: str = "*"


FIRST_CASE = "a weight of zero adds nothing*"
KERNEL_TESTS = (
    KernelTest(
        "attend_tensor",
        "attention on tensor cores",
        "a weight of zero*,every head dimension*,a row alone*,groups of 64*,a row that sees no*",
    ),
    KernelTest(
        "attend_reference",
        "attention in the CPU's order",
        "keys*,a row alone*,chunks in the pool*,few rows*,rows without keys*",
    ),
    KernelTest("write_rows", "writing rows"),
    KernelTest("rotate", "rotating rows"),
    KernelTest("summarize", "key summaries"),
    KernelTest(
        "select",
        "scores and selection",
        "scores on a device*,of equal and nearly*,rows of seventy*,four thousand*",
    ),
    KernelTest("linear", "products of linear layers"),
    KernelTest("graph", "captured graphs"),
)
HOST_TESTS = ("shim", "shim_order", "work")  # of tests/cpp/cuda, none of which needs a device
SANITIZED = tuple(test for test in KERNEL_TESTS if test.file != "graph")


@dataclass(frozen=True)
class Step:
    """does: one line for a table. parts: what it runs, one after another."""

    name: str
    does: str
    parts: Callable[[Place], Iterator[Part]]
    limit: float = LIMIT


def build(place: Place) -> Iterator[Part]:
    """One tree for plug-in, package and C++ tests, so that nothing is compiled twice."""
    cuda = ["-DKVPAGER_CUDA=OFF"]
    if not place.rehearse and place.prebuilt is None:
        cuda = ["-DKVPAGER_CUDA=ON", f"-DCMAKE_CUDA_ARCHITECTURES={architecture()}"]
    configure = [
        "cmake", "-S", ".", "-B", str(place.tree), "-G", "Ninja", "--log-level=WARNING",
        "-DCMAKE_BUILD_TYPE=Release", "-DKVPAGER_SHIM=ON", "-DKVPAGER_TESTS=ON",
        "-DKVPAGER_PYTHON=ON", f"-DPython_EXECUTABLE={place.python[0]}", *cuda,
    ]  # fmt: skip
    imports = [*place.python, "-c", _IMPORTS]
    yield Part("packages", imports, 60, judge.told, place.environment())
    yield Part("configure", configure, 60)
    compiled = ["device_test", "cuda_test", "pager_test", "_core", "kvpager_shim"]
    compiled += ["kvpager_cuda"] if "-DKVPAGER_CUDA=ON" in cuda else []
    ninja = ["cmake", "--build", str(place.tree), "--parallel", str(place.jobs), "--target"]
    yield Part("compile", [*ninja, *compiled], LIMIT)
    shutil.rmtree(place.site, ignore_errors=True)
    shutil.copytree(
        ROOT / "python" / "kvpager",
        place.site / "kvpager",
        ignore=shutil.ignore_patterns("*.so", "__pycache__"),
    )
    if place.prebuilt is not None:
        shutil.copy2(place.prebuilt / PLUGIN, place.site / "kvpager")
    install = ["cmake", "--install", str(place.tree), "--component", "python"]
    yield Part("install", [*install, "--prefix", str(place.site)], 60)
    yield Part(
        "the plug-in loads", [*place.python, "-c", _PROBE, place.device], 60,
        judge.told, place.environment(),
    )  # fmt: skip


_IMPORTS = """
import importlib, sys
names = "torch transformers numpy blake3 xxhash safetensors rich matplotlib"
names += " pybind11 pytest hypothesis"
missing = []
for name in names.split():
    try:
        importlib.import_module(name)
    except ImportError:
        missing.append(name)
sys.exit(f"missing Python packages: {' '.join(missing)}" if missing else 0)
"""
_PROBE = """
import sys
from kvpager.pager.device import require
import kvpager
require(sys.argv[1])
print(kvpager.__file__)
"""


def kernels(place: Place) -> Iterator[Part]:
    """What the machine is, then the C++ tests, the kernels' first, one file at a time."""
    yield measure(place, "facts", limit=100)
    first = KERNEL_TESTS[0]
    yield cpp(place, "cuda", first.file, f"{first.kernel}: {FIRST_CASE[:-1]}", FIRST_CASE)
    for test in KERNEL_TESTS:
        yield cpp(place, "cuda", test.file, test.kernel)
    for room in ("device", "pager"):
        for path in sorted((ROOT / "tests" / "cpp" / room).glob("*_test.cc")):
            file = path.name.removesuffix("_test.cc")
            yield cpp(place, room, file, f"{room}/{file}")


def cpp(place: Place, room: str, file: str, name: str, cases: str = "*") -> Part:
    """A file of C++ tests."""
    command = [*_doctest(place, room, file, cases), "--duration=true"]
    environment = place.environment(small=place.rehearse)
    return Part(name, command, 100, judge.doctest, environment)


def _doctest(place: Place, room: str, file: str, cases: str) -> list[str]:
    return [
        str(place.test(room)), f"--source-file=*/{room}/{file}_test.cc",
        f"--test-case={cases}", "--test-suite-exclude=long",
    ]  # fmt: skip


def python(place: Place) -> Iterator[Part]:
    """The tests that are marked for a GPU."""
    files = [str(path.relative_to(ROOT)) for path in device_tests()]
    which = ["-m", "cuda"]
    if place.rehearse:
        files = ["tests/python/test_device_pager.py"]
        which = ["-m", "not long and not cuda", "-k", "shim"]
    command = [
        *place.python, "-m", "pytest", "-q", "-x", *which, "-p", "no:cacheprovider", *files,
    ]  # fmt: skip
    yield Part("Python tests", command, LIMIT, judge.pytest, place.environment())


def device_tests() -> list[Path]:
    """The files of Python tests with a test that is marked for a GPU."""
    marked = re.compile(r"mark\.cuda|^from devices import", re.MULTILINE)
    folders = (ROOT / "tests" / name for name in ("python", "model"))
    paths = (path for folder in folders for path in sorted(folder.glob("test_*.py")))
    return [path for path in paths if marked.search(path.read_text(encoding="utf-8"))]


def sanitizers(place: Place) -> Iterator[Part]:
    """Small cases under each tool, of files that do not fork: a child with a context would hang."""
    for tool in ("memcheck", "racecheck", "synccheck"):
        for test in SANITIZED:
            yield sanitized(place, tool, "cuda", test.file, f"{tool}: {test.kernel}", test.cases)
        if tool == "memcheck":
            yield sanitized(place, tool, "device", "memory", f"{tool}: device memory", "*")


def sanitized(place: Place, tool: str, room: str, file: str, name: str, cases: str) -> Part:
    """A part of a file of C++ tests under compute-sanitizer; in a rehearsal without it."""
    # An allocation of 64 TiB is refused on purpose, which is no error of ours.
    around = [
        "compute-sanitizer",
        "--tool",
        tool,
        "--report-api-errors",
        "no",
        "--error-exitcode",
        "99",
    ]
    command = [*([] if place.rehearse else around), *_doctest(place, room, file, cases)]
    judged = judge.doctest if place.rehearse else judge.sanitizer
    return Part(name, command, 120, judged, place.environment(small=True))


def operations(place: Place) -> Iterator[Part]:
    """The kernels in the shape of an 8B model, everything at rest beside them."""
    yield measure(place, "attention", "selection", "linear", "paging", limit=450)


def decode(place: Place) -> Iterator[Part]:
    """The row counts first: what a step costs depends on which of them cuBLAS treats alike."""
    yield measure(place, "rows", "decode", limit=LIMIT)


def profiles(place: Place) -> Iterator[Part]:
    """Which kernels a layer and a step consist of."""
    yield measure(place, "profiles", limit=300)


def verify(place: Place) -> Iterator[Part]:
    """The promise end to end, on the shipped model in a dtype that has tensor kernels."""
    # Every engine it starts pins its arena.
    small = ["--pool", "4096", "--host", "256MiB"]
    if place.rehearse:
        small = ["--rows", "16", "--pool", "512", "--host", "64MiB"]
    command = [
        *place.python, "-m", "kvpager", "verify", "--device", place.device, "--dtype", "bfloat16",
        *small, "--quiet", "--format", "json", "--output", str(place.measured),
    ]  # fmt: skip
    yield Part("verify", command, 300, judge.told, place.environment(), place.measured)
    yield measure(place, "restore", limit=300)


def measure(place: Place, *sections: str, limit: float) -> Part:
    """Sections of the benchmark; an interrupt leaves the rows that they have."""
    command = [
        *place.python, "-m", "kvpager_bench.gpu", *sections, "--out", str(place.measured),
        *(["--rehearse"] if place.rehearse else []),
    ]  # fmt: skip
    return Part(
        ", ".join(sections), command, limit, judge.measurement, place.environment(), place.measured
    )


STEPS = (
    Step("build", "compiles the plug-in for this GPU, the package and the C++ tests, once", build),
    Step("kernels", "what the machine is; C++ tests of kernels, device and pager by file", kernels),
    Step("python", "the Python tests that are marked for a GPU", python),
    Step(
        "sanitizers", "memcheck, racecheck and synccheck on small cases of each kernel", sanitizers
    ),
    Step("operations", "attention, selection, linear layers, paging, beside ceilings", operations),
    Step("decode", "row counts; decoding at 16K, 64K and 256K", decode),
    Step("profiles", "the kernels of one layer and of five decode steps", profiles),
    Step("verify", "`kvpager verify`; restoring 32K", verify),
)
