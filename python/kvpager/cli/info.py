"""`kvpager info`: what is installed and what this machine offers."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Iterator
from typing import Any

from kvpager.cli.output import emit_result
from kvpager.cli.parser import Commands


def add(commands: Commands) -> None:
    """Adds the command."""
    told = "the processor's instruction set, devices and memory"
    about = f"Tells what this installation can use: versions, {told}."
    commands.add("info", run, "versions, instruction set, devices, memory", about)


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    values = collect()
    emit_result(args, values, lambda shown: shown.fields(_facts(values), 18))
    return 0


def collect() -> dict[str, Any]:
    """Everything that `info` reports."""
    import numpy as np
    import torch
    import transformers

    from kvpager import __version__, _core
    from kvpager.cli.needles import shipped_model_path
    from kvpager.config import DEFAULT_ROWS, physical_memory
    from kvpager.pager.device import missing

    try:
        model: str | None = str(shipped_model_path())
    except FileNotFoundError:
        model = None
    why_not = missing("cuda")
    return {
        "kvpager": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "backend": "CPU" if why_not else "CPU and CUDA",
        "cuda": {**_core.probe_device("cuda"), "why_not": why_not},
        "shim": _core.probe_device("shim"),
        "instruction_set": _core.isa_name(),
        "processors": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "memory_bytes": physical_memory(),
        "rows": DEFAULT_ROWS["cpu"][0],
        "kernel_version": _core.KERNEL_VERSION,
        "snapshot_version": ".".join(map(str, _core.SNAPSHOT_VERSION)),
        "shipped_model": model,
    }


def _facts(values: dict[str, Any]) -> Iterator[tuple[str, object]]:
    for name, value in values.items():
        if name == "cuda":
            yield from _cuda_facts(value)
        elif name == "shim":
            if not value["why_not"]:
                yield name, "built (the GPU's code, for tests)"
        elif name == "memory_bytes":
            yield "memory", f"{value / 2**30:.1f} GiB"
        elif name == "rows":
            yield "rows of a forward", value
        else:
            yield name.replace("_", " "), "not found" if value is None else value


def _cuda_facts(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    built = f"plug-in {found['plugin']}" if found["plugin"] else "no plug-in"
    yield "cuda", found["why_not"] or built
    for number, device in enumerate(found["devices"]):
        driver = device["driver"]  # 13000 is 13.0
        yield (
            f"cuda:{number}",
            f"{device['name']}, capability {device['capability']}, "
            f"{device['memory_bytes'] / 2**30:.1f} GiB, driver for CUDA {driver // 1000}."
            f"{driver % 1000 // 10}",
        )
