"""Holds what the compiler made of the kernels against limits, for each architecture of a plug-in.

    python scripts/cuda_gates.py PLUGIN [--tools FOLDER]

Registers, spills, shared memory, instructions of tensor cores and asynchronous copies. cuobjdump
and nvdisasm are taken from PATH, or from packages that are put into FOLDER; no GPU is needed.
Exits with 1 if a kernel is outside a limit, or one that has to be there is not.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

PACKAGES = ("nvidia-cuda-cuobjdump==13.5.*", "nvidia-cuda-nvdisasm==13.5.*")

# Bytes of shared memory a block may ask for (CUDA C++ programming guide, "Compute capabilities").
SHARED_BYTES = {
    "sm_80": 166_912,
    "sm_86": 101_376,
    "sm_89": 101_376,
    "sm_90": 232_448,
    "sm_100": 232_448,
    "sm_120": 101_376,
}
# What the compiler lists beside a kernel's own: the system's.
RESERVED_SHARED_BYTES = 1024


@dataclass(frozen=True)
class Limit:
    """What a kernel has to be; `kernel` is a regular expression for all of its readable name."""

    kernel: str
    registers: int  # for the blocks per multiprocessor it is launched with
    shared_bytes: int = 0  # dynamic, where the launch always asks for the same
    matrix: str = ""  # an instruction it must have
    copies: bool = False  # whether it must copy 16 bytes at a time in the background
    spilled: int = 0  # bytes of stack that it may spill registers to


# The first that matches counts. A test compares shared_bytes with the sources.
LIMITS = (
    Limit(r"tensor::large_tiles<(bf16|fp16),64,0>", 255, 94_848, "HMMA.16816.F32", copies=True),
    Limit(r"tensor::large_tiles<(bf16|fp16),96,0>", 255, 111_232, "HMMA.16816.F32", copies=True),
    Limit(r"tensor::large_tiles<(bf16|fp16),128,0>", 255, 144_000, "HMMA.16816.F32", copies=True),
    Limit(r"tensor::small_tiles<(bf16|fp16),64,0>", 255, 65_536, "HMMA.16816.F32", copies=True),
    Limit(r"tensor::small_tiles<(bf16|fp16),96,0>", 255, 65_536, "HMMA.16816.F32", copies=True),
    Limit(r"tensor::small_tiles<(bf16|fp16),128,0>", 255, 81_920, "HMMA.16816.F32", copies=True),
    # The last argument: of codes in 8 bits.
    Limit(r"tensor::large_tiles<bf16,64,1>", 255, 62_592, "HMMA.16816.F32", copies=True),
    Limit(r"tensor::large_tiles<bf16,128,1>", 255, 144_512, "HMMA.16816.F32", copies=True),
    Limit(r"tensor::small_tiles<bf16,64,1>", 255, 65_536, "HMMA.16816.F32", copies=True),
    # Two registers too many on sm_80 and sm_100: conversions of codes have all 255.
    Limit(
        r"tensor::small_tiles<bf16,128,1>", 255, 81_920, "HMMA.16816.F32", copies=True, spilled=8
    ),
    Limit(r"tensor::merge_states<64>", 128, 2_112),
    Limit(r"tensor::merge_states<96>", 128, 3_136),
    Limit(r"tensor::merge_states<128>", 128, 4_160),
    # Two registers too many on sm_90.
    # Two registers too many on sm_100, of rows at odd addresses.
    Limit(r"linear::few_rows<(bf16|fp16),1,2,0>", 128, 8_192, "HMMA.16816.F32", spilled=8),
    Limit(r"linear::few_rows<(bf16|fp16),1,2,1>", 128, 8_192, "HMMA.16816.F32"),
    Limit(r"linear::few_rows<(bf16|fp16),4,4,1>", 255, 65_536, "HMMA.16816.F32"),
    Limit(r"linear::many_rows<(bf16|fp16)>", 128, 73_728, "HMMA.16816.F32", copies=True),
    Limit(r"linear::in_lanes<\d+,\d+>", 255),
    Limit(r"scoring::score_sketches<64,1>", 128, 0, "IMMA.16832.U8.S8", copies=True, spilled=8),
    Limit(r"scoring::score_sketches<\d+,\d+>", 128, 0, "IMMA.16832.U8.S8", copies=True),
    Limit(r"reference::walk<\d+,\d+>", 255),
    Limit(r"reference::.*", 128),
    Limit(r".*", 128),
)
# Kernels that every architecture must have, by the name of their function.
EXPECTED = (
    "large_tiles",
    "small_tiles",
    "merge_states",
    "score_sketches",
    "few_rows",
    "many_rows",
    "in_lanes",
    "walk",
    "select_rows",
    "write_rows_kernel",
)


@dataclass
class Kernel:
    """One kernel of one architecture, as cuobjdump lists it."""

    architecture: str
    name: str
    registers: int = 0
    stack_bytes: int = 0
    static_shared_bytes: int = 0
    local_bytes: int = 0
    instructions: dict[str, int] = field(default_factory=dict)

    def count(self, prefix: str) -> int:
        """How many instructions start with these modifiers in this order."""
        return sum(n for name, n in self.instructions.items() if name.startswith(prefix))


# --- names ---------------------------------------------------------------------------------------

_DTYPES = {"0": "fp32", "1": "fp16", "2": "bf16", "4": "q8", "5": "q4"}


def readable(symbol: str) -> str:
    """`tensor::small_tiles<bf16,64,0>` of a mangled name: namespaces of kvpager::gpu left out."""
    if not symbol.startswith("_ZN"):
        return symbol
    parts, rest = [], symbol[3:]
    while digits := re.match(r"\d+", rest):
        end = digits.end() + int(digits.group())
        parts.append(rest[digits.end() : end])
        rest = rest[end:]
    kept = [part for part in parts if part not in ("kvpager", "gpu") and "_GLOBAL__N_" not in part]
    # Template arguments are integers and enumerators: Li64E, LNS_5DTypeE2E.
    found = re.match(r"I((?:L(?:NS\w*?_\d+\D+?E|[a-z])\d+E)+)E", rest)
    arguments = re.findall(r"L(NS\w*?E|[a-z])(\d+)E", found.group(1)) if found else []
    values = [_DTYPES.get(value, value) if "DType" in kind else value for kind, value in arguments]
    return "::".join(kept) + (f"<{','.join(values)}>" if values else "")


# --- reading -------------------------------------------------------------------------------------

_ARCHITECTURE = re.compile(r"^arch = (\w+)$")
_RESOURCES = re.compile(r"^\s*Function (\S+?):$")
_NUMBERS = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_CODE = re.compile(r"^\s*Function : (\S+)$")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")


def read_resources(lines: Iterable[str]) -> dict[tuple[str, str], Kernel]:
    """The kernels in `cuobjdump -res-usage`, by architecture and symbol."""
    kernels: dict[tuple[str, str], Kernel] = {}
    architecture = symbol = ""
    for line in lines:
        if match := _ARCHITECTURE.match(line):
            architecture = match.group(1)
        elif match := _RESOURCES.match(line):
            symbol = match.group(1)
        elif match := _NUMBERS.search(line):
            registers, stack, shared, local = (int(number) for number in match.groups())
            kernels[architecture, symbol] = Kernel(
                architecture, readable(symbol), registers, stack, shared, local
            )
    return kernels


def count_instructions(lines: Iterable[str], kernels: dict[tuple[str, str], Kernel]) -> None:
    """Adds what `cuobjdump -sass` lists to the kernels it lists it of."""
    architecture = ""
    kernel: Kernel | None = None
    for line in lines:
        if match := _INSTRUCTION.match(line):
            if kernel is not None:
                name = match.group(1)
                kernel.instructions[name] = kernel.instructions.get(name, 0) + 1
        elif match := _ARCHITECTURE.match(line):
            architecture = match.group(1)
        elif match := _CODE.match(line):
            kernel = kernels.get((architecture, match.group(1)))


# --- judging -------------------------------------------------------------------------------------


def limit_of(kernel: Kernel) -> Limit:
    """The table's first entry for the kernel."""
    return next(limit for limit in LIMITS if re.fullmatch(limit.kernel, kernel.name))


def shared_limit(architecture: str) -> int | None:
    """Of sm_90a as of sm_90; None where the table has none."""
    return SHARED_BYTES.get(architecture.rstrip("af"))


def shared_bytes(kernel: Kernel) -> int:
    """Static and dynamic, without the system's."""
    return (
        max(0, kernel.static_shared_bytes - RESERVED_SHARED_BYTES) + limit_of(kernel).shared_bytes
    )


def complaints(kernel: Kernel) -> Iterator[str]:
    """What is outside of the kernel's limits: value and limit."""
    limit = limit_of(kernel)
    if kernel.registers > limit.registers:
        yield f"{kernel.registers} registers, at most {limit.registers}"
    if kernel.local_bytes > 0:
        yield f"{kernel.local_bytes} bytes of local memory, at most 0"
    if kernel.stack_bytes > limit.spilled:
        yield f"{kernel.stack_bytes} bytes of stack, at most {limit.spilled}"
    spills = kernel.count("STL") + kernel.count("LDL")
    if spills > 0 and limit.spilled == 0:
        yield f"{spills} instructions that spill to local memory or read it back, at most 0"
    most = shared_limit(kernel.architecture)
    if most is None:
        yield f"an architecture without a limit of shared memory in {Path(__file__).name}"
    elif shared_bytes(kernel) > most:
        yield f"{shared_bytes(kernel)} bytes of shared memory, at most {most}"
    if limit.matrix and kernel.count(limit.matrix) == 0:
        yield f"0 of {limit.matrix}, at least 1"
    if limit.copies and kernel.count("LDGSTS.E.BYPASS.128") == 0:
        yield "0 of LDGSTS.E.BYPASS.128, at least 1"


def judge(kernels: Iterable[Kernel]) -> list[str]:
    """All complaints, each with its kernel and architecture."""
    found = []
    names: dict[str, set[str]] = {}
    for kernel in kernels:
        base = kernel.name.split("<")[0].rsplit("::", 1)[-1]
        names.setdefault(kernel.architecture, set()).add(base)
        found += [f"{kernel.name}, {kernel.architecture}: {text}" for text in complaints(kernel)]
    if not names:
        found.append("no kernel at all")
    for architecture, present in names.items():
        missing = [name for name in EXPECTED if name not in present]
        found += [f"{name}, {architecture}: not there" for name in missing]
    return found


def table(kernels: Iterable[Kernel]) -> str:
    """A line for each kernel."""
    head = (
        f"{'kernel':<40} {'arch':<8} {'reg':>4} {'local':>5} {'shared':>7} {'mma':>5} {'copies':>6}"
    )
    rows = [
        f"{kernel.name:<40} {kernel.architecture:<8} {kernel.registers:>4} {kernel.local_bytes:>5} "
        f"{shared_bytes(kernel):>7} {kernel.count('HMMA') + kernel.count('IMMA'):>5} "
        f"{kernel.count('LDGSTS.E.BYPASS.128'):>6}"
        for kernel in sorted(kernels, key=lambda kernel: (kernel.name, kernel.architecture))
    ]
    return "\n".join([head, *rows])


# --- running -------------------------------------------------------------------------------------


def find_tools(folder: Path) -> dict[str, str]:
    """An environment whose PATH has cuobjdump and the nvdisasm that it starts."""
    installed = folder / "nvidia" / "cu13" / "bin"
    path = os.pathsep.join([os.environ.get("PATH", ""), str(installed)])
    if any(shutil.which(tool, path=path) is None for tool in ("cuobjdump", "nvdisasm")):
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        subprocess.run(
            [*command, "--no-deps", "--upgrade", "--target", str(folder), *PACKAGES], check=True
        )
    return {**os.environ, "PATH": path}


def read_plugin(plugin: Path, environment: dict[str, str]) -> dict[tuple[str, str], Kernel]:
    """All kernels of all architectures."""
    tool = shutil.which("cuobjdump", path=environment["PATH"])
    if tool is None:
        raise SystemExit("no cuobjdump")

    def lines(option: str) -> Iterator[str]:
        command = [tool, option, str(plugin)]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=environment
        ) as process:
            assert process.stdout is not None
            yield from process.stdout
        if process.returncode != 0:
            raise SystemExit(f"{' '.join(command)} failed with {process.returncode}")

    kernels = read_resources(lines("-res-usage"))
    count_instructions(lines("-sass"), kernels)
    return kernels


def main(arguments: list[str] | None = None) -> int:
    """Prints the table and what is outside of the limits."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("plugin", type=Path, help="the library that was built, libkvpager_cuda.so")
    parser.add_argument("--tools", type=Path, default=Path("build/cuda_tools"), metavar="FOLDER")
    options = parser.parse_args(arguments)
    kernels = read_plugin(options.plugin, find_tools(options.tools)).values()
    print(table(kernels))
    found = judge(kernels)
    for text in found:
        print(text, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
