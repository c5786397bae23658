"""`kvpager info`: what is installed and what this machine offers."""

from __future__ import annotations

import argparse
import os
import platform
from typing import Any

from kvpager.cli.output import emit_result
from kvpager.cli.parser import Parser


def add(commands: Any, common: Parser) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "info",
        parents=[common],
        help="versions, instruction set, devices, memory, scorers",
        description="Tells what this installation can use: versions, the processor's instruction "
        "set, devices, memory and scorers.",
    )
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    values = collect()
    emit_result(args, values, lambda: _text(values))
    return 0


def collect() -> dict[str, Any]:
    """Everything that `info` reports."""
    import numpy as np
    import torch
    import transformers

    from kvpager import Layout, __version__, _core
    from kvpager.config import DEFAULT_ROWS, DEFAULT_SCORER, physical_memory
    from kvpager.needles import shipped_model_path
    from kvpager.pager.device import missing

    try:
        model: str | None = str(shipped_model_path())
    except FileNotFoundError:
        model = None
    usual = Layout(
        layers=1, kv_heads=1, k_dim=128, v_dim=128, k_dtype="bfloat16", v_dtype="bfloat16"
    )
    native = usual.native()
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
        "default_scorer": DEFAULT_SCORER,
        "scorers": {
            name: {
                "description": _core.scorer_description(name),
                "share_of_kv": _core.summary_bytes(name, native) / native.chunk_bytes,
            }
            for name in _core.scorer_names()
        },
    }


def _device_lines(kind: str, found: dict[str, Any]) -> list[str]:
    """What was found of a kind of device. Of the one for tests, only that it is there."""
    if kind == "shim":
        return [] if found["why_not"] else [f"{'shim':18} built (the GPU's code, for tests)"]
    lines = [
        f"{kind + ':' + str(number):18} {device['name']}, capability {device['capability']}, "
        f"{device['memory_bytes'] / 2**30:.1f} GiB, driver for CUDA {_release(device['driver'])}"
        for number, device in enumerate(found["devices"])
    ]
    built = f"plug-in {found['plugin']}" if found["plugin"] else "no plug-in"
    return [f"{kind:18} {found['why_not'] or built}", *lines]


def _release(number: int) -> str:
    """13000 is 13.0."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _text(values: dict[str, Any]) -> str:
    labels = {
        "instruction_set": "instruction set",
        "torch_threads": "torch threads",
        "memory_bytes": "memory",
        "rows": "rows of a forward",
        "kernel_version": "kernel version",
        "snapshot_version": "snapshot version",
        "shipped_model": "shipped model",
    }
    lines = []
    for name, value in values.items():
        if name in ("scorers", "default_scorer"):
            continue
        shown = value
        if name in ("cuda", "shim"):
            lines += _device_lines(name, value)
            continue
        if name == "memory_bytes":
            shown = f"{value / 2**30:.1f} GiB"
        elif value is None:
            shown = "not found"
        lines.append(f"{labels.get(name, name):18} {shown}")
    lines.append("")
    lines.append("scorers            (share: summary bytes of bf16 K/V at head_dim 128)")
    for name, scorer in values["scorers"].items():
        mark = "  (default)" if name == values["default_scorer"] else ""
        share = f"{100 * scorer['share_of_kv']:.1f}%"
        lines.append(f"  {name:8} {share:>6}  {scorer['description']}{mark}")
    return "\n".join(lines) + "\n"
