"""Where the steps build, what they find there, and the environment of what they run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "gpu"
PLUGIN = "libkvpager_cuda.so"
CUDA_TOOLS = "/usr/local/cuda/bin"  # has compute-sanitizer, where PATH has not


class PlaceError(Exception):
    """A step cannot run here."""


@dataclass(frozen=True)
class Place:
    """out: for JSON and logs. prebuilt: a folder with the plug-in, or None to build it."""

    out: Path
    rehearse: bool = False
    jobs: int = 2
    prebuilt: Path | None = None
    build: Path = BUILD

    @property
    def device(self) -> str:
        """What tests and pagers are told to run on."""
        return "shim" if self.rehearse else "cuda"

    @property
    def patience(self) -> float:
        """How much longer than on a machine with a GPU, and its many cores, a part may take."""
        return 6.0 if self.rehearse else 1.0

    @property
    def tree(self) -> Path:
        """Of CMake."""
        return self.build / "tree"

    @property
    def site(self) -> Path:
        """A folder with the package that was built."""
        return self.build / "site"

    @property
    def measured(self) -> Path:
        """What the part that runs measures, before it is part of the step's JSON."""
        return self.build / "measured.json"

    @property
    def has_package(self) -> bool:
        """Whether the step build has put it there."""
        return (self.site / "kvpager").is_dir()

    def test(self, room: str) -> Path:
        """The executable of a room's C++ tests."""
        return self.tree / "tests" / "cpp" / f"{room}_test"

    @property
    def python(self) -> list[str]:
        """-S: an editable install would be imported in the place of what was built."""
        return [sys.executable, *(["-S"] if self.has_package else [])]

    def environment(self, *, small: bool = False) -> dict[str, str]:
        """Of tests and measurements. small: sizes that a sanitizer can cope with."""
        paths = [str(self.site), str(ROOT / "bench"), os.environ.get("PYTHONPATH", "")]
        if self.has_package:
            paths += [path for path in sys.path[1:] if path]  # what -S leaves out
        # C++ tests find the plug-ins where the package has them.
        plugins = [str(self.site / "kvpager"), os.environ.get("KVPAGER_DEVICE_PATH", "")]
        return {
            **os.environ,
            "KVPAGER_DEVICE_PATH": ":".join(filter(None, plugins)),
            "KVPAGER_TEST_DEVICES": self.device,
            "PATH": f"{os.environ.get('PATH', '')}:{CUDA_TOOLS}",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYTHONUNBUFFERED": "1",
            **({"KVPAGER_TEST_SMALL": "1"} if small else {}),
        }

    def check(self, step: str) -> None:
        """Raises PlaceError where the step cannot run."""
        if not self.rehearse and shutil.which("nvidia-smi") is None:
            raise PlaceError("no nvidia-smi: no GPU here; --rehearse runs the same without one")
        if self.prebuilt is not None and not (self.prebuilt / PLUGIN).is_file():
            raise PlaceError(
                f"--prebuilt {self.prebuilt}: expected a folder with {PLUGIN}, and there is none"
            )
        # A rehearsal measures the package that is installed, if nothing was built.
        needs_tree = step in ("kernels", "sanitizers")
        if step == "build" or (self.rehearse and not needs_tree):
            return
        if not (self.has_package and self.test("cuda").is_file()):
            raise PlaceError(f"{step}: nothing is built in {self.build}; run the step build first")


def architecture() -> str:
    """What CMake calls machine code for the first GPU of this machine."""
    line = subprocess.run(
        ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()[0]
    number = line.strip().replace(".", "")
    return f"{number}-real"
