"""A copy of the tree in which mutants are built and tested, so that the tree itself never changes.

Tests run against the copy's package and extension, in child processes too: the editable install's
import hook, which would answer with the tree's own package, is taken out by a sitecustomize module.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvpager import _core
from long_tests import listed
from mutants.mutant import ROOT, Mutant
from mutants.preloaded import Preloaded

LEFT_OUT = shutil.ignore_patterns(
    "build", "dist", "*.so", "__pycache__", "results", ".git", ".venv", ".*_cache", ".hypothesis"
)
SITE = """\
import sys

sys.meta_path[:] = [each for each in sys.meta_path if "ScikitBuild" not in type(each).__name__]
"""
# Little optimisation: the suite is small and it is built again for every mutant. No CUDA: the shim
# compiles the same kernels, in a fraction of the time.
CMAKE = (
    "-G", "Ninja", "-DKVPAGER_PYTHON=ON", "-DKVPAGER_TESTS=ON", "-DKVPAGER_CHECK_INVARIANTS=ON",
    "-DKVPAGER_CUDA=OFF", "-DKVPAGER_SHIM=ON",
    f"-DCMAKE_PREFIX_PATH={ROOT / 'build' / 'doctest' / 'usr'}",
    "-DCMAKE_BUILD_TYPE=RelWithDebInfo", "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1",
    f"-DPython_EXECUTABLE={sys.executable}", "--log-level=WARNING",
)  # fmt: skip


class BuildError(Exception):
    """The copy does not compile, or its package cannot be imported."""


class Workshop:
    """`folder` holds the copy, its build and nothing else; what is there already is used again.

    installed: the tests use the extension that is installed. Nothing is built, so that only Python
    can be changed, and the pager does not check its invariants by itself.
    """

    def __init__(
        self, folder: Path, *, jobs: int, installed: bool = False, fast: bool = False
    ) -> None:
        """fast: without the long tests, which are then "not found"."""
        self._tree = folder / "tree"
        self._build = folder / "build"
        self._site = folder / "site"
        self._jobs = jobs
        self._installed = installed
        self._fast = fast
        self._built = installed
        self._python: Preloaded | None = None

    def close(self) -> None:
        """Ends the process that runs tests; the folder stays."""
        if self._python is not None:
            self._python.close()
            self._python = None

    def prepare(self) -> None:
        """Copies the tree and builds it, unless what is installed is used."""
        _mirror(ROOT, self._tree)
        self._site.mkdir(parents=True, exist_ok=True)
        (self._site / "sitecustomize.py").write_text(SITE, encoding="utf-8")
        package = self._tree / "python" / "kvpager"
        if self._installed:
            self._build.mkdir(parents=True, exist_ok=True)
            extensions = [Path(_core.__file__)]
        else:
            self._call("cmake", "-S", self._tree, "-B", self._build, *CMAKE)
            self.build()
            extensions = list((self._build / "csrc" / "bindings").glob("_core*.so"))
        for extension in extensions:
            link = package / extension.name
            link.unlink(missing_ok=True)
            link.symlink_to(extension)
        self._python = Preloaded(self._tree, self._environment())
        where = "import kvpager, kvpager._core; print(kvpager.__file__)"
        found = self._imported(where).strip()
        if not Path(found).is_relative_to(self._tree):
            raise BuildError(f"tests would import {found}, not the copy in {self._tree}")

    def build(self) -> None:
        """Builds what has changed since the last time."""
        self._call("cmake", "--build", self._build, "-j", str(self._jobs), "--", "--quiet")

    @contextmanager
    def changed(self, mutant: Mutant) -> Iterator[None]:
        """While open, the copy has the defect in it, built.

        Raises BuildError where it does not compile.
        """
        path = self._tree / mutant.file
        sound = path.read_text(encoding="utf-8")
        path.write_text(mutant.applied_to(sound), encoding="utf-8")
        try:
            if mutant.native:
                if self._installed:
                    raise BuildError(f"{mutant.file} is in the extension, which is not built")
                self._built = False
            if not self._built:
                self.build()
                self._built = not mutant.native
            self._imported("import kvpager, kvpager.cli")
            yield
        finally:
            path.write_text(sound, encoding="utf-8")

    def run(self, tests: Iterable[str], timeout_s: float | None = None) -> dict[str, str]:
        """What became of each test: "passed", "failed", "timed out" or "not found".

        timeout_s: for each C++ test case, and for all Python tests together.
        """
        tests = list(dict.fromkeys(tests))
        outcomes = {test: self._run_case(test, timeout_s) for test in tests if ".cc::" in test}
        nodes = [test for test in tests if test not in outcomes]
        if nodes:
            outcomes |= self._run_pytest(nodes, timeout_s)
        return {test: outcomes[test] for test in tests}

    def _run_case(self, test: str, timeout_s: float | None) -> str:
        file, _, name = test.partition("::")
        room = Path(file).parent.name
        # Commas separate filters; a question mark stands for any character.
        command = [
            self._build / "tests" / "cpp" / f"{room}_test",
            f"--source-file=*/{room}/{Path(file).name}",
            f"--test-case={name.replace(',', '?')}",
            *(["--test-suite-exclude=long"] if self._fast else []),
        ]
        try:
            done = self._run(*command, timeout_s=timeout_s)
        except subprocess.TimeoutExpired:
            return "timed out"
        if "test cases: 0 " in done.stdout:
            return "not found"
        return "failed" if done.returncode else "passed"

    def _run_pytest(self, nodes: list[str], timeout_s: float | None) -> dict[str, str]:
        report = self._build / "pytest.xml"
        report.unlink(missing_ok=True)
        options = ("-q", "-m", "", "--tb=line", "-p", "no:cacheprovider", f"--junitxml={report}")
        tests = [f"tests/{node}" for node in nodes]
        if self._fast:
            functions = {node.partition("[")[0] for node in nodes}
            left = [line for line in listed() if line.partition("[")[0] in functions]
            tests += [part for line in left for part in ("--deselect", f"tests/{line}")]
        assert self._python is not None, "prepare() comes first"
        try:
            self._python.run("-m", "pytest", *options, *tests, timeout_s=timeout_s)
        except subprocess.TimeoutExpired:
            return dict.fromkeys(nodes, "timed out")
        if not report.exists():
            return dict.fromkeys(nodes, "failed")  # the process died
        return outcomes_in(ET.parse(report).getroot(), nodes)

    def _imported(self, code: str) -> str:
        """What Python prints that only imports; raises BuildError if it fails."""
        assert self._python is not None
        returncode, output = self._python.run("-c", code)
        if returncode:
            raise BuildError(f"{code}\n{output[-3000:]}")
        return output

    def _call(self, *command: str | Path) -> str:
        """What a command says that must succeed; raises BuildError if it does not."""
        done = self._run(*command)
        if done.returncode:
            raise BuildError(f"{' '.join(map(str, command[:3]))} ...\n{done.stdout[-3000:]}")
        return done.stdout

    def _run(
        self, *command: str | Path, timeout_s: float | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(part) for part in command],
            cwd=self._tree,
            env=self._environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",  # a failed comparison prints the bytes that it compared
            timeout=timeout_s,
            check=False,
        )

    def _environment(self) -> dict[str, str]:
        paths = [self._site, self._tree / "python"]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_WAIT_POLICY": "passive",
        }
        # The shim is not beside the extension, as it is in a package that was installed.
        for plugin in self._build.glob("csrc/**/libkvpager_shim.so"):
            environment["KVPAGER_DEVICE_PATH"] = str(plugin.parent)
        return environment


def outcomes_in(report: ET.Element, nodes: list[str]) -> dict[str, str]:
    """What pytest's report says of each node; one of several cases that fails fails its test."""
    outcomes = dict.fromkeys(nodes, "not found")
    for case in report.iter("testcase"):
        scope, name = case.get("classname", ""), case.get("name", "")
        for node in nodes:
            file, *classes = node.partition("[")[0].split("::")[:-1]
            wanted = node.removeprefix("::".join([file, *classes]) + "::")
            whole = name if "[" in wanted else name.partition("[")[0]
            module = "tests." + file.removesuffix(".py").replace("/", ".")
            if scope != ".".join([module, *classes]) or wanted != whole:
                continue
            if case.find("failure") is not None or case.find("error") is not None:
                outcomes[node] = "failed"
            elif outcomes[node] == "not found" and case.find("skipped") is None:
                outcomes[node] = "passed"
    return outcomes


def _mirror(source: Path, target: Path) -> None:
    """Makes `target` a copy, touching only files that differ, so that a kept build stays good."""
    fresh = target.with_name(target.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.copytree(source, fresh, ignore=LEFT_OUT, ignore_dangling_symlinks=True)
    if not target.exists():
        fresh.rename(target)
        return
    wanted = {path.relative_to(fresh) for path in fresh.rglob("*") if path.is_file()}
    for path in [path for path in target.rglob("*") if path.is_file() or path.is_symlink()]:
        if path.relative_to(target) not in wanted:
            path.unlink()
    for name in wanted:
        new, old = fresh / name, target / name
        if not old.is_file() or old.read_bytes() != new.read_bytes():
            old.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(new, old)
    shutil.rmtree(fresh)
